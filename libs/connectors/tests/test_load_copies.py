"""Copies of a load equal those of its transfers, one by one or many at once."""

from __future__ import annotations

import dataclasses
from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_copies import bytes_of, copy_of
from test_lookups import BLOCK, DRAFTER, FULL, HASHES, STATE, make_layout

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.copies.table import copies_of_runs
from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.planner import GroupKind, GroupSpec, LocalCopies, plan_load, plan_load_runs, read_blocks
from hybridkv.tiers import Slot

WINDOW = GroupSpec(GroupKind.WINDOW, BLOCK, window_tokens=3 * BLOCK)
HALF_BLOCKS = GroupSpec(GroupKind.FULL, 2 * BLOCK)
CUT = GroupSpec(GroupKind.FULL, 3 * BLOCK, part_tokens=BLOCK)
MIXES = ([FULL], [FULL, WINDOW], [WINDOW, HALF_BLOCKS], [FULL, STATE], [DRAFTER, FULL], [FULL, CUT])
PAGE_BYTES = 24


@given(st.sampled_from(MIXES), st.sampled_from([None, BLOCK]), st.integers(1, 12), st.data())
def test_copies_made_at_once_equal_copies_made_one_by_one(
    groups: list[GroupSpec], tail_tokens: int | None, num_chunks: int, data: st.DataObject
) -> None:
    is_with_tails = tail_tokens is not None and groups[-1] is STATE
    made = make_layout(groups, tail_tokens if is_with_tails else None)
    layers = tuple((LayerLayout(f"layer{index}", PAGE_BYTES),) for index in range(len(groups)))
    layout = dataclasses.replace(made.layout, layers=layers)
    spec = layout.spec
    boundary = num_chunks * spec.chunk_tokens + (BLOCK if is_with_tails else 0)
    ids = count(1)
    reads = [read_blocks(group, boundary) for group in groups]
    tables = [[0] * read.start + [next(ids) for _ in read] for read in reads]
    transfers = plan_load(spec, boundary, 0, tables)
    keys = [made.key(each.group_index, HASHES, each.end_token) for each in transfers]
    slots = [Slot(((number, 1),)) for number, _ in enumerate(transfers)]
    local = LocalCopies(tuple(each.block_ids if data.draw(st.booleans()) else () for each in transfers), 0)
    runs = plan_load_runs(spec, boundary, 0, tables)
    together = copies_of_runs(layout, runs, keys, slots, local)
    alone = [
        msgspec.structs.replace(copy_of(spec, transfer, key, slot), local_blocks=local_blocks)
        for transfer, key, slot, local_blocks in zip(transfers, keys, slots, local.block_ids, strict=True)
    ]
    assert list(together.copies) == alone
    assert together.local_bytes == sum(bytes_of(layout, copy) for copy in alone if copy.local_blocks)
    assert together.tier_bytes == sum(bytes_of(layout, copy) for copy in alone if not copy.local_blocks)
    # Without local blocks no object per chunk is made; slots have one extent or several.
    scattered = [Slot(tuple((each + more, 1) for more in range(1 + each % 7 // 5))) for each in range(len(keys))]
    from_tier = copies_of_runs(layout, runs, keys, scattered)
    assert list(from_tier.copies) == [copy_of(spec, *each) for each in zip(transfers, keys, scattered, strict=True)]
    assert (from_tier.tier_bytes, from_tier.local_bytes) == (sum(bytes_of(layout, copy) for copy in alone), 0)
    none_local = LocalCopies(((),) * len(keys), 0)
    assert from_tier == copies_of_runs(layout, runs, keys, scattered, none_local)
    with pytest.raises(ValueError, match="keys and slots"):
        copies_of_runs(layout, runs, keys, scattered[1:])
    with pytest.raises(ValueError, match="keys and slots"):
        copies_of_runs(layout, runs, keys[1:], scattered)
    with pytest.raises(ValueError, match="local blocks"):
        copies_of_runs(layout, runs, keys, slots, LocalCopies(local.block_ids[1:], 0))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.booleans(), st.lists(st.integers(0, 19), max_size=2))
def test_keys_at_given_ends_equal_keys_one_by_one(units: list[int], in_a_row: bool, kept: list[int]) -> None:
    made = make_layout([FULL, STATE], BLOCK)
    chunk = made.spec.chunk_tokens
    first = units[0] // 2 + 1
    row = [(first + place) * chunk for place in range(len(units))]
    ends = row if in_a_row else [unit * BLOCK for unit in units]
    keys = RequestKeys(made.spec, made.keys).follow(HASHES)
    if len(kept) == 2:
        keys.between(0, min(kept), max(kept) + 1)
    expected = [made.key(0, HASHES, end) for end in ends]
    assert list(keys.ending_at(0, ends)) == expected
    assert list(keys.ending_at(0, ends)) == expected
