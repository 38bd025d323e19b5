"""Number of keys that a search looks up: the engine's loop waits for it."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, Ranges, any_caches, stores

from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, Hit, LookupResult, Miss, longest_hit

CHUNK = 64
FULL = GroupSpec(GroupKind.FULL, 16)
STATE = GroupSpec(GroupKind.RECURRENT, CHUNK)
LONG = 1024
"""Chunks of the prompt."""


class Tier:
    """Holds the chunks for which `holds(group, chunk)` is true, chunks counted from 1; counts the lookups of each
    group."""

    def __init__(self, holds: Callable[[int, int], bool]) -> None:
        self.holds, self.asked = holds, Counter()

    def __call__(self, group: int, end: int) -> LookupResult:
        self.asked[group] += 1
        return LookupResult.HIT if self.holds(group, end // CHUNK) else LookupResult.MISS


def search(groups: tuple[GroupSpec, ...], tier: Tier) -> Hit | Miss:
    return longest_hit(CacheSpec(groups, CHUNK), LONG * CHUNK + 1, 0, tier)


def window(chunks: int) -> GroupSpec:
    return GroupSpec(GroupKind.WINDOW, 16, window_tokens=chunks * CHUNK)


def test_a_full_hit_costs_one_lookup_per_chunk_and_one_per_state() -> None:
    tier = Tier(lambda group, chunk: True)
    assert search((STATE, STATE, window(8), FULL), tier) == Hit(LONG * CHUNK)
    assert tier.asked == {0: 1, 1: 1, 2: 8, 3: LONG}


def test_a_full_miss_costs_a_few_lookups_however_long_the_prompt() -> None:
    for groups in ((FULL,), (STATE, FULL), (window(1), FULL), (STATE, window(8), FULL)):
        tier = Tier(lambda group, chunk: False)
        assert isinstance(search(groups, tier), Miss)
        assert tier.asked.total() <= 17


@pytest.mark.parametrize("scarce", [(), (STATE,), (window(1),), (window(8),), (STATE, STATE, window(8))])
def test_a_miss_beside_tails_costs_no_more_for_a_longer_prompt(scarce: tuple[GroupSpec, ...]) -> None:
    spec = CacheSpec((*scarce, FULL), 16 * CHUNK, tail_tokens=16)
    totals = []
    for num_tokens in (LONG * CHUNK, 16 * LONG * CHUNK):
        tier = Tier(lambda group, chunk: False)
        assert isinstance(longest_hit(spec, num_tokens + 1, 0, tier), Miss)
        totals.append(tier.asked.total())
    assert totals[0] == totals[1] <= 576


def test_a_missing_window_costs_one_lookup_per_window() -> None:
    tier = Tier(lambda group, chunk: False)
    assert isinstance(search((window(8),), tier), Miss)
    assert tier.asked[0] == LONG // 8


def test_states_are_not_looked_up_beyond_the_end_of_the_full_prefix() -> None:
    tier = Tier(lambda group, chunk: chunk == 100 if group == 0 else chunk <= 110)
    assert search((STATE, FULL), tier) == Hit(100 * CHUNK)
    assert tier.asked[0] <= 16 + 11
    assert tier.asked[1] <= 100 + 2 * math.log2(LONG)


def test_a_full_prefix_is_walked_only_as_far_as_the_states_reach() -> None:
    tier = Tier(lambda group, chunk: group == 1 or chunk == LONG - 10)
    assert search((STATE, FULL), tier) == Hit((LONG - 10) * CHUNK)
    assert tier.asked == {0: 11, 1: LONG - 10}


@given(any_caches, st.data())
def test_no_search_looks_up_more_keys_than_boundaries(spec: CacheSpec, data: st.DataObject) -> None:
    store = data.draw(stores(spec))
    asked: Counter[int] = Counter()

    def lookup(group: int, end: int) -> LookupResult:
        asked[group] += 1
        return store[group, end]

    longest_hit(spec, CHUNKS * spec.chunk_tokens + max(1, spec.lookahead_tokens), 0, lookup)
    num_boundaries = CHUNKS * spec.chunk_tokens // spec.boundary_tokens  # as many as chunks where no tails are stored
    assert all(count <= num_boundaries for count in asked.values())


@given(st.integers(0, LONG), st.sampled_from([STATE, window(1)]))
def test_a_scarce_group_alone_is_looked_up_at_every_missing_chunk(stored_chunks: int, group: GroupSpec) -> None:
    tier = Tier(lambda _, chunk: chunk <= stored_chunks)
    search((group,), tier)
    assert tier.asked[0] == min(LONG, LONG - stored_chunks + 1)


def test_missing_states_beside_tails_cost_one_lookup_per_boundary() -> None:
    asked: Counter[int] = Counter()

    def lookup(group: int, end: int) -> LookupResult:
        asked[group] += 1
        return LookupResult.HIT if group == 1 else LookupResult.MISS

    spec = CacheSpec((STATE, FULL), CHUNK, tail_tokens=16)
    assert longest_hit(spec, LONG * CHUNK + 1, 0, lookup) == Miss(
        0, "group 0 (RECURRENT) is not stored beyond the 0 tokens held"
    )
    assert asked[0] == LONG * CHUNK // 16
    assert asked[1] <= 2


def test_two_alternating_groups_cost_one_range_lookup_per_hole() -> None:
    groups = (window(2), FULL)
    spec = CacheSpec(groups, CHUNK)
    ranges = Ranges(
        spec,
        {(g, (c + 1) * CHUNK): LookupResult.HIT for g in (0, 1) for c in range(LONG) if g == 1 or c % 2 == 0},
    )
    found = longest_hit(spec, LONG * CHUNK + 1, 0, lambda *key: LookupResult.MISS, ranges)
    assert found == Hit(CHUNK)
    assert LONG // 2 <= ranges.questions <= 2 * LONG


@pytest.mark.parametrize("stored_chunks", [0, 1, 100, LONG])
@pytest.mark.parametrize("groups", [(FULL,), (STATE, STATE, FULL), (window(1), window(8), FULL), (FULL,) * 64])
def test_range_lookups_are_few_per_group_and_replace_single_keys(
    groups: tuple[GroupSpec, ...], stored_chunks: int
) -> None:
    spec = CacheSpec(groups, CHUNK)
    ranges = Ranges(
        spec,
        {(g, (c + 1) * CHUNK): LookupResult.HIT for g in spec.stored_groups for c in range(stored_chunks)},
    )

    def lookup(group: int, end: int) -> LookupResult:
        raise AssertionError("a single key was looked up")

    found = longest_hit(spec, LONG * CHUNK + 1, 0, lookup, ranges)
    assert found == Hit(stored_chunks * CHUNK) if stored_chunks else isinstance(found, Miss)
    assert ranges.questions <= 5 * len(groups) + 2 * math.log2(LONG)


@pytest.mark.parametrize("groups", [(FULL,), (STATE, FULL), (window(1), window(8), FULL), (FULL,) * 64])
def test_a_miss_costs_one_range_lookup(groups: tuple[GroupSpec, ...]) -> None:
    spec = CacheSpec(groups, CHUNK)
    ranges = Ranges(spec, {})
    assert isinstance(longest_hit(spec, LONG * CHUNK + 1, 0, lambda *key: LookupResult.MISS, ranges), Miss)
    assert ranges.questions == 1


def test_the_first_chunk_of_a_full_prefix_is_looked_up_alone() -> None:
    spec = CacheSpec((FULL,), CHUNK)
    spans: list[tuple[int, int]] = []

    class Watched(Ranges):
        def num_leading_held(self, group_index: int, first_end: int, last_end: int) -> int:
            spans.append((first_end // CHUNK, last_end // CHUNK))
            return super().num_leading_held(group_index, first_end, last_end)

    store = {(0, (c + 1) * CHUNK): LookupResult.HIT for c in range(LONG)}
    for computed in (0, 3 * CHUNK + 1):
        spans.clear()
        watched = Watched(spec, store)
        found = longest_hit(spec, LONG * CHUNK + 1, computed, lambda *key: LookupResult.MISS, watched)
        assert found == Hit(LONG * CHUNK)
        first = computed // CHUNK + 1
        assert spans == [(first, first), (first + 1, LONG)]


def test_a_range_lookup_ends_where_the_full_prefix_ends() -> None:
    spec = CacheSpec((STATE, FULL), CHUNK)
    reached: list[int] = []

    class Watched(Ranges):
        def last_held(self, group_index: int, first_end: int, last_end: int) -> int:
            reached.append((last_end - first_end) // CHUNK + 1)
            return super().last_held(group_index, first_end, last_end)

    store = {(1, (c + 1) * CHUNK): LookupResult.HIT for c in range(100)} | {(0, 90 * CHUNK): LookupResult.HIT}
    found = longest_hit(spec, LONG * CHUNK + 1, 0, lambda *key: LookupResult.MISS, Watched(spec, store))
    assert found == Hit(90 * CHUNK)
    assert max(reached) <= 100
