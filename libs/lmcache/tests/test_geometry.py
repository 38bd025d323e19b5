"""Geometry of groups under a server's chunk: windows, order, refusals, and the blocks of a range of tokens."""

import itertools
from collections.abc import Sequence

import pytest
from caches import DEEPSEEK_V4, FULL, INTERLEAVED, QWEN3_NEXT, RECURRENT, WINDOW
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.lmcache.errors import LMCacheConfigurationError, LMCacheProtocolError
from hybridkv.lmcache.geometry import Geometry, PageGroup, chunk_alignment, common_chunks, cut_tables
from hybridkv.lmcache.keys import cache_name, prefix_words
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec
from hybridkv.planner.coverage import resume_start
from kits.lmcache.rig import kept_blocks, needed_blocks

CHUNK = 256
BLOCKS = st.sampled_from([4, 8, 32, 64, 128, 256])


@st.composite
def page_groups(draw: st.DrawFn) -> PageGroup:
    block = draw(BLOCKS)
    kind = draw(st.sampled_from([FULL, WINDOW, RECURRENT, GroupKind.CHUNKED]))
    window = draw(st.integers(1, 1500)) if kind is WINDOW else None
    align = draw(st.integers(1, 1500)) if kind is GroupKind.CHUNKED else None
    return PageGroup(GroupSpec(kind, block, window_tokens=window, align_tokens=align), draw(st.integers(1, 500)))


caches = st.lists(page_groups(), min_size=1, max_size=6).map(tuple)


def _tables(geometry: Geometry, num_chunks: int) -> dict[int, list[int]]:
    numbers = itertools.count(1)
    return {
        group: [next(numbers) for _ in range(num_chunks * blocks)]
        for group, blocks in enumerate(geometry.blocks_per_chunk)
    }


def test_a_prompt_of_4096_tokens_has_blocks_in_every_group() -> None:
    geometry = Geometry(DEEPSEEK_V4, CHUNK)
    tables = _tables(geometry, 16)
    cut = cut_tables(geometry, tables, 0, 4096)
    lengths = dict(zip(geometry.order, map(len, cut), strict=True))
    assert [lengths[group] for group in range(5)] == [16, 64, 64, 1024, 512]


@given(caches, st.lists(st.integers(0, 8), min_size=2, max_size=5))
def test_consecutive_ranges_cover_every_block_once_in_the_servers_order(
    groups: tuple[PageGroup, ...], cuts: list[int]
) -> None:
    geometry = Geometry(groups, CHUNK)
    tables = _tables(geometry, 8)
    cuts = sorted(set(cuts))
    taken: list[list[int]] = [[] for _ in groups]
    for start, end in itertools.pairwise(cuts):
        for index, blocks in zip(geometry.order, cut_tables(geometry, tables, start * 256, end * 256), strict=True):
            taken[index] += blocks
    for index, blocks in enumerate(geometry.blocks_per_chunk):
        assert taken[index] == tables[index][cuts[0] * blocks : cuts[-1] * blocks]


def test_a_group_without_blocks_limits_the_common_chunks() -> None:
    geometry = Geometry(DEEPSEEK_V4, CHUNK)
    tables: dict[int, Sequence[int]] = {**_tables(geometry, 4)}
    assert common_chunks(geometry, tables) == 4
    tables[3] = tables[3][:-1]
    assert common_chunks(geometry, tables) == 3
    assert len(cut_tables(geometry, tables, 0, 768)) == 5
    del tables[3]
    assert common_chunks(geometry, tables) == 0
    with pytest.raises(LMCacheProtocolError, match="no blocks up to token"):
        cut_tables(geometry, tables, 0, 256)


@pytest.mark.parametrize("cut", [(0, 100), (100, 256), (256, 256), (512, 256), (-256, 256)])
def test_a_range_of_partial_chunks_is_a_protocol_error(cut: tuple[int, int]) -> None:
    geometry = Geometry(DEEPSEEK_V4, CHUNK)
    with pytest.raises(LMCacheProtocolError, match="not a range of whole chunks"):
        cut_tables(geometry, _tables(geometry, 4), *cut)


