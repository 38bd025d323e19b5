"""A disk that stalls, fails, vanishes, is full or read-only costs hits and a bounded wait, and never an answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import faults_process
import pytest
from harness import scratch_directory

START_S = 300
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def live(kind: str, directory: Path, *more: str, prefix: list[str] | None = None) -> dict[str, Any]:
    output = directory / "lives.json"
    arguments = ["--kind", kind, "--directory", str(directory), "--output", str(output), *more]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.run(
        [*(prefix or []), sys.executable, faults_process.__file__, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=START_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout.decode(errors="replace")
    result: dict[str, Any] = json.loads(output.read_text())
    return result


@pytest.fixture(scope="module")
def lives(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return live(kind, scratch_directory(tmp_path_factory.mktemp("faults")))


@pytest.fixture(scope="module")
def mounted(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tried = shutil.which("unshare") and subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False)
    if not tried or tried.returncode != 0:
        pytest.skip("this machine lets nobody mount a file system in a namespace of his own")
    directory = scratch_directory(tmp_path_factory.mktemp("mounted")) / "mounted"
    directory.mkdir()
    return live(kind, directory, "--mount", prefix=NAMESPACE)


def outputs(life: dict[str, Any]) -> list[Any]:
    return [(result["tokens"], result["logprobs"]) for result in life["results"]]


def cached(life: dict[str, Any]) -> list[int]:
    return [result["cached"] for result in life["results"]]


def test_without_a_fault_everything_comes_from_disk(lives: dict[str, Any]) -> None:
    assert outputs(lives["none"]) == outputs(lives["cold"])
    assert min(cached(lives["none"])) > 0
    assert lives["none"]["promoted"] > 0 and lives["none"]["timeouts"] == 0


def test_a_read_that_never_ends_is_given_up_at_the_deadline(lives: dict[str, Any]) -> None:
    stalled = lives["stalled"]
    assert outputs(stalled) == outputs(lives["cold"]) and cached(stalled) == [0, 0, 0]
    assert stalled["timeouts"] > 0 and stalled["openings"] == 1
    # Once the breaker is open nobody waits: this is one deadline for each request at most, with room for the rest.
    assert stalled["seconds"] < 3 * faults_process.LOAD_TIMEOUT_S + 30


def test_reads_that_fail_are_computed_again_and_open_the_breaker(lives: dict[str, Any]) -> None:
    failing = lives["failing"]
    assert outputs(failing) == outputs(lives["cold"])
    assert failing["failures"] > 0


def test_a_directory_that_is_removed_under_the_tier_costs_hits(lives: dict[str, Any]) -> None:
    removed = lives["removed"]
    assert outputs(removed) == outputs(lives["cold"]) and removed["timeouts"] == 0


def test_a_file_system_that_has_become_read_only_still_serves(lives: dict[str, Any]) -> None:
    assert outputs(lives["read-only"]) == outputs(lives["cold"])
    assert min(cached(lives["read-only"])) > 0


def test_a_full_file_system_costs_hits(mounted: dict[str, Any]) -> None:
    assert outputs(mounted["full"]) == outputs(mounted["cold"])
    assert mounted["full"]["disk_bytes"] <= 2 << 20
