from collections import Counter
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, Ranges, Store, any_caches, boundaries, computed_tokens, stores

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    Hit,
    LookupResult,
    Miss,
    Pending,
    last_boundary,
    longest_hit,
    resume_start,
)

GPT_OSS = CacheSpec(
    (
        GroupSpec(kind=GroupKind.WINDOW, block_tokens=16, window_tokens=128),
        GroupSpec(kind=GroupKind.FULL, block_tokens=16),
    ),
    64,
)
QWEN3_NEXT = CacheSpec(
    (
        *(GroupSpec(kind=GroupKind.RECURRENT, block_tokens=64) for _ in range(3)),
        GroupSpec(kind=GroupKind.FULL, block_tokens=64),
    ),
    64,
)


def everything(spec: CacheSpec, chunks: int) -> Store:
    return {
        (group, end): LookupResult.HIT
        for group in spec.stored_groups
        for end in range(spec.boundary_tokens, chunks * spec.chunk_tokens + 1, spec.boundary_tokens)
    }


def hit(spec: CacheSpec, num_tokens: int, computed: int, store: Store) -> Hit | Pending | Miss:
    return longest_hit(spec, num_tokens, computed, lambda group, end: store.get((group, end), LookupResult.MISS))


def resumable(spec: CacheSpec, boundary: int, computed: int, store: Store) -> set[LookupResult]:
    """Every answer that a boundary depends on, computed from `resume_start` without any search.

    Blocks are loaded whole, or the engine would keep incomplete ones.
    """
    answers = set()
    for group_index in spec.stored_groups:
        group = spec.groups[group_index]
        start = resume_start(group, boundary)
        if start < boundary:
            for token in range(start // group.block_tokens * group.block_tokens, boundary):
                if token >= computed or group.kind is GroupKind.RECURRENT:
                    end = min((token // spec.chunk_tokens + 1) * spec.chunk_tokens, boundary)
                    answers.add(store.get((group_index, end), LookupResult.MISS))
    return answers


def exhaustive(spec: CacheSpec, num_tokens: int, computed: int, store: Store) -> int:
    boundary = last_boundary(spec, num_tokens)
    while boundary > computed and LookupResult.MISS in resumable(spec, boundary, computed, store):
        boundary -= spec.boundary_tokens
    return boundary if boundary > computed else 0


@given(any_caches, st.data())
def test_a_hit_equals_that_of_exhaustive_search(spec: CacheSpec, data: st.DataObject) -> None:
    store = data.draw(stores(spec))
    num_tokens = data.draw(st.integers(0, CHUNKS * spec.chunk_tokens))
    computed = data.draw(computed_tokens(spec, num_tokens - 1))
    with mock.patch("hybridkv.planner.hit._MAX_RULED_OUT", data.draw(st.sampled_from([1, 2, 16]))):
        found = hit(spec, num_tokens, computed, store)
        by_ranges = longest_hit(spec, num_tokens, computed, lambda *key: store[key], Ranges(spec, store))
    assert getattr(by_ranges, "num_tokens", 0) == getattr(found, "num_tokens", 0) and type(by_ranges) is type(found)
    expected = exhaustive(spec, num_tokens, computed, store)
    if expected == 0:
        assert isinstance(found, Miss)
    elif LookupResult.PENDING in resumable(spec, expected, computed, store):
        assert found == Pending(expected)
    else:
        assert found == Hit(expected)


@given(any_caches, st.data())
def test_a_hit_needs_no_token_that_is_not_stored(spec: CacheSpec, data: st.DataObject) -> None:
    store = data.draw(stores(spec))
    found = hit(spec, CHUNKS * spec.chunk_tokens, 0, store)
    if isinstance(found, Hit):
        assert resumable(spec, found.num_tokens, 0, store) <= {LookupResult.HIT}


@given(any_caches, st.data())
def test_storing_one_more_chunk_never_shortens_a_hit(spec: CacheSpec, data: st.DataObject) -> None:
    store = {key: LookupResult.HIT for key, answer in data.draw(stores(spec)).items() if answer is LookupResult.HIT}
    num_tokens = data.draw(st.integers(0, CHUNKS * spec.chunk_tokens))
    before = hit(spec, num_tokens, 0, store)
    group = data.draw(st.sampled_from(spec.stored_groups))
    store[group, data.draw(st.sampled_from(boundaries(spec)))] = LookupResult.HIT
    after = hit(spec, num_tokens, 0, store)
    assert getattr(after, "num_tokens", 0) >= getattr(before, "num_tokens", 0)


@given(any_caches, st.data())
def test_no_chunk_is_looked_up_twice(spec: CacheSpec, data: st.DataObject) -> None:
    store = data.draw(stores(spec))
    asked: Counter[tuple[int, int]] = Counter()

    def lookup(group: int, end: int) -> LookupResult:
        asked[group, end] += 1
        return store.get((group, end), LookupResult.MISS)

    longest_hit(spec, CHUNKS * spec.chunk_tokens, 0, lookup)
    assert all(count == 1 for count in asked.values())
    assert all(0 < end < CHUNKS * spec.chunk_tokens and end % spec.boundary_tokens == 0 for _, end in asked)


def test_the_last_token_is_never_part_of_a_hit() -> None:
    assert hit(GPT_OSS, 256, 0, everything(GPT_OSS, 8)) == Hit(192)
    assert hit(GPT_OSS, 257, 0, everything(GPT_OSS, 8)) == Hit(256)


def test_a_hit_ends_at_the_last_recurrent_state() -> None:
    store = everything(QWEN3_NEXT, 8)
    for chunk in (4, 5, 6, 7):
        del store[1, (chunk + 1) * 64]
    assert hit(QWEN3_NEXT, 1000, 0, store) == Hit(256)


def test_a_missing_state_ends_the_search_before_the_full_prefix_is_walked() -> None:
    asked: list[int] = []

    def lookup(group: int, end: int) -> LookupResult:
        asked.append(group)
        return LookupResult.MISS if group == 0 else LookupResult.HIT

    found = longest_hit(QWEN3_NEXT, 1000, 0, lookup)
    assert found == Miss(0, "group 0 (RECURRENT) is not stored beyond the 0 tokens held")
    assert set(asked) == {0}


def test_a_hole_before_the_window_does_not_matter() -> None:
    store = everything(GPT_OSS, 8)
    del store[0, 64]
    assert hit(GPT_OSS, 513, 0, store) == Hit(512)
    del store[0, 448]
    assert hit(GPT_OSS, 513, 0, store) == Hit(384)


def test_chunks_that_the_engine_holds_need_not_be_stored() -> None:
    store = everything(GPT_OSS, 8)
    for chunk in range(4):
        del store[1, (chunk + 1) * 64]
    assert hit(GPT_OSS, 513, 256, store) == Hit(512)
    assert isinstance(hit(GPT_OSS, 513, 192, store), Miss)


def test_a_prompt_shorter_than_a_chunk_is_a_miss_with_a_reason() -> None:
    found = hit(GPT_OSS, 64, 0, everything(GPT_OSS, 8))
    assert found == Miss(None, "64 tokens have no boundary of 64 tokens beyond the 0 held")


@pytest.mark.parametrize(("num_tokens", "computed"), [(-1, 0), (0, -1)])
def test_negative_tokens_are_refused(num_tokens: int, computed: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        hit(GPT_OSS, num_tokens, computed, {})
