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
import patience
import pytest
from equality import require_same_written
from harness import scratch_directory

START_S = patience.seconds(80.0)
REQUESTS_WITHOUT_DISK = 1
"""After a pause of the breaker: one, which finds it open and is computed in the step that lets the disk be tried."""
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


def cached(results: list[dict[str, Any]]) -> list[int]:
    return [result["cached"] for result in results]


def require_equal_answers(life: dict[str, Any]) -> None:
    assert cached(life["cold"]) == [0] * len(life["cold"])
    require_same_written(life["cold"], life["warm"])


def test_without_a_fault_everything_comes_from_disk(lives: dict[str, Any]) -> None:
    none = lives["none"]
    require_equal_answers(none)
    assert min(cached(none["warm"])) > 0
    assert none["promotions"].keys() == {"done"} and none["cascades"]["done"] > 0
    assert (none["failures"], none["timeouts"], none["openings"], none["file_errors"]) == ({}, 0, {}, {})


@pytest.mark.parametrize("name", ["held", "stalled"])
def test_a_read_that_stands_still_is_given_up_at_the_deadline_and_not_before(lives: dict[str, Any], name: str) -> None:
    stall = lives[name]
    assert stall["waited"] == [True, True] and stall["early"]["timeouts"] == 0
    require_equal_answers(stall)
    assert cached(stall["warm"])[0] == 0
    assert stall["late"]["timeouts"] == 1


@pytest.mark.parametrize("name", ["held", "stalled"])
def test_a_disk_that_stalls_is_left_alone_so_that_nobody_else_waits(lives: dict[str, Any], name: str) -> None:
    """The second request came while time stood still: had it waited, it would wait now."""
    stall = lives[name]
    assert stall["was_open"] and stall["late"]["openings"] == {"promote": 1}
    assert cached(stall["warm"])[1] == 0


@pytest.mark.parametrize("name", ["held", "stalled"])
def test_after_a_stall_the_disk_serves_again(lives: dict[str, Any], name: str) -> None:
    """Without another wait for a deadline, because time stands still; whether or not the read has ended at last."""
    stall = lives[name]
    others = cached(stall["warm"])[2:]
    assert min(others[REQUESTS_WITHOUT_DISK:]) > 0
    assert stall["is_closed"]
    assert stall["after"]["promotions"]["done"] > 0
    assert (stall["after"]["timeouts"], stall["after"]["openings"], stall["after"]["failures"]) == (0, {}, {})


@pytest.mark.parametrize("name", ["held", "stalled"])
def test_after_a_stall_the_same_prefix_is_answered_without_another_wait(lives: dict[str, Any], name: str) -> None:
    stall = lives[name]
    require_same_written(stall["cold"][:2], stall["again"])
    assert cached(stall["again"])[1] > 0


def test_bytes_that_came_too_late_for_their_request_serve_the_next_one(lives: dict[str, Any]) -> None:
    assert cached(lives["held"]["again"])[0] > 0


def test_reads_that_fail_are_computed_again_and_open_the_breaker_of_loads_alone(lives: dict[str, Any]) -> None:
    failing = lives["failing"]
    require_equal_answers(failing)
    assert cached(failing["warm"]) == [0, 0, 0]
    assert failing["failures"].keys() == {"io"} and failing["failures"]["io"] == failing["promotions"]["failed"]
    assert failing["openings"] == {"promote": 1} and failing["cascades"].keys() == {"done"}


def test_a_directory_that_is_removed_under_the_tier_costs_hits(lives: dict[str, Any]) -> None:
    removed = lives["removed"]
    require_equal_answers(removed)
    assert removed["timeouts"] == 0
    # Either the creation of a segment or the batch of changes comes first.
    assert {"create: ENOENT", "log: ENOENT"} & removed["file_errors"].keys()


def test_a_file_system_that_has_become_read_only_still_serves(lives: dict[str, Any]) -> None:
    read_only = lives["read-only"]
    require_equal_answers(read_only)
    assert min(cached(read_only["warm"])) > 0 and read_only["promotions"].keys() == {"done"}
    assert "done" not in read_only["cascades"] and read_only["failures"].keys() == {"io"}
    assert all(error.endswith(": EROFS") for error in read_only["file_errors"]) and read_only["file_errors"]


def test_a_full_file_system_costs_hits(mounted: dict[str, Any]) -> None:
    full = mounted["full"]
    require_equal_answers(full)
    assert full["disk_bytes"] <= 2 << 20
    assert full["before"]["file_errors"].keys() == {"create: ENOSPC"}
    assert full["cascades"].keys() == {"dropped_no_room", "dropped_orphan"}
