"""The copy engines for a GPU with the kernels of hybridkv-cuda. csrc/cuda/job.h decides what goes which way.

A job is fenced when it is submitted: its copies happen after everything that the submitting thread has enqueued for
compute until then, and beside everything that comes later. So a store waits for the forward pass that wrote its blocks,
and a load waits for what still reads the blocks that it overwrites, but not for the forward pass that comes next.
The other direction needs no fence on the GPU: the result of a job is given out only once its copies have happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hybridkv.transfer.cuda.device import CudaDevice, MemoryKind
from hybridkv.transfer.inline import InlineCopyEngine
from hybridkv.transfer.jobs import Copier
from hybridkv.transfer.queued import QueuedCopyEngine
from hybridkv.transfer.runs import CopyEngineError, CopyRuns, Integers


def _fenced(device: CudaDevice) -> Copier:
    """A copy that happens after all that the calling thread has enqueued for compute so far. Takes no digests."""
    caller = device.caller_event()

    def copy(runs: CopyRuns, record_ends: Integers | None = None) -> None:
        device.copy(runs, caller)

    return copy


def _kind_of(device: CudaDevice, address: int, name: str) -> MemoryKind:
    kind = device.memory_kind(address)
    if kind is MemoryKind.OTHER:
        raise CopyEngineError(f"register {name}: expected this GPU's memory or pinned memory, got neither")
    return kind


class CudaCopyEngine(QueuedCopyEngine):
    """A `CopyEngine` between a GPU's memory and pinned host memory, on a thread and on streams of its own.

    `device` belongs to this engine alone. `CopyEngineError` when memory is registered that the GPU cannot reach. A
    CUDA call that fails is the failure of its job, and names the call.
    """

    def __init__(
        self, device: CudaDevice, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        self._device = device
        super().__init__(lambda: _fenced(device), clock, max_queued_jobs)

    def register(self, address: int, num_bytes: int, name: str) -> None:
        kind = _kind_of(self._device, address, name)
        super().register(address, num_bytes, name)
        if kind is MemoryKind.DEVICE:
            self._device.register(address, num_bytes)


class InlineCudaCopyEngine(InlineCopyEngine):
    """The same, in `submit`, on the caller's thread: it returns when the bytes are there."""

    def __init__(
        self, device: CudaDevice, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        self._device = device
        super().__init__(clock, max_queued_jobs, lambda: _fenced(device))

    def register(self, address: int, num_bytes: int, name: str) -> None:
        kind = _kind_of(self._device, address, name)
        super().register(address, num_bytes, name)
        if kind is MemoryKind.DEVICE:
            self._device.register(address, num_bytes)
