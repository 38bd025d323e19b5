"""The smallest run: each side does what it is called, whatever it costs."""

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
    """Of an engine with a tier of host memory and one of disk below it."""
    model = MODELS["gemma3"]
    with ExitStack() as kept:
        started = Started(kept, model.kind, "ttft_engine.py")
        transfer = ours("auto", "16MiB")
        disk = {"type": "disk", "path": str(started.directory / "tier"), "capacity": "256MiB"}
        transfer["kv_connector_extra_config"]["tiers"].append(disk)
        subject = Subject(started.engine(DISK, transfer, ARGUMENTS | model.arguments), started.directory, DISK)
        subject.fill(TOKENS)
        yield [subject.turn(number, TOKENS) for number in range(2)]


def test_without_a_connector_and_with_one_that_finds_nothing_no_byte_moves(rounds: list[Round]) -> None:
    for each in rounds:
        moved = {(side, each[side]["hit"], each[side]["store_bytes"], each[side]["load_bytes"]) for side in COLD[:3]}
        assert moved == {("plain", 0, 0, 0), ("again", 0, 0, 0), ("never", 0, 0, 0)}


def test_what_the_connector_computes_is_counted_where_there_is_one(rounds: list[Round]) -> None:
    for each in rounds:
        assert {each[side]["connector_cpu"] for side in ("plain", "again", "own")} == {0.0}
        assert all(0.0 < each[side]["connector_cpu"] < each[side]["engine_cpu"] for side in ("never", "storing", "ram"))


def test_a_prompt_that_is_stored_is_new_and_is_stored_whole(rounds: list[Round]) -> None:
    for each in rounds:
        assert each["storing"]["hit"] == 0
        assert each["storing"]["store_bytes"] == rounds[0]["storing"]["store_bytes"] > 0


def test_a_store_that_was_filled_makes_room_for_the_next_prompt(rounds: list[Round]) -> None:
    assert rounds[0]["storing"]["evicted_bytes"] > 0


def test_each_hit_is_as_long_and_comes_from_where_its_name_says(rounds: list[Round]) -> None:
    for each in rounds:
        assert {each[side]["hit"] for side in ("own", "ram", "disk")} == {TOKENS - 1}
        assert each["own"]["load_bytes"] == each["ram"]["move_bytes"] == 0
        assert each["ram"]["load_bytes"] == each["disk"]["load_bytes"] > 0
        assert each["disk"]["move_bytes"] >= each["disk"]["load_bytes"]


def test_a_hit_gives_the_token_that_was_computed(rounds: list[Round]) -> None:
    for each in rounds:
        assert {each[side]["token"] for side in ("ram", "disk")} == {each["storing"]["token"]}
        assert each["own"]["token"] == each["plain"]["token"]


def test_a_row_has_every_ratio_that_is_judged(rounds: list[Round]) -> None:
    found = row(rounds)
    assert found["same tokens"]
    assert found["over limit"].keys() == {"ram", "disk"}
    assert found["seconds over plain"].keys() == {"again", "never", "storing"}


def test_a_limit_is_the_own_hit_a_step_and_a_fifth_more_than_the_bytes_take() -> None:
    seconds = {"own": 1.0, "step": 2.0, "copy": 10.0, "read": 100.0}
    found = {name: {"seconds": each} for name, each in seconds.items()}
    assert limit(found, RAM) == pytest.approx(15.0)
    assert limit(found, "disk") == pytest.approx(135.0)
