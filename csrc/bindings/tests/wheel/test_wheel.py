"""A wheel carries one extension, and its tag promises no more than the extension keeps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture
def wheel() -> Path:
    [found] = Path(os.environ["HYBRIDKV_NATIVE_WHEEL"]).glob("*.whl")
    return found


def test_the_wheel_carries_one_extension(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    extension = {"cp311-cp311": "_cpu.cpython-311-x86_64-linux-gnu.so", "cp312-abi3": "_cpu.abi3.so"}
    python, abi = wheel.name.split("-")[2:4]
    assert files == {
        "hybridkv/native/__init__.py",
        "hybridkv/native/" + extension[f"{python}-{abi}"],
        "hybridkv/native/_cpu.pyi",
        "hybridkv/native/py.typed",
    }


def test_the_extension_keeps_what_the_tag_promises(wheel: Path) -> None:
    """auditwheel reads the symbols: which C library an extension needs shows in their versions."""
    asked = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    kept = json.loads(ran.stdout)["overall_tag"]
    assert glibc_of(kept) <= glibc_of(wheel.name)


def glibc_of(tag: str) -> tuple[int, int]:
    [(major, minor)] = re.findall(r"manylinux_(\d+)_(\d+)_x86_64", tag)
    return int(major), int(minor)
