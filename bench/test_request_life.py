"""Checks on minimal lives that both sides do the same work. Does not check times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from life_driver import Driver, LifeTimes
from life_prompts import SCENARIOS, Prompts
from life_sides import Ours
from planner_lookup import PRESETS
from request_life import measure_besides, measure_lives, measure_running, ratios, save

TOKENS = 2176
"""Four chunks of the model with the longest chunks."""


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_both_sides_hit_load_and_store_the_same(preset: str, scenario: str) -> None:
    prompts = Prompts(preset, TOKENS, scenario)
    sides = measure_lives(prompts, 1)
    done = {(side["hit_tokens"], side["loaded_blocks"], side["stored_full_blocks"]) for side in sides.values()}
    assert len(done) == 1
    (hit_tokens, _, stored_blocks), *_ = done
    full_tokens = PRESETS[preset][0].block_tokens
    assert hit_tokens == prompts.hit_tokens
    assert stored_blocks * full_tokens == prompts.stored_tokens - prompts.hit_tokens
    assert ratios(sides).keys() == sides.keys() - {"ours"}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_cold_prompt_in_a_full_tier_is_found_completely_on_both_sides(preset: str) -> None:
    prompts = Prompts(preset, TOKENS, "miss")
    hashes = prompts.next_hashes()
    for name in prompts.side_names:
        side = prompts.open(name)
        for expected in (0, prompts.stored_tokens):
            times = LifeTimes()
            Driver(side, times).live(prompts.request(hashes), 2)
            assert times.hit_tokens == expected, name


def test_a_cold_prompt_evicts_earlier_keys() -> None:
    prompts = Prompts("gemma3", TOKENS, "miss")
    side = prompts.open("ours")
    assert isinstance(side, Ours)
    num_keys, times = side.index.num_keys, LifeTimes()
    Driver(side, times).live(prompts.request(prompts.next_hashes()), 0)
    assert times.work.num_stored_full > 0
    assert side.index.num_keys == num_keys == len(PRESETS["gemma3"]) * TOKENS // prompts.spec.chunk_tokens


@pytest.mark.parametrize("preset", ["gemma3", "qwen3next"])
def test_additional_measurements_run_on_both_sides(preset: str) -> None:
    prompts = Prompts(preset, TOKENS, "full")
    for name in prompts.side_names:
        running = measure_running(prompts, name, 3)
        besides = measure_besides(prompts, name)
        assert min(running["step_us"], besides["abort_us"], besides["preemption_us"], besides["plan_bytes"]) > 0


def test_a_run_of_some_cases_keeps_the_others_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "life.json"

    def found(scenario: str, total: int) -> dict[str, list[dict[str, object]]]:
        return {"lives": [{"asked_tokens": 8192, "scenario": scenario, "total": total}]}

    runs = [("llama", "full", 1), ("llama", "miss", 2), ("gemma3", "full", 3), ("llama", "full", 4)]
    for preset, scenario, total in runs:
        save(out, preset, found(scenario, total))
    presets = json.loads(out.read_text())["presets"]
    lives = {(name, life["scenario"]): life["total"] for name, each in presets.items() for life in each["lives"]}
    assert lives == {("llama", "miss"): 2, ("llama", "full"): 4, ("gemma3", "full"): 3}
