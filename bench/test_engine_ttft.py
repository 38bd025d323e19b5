"""Checks in a minimal run that each measurement does the work of its name. Does not check times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from checkpoint_cost import Started, ours
from engine_ttft import ARGUMENTS, COLD, DISK, MODELS, RAM, Subject, limit, row

TOKENS = 1025
Round = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def rounds() -> Iterator[list[Round]]:
    """Rounds of an engine with a host memory tier and a disk tier."""
    model = MODELS["gemma3"]
    with ExitStack() as kept:
        started = Started(kept, model.kind, "ttft_engine.py")
        transfer = ours("auto", "16MiB")
        disk = {"type": "disk", "path": str(started.directory / "tier"), "capacity": "256MiB"}
        transfer["kv_connector_extra_config"]["tiers"].append(disk)
        subject = Subject(started.engine(DISK, transfer, ARGUMENTS | model.arguments), started.directory, DISK)
        subject.fill(TOKENS)
        yield [subject.turn(number, TOKENS) for number in range(2)]


def test_no_byte_moves_without_a_connector_or_without_a_hit(rounds: list[Round]) -> None:
    for each in rounds:
        moved = {(side, each[side]["hit"], each[side]["store_bytes"], each[side]["load_bytes"]) for side in COLD[:3]}
        assert moved == {("plain", 0, 0, 0), ("again", 0, 0, 0), ("never", 0, 0, 0)}


def test_the_connectors_time_is_counted_if_there_is_one(rounds: list[Round]) -> None:
    for each in rounds:
        assert {each[side]["connector_cpu"] for side in ("plain", "again", "own")} == {0.0}
        assert all(0.0 < each[side]["connector_cpu"] < each[side]["engine_cpu"] for side in ("never", "storing", "ram"))


def test_a_stored_prompt_is_new_and_is_stored_completely(rounds: list[Round]) -> None:
    for each in rounds:
        assert each["storing"]["hit"] == 0
        assert each["storing"]["store_bytes"] == rounds[0]["storing"]["store_bytes"] > 0


def test_a_full_store_makes_room_for_the_next_prompt(rounds: list[Round]) -> None:
    assert rounds[0]["storing"]["evicted_bytes"] > 0


def test_each_hit_has_the_length_and_source_of_its_name(rounds: list[Round]) -> None:
    for each in rounds:
        assert {each[side]["hit"] for side in ("own", "ram", "disk")} == {TOKENS - 1}
        assert each["own"]["load_bytes"] == each["ram"]["move_bytes"] == 0
        assert each["ram"]["load_bytes"] == each["disk"]["load_bytes"] > 0
        assert each["disk"]["move_bytes"] >= each["disk"]["load_bytes"]


def test_a_hit_gives_the_computed_token(rounds: list[Round]) -> None:
    for each in rounds:
        assert {each[side]["token"] for side in ("ram", "disk")} == {each["storing"]["token"]}
        assert each["own"]["token"] == each["plain"]["token"]


def test_a_row_has_every_judged_ratio(rounds: list[Round]) -> None:
    found = row(rounds)
    assert found["same tokens"]
    assert found["over limit"].keys() == {"ram", "disk"}
    assert found["seconds over plain"].keys() == {"again", "never", "storing"}


def test_a_limit_is_the_own_hit_plus_a_step_plus_the_bytes_with_a_fifth_more() -> None:
    seconds = {"own": 1.0, "step": 2.0, "copy": 10.0, "read": 100.0}
    found = {name: {"seconds": each} for name, each in seconds.items()}
    assert limit(found, RAM) == pytest.approx(15.0)
    assert limit(found, "disk") == pytest.approx(135.0)
