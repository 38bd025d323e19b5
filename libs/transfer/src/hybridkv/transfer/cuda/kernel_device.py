"""The `CudaDevice` that calls the library of hybridkv-cuda (csrc/cuda/copier.cc)."""

from __future__ import annotations

import ctypes
import functools
import importlib
import weakref
from typing import Any

import numpy as np
import torch

from hybridkv.transfer.cuda import driver
from hybridkv.transfer.cuda.device import CopyTuning, CudaError, MemoryKind, merge_ranges
from hybridkv.transfer.pinned import REGISTRATION_BYTES
from hybridkv.transfer.runs import ROW_WORDS, CopyRuns, Integers

INTERFACE_VERSION = 4
"""Version of the functions in csrc/cuda/copier.cc."""
_ERROR_BYTES = 512


@functools.cache
def load_library() -> ctypes.CDLL:
    """Load the library of hybridkv-cuda.

    Raises:
        CudaError: the library is not installed, cannot be loaded, or has another interface version.
    """
    try:
        module = importlib.import_module("hybridkv.cuda_kernels")
        library = ctypes.CDLL(str(module.library_path()))
        version = library.hybridkv_cuda_interface_version()
    except (ImportError, OSError, AttributeError) as error:
        raise CudaError(f"hybridkv-cuda cannot be loaded: {error}; install hybridkv-vllm[cuda]") from error
    if version != INTERFACE_VERSION:
        wanted = f"hybridkv-transfer needs {INTERFACE_VERSION}"
        raise CudaError(f"hybridkv-cuda has interface version {version}, {wanted}: install matching versions")
    return library


class KernelDevice:
    """A `CudaDevice`. `index` is torch's index. `CudaError` if torch sees no such GPU, hybridkv-cuda cannot be loaded,
    or a CUDA call fails."""

    def __init__(self, index: int, tuning: CopyTuning) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise CudaError(f"torch {torch.__version__} sees no GPU cuda:{index}")
        self._index = index
        self._library = load_library()
        self._copier = ctypes.c_void_p()
        sizes = tuning.large_run_bytes, tuning.direct_job_bytes, tuning.part_bytes, tuning.tile_bytes
        limits = (ctypes.c_uint64 * 6)(*sizes, REGISTRATION_BYTES, tuning.num_blocks)
        call(self._library, "open", ctypes.c_int32(index), limits, ctypes.byref(self._copier))
        # Not at process exit: the driver may be unloaded already, and its exit frees all resources.
        weakref.finalize(self, self._library.hybridkv_cuda_close, self._copier).atexit = False
        self._ranges: list[tuple[int, int]] = []
        self._table = np.empty((0, 2), dtype=np.uint64)

    def memory_kind(self, address: int) -> MemoryKind:
        with torch.cuda.device(self._index):
            return driver.memory_kind(address, self._index)

    def register(self, address: int, num_bytes: int) -> None:
        self._ranges.append((address, address + num_bytes))
        self._table = np.array(merge_ranges(self._ranges), dtype=np.uint64)

    def caller_event(self) -> torch.cuda.Event:
        try:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._index))
        except RuntimeError as error:
            raise CudaError(f"record on the caller's stream: {error}") from error
        return event

    def enqueue(self, runs: CopyRuns, caller: torch.cuda.Event) -> EnqueuedJob:
        table = self._table
        rows = np.ascontiguousarray(runs.rows)
        count, num_ranges = ctypes.c_uint64(len(rows) // ROW_WORDS), ctypes.c_uint64(len(table))
        event, job = ctypes.c_uint64(caller.cuda_event), ctypes.c_void_p()
        arguments = self._copier, event, _pointer(rows), count, _pointer(table), num_ranges, ctypes.byref(job)
        call(self._library, "enqueue", *arguments)
        return EnqueuedJob(self, job)


class EnqueuedJob:
    """`EnqueuedCopies` of the library. Its finalizer waits for the copies if `synchronize` was not called."""

    def __init__(self, device: KernelDevice, job: ctypes.c_void_p) -> None:
        self._device = device  # must outlive the job
        self._wait = weakref.finalize(self, call, device._library, "wait", job)
        self._wait.atexit = False

    def synchronize(self) -> None:
        """Wait for the copies, without the GIL. Later calls do nothing."""
        self._wait()


def call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Call a function of the library. Raises its failure as `CudaError`."""
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    if getattr(library, f"hybridkv_cuda_{name}")(*arguments, error, ctypes.c_uint64(_ERROR_BYTES)):
        raise CudaError(error.value.decode())


def _pointer(array: Integers | np.ndarray[Any, np.dtype[np.uint64]]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
