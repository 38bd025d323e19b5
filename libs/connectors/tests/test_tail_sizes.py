"""Sizes of chunks and tails are those reported to the tiers, and none exceeds the reported maximum."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, chunk_unit


@st.composite
def groups(draw: st.DrawFn) -> GroupSpec:
    kind = draw(st.sampled_from([GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNKED, GroupKind.RECURRENT]))
    return GroupSpec(
        kind,
        draw(st.sampled_from([1, 2, 4, 8])),
        window_tokens=draw(st.integers(1, 40)) if kind is GroupKind.WINDOW else None,
        align_tokens=draw(st.integers(1, 40)) if kind is GroupKind.CHUNKED else None,
    )


@given(st.lists(groups(), min_size=1, max_size=3), st.integers(1, 3), st.sampled_from([None, 1, 2]))
def test_each_part_has_a_reported_size(made: list[GroupSpec], units: int, wanted: int | None) -> None:
    chunk = chunk_unit(made) * units
    tail = wanted if wanted is not None and chunk % wanted == 0 else None
    spec = CacheSpec(tuple(made), chunk, tail)
    layers = tuple((LayerLayout(f"layer{index}", 16 * (index + 1)),) for index in range(len(made)))
    layout = CacheLayout(spec, layers, (), 1, "sha256", 1)
    ends = range(spec.boundary_tokens, 40 * chunk + 1, spec.boundary_tokens)
    occurring = [{layout.chunk_bytes(group, end) for end in ends} for group in spec.stored_groups]
    assert set(layout.chunk_sizes()) >= set().union(*occurring) - {0}
    for group in spec.stored_groups:
        assert layout.largest_chunk_bytes(group) >= max(occurring[group])


def test_a_window_may_take_one_more_block_before_a_tail() -> None:
    window = GroupSpec(GroupKind.WINDOW, 4, window_tokens=5)
    sizes = []
    for tail in (None, 2):
        spec = CacheSpec((window,), 16, tail)
        layout = CacheLayout(spec, ((LayerLayout("layer", 64),),), (), 2, "sha256", 1)
        sizes.append((layout.chunk_sizes(), layout.largest_chunk_bytes(0)))
    assert sizes == [((64,), 64), ((64, 128), 128)]
