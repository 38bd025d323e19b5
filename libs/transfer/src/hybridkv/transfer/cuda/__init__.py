"""Copy engines between GPU memory and pinned host memory, with hybridkv-cuda. Imports torch only to use a GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridkv.transfer.cuda.device import CopyTuning, CudaDevice, CudaError, MemoryKind
from hybridkv.transfer.cuda.engine import CudaCopyEngine, InlineCudaCopyEngine

__all__ = [
    "CopyTuning",
    "CudaCopyEngine",
    "CudaDevice",
    "CudaError",
    "InlineCudaCopyEngine",
    "MemoryKind",
    "open_device",
    "pin_existing",
    "pin_memory",
]


def open_device(index: int, tuning: CopyTuning | None = None) -> CudaDevice:
    """Open a GPU with its own streams and staging memory, for one copy engine. Imports torch.

    Raises:
        CudaError: torch sees no such GPU, hybridkv-cuda cannot be loaded, or a CUDA call fails.
    """
    from hybridkv.transfer.cuda.kernel_device import KernelDevice

    return KernelDevice(index, tuning or CopyTuning())


def pin_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """See `hybridkv.transfer.cuda.pinned.pin_memory`. Imports torch."""
    from hybridkv.transfer.cuda import pinned

    return pinned.pin_memory(num_bytes)


def pin_existing(memory: npt.NDArray[np.uint8]) -> None:
    """See `hybridkv.transfer.cuda.pinned.pin_existing`. Imports torch."""
    from hybridkv.transfer.cuda import pinned

    pinned.pin_existing(memory)
