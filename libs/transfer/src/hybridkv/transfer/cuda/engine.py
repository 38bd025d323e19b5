"""GPU copy engines with the kernels of hybridkv-cuda. csrc/cuda/job.h selects the copy method of each run.

`submit` records a fence: the copies of a job run after all compute that the submitting thread has enqueued before, and
in parallel with later compute. So a store waits for the forward pass that wrote its blocks. A load waits for the last
reads of the blocks that it overwrites, but not for the next forward pass.
Compute needs no fence after a job: the result of a job is returned only after its copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hybridkv.transfer.cuda.device import CudaDevice, MemoryKind
from hybridkv.transfer.gpu import EnqueuedCopies, GpuCopyEngine, InlineGpuCopyEngine
from hybridkv.transfer.runs import CopyEngineError, CopyRuns


class KernelCopies:
    """`GpuCopies` of a `CudaDevice`."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int, name: str) -> None:
        kind = self._device.memory_kind(address)
        if kind is MemoryKind.OTHER:
            raise CopyEngineError(f"register {name}: expected this GPU's memory or pinned memory, got neither")
        if kind is MemoryKind.DEVICE:
            self._device.register(address, num_bytes)

    def fence(self) -> Any:
        return self._device.caller_event()

    def enter_thread(self) -> None:
        """Does nothing: the library sets the current device in each call."""

    def enqueue(self, runs: CopyRuns, fence: Any) -> EnqueuedCopies:
        return self._device.enqueue(runs, fence)


class CudaCopyEngine(GpuCopyEngine):
    """A `CopyEngine` between GPU memory and pinned host memory, on its own streams and two threads. Computes no digests
    of the copied bytes.

    `device` must not be shared with another engine. `register` raises `CopyEngineError` for memory that the GPU cannot
    access. If a CUDA call fails, its job fails with the name of the call.
    """

    def __init__(
        self, device: CudaDevice, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        super().__init__(KernelCopies(device), clock, max_queued_jobs)


class InlineCudaCopyEngine(InlineGpuCopyEngine):
    """Like `CudaCopyEngine`, but `submit` copies on the caller's thread and returns when the job has ended."""

    def __init__(
        self, device: CudaDevice, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        super().__init__(KernelCopies(device), clock, max_queued_jobs)
