"""Checks of the compiled kernels without a GPU: cubins, their machine code, and PTX."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ARCHITECTURES = ("80", "90", "100")
KERNELS = ("copy_kernel", "table_kernel")
MOST_REGISTERS = {"copy_kernel": 64, "table_kernel": 64}
"""The limit at which two blocks of 512 threads, or one of 1,024, fit on one multiprocessor."""


def device_code() -> dict[str, Path]:
    """The compilers' output files by suffix: `sm_90.cubin`, `ptx`."""
    found = [Path(name) for name in os.environ["HYBRIDKV_DEVICE_CODE"].split()]
    return {path.name.removeprefix("kernels."): path for path in found}


def cubin(architecture: str) -> Path:
    code = device_code()
    if f"sm_{architecture}.cubin" not in code:
        pytest.skip(f"this nvcc does not know sm_{architecture}; it made {sorted(code)}")
    return code[f"sm_{architecture}.cubin"]


def tools() -> Path:
    """The directory of cuobjdump and nvdisasm."""
    places = [Path(entry, "nvidia", "cu13", "bin") for entry in sys.path]
    return next(place for place in places if (place / "cuobjdump").exists() and (place / "nvdisasm").exists())


def cuobjdump(*arguments: str | Path) -> str:
    environment = {**os.environ, "PATH": f"{tools()}:{os.environ.get('PATH', '')}"}
    command = [tools() / "cuobjdump", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def machine_code(architecture: str) -> dict[str, str]:
    """The instructions of each kernel."""
    parts = re.split(r"^\s*Function : (\S+)$", cuobjdump("--dump-sass", cubin(architecture)), flags=re.MULTILINE)
    named = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {kernel: next(text for name, text in named.items() if kernel in name) for kernel in KERNELS}


def resources(architecture: str) -> dict[str, dict[str, int]]:
    """The resources of each kernel as reported by the compiler: REG, STACK, LOCAL, SHARED."""
    report = cuobjdump("--dump-resource-usage", cubin(architecture))
    parts = re.findall(r"Function (\S+):\n(.*)", report)
    numbers = {name: dict(re.findall(r"(\w+):(\d+)", line)) for name, line in parts}
    return {
        kernel: next(
            {key: int(value) for key, value in found.items()} for name, found in numbers.items() if kernel in name
        )
        for kernel in KERNELS
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_cubin_is_code_for_its_architecture(architecture: str) -> None:
    elf = cubin(architecture).read_bytes()
    assert elf[:4] == b"\x7fELF"
    assert int.from_bytes(elf[18:20], "little") == 190
    assert f"sm_{architecture}" in cuobjdump("--dump-elf", cubin(architecture))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_read_16_bytes_at_a_time(architecture: str, kernel: str) -> None:
    assert re.search(r"\bLDG\.E\S*\.128\b", machine_code(architecture)[kernel])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_copy_kernel_writes_16_bytes_at_a_time(architecture: str) -> None:
    assert re.search(r"\bSTG\.E\S*\.128\b", machine_code(architecture)["copy_kernel"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_copy_kernel_has_four_wide_reads_in_flight(architecture: str) -> None:
    """Four loads come before the stores that follow them."""
    steps = re.findall(r"\b(LDG|STG)\.E\S*\.128\b", machine_code(architecture)["copy_kernel"])
    assert "LDG LDG LDG LDG STG STG STG STG" in " ".join(steps)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills_to_local_memory(architecture: str, kernel: str) -> None:
    used = resources(architecture)[kernel]
    assert (used["STACK"], used["LOCAL"]) == (0, 0), used
    assert not re.search(r"\b(LDL|STL)\b", machine_code(architecture)[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_use_at_most_their_limit_of_registers(architecture: str, kernel: str) -> None:
    assert resources(architecture)[kernel]["REG"] <= MOST_REGISTERS[kernel]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_ptx_assembles_without_spills(architecture: str, tmp_path: Path) -> None:
    """The driver does the same on a GPU without machine code in the library."""
    cubin(architecture)
    ptxas = Path(os.environ["HYBRIDKV_PTXAS"]).resolve()
    command = [ptxas, "-v", f"-arch=sm_{architecture}", "-o", tmp_path / "kernels.cubin", device_code()["ptx"]]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills == [("0", "0", "0")] * len(KERNELS), report


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_shipped_library_has_code_for_the_architecture(architecture: str) -> None:
    cubin(architecture)
    assert f".sm_{architecture}.cubin" in cuobjdump("--list-elf", os.environ["HYBRIDKV_CUDA_LIBRARY"])


def test_the_shipped_library_has_ptx_for_later_gpus() -> None:
    assert f".sm_{ARCHITECTURES[0]}.ptx" in cuobjdump("--list-ptx", os.environ["HYBRIDKV_CUDA_LIBRARY"])


def test_the_ptx_targets_the_first_architecture() -> None:
    assert f".target sm_{ARCHITECTURES[0]}" in device_code()["ptx"].read_text()
