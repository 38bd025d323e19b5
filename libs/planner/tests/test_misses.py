"""Misses: the group that limits them, and the answers that count as one."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, Ranges, any_caches, computed_tokens, stores

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
    measure_loss,
    needed_ends,
)

STATE = GroupSpec(GroupKind.RECURRENT, 64)
WINDOW = GroupSpec(GroupKind.WINDOW, 64, window_tokens=129)
FULL = GroupSpec(GroupKind.FULL, 64)
DOUBTFUL = [False, None, 0, "miss", "hit", True, 1]


@pytest.mark.parametrize("num_stored", [1, 20, 84, 90, 100])
@pytest.mark.parametrize("scarce", [STATE, WINDOW])
def test_a_miss_names_the_full_group_however_far_the_others_reach(scarce: GroupSpec, num_stored: int) -> None:
    spec = CacheSpec((scarce, FULL), 64)

    def lookup(group: int, end: int) -> LookupResult:
        return LookupResult.HIT if group == 0 and end <= num_stored * 64 else LookupResult.MISS

    assert longest_hit(spec, 100 * 64 + 1, 0, lookup) == Miss(
        1, "group 1 (FULL) is not stored beyond the 0 tokens held"
    )


@given(any_caches, st.data())
def test_the_limiting_group_lacks_a_chunk_of_the_first_boundary(spec: CacheSpec, data: st.DataObject) -> None:
    store = data.draw(stores(spec))
    num_tokens = CHUNKS * spec.chunk_tokens
    computed = data.draw(computed_tokens(spec, num_tokens - 1))
    ranges = Ranges(spec, store) if data.draw(st.booleans()) else None
    with mock.patch("hybridkv.planner.hit._MAX_RULED_OUT", data.draw(st.sampled_from([1, 2, 16]))):
        found = longest_hit(spec, num_tokens, computed, lambda *key: store[key], ranges)
    if isinstance(found, Miss) and last_boundary(spec, num_tokens) > computed:
        assert found.limiting_group is not None
        first = (computed // spec.boundary_tokens + 1) * spec.boundary_tokens
        ends = needed_ends(spec, found.limiting_group, first, computed)
        assert LookupResult.MISS in {store[found.limiting_group, end] for end in ends}


@pytest.mark.parametrize("doubtful", DOUBTFUL)
@pytest.mark.parametrize("groups", [(FULL,), (STATE,), (WINDOW,), (STATE, WINDOW, FULL)])
@pytest.mark.parametrize("tail_tokens", [None, 32])
def test_an_invalid_answer_is_a_miss(groups: tuple[GroupSpec, ...], tail_tokens: int | None, doubtful: object) -> None:
    spec = CacheSpec(groups, 64, tail_tokens)
    assert isinstance(longest_hit(spec, 50 * 64 + 1, 0, lambda group, end: doubtful), Miss)


@given(any_caches, st.data())
def test_an_invalid_answer_equals_a_miss_at_any_place(spec: CacheSpec, data: st.DataObject) -> None:
    store = data.draw(stores(spec))
    doubtful = data.draw(st.sampled_from(DOUBTFUL))
    num_tokens = CHUNKS * spec.chunk_tokens

    def doubting(group: int, end: int) -> object:
        answer = store[group, end]
        return doubtful if answer is LookupResult.MISS else answer

    found = longest_hit(spec, num_tokens, 0, doubting)
    assert found == longest_hit(spec, num_tokens, 0, lambda *key: store[key])
    resumed = found.num_tokens if isinstance(found, Hit | Pending) else 0
    assert measure_loss(spec, num_tokens, 0, resumed, doubting) == measure_loss(
        spec, num_tokens, 0, resumed, lambda *key: store[key]
    )