def test_a_single_group_is_a_list_of_one() -> None:
    geometry = Geometry((PageGroup(GroupSpec(FULL, 16), 100),), CHUNK)
    assert cut_tables(geometry, {0: list(range(32))}, 256, 512) == [list(range(16, 32))]


@given(caches, st.integers(1, 6))
def test_the_blocks_of_a_resume_agree_with_the_planner(groups: tuple[PageGroup, ...], num_chunks: int) -> None:
    geometry = Geometry(groups, CHUNK)
    end = num_chunks * CHUNK
    for index, group in enumerate(groups):
        block = group.spec.block_tokens
        needed = needed_blocks(geometry, index, num_chunks)
        planned = range(resume_start(group.spec, end) // block, end // block)
        if group.spec.kind is GroupKind.CHUNKED or not planned:
            assert set(planned) <= set(needed)  # the server has one window for every boundary
        else:
            assert needed == list(planned)


@given(caches, st.integers(1, 6))
def test_a_server_keeps_the_blocks_of_a_resume(groups: tuple[PageGroup, ...], num_chunks: int) -> None:
    geometry = Geometry(groups, CHUNK)
    for index in range(len(groups)):
        assert set(needed_blocks(geometry, index, num_chunks)) <= set(kept_blocks(geometry, index, num_chunks))


@given(caches)
def test_groups_with_the_same_retention_rule_are_adjacent(groups: tuple[PageGroup, ...]) -> None:
    geometry = Geometry(groups, CHUNK)

    def law(index: int) -> tuple[bool, int | None]:
        window = geometry.windows[index]
        return groups[index].spec.kind is RECURRENT, None if window is None else -(-window // CHUNK)

    laws = [law(index) for index in geometry.order]
    assert len(list(itertools.groupby(laws))) == len(set(laws))
    assert sorted(geometry.order) == list(range(len(groups)))


@given(caches)
def test_a_window_is_whole_blocks_as_a_server_requires(groups: tuple[PageGroup, ...]) -> None:
    geometry = Geometry(groups, CHUNK)
    for group, window in zip(groups, geometry.windows, strict=True):
        assert window is None or (window > 0 and window % group.spec.block_tokens == 0)


def test_groups_with_alternating_retention_rules_are_sorted() -> None:
    assert Geometry(INTERLEAVED, CHUNK).order == (0, 3, 4, 1, 2)
    assert Geometry(QWEN3_NEXT, CHUNK).order == (3, 0, 1, 2)


def test_a_chunk_of_partial_blocks_is_refused_with_both_numbers_and_a_hint() -> None:
    assert chunk_alignment(DEEPSEEK_V4) == 256
    with pytest.raises(LMCacheConfigurationError, match=r"multiple of 256 tokens.*got 384\nhint:.*--chunk-size 512"):
        Geometry(DEEPSEEK_V4, 384)


def test_scratch_groups_and_empty_caches_are_refused() -> None:
    with pytest.raises(LMCacheConfigurationError, match="SCRATCH"):
        Geometry((PageGroup(GroupSpec(GroupKind.SCRATCH, 16), 1),), CHUNK)
    with pytest.raises(LMCacheConfigurationError, match="1 to 64"):
        Geometry((), CHUNK)


def test_cache_names_differ_by_content_and_layout() -> None:
    layouts = [Geometry(groups, chunk).digest() for groups in (DEEPSEEK_V4, QWEN3_NEXT) for chunk in (256, 512)]
    names = {cache_name(fingerprint, layout) for fingerprint in (b"a", b"b") for layout in layouts}
    assert len(names) == 8
    assert all(name.replace("-", "").isalnum() for name in names)


def test_words_are_one_chunk_per_digest() -> None:
    assert prefix_words([b"a" * 32, b"b" * 48], 16) == b"a" * 32 + bytes(32) + b"b" * 48 + bytes(16)
    with pytest.raises(LMCacheConfigurationError, match="at least 12 tokens"):
        prefix_words([b"b" * 48], 8)


def test_groups_of_the_planner_fit() -> None:
    spec = CacheSpec(tuple(group.spec for group in DEEPSEEK_V4), CHUNK)
    assert Geometry(tuple(PageGroup(group, 64) for group in spec.groups), spec.chunk_tokens).windows[1] == 128
