"""The wheel of the kernels contains the library, names its platform, and needs only libraries that every host has."""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

NEEDED = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6"}
LOADER = "ld-linux-x86-64.so.2"
NEWEST_GLIBC = (2, 34)
LIBRARY = "hybridkv/cuda_kernels/libhybridkv_cuda.so"


@pytest.fixture
def wheel() -> Path:
    [found] = Path(os.environ["HYBRIDKV_CUDA_WHEEL"]).glob("*.whl")
    return found


@pytest.fixture
def library(wheel: Path, tmp_path: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(LIBRARY, tmp_path))


def readelf(*arguments: str | Path) -> str:
    return subprocess.run(["readelf", *arguments], check=True, capture_output=True, text=True).stdout


def test_the_wheel_holds_the_library_and_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert LIBRARY in names
    assert "hybridkv/cuda_kernels/__init__.py" in names
    assert "hybridkv/__init__.py" not in names
    assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_is_for_one_platform_and_any_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")


def test_the_library_needs_neither_torch_nor_a_cuda_library_of_the_host(library: Path) -> None:
    """The CUDA runtime is linked statically, and the driver is looked up at run time."""
    needed = set(re.findall(r"Shared library: \[(.*)\]", readelf("-d", library)))
    assert needed <= NEEDED | {LOADER}


def test_the_library_runs_on_the_promised_glibc(library: Path) -> None:
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", readelf("-V", library))}
    assert max(versions) <= NEWEST_GLIBC
