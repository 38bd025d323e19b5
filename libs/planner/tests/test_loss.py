"""The measured loss by a scarce state or window equals its definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, Ranges, Store, any_caches, computed_tokens, stores

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    Hit,
    Lookup,
    LookupResult,
    Pending,
    last_boundary,
    longest_hit,
    measure_loss,
    needed_ends,
)

QWEN3_NEXT = CacheSpec(
    (
        GroupSpec(kind=GroupKind.RECURRENT, block_tokens=64),
        GroupSpec(kind=GroupKind.FULL, block_tokens=64),
    ),
    64,
)
RECURRENT, FULL = 0, 1


def answering(store: Store) -> Lookup:
    return lambda group, end: store.get((group, end), LookupResult.MISS)


def stored(*keys: tuple[int, int]) -> Store:
    return dict.fromkeys(keys, LookupResult.HIT)


def holds(spec: CacheSpec, group: int, boundary: int, computed: int, store: Store) -> bool:
    ends = needed_ends(spec, group, boundary, computed)
    return all(store.get((group, end), LookupResult.MISS) is not LookupResult.MISS for end in ends)


@given(any_caches, st.data())
def test_a_loss_equals_its_definition(spec: CacheSpec, data: st.DataObject) -> None:
    store = data.draw(stores(spec))
    num_tokens = data.draw(st.integers(0, CHUNKS * spec.chunk_tokens))
    computed = data.draw(computed_tokens(spec, num_tokens - 1))
    found = longest_hit(spec, num_tokens, computed, answering(store))
    resumed = found.num_tokens if isinstance(found, Hit | Pending) else computed
    loss = measure_loss(spec, num_tokens, computed, resumed, answering(store))

    full_groups = [i for i in spec.stored_groups if spec.groups[i].kind is GroupKind.FULL]
    held = [
        boundary
        for boundary in range(0, last_boundary(spec, num_tokens) + 1, spec.boundary_tokens)
        if boundary > resumed and full_groups and all(holds(spec, i, boundary, computed, store) for i in full_groups)
    ]
    assert loss.resumed_tokens == resumed
    assert loss.full_tokens == max(held, default=resumed)
    assert loss.lost_tokens == loss.full_tokens - resumed
    if loss.limiting_group is not None:
        assert spec.groups[loss.limiting_group].kind not in (GroupKind.FULL, GroupKind.SCRATCH)
        assert not holds(spec, loss.limiting_group, min(held), computed, store)
    assert measure_loss(spec, num_tokens, computed, resumed, answering(store), Ranges(spec, store)) == loss


def test_a_missing_state_loses_the_tokens_that_the_full_group_holds() -> None:
    store = stored((FULL, 64), (FULL, 128), (FULL, 192), (RECURRENT, 64))
    loss = measure_loss(QWEN3_NEXT, 300, 0, 64, answering(store))
    assert (loss.full_tokens, loss.lost_tokens, loss.limiting_group) == (192, 128, RECURRENT)


def test_a_boundary_without_a_tail_of_the_full_group_does_not_hide_a_loss() -> None:
    spec = CacheSpec(QWEN3_NEXT.groups, 64, tail_tokens=16)
    store = stored((FULL, 64), (FULL, 96), (RECURRENT, 64), (RECURRENT, 80))
    assert longest_hit(spec, 128, 0, answering(store)) == Hit(64)
    loss = measure_loss(spec, 128, 0, 64, answering(store))
    assert (loss.full_tokens, loss.lost_tokens, loss.limiting_group) == (96, 32, RECURRENT)


def test_nothing_is_lost_where_the_full_prefix_ends() -> None:
    store = stored((FULL, 64), (RECURRENT, 64))
    loss = measure_loss(QWEN3_NEXT, 300, 0, 64, answering(store))
    assert (loss.full_tokens, loss.lost_tokens, loss.limiting_group) == (64, 0, None)


def test_tokens_that_the_engine_holds_are_not_lost() -> None:
    store = stored((FULL, 192))
    assert measure_loss(QWEN3_NEXT, 300, 128, 128, answering(store)).lost_tokens == 64


def test_a_complete_hit_looks_up_nothing() -> None:
    def ask(group: int, end: int) -> LookupResult:
        pytest.fail(f"asked for {group}, {end}")

    assert measure_loss(QWEN3_NEXT, 300, 0, 256, ask).lost_tokens == 0


def test_nothing_is_lost_without_a_full_group() -> None:
    spec = CacheSpec((GroupSpec(kind=GroupKind.RECURRENT, block_tokens=64),), 64)
    assert measure_loss(spec, 300, 0, 0, answering({})).lost_tokens == 0


@pytest.mark.parametrize(("computed", "resumed"), [(-1, 0), (64, 0), (0, 301)])
def test_resumed_tokens_outside_of_the_request_are_refused(computed: int, resumed: int) -> None:
    with pytest.raises(ValueError, match="resumed_tokens"):
        measure_loss(QWEN3_NEXT, 300, computed, resumed, answering({}))
