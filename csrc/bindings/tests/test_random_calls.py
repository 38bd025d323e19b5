"""No sequence of calls of a class, with whatever arguments, crashes the process or hangs.

HYBRIDKV_CALLS_S: for how many seconds each class is tried, instead of a few inputs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import random_calls

SECONDS = int(os.environ.get("HYBRIDKV_CALLS_S", "0"))
INPUTS = 150
NEVER_ANSWER = {"raise_not_reserved", "raise_not_pinned"}


@pytest.mark.parametrize("kind", random_calls.PLAYS)
def test_random_calls_answer_or_raise(kind: str) -> None:
    program = subprocess.run(
        [sys.executable, "-X", "faulthandler", random_calls.__file__, kind, "1", str(INPUTS), str(SECONDS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, f"{program.returncode}: {program.stderr[-3000:]}"
    told = json.loads(program.stdout)
    if not SECONDS:
        assert told["tried"] == INPUTS
    assert set(told["answered"]) == set(told["called"]) - NEVER_ANSWER, "each call fits sometimes"
    assert sum(told["answered"].values()) < sum(told["called"].values()), "and some do not"


def test_all_classes_are_tried() -> None:
    native = random_calls.native
    classes = {name for name in native.__all__ if isinstance(getattr(native, name), type)}
    assert classes == set(random_calls.PLAYS)
