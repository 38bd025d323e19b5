"""No sequence of calls of a class, with any arguments, crashes the process or hangs.

HYBRIDKV_CALLS_S: seconds to try each class, instead of a few inputs.
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
def test_random_calls_return_or_raise(kind: str) -> None:
    program = subprocess.run(
        [sys.executable, "-X", "faulthandler", random_calls.__file__, kind, "1", str(INPUTS), str(SECONDS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, f"{program.returncode}: {program.stderr[-3000:]}"
    report = json.loads(program.stdout)
    if not SECONDS:
        assert report["tried"] == INPUTS
    assert set(report["answered"]) == set(report["called"]) - NEVER_ANSWER, "each call succeeds at least once"
    assert sum(report["answered"].values()) < sum(report["called"].values()), "and some calls fail"


def test_all_classes_are_tried() -> None:
    native = random_calls.native
    classes = {name for name in native.__all__ if isinstance(getattr(native, name), type)}
    assert classes == set(random_calls.PLAYS)
