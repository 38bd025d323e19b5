"""States at the end of answers: which are worth their bytes, since enough requests resume at them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.planner import NO_EXPERIENCE, AnswerReuse, Costs, StoreUsage
from hybridkv.planner.checkpoints.experience import KEPT_SHARE

COSTS = Costs(2_048, 1, 64)
numbers = st.floats(0.0, 1e9)
usages = st.builds(
    lambda aged, stored: StoreUsage(
        1 << 30, 0, msgspec.structs.replace(NO_EXPERIENCE, aged_tokens=aged, stored_bytes=stored)
    ),
    numbers,
    numbers,
)
calls = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 5), max_size=3)), max_size=40)


def tight(tokens_a_state: float) -> StoreUsage:
    """Usage in which the bytes of one state of `COSTS` are worth so many tokens."""
    learned = msgspec.structs.replace(NO_EXPERIENCE, aged_tokens=1.0, stored_bytes=1.0)
    aged = tokens_a_state / COSTS.state_bytes / learned.tokens_per_byte
    return StoreUsage(1 << 30, 0, msgspec.structs.replace(learned, aged_tokens=aged))


def replay(states: AnswerReuse, steps: list[tuple[bool, list[int]]]) -> AnswerReuse:
    for is_met, keys in steps:
        if is_met:
            states.record_resumed(keys)
        else:
            for key in keys:
                states.note(key)
    return states


def test_every_state_is_unproven_before_the_first_request_returns() -> None:
    states = AnswerReuse(10)
    assert states.is_unproven(1_000_000, StoreUsage(1 << 30), COSTS)
    states.note("a")
    assert states.is_unproven(1_000_000, StoreUsage(1 << 30), COSTS)


def test_states_are_worth_storing_at_a_return_rate_of_one_half_not_of_one_percent() -> None:
    often, seldom = AnswerReuse(1_000), AnswerReuse(1_000)
    for number in range(300):
        often.note(number)
        seldom.note(number)
        often.record_resumed([number] if number % 2 else [])
        seldom.record_resumed([number] if number % 100 == 99 else [])
    assert often.resumed_share == pytest.approx(0.5, abs=0.05) and seldom.resumed_share == pytest.approx(
        0.01, abs=0.005
    )
    usage = tight(tokens_a_state=200.0)
    assert not often.is_unproven(10_000, usage, COSTS)
    assert seldom.is_unproven(10_000, usage, COSTS)


def test_every_state_is_proven_once_returns_were_seen_and_bytes_are_free() -> None:
    states = AnswerReuse(10)
    states.note("a")
    states.record_resumed(["a"])
    stored_anew = msgspec.structs.replace(NO_EXPERIENCE, bytes_ever=float(4 << 30))
    assert not states.is_unproven(128, StoreUsage(1 << 30, 0, stored_anew), COSTS)
    assert states.is_unproven(128, StoreUsage(1 << 30), COSTS), (
        "a store that has evicted little can have lost few states"
    )


def test_each_state_counts_once_and_a_forgotten_state_does_not() -> None:
    states = AnswerReuse(2)
    for key in "abc":
        states.note(key)
    states.record_resumed("a")
    assert (len(states), states.resumed_share) == (2, 0.0)
    states.record_resumed("bb")
    states.record_resumed("b")
    once = states.resumed_share
    assert len(states) == 1 and once > 0
    states.forget()
    states.record_resumed("c")
    assert (len(states), states.resumed_share) == (0, once)


def test_two_answers_with_the_same_state_count_as_a_state_and_its_return() -> None:
    states = AnswerReuse(10)
    for _ in range(2):
        states.note("a")
    assert (len(states), states.resumed_share) == (0, pytest.approx(0.5, abs=0.01))


def test_the_return_rate_falls_again_when_requests_stop_returning() -> None:
    states = AnswerReuse(10)
    for number in range(50):
        states.note(number)
        states.record_resumed([number])
    for number in range(50, 5_000):
        states.note(number)
    assert states.resumed_share < 0.01


@given(st.integers(0, 6), calls)
def test_the_counts_agree_with_a_list_of_all_events(max_states: int, steps: list[tuple[bool, list[int]]]) -> None:
    states = replay(AnswerReuse(max_states), steps)
    waiting: list[int] = []
    outgrown, met = [1.0], []
    for is_met, keys in steps:
        for key in keys:
            if not is_met and key not in waiting:
                outgrown, met = [each * KEPT_SHARE for each in outgrown] + [1.0], [each * KEPT_SHARE for each in met]
                waiting = [*waiting, key][-max_states or len(waiting) + 1 :]
            elif key in waiting:
                waiting.remove(key)
                met.append(1.0)
    assert len(states) == len(waiting) <= max_states
    assert states.resumed_share == pytest.approx(sum(met) / sum(outgrown))


@given(calls, st.integers(0, 1 << 20), st.integers(0, 1 << 20), usages, st.integers(0, 1 << 20))
def test_deeper_states_and_cheaper_bytes_are_never_worth_less(
    steps: list[tuple[bool, list[int]]], num_tokens: int, more_tokens: int, usage: StoreUsage, more_bytes: int
) -> None:
    states = replay(AnswerReuse(4), steps)
    dear = msgspec.structs.replace(COSTS, state_bytes=COSTS.state_bytes + more_bytes)
    assert states.is_unproven(num_tokens, usage, COSTS) >= states.is_unproven(num_tokens + more_tokens, usage, COSTS)
    assert states.is_unproven(num_tokens, usage, dear) >= states.is_unproven(num_tokens, usage, COSTS)


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="max_states"):
        AnswerReuse(-1)
