#!/usr/bin/env python3
"""Installs the wheelhouse in a new virtual environment of each given Python, with the machine's package index.

    tools/try_wheelhouse.py [--wheelhouse bazel-bin/plugins/wheelhouse] [PYTHON ...]

Prints a table: what pip installed and what ran, or the last line of the error. Without arguments it tries python3.10 to
python3.14 of PATH. Exits with 1 if a Python from 3.11 on fails, or an older one is not refused. This is no test,
because tests have no package index.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST = (3, 11)
_CONFIG = (
    '{"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute", '
    '"kv_connector_extra_config": {"tiers": [{"type": "ram", "capacity": "4GiB"}]}}'
)
REQUIREMENTS = {
    "hybridkv-vllm": ["bin/hybridkv", "check", _CONFIG],
    "hybridkv-vllm[object]": ["bin/python", "-c", "import obstore, hybridkv.tiers.object.store"],
    "hybridkv-tiers[object]": ["bin/python", "-c", "import obstore, hybridkv.tiers.object.store"],
    "hybridkv-cli": ["bin/hybridkv", "check", _CONFIG],
}
"""Requirements, each for an environment of its own, with a command that must run there."""


def version_of(python: str) -> tuple[int, ...] | None:
    """The version of a Python, or None if it does not run."""
    try:
        ran = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:3])"], capture_output=True, check=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(map(int, ran.stdout.split()))


def try_one(python: str, wheelhouse: Path, requirement: str) -> str:
    """Installs one requirement and runs its command; returns the last line of the error, or nothing."""
    options = [f"--find-links={wheelhouse}", "--only-binary=hybridkv-native", requirement]
    with tempfile.TemporaryDirectory() as environment:
        steps = [
            [python, "-m", "venv", environment],
            [f"{environment}/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options],
            [f"{environment}/{REQUIREMENTS[requirement][0]}", *REQUIREMENTS[requirement][1:]],
        ]
        for step in steps:
            ran = subprocess.run(step, capture_output=True, check=False, text=True)
            if ran.returncode:
                return (ran.stderr or ran.stdout).strip().splitlines()[-1]
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheelhouse", type=Path, default=Path("bazel-bin/plugins/wheelhouse"))
    parser.add_argument("pythons", nargs="*", default=[f"python3.{minor}" for minor in range(10, 15)])
    options = parser.parse_args()
    wheelhouse = options.wheelhouse.resolve()
    print("| Python | requirement | result |\n| --- | --- | --- |")
    num_wrong = 0
    for python in options.pythons:
        version = version_of(python)
        if version is None:
            print(f"| {python} | all | does not run here |")
            continue
        name = ".".join(map(str, version))
        for requirement in REQUIREMENTS:
            error = try_one(python, wheelhouse, requirement)
            num_wrong += bool(error) == (version >= OLDEST)
            print(f"| {name} | `{requirement}` | {error or 'installed, runs'} |", flush=True)
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
