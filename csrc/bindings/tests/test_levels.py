"""The allowed CPU features are fixed when a process starts: all features of the machine, or fewer if requested."""

import os
import subprocess
import sys

import pytest

VARIABLE = "HYBRIDKV_CPU_LEVEL"
PROGRAM = "import hybridkv.native; print(*hybridkv.native.levels())"
WORST_FIRST = ["scalar", "avx2", "avx512"]


def run(level: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    # Without the files of --config=avx2, which set the variable themselves.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and "without_avx512" not in path)
    if level is not None:
        environment[VARIABLE] = level
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)


def test_all_features_of_the_machine_are_allowed_by_default() -> None:
    found = run(None).stdout.split()
    assert found == [level for level in WORST_FIRST if level in found] and "scalar" in found


@pytest.mark.parametrize("level", WORST_FIRST)
def test_a_level_limits_the_allowed_features(level: str) -> None:
    allowed = WORST_FIRST[: WORST_FIRST.index(level) + 1]
    assert run(level).stdout.split() == [found for found in run(None).stdout.split() if found in allowed]


def test_an_unknown_level_is_refused() -> None:
    refused = run("sse9")
    assert refused.returncode != 0
    assert f"ValueError: {VARIABLE}: expected scalar, avx2 or avx512, got sse9" in refused.stderr
