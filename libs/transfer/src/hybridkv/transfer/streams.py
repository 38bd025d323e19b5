"""GPU copy engines on the batched copies, streams and events of the inference engine.

This module imports neither CUDA nor torch: the caller passes a `CopyDevice`. A job is one batch, or two if only some of
its sources lie in pinned memory. The order of jobs follows vLLM's `v1/kv_offload/cpu/gpu_worker.py`:

- `submit` records a fence: the batch waits for all compute that the submitting thread has enqueued before; only reads
  of pinned host memory can be earlier. So a store reads the output of the forward pass, and a load overwrites blocks
  only after all earlier reads and writes of these blocks, including the zeroing of new blocks.
- Compute needs no fence after a job: the result of a job is returned only after the event that follows its batch.
- Batches of one engine run in its own stream, in order of submission.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from hybridkv.transfer.gpu import GpuCopyEngine, InlineGpuCopyEngine
from hybridkv.transfer.memory import AddressRanges
from hybridkv.transfer.pinned import REGISTRATION_BYTES
from hybridkv.transfer.runs import CopyRuns, Integers

MAX_KEPT_RUNS = 1 << 18
"""Arrays of more runs are freed after their batch."""


class DeviceEvent(Protocol):
    """Like torch.cuda.Event."""

    def record(self, stream: Any) -> None:
        """Place the event after all work that is enqueued in `stream`."""
        ...

    def synchronize(self) -> None:
        """Wait for the event without the GIL. Raises the errors of earlier work."""
        ...


class DeviceStream(Protocol):
    """Like torch.cuda.Stream: work in one stream runs in order; only events order two streams."""

    def synchronize(self) -> None:
        """Wait for all enqueued work, without the GIL."""
        ...

    def wait_event(self, event: Any) -> None:
        """Run all later work of this stream after `event`."""
        ...


class CopyDevice(Protocol):
    """One device of the inference engine. Any thread may call the methods, and none of them waits: only `synchronize`
    of events and streams does."""

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread. Can be called again."""
        ...

    def new_stream(self) -> DeviceStream: ...

    def new_event(self) -> DeviceEvent: ...

    def current_stream(self) -> DeviceStream:
        """The stream of the calling thread's compute."""
        ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current stream of the calling thread within the context."""
        ...

    def swap_blocks_batch(
        self, sources: Integers, destinations: Integers, num_bytes: Integers, *, is_src_access_order_any: bool
    ) -> None:
        """Enqueue all copies in the current stream of the calling thread. Their order is undefined.

        The caller reuses the arrays after this returns, so the device must not read them later. With
        `is_src_access_order_any`, sources can be read immediately, even before earlier work in the stream.
        """
        ...

    def is_pinned(self, address: int) -> bool:
        """True if the address is in host memory that is pinned for the device."""
        ...


class StreamCopies:
    """`GpuCopies` in one stream of a device. Batches of at most `MAX_KEPT_RUNS` runs use the same arrays."""

    def __init__(self, device: CopyDevice) -> None:
        self.device = device
        self._stream = device.new_stream()
        self._pinned = AddressRanges()
        self._columns = np.empty((3, 0), dtype=np.int64)
        """Addresses and sizes of a batch. Reused, because allocating memory takes longer than filling it."""

    def register(self, address: int, num_bytes: int, name: str) -> None:
        if self.device.is_pinned(address):
            self._pinned = self._pinned.with_range(address, num_bytes)

    def enter_thread(self) -> None:
        self.device.enter_thread()

    def fence(self) -> DeviceEvent:
        """An event after all compute that the calling thread has enqueued."""
        return self._record(self.device.current_stream())

    def enqueue(self, runs: CopyRuns, fence: DeviceEvent) -> DeviceEvent:
        """Enqueue a batch after `fence`. Returns the event after the batch. Before it raises, waits for the stream:
        then no copy of the batch still writes."""
        runs = runs.cut_at_multiples(REGISTRATION_BYTES)
        try:
            with self.device.stream(self._stream):
                self._stream.wait_event(fence)
                # Of all copies of the device, only stores write host memory, and a load starts after the results of
                # these stores. So sources in host memory can be read before the fence. Sources in device memory cannot:
                # compute may write them until the fence.
                for is_any, part in self._by_source(runs):
                    if len(part):
                        self.device.swap_blocks_batch(*self._columns_of(part), is_src_access_order_any=is_any)
            return self._record(self._stream)
        except BaseException:
            self._stream.synchronize()
            raise

    def _by_source(self, runs: CopyRuns) -> list[tuple[bool, CopyRuns]]:
        """The runs from pinned memory (True), and the other runs (False)."""
        is_all = self._pinned.contain_all(runs.spans.source_begin, runs.spans.source_end)
        if is_all is not None:
            return [(is_all, runs)]
        is_host = self._pinned.contain(runs.sources)
        return [(True, runs.select(is_host)), (False, runs.select(~is_host))]

    def _columns_of(self, runs: CopyRuns) -> tuple[Integers, Integers, Integers]:
        if len(runs) > MAX_KEPT_RUNS:
            columns = np.empty((3, len(runs)), dtype=np.int64)
        else:
            if self._columns.shape[1] < len(runs):
                self._columns = np.empty((3, len(runs)), dtype=np.int64)
            columns = self._columns[:, : len(runs)]
        sources, destinations, num_bytes = columns
        runs.fill(sources, destinations, num_bytes)
        return sources, destinations, num_bytes

    def _record(self, stream: DeviceStream) -> DeviceEvent:
        event = self.device.new_event()
        event.record(stream)
        return event


class StreamCopyEngine(GpuCopyEngine):
    """A `CopyEngine` between GPU memory and pinned host memory, on its own stream and two threads. Computes no
    digests."""

    def __init__(
        self, device: CopyDevice, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        super().__init__(StreamCopies(device), clock, max_queued_jobs)


class InlineStreamCopyEngine(InlineGpuCopyEngine):
    """Like `StreamCopyEngine`, but `submit` copies on the caller's thread and returns when the job has ended."""

    def __init__(self, device: CopyDevice) -> None:
        super().__init__(StreamCopies(device))
