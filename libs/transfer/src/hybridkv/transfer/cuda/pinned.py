"""Host memory that a GPU can read and write directly: mapped by us, registered with CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridkv.transfer.cuda.device import CudaError
from hybridkv.transfer.pinned import map_memory, numa_local_cpus, pin

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


def pin_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Pinned memory, page-aligned, uint8, zeroed. It is given back when the array and all views of it are gone.

    Not torch's allocator, which rounds up to the next power of two and keeps what was given back. The operating system
    commits all of it now. A GPU must be there and be current.

    Raises:
        TransferError: there is not so much, or the driver would not register it: a limit on locked memory.
    """
    memory = map_memory(num_bytes)
    pin_existing(memory)
    return memory


def pin_existing(memory: npt.NDArray[np.uint8]) -> None:
    """Pin memory that is there already, until the array and all its views are gone. A GPU must be there and be current.

    Raises:
        TransferError: the driver would not register it.
    """
    cudart = _cudart()
    cpus = numa_local_cpus(torch.cuda.get_device_properties(torch.cuda.current_device()))
    pin(memory, lambda address, num_bytes: _register(cudart, address, num_bytes), cudart.cudaHostUnregister, cpus)


def _cudart() -> Any:
    try:
        return torch.cuda.cudart()
    except (AssertionError, RuntimeError) as error:  # the first: torch's word for a build without CUDA
        raise CudaError(f"torch {torch.__version__}: {error}") from error


def _register(cudart: Any, address: int, num_bytes: int) -> None:
    code = int(cudart.cudaHostRegister(address, num_bytes, _PORTABLE))
    if code != 0:
        raise CudaError(f"cudaHostRegister of {num_bytes} bytes: cudaError {code}; see `ulimit -l` and free memory")
