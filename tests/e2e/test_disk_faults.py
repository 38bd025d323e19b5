"""A disk that stalls, fails, disappears, is full or read-only costs hits and a limited wait, but never a wrong
answer.
"""

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
"""After the pause of the breaker, one request still finds it open and is computed; then the disk is tried again."""
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
        pytest.skip("this machine does not allow mounts in a user namespace")
    directory = scratch_directory(tmp_path_factory.mktemp("mounted")) / "mounted"
    directory.mkdir()
    return live(kind, directory, "--mount", prefix=NAMESPACE)


def cached(results: list[dict[str, Any]]) -> list[int]:
    return [result["cached"] for result in results]


def require_equal_answers(life: dict[str, Any]) -> None:
    assert cached(life["cold"]) == [0] * len(life["cold"])
    require_same_written(life["cold"], life["warm"])


def test_without_a_fault_all_prompts_are_restored_from_disk(lives: dict[str, Any]) -> None:
    none = lives["none"]
    require_equal_answers(none)
    assert min(cached(none["warm"])) > 0
    assert none["promotions"].keys() == {"done"} and none["cascades"]["done"] > 0
    assert (none["failures"], none["timeouts"], none["openings"], none["file_errors"]) == ({}, 0, {}, {})


@pytest.mark.parametrize("name", ["held", "stalled"])
def test_a_stalled_read_is_given_up_exactly_at_its_deadline(lives: dict[str, Any], name: str) -> None:
    stall = lives[name]
    assert stall["waited"] == [True, True] and stall["early"]["timeouts"] == 0
    require_equal_answers(stall)
    assert cached(stall["warm"])[0] == 0
    assert stall["late"]["timeouts"] == 1


@pytest.mark.parametrize("name", ["held", "stalled"])
def test_a_stalled_disk_is_skipped_so_that_other_requests_do_not_wait(lives: dict[str, Any], name: str) -> None:
    """Time did not pass while the second request ran, so it would still be waiting if it had waited."""
    stall = lives[name]
    assert stall["was_open"] and stall["late"]["openings"] == {"promote": 1}
    assert cached(stall["warm"])[1] == 0


@pytest.mark.parametrize("name", ["held", "stalled"])
def test_the_disk_serves_again_after_a_stall(lives: dict[str, Any], name: str) -> None:
    """No request waits for a deadline again, because time does not pass; whether the stalled read ended or not."""
    stall = lives[name]
    others = cached(stall["warm"])[2:]
    assert min(others[REQUESTS_WITHOUT_DISK:]) > 0
    assert stall["is_closed"]
    assert stall["after"]["promotions"]["done"] > 0
    assert (stall["after"]["timeouts"], stall["after"]["openings"], stall["after"]["failures"]) == (0, {}, {})


@pytest.mark.parametrize("name", ["held", "stalled"])
def test_a_prefix_is_restored_without_a_wait_after_a_stall(lives: dict[str, Any], name: str) -> None:
    stall = lives[name]
    require_same_written(stall["cold"][:2], stall["again"])
    assert cached(stall["again"])[1] > 0


def test_bytes_that_arrive_late_serve_the_next_request(lives: dict[str, Any]) -> None:
    assert cached(lives["held"]["again"])[0] > 0


def test_failed_reads_are_recomputed_and_open_only_the_breaker_of_loads(lives: dict[str, Any]) -> None:
    failing = lives["failing"]
    require_equal_answers(failing)
    assert cached(failing["warm"]) == [0, 0, 0]
    assert failing["failures"].keys() == {"io"} and failing["failures"]["io"] == failing["promotions"]["failed"]
    assert failing["openings"] == {"promote": 1} and failing["cascades"].keys() == {"done"}


def test_a_removed_directory_costs_hits(lives: dict[str, Any]) -> None:
    removed = lives["removed"]
    require_equal_answers(removed)
    assert removed["timeouts"] == 0
    # The creation of a segment and the batch of changes may fail in either order.
    assert {"create: ENOENT", "log: ENOENT"} & removed["file_errors"].keys()


def test_a_read_only_file_system_still_serves_loads(lives: dict[str, Any]) -> None:
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
