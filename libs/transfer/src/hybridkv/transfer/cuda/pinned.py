"""Host memory that a GPU can read and write directly: mapped by us, registered with CUDA."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridkv.transfer.cuda.device import CudaError

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


def pin_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Pinned memory, page-aligned, uint8, zeroed. It is given back when the array and all views of it are gone.

    Not torch's allocator, which rounds up to the next power of two and keeps what was given back. The operating system
    commits all of it now. A GPU must be there and be current.

    Raises:
        CudaError: the driver would not register it: too little memory, or a limit on locked memory.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes: expected a number >= 1, got {num_bytes}")
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CudaError(f"mmap of {num_bytes} bytes: {error}") from error
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin, and for the GPU to look up
    memory = np.frombuffer(mapping, dtype=np.uint8)
    _pin(memory, mapping)
    return memory


def pin_existing(memory: npt.NDArray[np.uint8]) -> None:
    """Pin memory that is there already, until the array and all its views are gone. A GPU must be there and be current.

    Raises:
        CudaError: the driver would not register it.
    """
    _pin(memory, memory.base)


def _pin(memory: npt.NDArray[np.uint8], owner: Any) -> None:
    try:
        cudart = torch.cuda.cudart()
    except (AssertionError, RuntimeError) as error:  # the first: torch's word for a build without CUDA
        raise CudaError(f"torch {torch.__version__}: {error}") from error
    address = int(memory.ctypes.data)
    code = int(cudart.cudaHostRegister(address, memory.nbytes, _PORTABLE))
    if code != 0:
        raise CudaError(f"cudaHostRegister of {memory.nbytes} bytes: cudaError {code}; see `ulimit -l` and free memory")
    # The owner is an argument so that it outlives the registration.
    weakref.finalize(memory, _unregister, cudart, address, owner)


def _unregister(cudart: Any, address: int, owner: Any) -> None:
    # At the end of a process CUDA may be gone already, and the memory goes with it.
    cudart.cudaHostUnregister(address)
