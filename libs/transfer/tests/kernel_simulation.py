"""Simulates a job of csrc/cuda on the CPU with csrc/cuda/simulation.cc: the same plan, and the same kernel warp by
warp."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hybridkv.transfer import CopyRuns
from hybridkv.transfer.runs import ROW_WORDS as COPY_ROW_WORDS

CSRC = Path(__file__).resolve().parents[3] / "csrc"
SOURCES = ("simulation.cc", "job.cc")
ROW_WORDS = 8
"""64-bit words of a row: source, destination, both strides, bytes of a fragment, number of fragments, number of tiles
of all earlier rows, tiles of one fragment."""

Words = npt.NDArray[np.int64]


@functools.cache
def simulation() -> ctypes.CDLL:
    """The library that Bazel built, or one compiled now. Skips the test if it cannot be compiled."""
    if built := os.environ.get("HYBRIDKV_CUDA_SIMULATION"):
        library = ctypes.CDLL(str(Path(built).resolve()))
    else:
        library = ctypes.CDLL(str(_compiled()))
    library.hybridkv_simulate_table.restype = ctypes.c_int64
    library.hybridkv_simulate_copier.restype = ctypes.c_void_p
    for name in ("fill_table", "job_parts", "job_tables", "job_table_rows"):
        getattr(library, f"hybridkv_{name}").restype = ctypes.c_uint64
    return library


def _compiled() -> Path:
    compiler = shutil.which("g++")
    sources = [CSRC / "cuda" / name for name in SOURCES]
    if compiler is None or not all(source.exists() for source in sources):
        pytest.skip(f"HYBRIDKV_CUDA_SIMULATION is not set, and g++ or {sources} is missing")
    made = Path(tempfile.mkdtemp(), "simulation.so")
    options = ["-std=c++20", "-O2", "-fPIC", "-shared", f"-I{CSRC / 'include'}"]
    subprocess.run([compiler, *options, *map(str, sources), "-o", str(made)], check=True)
    return made


CopyRow = tuple[int, int, int, int, int, int]
"""Source, destination, step of the sources, step of the destinations, bytes of a run, number of runs."""


def runs_in_rows(rows: Sequence[CopyRow]) -> CopyRuns:
    """The runs of rows, in the form that `Lowering` creates."""
    plain = CopyRuns.of(
        (source + run * source_step, destination + run * destination_step, num_bytes)
        for source, destination, source_step, destination_step, num_bytes, num_runs in rows
        for run in range(num_runs)
    )
    return CopyRuns.of_rows(np.array(rows, dtype=np.int64).reshape(-1), len(plain), plain.total_bytes, plain.spans)


def row_pointer(runs: CopyRuns) -> tuple[ctypes.c_void_p, ctypes.c_uint64]:
    """The rows of `runs` and their number. `runs` must outlive the pointer."""
    assert runs.rows.flags.c_contiguous
    return ctypes.c_void_p(runs.rows.ctypes.data), ctypes.c_uint64(len(runs.rows) // COPY_ROW_WORDS)


def table_of(runs: CopyRuns, tile_bytes: int, max_rows: int | None = None) -> tuple[Words, int, int]:
    """The kernel's table, int64 of shape (n, ROW_WORDS); its number of tiles; its number of runs."""
    room = max(len(runs), 1) if max_rows is None else max_rows
    rows = np.zeros((room, ROW_WORDS), dtype=np.int64)
    num_rows, num_tiles = ctypes.c_uint64(0), ctypes.c_uint64(0)
    done = simulation().hybridkv_fill_table(
        *row_pointer(runs),
        ctypes.c_uint64(tile_bytes),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_uint64(room),
        ctypes.byref(num_rows),
        ctypes.byref(num_tiles),
    )
    return rows[: num_rows.value], num_tiles.value, done


def simulate_table(rows: Words, num_tiles: int, tile_bytes: int, num_warps: int) -> int:
    """Returns the number of 16-byte words moved. Raises `AssertionError` for an access that faults on a GPU."""
    words = simulation().hybridkv_simulate_table(
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_uint64(len(rows)),
        ctypes.c_uint64(num_tiles),
        ctypes.c_uint64(tile_bytes),
        ctypes.c_uint32(num_warps),
    )
    assert words >= 0, "a word was not aligned"
    return int(words)


def simulate_copy(runs: CopyRuns, tile_bytes: int, num_warps: int) -> int:
    """Like `simulate_table`, for the table of `runs`."""
    rows, num_tiles, _ = table_of(runs, tile_bytes)
    return simulate_table(rows, num_tiles, tile_bytes, num_warps)
