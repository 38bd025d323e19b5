"""GPU copy engines with the kernels of hybridkv-cuda. csrc/cuda/job.h selects the copy method of each run.

`submit` records a fence: the copies of a job run after all compute that the submitting thread has enqueued before, and
in parallel with later compute. So a store waits for the forward pass that wrote its blocks. A load waits for the last
reads of the blocks that it overwrites, but not for the next forward pass.
Compute needs no fence after a job: the result of a job is returned only after its copies.
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
    """A copy after all compute that the calling thread has enqueued. Computes no digests."""
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
    """A `CopyEngine` between GPU memory and pinned host memory, on its own thread and streams.

    `device` must not be shared with another engine. `register` raises `CopyEngineError` for memory that the GPU cannot
    access. A CUDA call that fails is the failure of its job, which names the call.
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
    """Like `CudaCopyEngine`, but `submit` copies on the caller's thread and returns when the job has ended."""

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
