"""An engine gives the same answers whether the compiled extension moves its bytes or the plain reference does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import extension_run
import pytest
from equality import require_same_written


@pytest.fixture(scope="module")
def runs(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each process wrote."""
    pytest.importorskip("hybridkv.native", reason="the extension is not among this target's dependencies")
    written = {}
    # One directory: a model at another path has other keys.
    directory = tmp_path_factory.mktemp("engine")
    for choice in ("with", "without"):
        output = directory / f"{choice}.json"
        program = [sys.executable, extension_run.__file__, kind, choice, str(directory), str(output)]
        ran = subprocess.run(program, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-5000:]
        written[choice] = json.loads(Path(output).read_text())
    return written


def test_each_run_moved_its_bytes_as_it_was_told(runs: dict[str, dict[str, Any]]) -> None:
    with_it, without = ({"was_used": True, "copies": chosen, "checksums": chosen} for chosen in (True, False))
    assert runs["with"]["extension"] == {**with_it, "disk": "NativeRunner"}
    assert runs["without"]["extension"] == {**without, "disk": "PythonRunner"}


def test_the_answers_are_the_same_to_the_last_digit(runs: dict[str, dict[str, Any]]) -> None:
    for phase in ("warm", "far"):
        assert all(answer["cached"] > 0 for answer in runs["with"][phase])
    for phase in ("cold", "warm", "far"):
        require_same_written(runs["with"][phase], runs["without"][phase])
        assert [answer["cached"] for answer in runs["with"][phase]] == [
            answer["cached"] for answer in runs["without"][phase]
        ]


def test_what_was_loaded_answers_as_what_was_computed(runs: dict[str, dict[str, Any]]) -> None:
    for run in runs.values():
        for phase in ("warm", "far"):
            require_same_written(run["cold"], run[phase])


def test_the_same_bytes_are_on_disk(runs: dict[str, dict[str, Any]]) -> None:
    assert len(set(runs["with"]["stored"].values())) > 10
    assert runs["with"]["stored"] == runs["without"]["stored"]
