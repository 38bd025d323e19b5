"""Invalid arguments raise an error: no crash, no hang, no access out of bounds."""

from __future__ import annotations

import os
import subprocess
import sys

import bad_calls
import pytest

NAMES = [name for name, _, _ in bad_calls.calls()]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """The outcome of each call by name. If a process ends early, the next process makes the remaining calls."""
    found: dict[str, str] = {}
    while len(found) < len(NAMES):
        program = subprocess.run(
            [sys.executable, "-X", "faulthandler", bad_calls.__file__, str(len(found))],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        for line in program.stdout.splitlines():
            name, _, outcome = line.partition("\t")
            found[name] = outcome or f"the process ended with {program.returncode}"
        assert program.returncode or len(found) == len(NAMES)
        assert program.stdout, program.stderr
    return found


def test_all_calls_are_tried(outcomes: dict[str, str]) -> None:
    assert list(outcomes) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_call_is_an_error(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "as wanted"
