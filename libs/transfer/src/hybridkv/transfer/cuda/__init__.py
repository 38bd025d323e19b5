"""Copies between a GPU's memory and pinned host memory. The only part of `hybridkv.transfer` that imports torch.

`plan` and `table` are arithmetic and need no torch; `open_device` imports it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridkv.transfer.cuda.device import CudaDevice, CudaError, MemoryKind, Queue
from hybridkv.transfer.cuda.engine import CudaCopyEngine, InlineCudaCopyEngine
from hybridkv.transfer.cuda.plan import CopyPlan, CopyTuning, StagedBatch, plan_copies
from hybridkv.transfer.cuda.table import FragmentTable, fragment_table

__all__ = [
    "CopyPlan",
    "CopyTuning",
    "CudaCopyEngine",
    "CudaDevice",
    "CudaError",
    "FragmentTable",
    "InlineCudaCopyEngine",
    "MemoryKind",
    "Queue",
    "StagedBatch",
    "fragment_table",
    "open_device",
    "pin_existing",
    "pin_memory",
    "plan_copies",
]


def open_device(index: int, tuning: CopyTuning | None = None) -> CudaDevice:
    """A GPU with streams and staging memory of its own, for one copy engine. Imports torch.

    `CudaError` when torch sees no such GPU.
    """
    from hybridkv.transfer.cuda.torch_device import TorchCudaDevice

    return TorchCudaDevice(index, tuning or CopyTuning())


def pin_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """See `hybridkv.transfer.cuda.pinned.pin_memory`. Imports torch."""
    from hybridkv.transfer.cuda import pinned

    return pinned.pin_memory(num_bytes)


def pin_existing(memory: npt.NDArray[np.uint8]) -> None:
    """See `hybridkv.transfer.cuda.pinned.pin_existing`. Imports torch."""
    from hybridkv.transfer.cuda import pinned

    pinned.pin_existing(memory)
