"""Which results may be compared exactly, and how far two answers deviate; without an engine."""

from __future__ import annotations

import dataclasses

import pytest
from equality import require_same_output, same_arithmetic
from harness import Result, Step
from noise import deviation

ANSWER = (7, 8, 9)


def alone(*parts: tuple[int, int]) -> tuple[Step, ...]:
    return tuple(Step(*part, 0, (part,)) for part in parts)


def result(steps: tuple[Step, ...], *shift: float) -> Result:
    """An answer of three tokens to a prompt of 40, with log-probabilities changed by `shift`."""
    offsets = [*shift, *(0.0 for _ in ANSWER)]
    logprobs = tuple({token: -1.0 + offset, 5: -2.0} for token, offset in zip(ANSWER, offsets, strict=False))
    return Result("", ANSWER, logprobs, 0, "length", steps)


COLD = result(alone((0, 16), (16, 16), (32, 8), (40, 1), (41, 1)))


@pytest.mark.parametrize(
    ("steps", "is_same"),
    [
        (COLD.steps, True),
        (alone((16, 16), (32, 8), (40, 1), (41, 1)), True),
        (alone((32, 8), (40, 1), (41, 1)), True),
        (alone((24, 16), (40, 1), (41, 1)), False),
        # The load failed after the step had begun; then the request started again.
        (alone((32, 8), (16, 16), (32, 8), (40, 1), (41, 1)), True),
        (alone((32, 8), (16, 24), (40, 1), (41, 1)), False),
        # Preempted during its answer, whose beginning was computed in other steps.
        (alone((0, 40), (40, 1), (41, 1)), False),
        (alone((0, 40), (40, 1), (32, 9), (41, 1)), False),
        (alone((0, 40), (40, 1), (41, 1), (41, 1)), False),
        ((), False),
    ],
)
def test_arithmetic_is_the_same_if_all_needed_tokens_had_the_same_steps(steps: tuple[Step, ...], is_same: bool) -> None:
    other = result(steps)
    assert same_arithmetic(COLD, other) is is_same
    assert same_arithmetic(other, COLD) is is_same


def test_another_request_in_the_batch_changes_the_arithmetic() -> None:
    *first, last = COLD.steps
    beside = dataclasses.replace(last, batch=(*last.batch, (100, 1)))
    assert not same_arithmetic(COLD, result((*first, beside)))


def test_same_output_requires_exact_equality() -> None:
    require_same_output([COLD], [result(COLD.steps)])
    with pytest.raises(AssertionError):
        require_same_output([COLD], [result(COLD.steps, 1e-16)])
    with pytest.raises(AssertionError, match="the steps differ"):
        require_same_output([COLD], [result(alone((0, 40), (40, 1), (41, 1)))])


def test_a_deviation_is_the_mean_over_the_common_answer() -> None:
    assert deviation(COLD, COLD) == 0.0
    assert deviation(COLD, result((), 0.6)) == pytest.approx(0.6 / 2 / 3)


def test_a_deviation_ends_at_the_first_different_token() -> None:
    parted = dataclasses.replace(COLD, token_ids=(5, 8, 9), logprobs=({7: -1.5, 5: -1.5}, {}, {}))
    assert deviation(COLD, parted) == pytest.approx(0.5)


def test_an_unlisted_token_counts_as_likely_as_the_least_listed_one() -> None:
    other = dataclasses.replace(COLD, token_ids=(6, 8, 9), logprobs=({6: -0.5, 4: -4.0}, {}, {}))
    # Token 7: -1 against at most -4. Token 6: at most -2 against -0.5.
    assert deviation(COLD, other) == pytest.approx((3.0 + 1.5) / 2)


def test_a_result_survives_json_exactly() -> None:
    assert Result.from_json(COLD.as_json()) == dataclasses.replace(COLD, finish_reason=None)
