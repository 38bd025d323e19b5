"""The planner decides all loads and stores of a request, and imports no engine for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import whole_life
from whole_life import play, play_without_secondary

from hybridkv.planner.stages import NEW_REQUEST, GivenUp, Unsearched

WAITS = ["ask again", "ask again", "ask again"]
TRIES = ["offer 32", "load 5 chunks", "fail", "offer 24", "load 4 chunks", "fail", "offer 16", "load 3 chunks", "fail"]
WITHOUT = ["ask again", "ask again", "offer 8", "load 2 chunks"]


def test_a_request_waits_loads_fails_retries_with_less_and_is_given_up() -> None:
    engine = play()
    assert engine.story == [*WAITS, *TRIES, "compute", "store 5 chunks"]
    assert isinstance(engine.stage, GivenUp) and engine.stage.past.failed_loads == 3
    assert engine.admission.is_idle


def test_a_request_loads_without_a_secondary_tier_that_times_out() -> None:
    engine = play_without_secondary()
    assert engine.story == WITHOUT
    assert isinstance(engine.stage, Unsearched) and engine.stage.past.only_primary and engine.stage != NEW_REQUEST


def run(source: str) -> list[str]:
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, env=path)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("engine", [None, *whole_life.ENGINES])
def test_no_engine_is_imported_in_a_whole_life(engine: str | None) -> None:
    """In a fresh interpreter, since an import cannot be undone; an attempt counts even where the engine is not
    installed. The other parameters are the control: an attempt is noticed."""
    source = Path(whole_life.__file__).read_text()
    if engine is not None:
        attempt = f"\n    try:\n        import {engine}\n    except ImportError:\n        pass\n"
        source = source.replace("    print(*asked_for", f"{attempt}    print(*asked_for")
    first, second, engines = run(source)
    assert first.split(", ") == play().story and second.split(", ") == WITHOUT
    assert (engine in engines.split()) if engine else not engines
