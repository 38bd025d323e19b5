"""Runs the wheel for Python 3.12 and later on a later Python than that of this build."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path


def test_the_extension_runs_on_a_later_python(tmp_path: Path) -> None:
    [wheel] = Path(os.environ["HYBRIDKV_NATIVE_WHEEL"]).glob("*.whl")
    assert "-cp312-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    python = Path(os.environ["HYBRIDKV_LATER_PYTHON"])
    script = Path(__file__).with_name("use_native.py")
    ran = subprocess.run(
        [python.absolute(), script], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    version, extension = ran.stdout.split()
    assert tuple(map(int, version.split("."))) >= (3, 12)
    assert extension == "_cpu.abi3.so"
