"""The kernels of csrc/cuda, played on the CPU by csrc/cuda/simulation.cc: the same templates, warp by warp."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kernel_cases import POISON

from hybridkv.transfer import CopyRuns
from hybridkv.transfer.cuda import fragment_table

CSRC = Path(__file__).resolve().parents[3] / "csrc"
SOURCE = CSRC / "cuda" / "simulation.cc"


class SimulationMissingError(Exception):
    """Neither a built library nor what is needed to build one."""


def load(scratch: Path) -> ctypes.CDLL:
    """The library that Bazel built, else one that is compiled now."""
    if built := os.environ.get("HYBRIDKV_CUDA_SIMULATION"):
        return ctypes.CDLL(str(Path(built).resolve()))
    compiler = shutil.which("g++")
    if compiler is None or not SOURCE.exists():
        raise SimulationMissingError(f"HYBRIDKV_CUDA_SIMULATION is not set, and there is no g++ or no {SOURCE}")
    library = scratch / "simulation.so"
    options = ["-std=c++20", "-O2", "-fPIC", "-shared", f"-I{CSRC / 'include'}"]
    command = [compiler, *options, str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def simulate_copy(library: ctypes.CDLL, runs: CopyRuns, tile_bytes: int, num_warps: int) -> int:
    """16-byte words that were moved. `AssertionError` if an access was one that a GPU would fault on."""
    table = fragment_table(runs, tile_bytes)
    library.hybridkv_simulate_copy.restype = ctypes.c_int64
    words = library.hybridkv_simulate_copy(
        ctypes.c_void_p(table.rows.ctypes.data),
        ctypes.c_uint64(len(table.rows)),
        ctypes.c_uint64(table.num_tiles),
        ctypes.c_uint64(tile_bytes),
        ctypes.c_uint32(num_warps),
    )
    assert words >= 0, "a word was not aligned"
    return int(words)


def simulate_checksums(library: ctypes.CDLL, ranges: list[tuple[int, int]]) -> list[bytes]:
    """XXH3-128 of each (address, num_bytes)."""
    table = np.array(ranges, dtype=np.uint64).reshape(-1, 2)
    digests: npt.NDArray[np.uint64] = np.full_like(table, POISON)
    library.hybridkv_simulate_checksums(
        ctypes.c_void_p(table.ctypes.data), ctypes.c_uint64(len(table)), ctypes.c_void_p(digests.ctypes.data)
    )
    return [int(high).to_bytes(8, "big") + int(low).to_bytes(8, "big") for low, high in digests]
