"""A wheel has one extension, which runs on every system that the tag of the wheel names."""

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


def test_the_wheel_has_one_extension(wheel: Path) -> None:
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


def test_the_extension_needs_no_later_glibc_than_the_tag(wheel: Path) -> None:
    """auditwheel finds the required C library by the versions of the symbols."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)["overall_tag"]
    assert glibc_of(found) <= glibc_of(wheel.name)


def glibc_of(tag: str) -> tuple[int, int]:
    [(major, minor)] = re.findall(r"manylinux_(\d+)_(\d+)_x86_64", tag)
    return int(major), int(minor)
