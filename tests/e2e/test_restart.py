"""A process restores what an earlier one stored, with equal tokens and log-probabilities, however the earlier one
ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import restart_process
from equality import require_same_written
from harness import scratch_directory
from one_life import LIFE_S, Life, one_life

import tiny_models


def live(kind: str, directory: Path, end: str, *more: str) -> Life:
    status = 0 if end in ("clean", "at-once") else -signal.SIGKILL
    return one_life(restart_process.main, kind, directory, "--end", end, *more, status=status)


@pytest.fixture(scope="module", params=tiny_models.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = scratch_directory(tmp_path_factory.mktemp("restart")) / f"restart-{kind}"
    path.mkdir()
    return path


class Lives:
    """Processes that use one directory one after the other. Each is started when its result is first needed."""

    ENDS = ("killed", "clean", "clean")

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind = kind
        self._directory = directory
        self._lives: list[Life] = []

    def __getitem__(self, number: int) -> Life:
        for end in self.ENDS[len(self._lives) : number + 1]:
            self._lives.append(live(self._kind, self._directory, end))
        return self._lives[number]


@pytest.fixture(scope="module")
def lives(kind: str, directory: Path) -> Lives:
    return Lives(kind, directory)


@pytest.mark.parametrize(
    "number", [pytest.param(1, id="after SIGKILL"), pytest.param(2, id="after a clean end", marks=pytest.mark.full)]
)
def test_a_new_process_restores_from_disk_with_exactly_equal_answers(lives: Lives, number: int, kind: str) -> None:
    assert lives[0].cached == [0, 0, 0]
    for cached, prompt in zip(lives[number].cached, restart_process.prompts(kind), strict=True):
        assert len(prompt) - 256 <= cached < len(prompt)
    require_same_written(lives[0].results, lives[number].results)


@pytest.mark.full
def test_an_interpreter_with_another_hash_seed_restores_from_disk(lives: Lives, kind: str, directory: Path) -> None:
    """The other processes are forks of one process, so they have the same hash seed."""
    assert lives[0].results
    output = directory / "of-another.json"
    program = [sys.executable, "-c", "import sys, restart_process; restart_process.main(sys.argv[1:])"]
    program += ["--kind", kind, "--directory", str(directory), "--output", str(output), "--end", "clean"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(program, env=environment, timeout=LIFE_S, check=True)
    another = json.loads(output.read_text())
    require_same_written(lives[0].results, another)
    assert all(result["cached"] > 0 for result in another)


@pytest.mark.full
def test_a_kill_during_writes_leaves_no_wrong_data(lives: Lives, kind: str, directory: Path) -> None:
    early = directory / "early"
    early.mkdir()
    for end in ("killed-early", "clean", "clean"):
        require_same_written(lives[0].results, live(kind, early, end).results)


@pytest.mark.full
def test_a_clean_end_during_a_burst_loses_no_prompt(kind: str, directory: Path) -> None:
    """On a disk with few small segments, which do not exist yet when the burst begins."""
    burst = directory / "burst"
    burst.mkdir()
    first, second = (live(kind, burst, "at-once", "--capacity", "64MiB") for _ in range(2))
    assert first.cached == [0, 0, 0]
    for cached, prompt in zip(second.cached, restart_process.prompts(kind), strict=True):
        assert len(prompt) - 256 <= cached < len(prompt)


def test_each_process_logs_its_failure_policy(lives: Lives) -> None:
    for life in (lives[0], lives[1]):
        assert life.log.count("kv_load_failure_policy recompute; ") == 1


@pytest.mark.full
def test_another_dtype_or_model_misses_and_logs_the_difference(lives: Lives, kind: str, directory: Path) -> None:
    """The model with only one dtype uses other weights instead."""
    other, difference = ("--weights-seed", "1"), "weights"
    if kind != "qwen3-next":
        other, difference = ("--dtype", "bfloat16"), "dtype"
    life = live(kind, directory, "clean", *other)
    assert life.cached == [0, 0, 0]
    assert life.outputs != lives[0].outputs
    (line,) = [line for line in life.log.splitlines() if "holds no cache for this engine" in line]
    assert difference in line.partition("the nearest differs: ")[2]


@pytest.mark.full
def test_a_flipped_bit_on_disk_is_recomputed(lives: Lives, kind: str, directory: Path) -> None:
    """Runs last because it leaves a damaged store."""
    for path in (directory / "cache").rglob("segment-*"):
        with path.open("r+b") as file:
            content = file.read()
            for page in range(4096, len(content.rstrip(b"\0")), 4096):
                file.seek(page + 2048)
                file.write(bytes([content[page + 2048] ^ 1]))
    damaged = live(kind, directory, "clean")
    require_same_written(lives[0].results, damaged.results)
    assert damaged.cached == [0, 0, 0]
