"""The copy engines for a GPU that copy with the batched copies, streams and events of the inference engine.

Nothing here knows CUDA or torch: the caller hands over a `CopyDevice`. A job is one batch, two where some of its
sources lie on the device. The engines arrange jobs as vLLM's `v1/kv_offload/cpu/gpu_worker.py` does:

- A job is fenced when it is submitted: its batch waits for everything that the submitting thread has enqueued for
  compute until then. So a store reads what the forward pass wrote, and a load overwrites blocks only after all that
  reads or writes them before, the zeroing of new blocks included.
- Compute needs no fence behind a job: the result of a job is given out only after the event behind its batch.
- Batches of one engine run in its own stream, in order of submission.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from hybridkv.transfer.engine import CopyResult
from hybridkv.transfer.inline import InlineCopyEngine
from hybridkv.transfer.jobs import Copier, Job, conclude, describe, prepare
from hybridkv.transfer.memory import AddressRanges
from hybridkv.transfer.pinned import REGISTRATION_BYTES
from hybridkv.transfer.queued import JobQueue
from hybridkv.transfer.runs import CopyRuns, Integers


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self, stream: Any) -> None:
        """Happens after everything that was enqueued in `stream` so far."""
        ...

    def synchronize(self) -> None:
        """Wait until it has happened, without the interpreter lock. Reports what failed on the way."""
        ...


class Stream(Protocol):
    """As torch.cuda.Stream: what is enqueued in one happens in order; two are ordered by events alone."""

    def synchronize(self) -> None:
        """Wait until all that was enqueued has happened, without the interpreter lock."""
        ...

    def wait_event(self, event: Any) -> None:
        """What is enqueued from now on happens after `event`."""
        ...


class CopyDevice(Protocol):
    """One device as the inference engine sees it. Any thread may call. Nothing but `synchronize` waits."""

    def enter_thread(self) -> None:
        """Make it the device of the calling thread, which would use another otherwise. Any number of times."""
        ...

    def new_stream(self) -> Stream: ...

    def new_event(self) -> Event: ...

    def current_stream(self) -> Stream:
        """In which the calling thread enqueues compute."""
        ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes it the current stream of the calling thread."""
        ...

    def swap_blocks_batch(
        self, sources: Integers, destinations: Integers, num_bytes: Integers, *, is_src_access_order_any: bool
    ) -> None:
        """Enqueue all copies in the current stream of the calling thread, in any order among each other.

        With `is_src_access_order_any` sources may be read at any time from now on, also before what the stream holds.
        """
        ...

    def is_pinned(self, address: int) -> bool:
        """Whether this is host memory that was pinned for the device."""
        ...


class StreamCopies:
    """Batches of one stream of a device. Private to the engines of this module."""

    def __init__(self, device: CopyDevice) -> None:
        self.device = device
        self._stream = device.new_stream()
        self._pinned = AddressRanges()

    def register(self, address: int, num_bytes: int) -> None:
        if self.device.is_pinned(address):
            self._pinned = self._pinned.with_range(address, num_bytes)

    def fence(self) -> Event:
        """Behind everything that the calling thread has enqueued for compute so far."""
        return self._record(self.device.current_stream())

    def enqueue(self, runs: CopyRuns, fence: Event) -> Event:
        """Enqueue a batch behind `fence`. The event behind it. Where it raises, nothing of the batch still runs."""
        runs = runs.cut_at_multiples(REGISTRATION_BYTES)
        try:
            with self.device.stream(self._stream):
                self._stream.wait_event(fence)
                # Slots of the host are written by stores alone, and a load comes after their results: any order is
                # safe there. Blocks of the device may be written until the fence.
                is_host = self._pinned.contain(runs.sources)
                for is_any, part in ((True, runs.select(is_host)), (False, runs.select(~is_host))):
                    if len(part):
                        columns = part.sources, part.destinations, part.num_bytes
                        self.device.swap_blocks_batch(*columns, is_src_access_order_any=is_any)
            return self._record(self._stream)
        except BaseException:
            self._stream.synchronize()
            raise

    def fenced(self) -> Copier:
        """A copy that waits for all that the calling thread has enqueued for compute so far. Takes no digests."""
        fence = self.fence()

        def copy(runs: CopyRuns, record_ends: Integers | None = None) -> None:
            self.enqueue(runs, fence).synchronize()

        return copy

    def _record(self, stream: Stream) -> Event:
        event = self.device.new_event()
        event.record(stream)
        return event


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A job on its way to its end: `copied` is None where nothing of it was enqueued."""

    job: Job
    started_s: float
    copied: Event | None
    failure: str | None
    num_bytes: int


class StreamCopyEngine(JobQueue[Event]):
    """A `CopyEngine` between a GPU's memory and pinned host memory, on a stream and on two threads of its own.

    The copy thread makes the runs of a job, calls `before` and submits the batch. The other waits for batches in order
    and calls `after`, so that the hooks of one job run while the batch of another is copied. It takes no digests.
    """

    def __init__(
        self,
        device: CopyDevice,
        clock: Callable[[], float] = time.monotonic,
        max_queued_jobs: int = 1024,
    ) -> None:
        self._copies = StreamCopies(device)
        self._submitted: SimpleQueue[_Submitted | None] = SimpleQueue()
        self._last_end_s = -math.inf
        self._ending = threading.Thread(target=self._end_jobs, name="hybridkv-copied", daemon=True)
        super().__init__(self._copies.fence, clock, max_queued_jobs)
        self._ending.start()

    def register(self, address: int, num_bytes: int, name: str) -> None:
        super().register(address, num_bytes, name)
        self._copies.register(address, num_bytes)

    def _carry_out(self, job: Job, prepared: Event) -> None:
        started_s = self._clock()
        copied, num_bytes = None, 0
        try:
            self._copies.device.enter_thread()
            runs, failure = prepare(job, self._memory)
            if failure is None and len(runs):
                copied = self._copies.enqueue(runs, prepared)
            if failure is None:
                num_bytes = runs.total_bytes
        except BaseException as error:  # the thread must outlive a job, or every later one would hang
            failure = describe(error)
        self._submitted.put(_Submitted(job, started_s, copied, failure, num_bytes))

    def _drain(self) -> None:
        self._submitted.put(None)
        self._ending.join()

    def _end_jobs(self) -> None:
        while (submitted := self._submitted.get()) is not None:
            result = self._result_of(submitted)
            del submitted  # with what its hooks hold
            self._finish(result)

    def _result_of(self, submitted: _Submitted) -> CopyResult:
        failure, num_bytes = submitted.failure, submitted.num_bytes
        try:
            self._copies.device.enter_thread()
            if submitted.copied is not None:
                submitted.copied.synchronize()
        except Exception as error:
            failure, num_bytes = describe(error), 0
        try:
            failure = failure or conclude(submitted.job)
        except BaseException as error:  # as on the copy thread
            failure = describe(error)
        # Until the job before had ended, this one waited for it.
        began_s, self._last_end_s = max(submitted.started_s, self._last_end_s), self._clock()
        return CopyResult(submitted.job.job_id, failure, num_bytes, self._last_end_s - began_s)


class InlineStreamCopyEngine(InlineCopyEngine):
    """The same, in `submit`, on the caller's thread: it returns when the bytes are there."""

    def __init__(self, device: CopyDevice) -> None:
        self._copies = StreamCopies(device)
        super().__init__(copier=self._copies.fenced)

    def register(self, address: int, num_bytes: int, name: str) -> None:
        super().register(address, num_bytes, name)
        self._copies.register(address, num_bytes)
