"""Block tables: what a producer offers, and which tables of the other side a reader refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_worlds import group, world
from world_reads import agreed

from hybridkv.peers.cells import moved_span
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.pairing import Exchange, Pairing, Resume
from hybridkv.peers.tables import MAX_READER_BLOCK_TOKENS, BlockTables, offered
from hybridkv.planner import GroupKind, GroupSpec

SPECS = (
    GroupSpec(GroupKind.FULL, 16),
    GroupSpec(GroupKind.WINDOW, 16, window_tokens=24),
    GroupSpec(GroupKind.RECURRENT, 64),
    GroupSpec(GroupKind.SCRATCH, 16),
)
WORLD = world(
    (
        group(GroupKind.FULL, (16, 16)),
        group(GroupKind.WINDOW, (16, 16), window_tokens=24),
        group(GroupKind.RECURRENT, (64, 64)),
    ),
    num_tokens=100,
)
LOCAL = BlockTables.whole(100, WORLD.tables[0])
REMOTE = offered([shape.spec(1) for shape in WORLD.shapes], WORLD.tables[1], 100)


def test_a_producer_offers_the_blocks_of_a_resume_and_their_first_index() -> None:
    ids, chunked = tuple(range(1, 8)), GroupSpec(GroupKind.CHUNKED, 16, align_tokens=48)
    specs = (SPECS[0], chunked, *SPECS[2:])
    assert offered(specs, [ids, ids, (8, 9), ids], 100) == BlockTables(100, (0, 6, 1, 0), (ids, (7,), (9,), ()))


def test_a_window_is_offered_from_earlier_blocks_that_the_engine_has_kept() -> None:
    window = GroupSpec(GroupKind.WINDOW, 16, window_tokens=24)
    ids = (0, 0, *range(3, 33))
    num_tokens = 16 * len(ids)
    first = (num_tokens - 23 - (MAX_READER_BLOCK_TOKENS - 1)) // 16
    assert offered([window], [ids], num_tokens) == BlockTables(num_tokens, (first,), (ids[first:],))
    assert offered([window], [ids[:8]], 128) == BlockTables(128, (0,), (ids[:8],))


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from([*GroupKind]),
    st.integers(1, 400),
    st.sampled_from([(16, 32), (16, 64), (16, MAX_READER_BLOCK_TOKENS), (8, 24), (64, 16), (16, 16)]),
    st.integers(1, 2000),
    st.integers(0, 80),
)
def test_an_offer_has_the_blocks_of_a_reader_with_other_blocks(
    kind: GroupKind, reach_tokens: int, blocks: tuple[int, int], num_tokens: int, computed_blocks: int
) -> None:
    """Attention chunks begin at blocks. A reader with larger blocks computes the prompt of a model with others."""
    window = reach_tokens if kind is GroupKind.WINDOW else None
    align = reach_tokens * max(blocks) if kind is GroupKind.CHUNKED else None
    theirs, ours = (GroupSpec(kind, size, window, align) for size in blocks)
    whole = tuple(range(1, 2 - (-num_tokens // theirs.block_tokens)))
    found = offered([theirs], [whole], num_tokens)
    computed = min(num_tokens, computed_blocks * ours.block_tokens)
    span = moved_span(ours, num_tokens, computed)
    if span.num_tokens:
        assert found.first_blocks[0] <= span.start // theirs.block_tokens
        assert found.first_blocks[0] + len(found.block_ids[0]) == -(-num_tokens // theirs.block_tokens)


def test_a_table_that_is_too_short_is_an_error_of_the_producer() -> None:
    with pytest.raises(ValueError, match="100 tokens in 7 blocks"):
        offered(SPECS[:1], [(1, 2)], 100)


def pair(local: BlockTables = LOCAL, remote: BlockTables = REMOTE, **resume: Any) -> Pairing | Incompatibility:
    return Exchange(agreed(WORLD)).pair(local, remote, Resume(**{"num_tokens": 100, **resume}))


def test_the_tables_of_the_controls_are_paired() -> None:
    assert isinstance(pair(), Pairing)


def with_ids(tables: BlockTables, group_index: int, ids: tuple[Any, ...]) -> BlockTables:
    lists = list(tables.block_ids)
    lists[group_index] = ids
    return msgspec.structs.replace(tables, block_ids=tuple(lists))


@pytest.mark.parametrize(
    ("remote", "field"),
    [
        (msgspec.structs.replace(REMOTE, first_blocks=(0, 0)), "first_blocks"),
        (msgspec.structs.replace(REMOTE, block_ids=()), "block_ids"),
        (msgspec.structs.replace(REMOTE, first_blocks=(-1, 4, 1)), "first_blocks[0]"),
        (msgspec.structs.replace(REMOTE, first_blocks=(0, 1 << 60, 1)), "first_blocks[1]"),
        (msgspec.structs.replace(REMOTE, first_blocks=(0, 5, 1)), "block_ids[1]"),
        (msgspec.structs.replace(REMOTE, num_tokens=99), "num_tokens"),
        (msgspec.structs.replace(REMOTE, num_tokens=101), "groups[2]: the boundary of a state"),
        (with_ids(REMOTE, 0, REMOTE.block_ids[0][:-1]), "block_ids[0]"),
        (with_ids(REMOTE, 0, (0, *REMOTE.block_ids[0][1:])), "block_ids[0]"),
        (with_ids(REMOTE, 0, (1 << 40, *REMOTE.block_ids[0][1:])), "block_ids[0]"),
        (with_ids(REMOTE, 0, (-1, *REMOTE.block_ids[0][1:])), "block_ids[0]"),
        (with_ids(REMOTE, 2, ()), "block_ids[2]"),
    ],
)
def test_an_invalid_remote_table_is_refused_by_name(remote: BlockTables, field: str) -> None:
    refusal = pair(remote=remote)
    assert isinstance(refusal, Incompatibility)
    assert refusal.field == field


def test_a_local_block_in_two_places_is_refused() -> None:
    twice = with_ids(LOCAL, 0, (LOCAL.block_ids[0][1], *LOCAL.block_ids[0][1:]))
    refusal = pair(local=twice)
    assert isinstance(refusal, Incompatibility)
    assert refusal.field == "block_ids"
    across = with_ids(LOCAL, 1, (*LOCAL.block_ids[1][:-1], LOCAL.block_ids[0][0]))
    assert isinstance(pair(local=across), Incompatibility)


def test_a_prefix_that_ends_inside_a_block_is_refused() -> None:
    refusal = pair(computed_tokens=40)
    assert isinstance(refusal, Incompatibility)
    assert refusal.field == "groups[0].computed_tokens"


def test_a_full_local_prefix_moves_nothing() -> None:
    found = pair(computed_tokens=100)
    assert isinstance(found, Pairing)
    assert (found.num_bytes, len(found.ranges)) == (0, 0)


def test_a_remote_block_may_be_read_twice_where_requests_share_it() -> None:
    """One remote id in two places means two equal prefixes, not an error."""
    shared = with_ids(REMOTE, 0, (REMOTE.block_ids[0][1], *REMOTE.block_ids[0][1:]))
    assert isinstance(pair(remote=shared), Pairing)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.builds(
        BlockTables,
        num_tokens=st.integers(-1, 101),
        first_blocks=st.lists(st.integers(-1, 8), min_size=2, max_size=4).map(tuple),
        block_ids=st.lists(st.lists(st.integers(-1, 20), max_size=9).map(tuple), min_size=2, max_size=4).map(tuple),
    ),
    st.sampled_from([0, 16, 64, 100]),
)
def test_any_table_is_paired_within_the_regions_or_refused(remote: BlockTables, computed: int) -> None:
    found = pair(remote=remote, computed_tokens=computed)
    if isinstance(found, Incompatibility):
        return
    theirs = WORLD.theirs[0].region_bytes
    for region, offset, size in zip(
        found.ranges.remote_regions, found.ranges.remote_offsets, found.ranges.num_bytes, strict=True
    ):
        assert offset >= 0 and offset + size <= theirs[region]


def test_moved_bytes_are_counted_per_group() -> None:
    found = pair()
    assert isinstance(found, Pairing)
    # 100 tokens in the full group, none after the last; the window's begin with a block; one state.
    assert [moves.num_bytes for moves in found.groups] == [200, 2 * (100 - 64), 2]


def test_a_last_block_of_one_unit_moves_whole() -> None:
    case = world((group(GroupKind.FULL, (16, 16), unit_tokens=16),), num_tokens=100)
    remote = offered([shape.spec(1) for shape in case.shapes], case.tables[1], 100)
    found = Exchange(agreed(case)).pair(BlockTables.whole(100, case.tables[0]), remote, Resume(100))
    assert isinstance(found, Pairing)
    assert found.num_bytes == 7 * 2
