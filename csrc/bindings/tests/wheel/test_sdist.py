"""The source distribution compiles on a machine without Bazel, and the compiled extension runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path


def test_the_source_distribution_compiles_and_runs(tmp_path: Path) -> None:
    [archive] = Path(os.environ["HYBRIDKV_NATIVE_SDIST"]).glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    [project] = tmp_path.iterdir()
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    built = subprocess.run(build, cwd=project, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = (project / "dist").glob("*.whl")
    assert "-linux_" in wheel.name  # only for this machine, unlike the wheels of a release
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "installed")
    script = Path(__file__).with_name("use_native.py")
    paths = os.pathsep.join([str(tmp_path / "installed"), *sys.path])
    ran = subprocess.run(
        [sys.executable, script], env={"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_the_error_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    [archive] = Path(os.environ["HYBRIDKV_NATIVE_SDIST"]).glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    [project] = tmp_path.iterdir()
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    environment = os.environ | {"CXX": str(tmp_path / "no-compiler")}
    built = subprocess.run(build, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode != 0
    assert "hint: install g++ 12 or later" in built.stderr
