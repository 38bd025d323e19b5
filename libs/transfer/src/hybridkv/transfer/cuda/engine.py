"""The copy engines for a GPU: they fence, enqueue and wait. What goes which way is decided in `plan`.

A job is fenced when it is submitted: its copies happen after everything that the submitting thread has enqueued for
compute until then, and beside everything that comes later. So a store waits for the forward pass that wrote its blocks,
and a load waits for whoever still reads the blocks that it overwrites, but not for the forward pass that comes next.
The other direction needs no fence on the GPU: the result of a job is given out only once its copies have happened.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from hybridkv.transfer.cuda.device import CudaDevice, CudaError, MemoryKind, Queue
from hybridkv.transfer.cuda.plan import CopyPlan, StagedBatch, plan_copies
from hybridkv.transfer.errors import CopyEngineError
from hybridkv.transfer.inline import InlineCopyEngine
from hybridkv.transfer.jobs import copy_runs
from hybridkv.transfer.memory import AddressRanges
from hybridkv.transfer.native import Copier
from hybridkv.transfer.queued import QueuedCopyEngine
from hybridkv.transfer.runs import CopyRuns, Integers

logger = logging.getLogger(__name__)


class CudaCopier:
    """Copies one job at a time on one GPU. Private to the engines of this module."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._ranges = AddressRanges()

    def kind_of(self, address: int, name: str) -> MemoryKind:
        """`CopyEngineError` when the GPU cannot reach the address."""
        kind = self._device.memory_kind(address)
        if kind is MemoryKind.OTHER:
            raise CopyEngineError(f"register {name}: expected this GPU's memory or pinned memory, got neither")
        return kind

    def register(self, address: int, num_bytes: int, kind: MemoryKind) -> None:
        self._device.register(address, num_bytes, kind)
        if kind is MemoryKind.DEVICE:
            self._ranges = self._ranges.with_range(address, num_bytes)

    def fenced(self) -> Copier:
        """A copy that happens after all that the calling thread has enqueued for compute so far. Takes no digests."""
        fence = self._device.caller_event()

        def copy(runs: CopyRuns, record_ends: Integers | None = None) -> None:
            self._copy(runs, fence)

        return copy

    def _copy(self, runs: CopyRuns, fence: Any) -> None:
        device = self._device
        plan = plan_copies(runs, self._ranges, device.staging_address, device.tuning, has_kernels=device.has_kernels)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("copying %s", plan.describe())
        try:
            for queue in Queue:
                device.wait(queue, fence)
            self._enqueue(plan)
            copy_runs(plan.within_host)
        except Exception:
            # What was enqueued may still write, and the result must not come before that.
            with contextlib.suppress(CudaError):
                device.finish()
            raise
        device.finish()

    def _enqueue(self, plan: CopyPlan) -> None:
        if len(plan.batched):
            self._device.copy_by_transfer(plan.batched)
        if len(plan.direct):
            self._device.copy_by_kernel(plan.direct)
        is_free: list[Any] = [None, None]
        for batch in plan.batches():
            is_free[batch.half] = self._enqueue_batch(batch, is_free[batch.half])

    def _enqueue_batch(self, batch: StagedBatch, is_free: Any) -> Any:
        """Both steps of one turn of a half, once `is_free`. The event behind them."""
        device = self._device
        kernel = (Queue.KERNEL, device.copy_by_kernel, batch.kernel)
        transfer = (Queue.TRANSFER, device.copy_by_transfer, batch.moved)
        (first, copy_first, first_runs), (second, copy_second, second_runs) = (
            (kernel, transfer) if batch.is_store else (transfer, kernel)
        )
        if is_free is not None:
            device.wait(first, is_free)
        copy_first(first_runs)
        device.wait(second, device.record(first))
        copy_second(second_runs)
        return device.record(second)


class CudaCopyEngine(QueuedCopyEngine):
    """A `CopyEngine` between a GPU's memory and pinned host memory, on a thread and on streams of its own.

    `device` belongs to this engine alone. `CopyEngineError` when memory is registered that the GPU cannot reach. A
    CUDA call that fails is the failure of its job, and names the call.
    """

    def __init__(
        self, device: CudaDevice, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        self._cuda = CudaCopier(device)
        super().__init__(self._cuda.fenced, clock, max_queued_jobs)

    def register(self, address: int, num_bytes: int, name: str) -> None:
        kind = self._cuda.kind_of(address, name)
        super().register(address, num_bytes, name)
        self._cuda.register(address, num_bytes, kind)


class InlineCudaCopyEngine(InlineCopyEngine):
    """The same, in `submit`, on the caller's thread: it returns when the bytes are there."""

    def __init__(
        self, device: CudaDevice, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        self._cuda = CudaCopier(device)
        super().__init__(clock, max_queued_jobs, self._cuda.fenced)

    def register(self, address: int, num_bytes: int, name: str) -> None:
        kind = self._cuda.kind_of(address, name)
        super().register(address, num_bytes, name)
        self._cuda.register(address, num_bytes, kind)
