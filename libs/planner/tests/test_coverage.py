from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, caches

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    TokenSpan,
    chunk_blocks,
    chunk_span,
    needed_ends,
    resume_start,
)


def spec(kind: GroupKind, chunk_tokens: int = 64, **sizes: int) -> CacheSpec:
    return CacheSpec((GroupSpec(kind=kind, block_tokens=16, **sizes),), chunk_tokens)


def start(num_tokens: int, kind: GroupKind, **sizes: int) -> int:
    return resume_start(GroupSpec(kind=kind, block_tokens=16, **sizes), num_tokens)


def test_full_attention_needs_every_token() -> None:
    assert start(128, GroupKind.FULL) == 0


def test_a_window_group_needs_only_its_last_window() -> None:
    assert start(128, GroupKind.WINDOW, window_tokens=33) == 96


def test_a_window_of_one_token_needs_nothing() -> None:
    assert start(128, GroupKind.WINDOW, window_tokens=1) == 128


def test_a_chunked_group_needs_the_tokens_since_its_last_boundary() -> None:
    assert start(128, GroupKind.CHUNKED, align_tokens=100) == 100
    assert start(200, GroupKind.CHUNKED, align_tokens=100) == 200


def test_a_recurrent_group_needs_one_state() -> None:
    assert start(128, GroupKind.RECURRENT) == 127
    assert list(needed_ends(spec(GroupKind.RECURRENT), 0, 128, 64)) == [128]


def test_nothing_is_needed_at_boundary_zero() -> None:
    for kind, sizes in (
        (GroupKind.FULL, {}),
        (GroupKind.WINDOW, {"window_tokens": 8}),
        (GroupKind.CHUNKED, {"align_tokens": 8}),
        (GroupKind.RECURRENT, {}),
    ):
        assert start(0, kind, **sizes) == 0


def test_only_the_last_blocks_of_a_window_chunk_are_stored() -> None:
    assert chunk_span(spec(GroupKind.WINDOW, window_tokens=17), 0, 128) == TokenSpan(112, 128)
    assert chunk_span(spec(GroupKind.WINDOW, window_tokens=18), 0, 128) == TokenSpan(96, 128)
    assert chunk_span(spec(GroupKind.WINDOW, window_tokens=500), 0, 128) == TokenSpan(64, 128)


def test_only_the_state_of_a_recurrent_chunk_is_stored() -> None:
    assert chunk_span(spec(GroupKind.RECURRENT), 0, 128) == TokenSpan(112, 128)


@given(caches(), st.data())
def test_the_stored_chunks_cover_the_tokens_that_any_boundary_needs(cache: CacheSpec, data: st.DataObject) -> None:
    boundary = data.draw(st.integers(1, CHUNKS)) * cache.chunk_tokens
    for group_index, group in enumerate(cache.groups):
        stored: set[int] = set()
        for end in needed_ends(cache, group_index, boundary, 0):
            span = chunk_span(cache, group_index, end)
            assert span.start % group.block_tokens == 0 and span.end == end
            stored |= set(range(span.start, span.end))
        assert set(range(resume_start(group, boundary), boundary)) <= stored


@given(caches(), st.data())
def test_a_later_boundary_never_needs_earlier_tokens(cache: CacheSpec, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 100))
    second = data.draw(st.integers(first, 200))
    for group in cache.groups:
        assert resume_start(group, first) <= resume_start(group, second)


@given(caches(cuts=True), st.integers(1, CHUNKS))
def test_the_blocks_of_parts_with_one_layout_are_those_of_their_spans(cache: CacheSpec, number: int) -> None:
    end = number * cache.chunk_tokens
    for index in cache.stored_groups:
        span, size = chunk_span(cache, index, end), cache.groups[index].block_tokens
        expected = range(span.start // size, -(-span.end // size)) if span.num_tokens else range(0)
        assert chunk_blocks(cache, index, end) == expected
        alike, first = cache.uniform_chunk_blocks[index], (end - cache.chunk_tokens) // size
        assert alike is None or range(first + alike.start, first + alike.stop) == expected


def test_parts_have_one_layout_unless_blocks_are_cut_or_attention_chunks_end_inside() -> None:
    assert spec(GroupKind.FULL).uniform_chunk_blocks == (range(4),)
    assert spec(GroupKind.WINDOW, window_tokens=18).uniform_chunk_blocks == (range(2, 4),)
    assert spec(GroupKind.RECURRENT).uniform_chunk_blocks == (range(3, 4),)
    assert spec(GroupKind.CHUNKED, align_tokens=100).uniform_chunk_blocks == (None,)
    assert spec(GroupKind.FULL, chunk_tokens=8, part_tokens=8).uniform_chunk_blocks == (None,)
