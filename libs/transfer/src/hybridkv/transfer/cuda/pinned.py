"""Pinned host memory for CUDA: registered by `cudaHostRegister`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridkv.transfer.cuda.device import CudaError
from hybridkv.transfer.pinned import map_memory, numa_local_cpus, pin

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all contexts of the process."""


def pin_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate pinned memory: page-aligned, uint8, zeroed. Freed with the array and all its views.

    Needs a current GPU. The operating system commits all memory now. Does not use torch's allocator, which rounds up
    to a power of two and keeps freed memory.

    Raises:
        TransferError: the memory is not available, or the driver cannot register it (limit of locked memory).
    """
    memory = map_memory(num_bytes)
    pin_existing(memory)
    return memory


def pin_existing(memory: npt.NDArray[np.uint8]) -> None:
    """Pin existing memory until the array and all its views are freed. Needs a current GPU.

    Raises:
        TransferError: the driver cannot register the memory.
    """
    cudart = _cudart()
    cpus = numa_local_cpus(torch.cuda.get_device_properties(torch.cuda.current_device()))
    pin(memory, lambda address, num_bytes: _register(cudart, address, num_bytes), cudart.cudaHostUnregister, cpus)


def _cudart() -> Any:
    try:
        return torch.cuda.cudart()
    except (AssertionError, RuntimeError) as error:  # AssertionError: torch was built without CUDA
        raise CudaError(f"torch {torch.__version__}: {error}") from error


def _register(cudart: Any, address: int, num_bytes: int) -> None:
    code = int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE))
    if code != 0:
        raise CudaError(f"cudaHostRegister of {num_bytes} bytes: cudaError {code}; see `ulimit -l` and free memory")
