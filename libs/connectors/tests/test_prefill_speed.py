"""Prefill speed is measured from the steps of the engine, and no single step changes it much."""

from __future__ import annotations

import logging

import pytest

from hybridkv.connectors.vllm.offload.loads.lookup_costs import CHECK_EVERY_S, LOG_AGAIN_S, BreakEvenLog
from hybridkv.connectors.vllm.offload.loads.prefill_speed import FIRST_TOKENS_PER_S, MAX_IN_FLIGHT, PrefillSpeed
from hybridkv.planner.stages import LookupWait


class Engine:
    """Steps of an engine that computes a token in `token_s`, and needs `step_s` for each step."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        self.now_s = 100.0
        self.speed = PrefillSpeed(lambda: self.now_s, tokens_per_s)

    def step(self, took_s: float, **tokens: int) -> None:
        number = self.speed.on_planned(tokens)
        self.now_s += took_s
        self.speed.on_output(number)
        self.now_s += 5.0  # idle


def test_the_first_step_is_measured() -> None:
    engine = Engine()
    assert engine.speed.seconds_per_token == 1 / FIRST_TOKENS_PER_S
    engine.step(0.5, a=1000)
    assert engine.speed.seconds_per_token == pytest.approx(0.0005)


def test_one_slow_step_changes_little() -> None:
    engine = Engine()
    for took_s in (30.0, 0.1, 0.1, 0.1):
        engine.step(took_s, a=1000)
    assert engine.speed.seconds_per_token == pytest.approx(0.0001)


@pytest.mark.parametrize("tokens", [{"a": 63}, {f"r{i}": 1 for i in range(256)}, {f"r{i}": 15 for i in range(256)}, {}])
def test_decodes_and_short_steps_are_not_measured(tokens: dict[str, int]) -> None:
    engine = Engine()
    engine.step(1.0, **tokens)
    assert engine.speed.seconds_per_token == 1 / FIRST_TOKENS_PER_S


def test_decodes_beside_a_prompt_do_not_count_as_prompt_tokens() -> None:
    engine = Engine()
    engine.step(0.2, a=1000, **{f"r{i}": 1 for i in range(256)})
    assert engine.speed.seconds_per_token == pytest.approx(0.0002)


def test_a_step_planned_ahead_starts_when_the_previous_one_ends() -> None:
    engine = Engine()
    for number in [engine.speed.on_planned({"a": 1000}), engine.speed.on_planned({"b": 1000})]:
        engine.now_s += 0.1
        engine.speed.on_output(number)
    assert engine.speed.seconds_per_token == pytest.approx(0.0001)


@pytest.mark.parametrize("num_lost", [1, 3, MAX_IN_FLIGHT, 50])
def test_steps_without_an_output_shift_no_other_step(num_lost: int) -> None:
    """An engine has no output for a step with only waiting requests, and an output may be lost."""
    engine = Engine()
    for _ in range(20):
        for _ in range(num_lost):
            engine.speed.on_planned({})
            engine.speed.on_planned({"lost": 1000})
            engine.now_s += 0.001
        engine.step(0.1, a=1000)
        engine.step(0.01, a=1)
    assert engine.speed.seconds_per_token == pytest.approx(0.0001)


def test_a_configured_speed_is_not_measured() -> None:
    engine = Engine(tokens_per_s=500.0)
    engine.step(0.1, a=1000)
    assert engine.speed.seconds_per_token == 0.002


def test_a_speed_is_known_after_a_measured_step_or_if_configured() -> None:
    engine = Engine()
    assert not engine.speed.is_known
    engine.step(0.5, a=1000)
    assert engine.speed.is_known and Engine(1000.0).speed.is_known


def test_the_break_even_is_logged_first_and_after_large_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now_s = 0.0
    log = BreakEvenLog(lambda: now_s)

    def lines(answer_s: float, saved_s: float = 0.00008, after_s: float = LOG_AGAIN_S) -> list[str]:
        nonlocal now_s
        now_s += after_s
        caplog.clear()
        log.record("object", LookupWait(1.0, answer_s, 0.004, saved_s), 0.0001)
        return [record.getMessage() for record in caplog.records]

    (line,) = lines(0.02)
    assert line == (
        "break-even of object: requests wait for hits of 301 tokens or more (an answer takes 20.0 ms, a hit of 1,000 "
        "tokens 24.0 ms to read and 100.0 ms to compute); shorter ones are found if the answer comes while the request "
        "is queued"
    )
    assert not lines(0.03) and not lines(0.01)
    assert "of 676 tokens" in lines(0.05)[0]
    assert "no request waits" in lines(0.05, -0.01)[0]
    assert not lines(0.06, -0.02)
    assert "no request waits" not in lines(0.05)[0]
    assert "no request waits" in lines(1.5)[0], "answers come after the deadline"
    assert not lines(0.05, after_s=LOG_AGAIN_S - 1)


def test_break_evens_are_checked_once_per_second() -> None:
    now_s = 0.0
    log = BreakEvenLog(lambda: now_s)
    assert log.is_due() and not log.is_due()
    now_s = CHECK_EVERY_S
    assert log.is_due()
