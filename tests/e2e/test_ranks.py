"""Two tensor-parallel ranks always hit together, from host memory and from disk, with equal tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import patience
import pytest
import ranks_process
from equality import require_same_written
from harness import scratch_directory
from stored_records import segments

START_S = patience.seconds(80.0)


@pytest.fixture(scope="module")
def lives(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = scratch_directory(tmp_path_factory.mktemp("ranks"))
    output = directory / "lives.json"
    arguments = ["--kind", kind, "--directory", str(directory), "--output", str(output)]
    process = subprocess.run(
        [sys.executable, ranks_process.__file__, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=START_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout.decode(errors="replace")
    for rank in range(ranks_process.RANKS):
        assert segments(directory / "cache", rank), f"rank {rank} has its own files"
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def outputs(life: dict[str, Any]) -> list[Any]:
    return [(result["tokens"], result["logprobs"]) for result in life["results"]]


def cached(life: dict[str, Any]) -> list[int]:
    return [result["cached"] for result in life["results"]]


def test_host_memory_serves_both_ranks(lives: dict[str, Any]) -> None:
    assert cached(lives["cold"]) == [0, 0, 0] and min(cached(lives["near"])) > 0
    require_same_written(lives["cold"]["results"], lives["near"]["results"])
    assert lives["near"]["promoted"] == 0


def test_a_load_that_fails_on_one_rank_is_recomputed_on_both(lives: dict[str, Any]) -> None:
    """A flipped bit in one rank's host memory, in a chunk that no other tier holds and that every boundary needs."""
    torn = lives["torn"]
    require_same_written(lives["cold"]["results"], torn["results"])
    assert torn["failed_loads"] == 1 and torn["blamed"] == ["checksum"], "one request, for one chunk of one rank"
    assert torn["counted"] == {"checksum": 1.0}
    assert cached(torn) == [0, *cached(lives["near"])[1:]]
    assert torn["loads"] == [1, 1, 1], "a failed load is not repeated"


def test_a_load_that_fails_on_one_rank_is_repeated_from_intact_copies(lives: dict[str, Any]) -> None:
    torn = lives["torn, whole on disk"]
    require_same_written(lives["cold"]["results"], torn["results"])
    assert torn["failed_loads"] == 1 and torn["blamed"] == ["checksum"]
    assert torn["counted"] == {"checksum": 1.0}
    assert cached(torn) == cached(lives["near"])
    assert torn["loads"] == [2, 1, 1] and torn["promoted"] == 1


def test_loads_that_succeed_count_no_failure(lives: dict[str, Any]) -> None:
    for name in ("near", "far", "mended", "forged"):
        assert (lives[name]["failed_loads"], lives[name]["blamed"], lives[name]["counted"]) == (0, [], {})
        assert lives[name]["loads"] == [1, 1, 1]


def test_the_disk_serves_both_ranks(lives: dict[str, Any]) -> None:
    assert cached(lives["far"]) == cached(lives["near"])
    require_same_written(lives["cold"]["results"], lives["far"]["results"])
    assert lives["far"]["promoted"] > 0 and lives["far"]["failures"] == 0


def test_damage_on_one_rank_is_recomputed_on_both(lives: dict[str, Any]) -> None:
    require_same_written(lives["cold"]["results"], lives["damaged"]["results"])
    assert cached(lives["damaged"]) == [0, 0, 0]
    assert lives["damaged"]["failures"] > 0


def test_recomputed_chunks_are_stored_again(lives: dict[str, Any]) -> None:
    assert cached(lives["mended"]) == cached(lives["near"])
    require_same_written(lives["cold"]["results"], lives["mended"]["results"])
    assert lives["mended"]["failures"] == 0


def test_answers_depend_on_the_loaded_bytes_of_each_rank(lives: dict[str, Any]) -> None:
    """Control: if a rank's bytes were not loaded or were recomputed, no test above would have failed."""
    assert cached(lives["forged"]) == cached(lives["near"])
    assert outputs(lives["forged"]) != outputs(lives["cold"])
