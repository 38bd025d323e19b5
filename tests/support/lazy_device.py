"""A device on the CPU that executes work as late, and in as unusual an order, as streams and events allow.

It is a `CopyDevice` of `hybridkv.transfer.streams`, so the engine with its threads, events and fences is the real one.
Device memory is host memory. The work of one stream runs in order, piece by piece; which stream continues is chosen at
random. Only events order two streams, and the pieces of one batch run in any order. With `is_src_access_order_any`, a
source may already be read when the batch is submitted. So a missing fence produces a wrong byte in some order. It does
not test CUDA's own calls, or timing.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import patience

TIMEOUT_S: Final = patience.seconds(6.0)
Choose = Callable[[int], int]
"""Returns a number below its argument."""


@dataclass(slots=True)
class _Piece:
    source: int
    destination: int
    num_bytes: int
    read: bytes | None = None
    """The content of a source that was read early."""

    def copy(self) -> None:
        if self.read is None:
            ctypes.memmove(self.destination, self.source, self.num_bytes)
        else:
            ctypes.memmove(self.destination, self.read, self.num_bytes)


@dataclass(slots=True)
class _Batch:
    pieces: list[_Piece]


class LazyEvent:
    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.happened = False
        self.stream: LazyStream | None = None
        """The stream in which it was recorded."""

    def record(self, stream: LazyStream) -> None:
        self.stream = stream
        self._device.enqueue(stream, ("record", self))

    def synchronize(self) -> None:
        self._device.wait_for(self)


@dataclass(slots=True, eq=False)
class LazyStream:
    device: LazyDevice
    name: str
    steps: deque[Any] = field(default_factory=deque)
    num_records: int = 0
    """The number of events recorded in it, completed or not."""

    def wait_event(self, event: LazyEvent) -> None:
        self.device.wait(self, event)

    def synchronize(self) -> None:
        event = self.device.new_event()
        event.record(self)
        event.synchronize()


class LazyDevice:
    """Thread safe. `choose` decides what happens next.

    If `is_driven`, work happens only in `advance` and `drain`, so that one thread controls everything. Otherwise some
    work may happen at each call, unless `is_late`, and `LazyEvent.synchronize` runs the work that it needs. Subclasses
    are deliberate bugs: each omits something.
    """

    def __init__(self, choose: Choose, *, is_driven: bool = False, is_late: bool = False) -> None:
        self.choose = choose
        self.compute = LazyStream(self, "compute")
        self.streams = [self.compute]
        self.failures: list[BaseException] = []
        """Exceptions of compute that ran on another thread than the test's."""
        self.num_batches = 0
        self.fail_batches = 0
        """How many of the next batches are refused, each after half of it was submitted."""
        self._is_driven = is_driven
        self._is_late = is_late
        self._pinned: list[tuple[int, int]] = []
        self._current = threading.local()
        self._changed = threading.Condition(threading.RLock())

    # The interface of a CopyDevice.

    def enter_thread(self) -> None:
        self._current.is_entered = True

    def new_stream(self) -> LazyStream:
        """Alternates between a stream for loads and one for stores, as a worker creates its engines."""
        with self._changed:
            stream = LazyStream(self, ("loads", "stores")[len(self.streams) % 2])
            self.streams.append(stream)
        return stream

    def new_event(self) -> LazyEvent:
        return LazyEvent(self)

    def current_stream(self) -> LazyStream:
        return getattr(self._current, "stream", self.compute)

    @contextlib.contextmanager
    def stream(self, stream: LazyStream) -> Iterator[None]:
        self._expect_entered()
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def swap_blocks_batch(
        self,
        sources: npt.NDArray[np.int64],
        destinations: npt.NDArray[np.int64],
        num_bytes: npt.NDArray[np.int64],
        *,
        is_src_access_order_any: bool,
    ) -> None:
        pieces = []
        for source, destination, size in zip(sources.tolist(), destinations.tolist(), num_bytes.tolist(), strict=True):
            half = size // 2
            pieces += [_Piece(source, destination, half), _Piece(source + half, destination + half, size - half)]
        with self._changed:
            self.num_batches += 1
            if self.fail_batches:
                self.fail_batches -= 1
                self.enqueue(self.current_stream(), _Batch(pieces[::2]))
                raise RuntimeError("swap_blocks_batch: invalid argument")
            for piece in pieces:
                if is_src_access_order_any and self.choose(2):
                    piece.read = ctypes.string_at(piece.source, piece.num_bytes)
            self.enqueue(self.current_stream(), _Batch(pieces))

    def is_pinned(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._pinned)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Register host memory that the device can access."""
        self._pinned.append((int(memory.ctypes.data), int(memory.ctypes.data) + memory.nbytes))

    # Other work of an inference engine.

    def launch(self, work: Callable[[], object]) -> None:
        """Run compute in the current stream of the calling thread."""
        self.enqueue(self.current_stream(), work)

    # Execution.

    def wait(self, stream: LazyStream, event: LazyEvent) -> None:
        self.enqueue(stream, ("wait", event))

    def enqueue(self, stream: LazyStream, step: Any) -> None:
        with self._changed:
            stream.steps.append(step)
            stream.num_records += isinstance(step, tuple) and step[0] == "record"
            if not (self._is_driven or self._is_late):
                self.advance(self.choose(3))
            self._changed.notify_all()

    def wait_for(self, event: LazyEvent) -> None:
        self._expect_entered()
        with self._changed:
            while not event.happened:
                if not self._is_driven and self._step():
                    continue
                if not self._changed.wait(TIMEOUT_S):
                    raise RuntimeError("the streams wait for each other")

    def wait_for_record(self, stream: LazyStream, number: int) -> bool:
        """Wait until `number` events were recorded in a stream. Returns False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: stream.num_records >= number, TIMEOUT_S)

    def advance(self, num_steps: int) -> None:
        """Run up to `num_steps` steps, or all that are possible."""
        with self._changed:
            while num_steps > 0 and self._step():
                num_steps -= 1

    def drain(self) -> None:
        """Run everything that can run."""
        with self._changed:
            while self._step():
                pass

    def raise_failures(self) -> None:
        """Raise the first exception of compute on another thread."""
        with self._changed:
            if self.failures:
                raise self.failures[0]

    def _expect_entered(self) -> None:
        """Only the main thread uses the right device without `enter_thread`."""
        if threading.current_thread() is not threading.main_thread() and not hasattr(self._current, "is_entered"):
            raise RuntimeError(f"{threading.current_thread().name} uses another device")

    def _step(self) -> bool:
        """Run one piece of work that is ready. Returns False if there is none."""
        ready = [stream for stream in self.streams if stream.steps and self._may_begin(stream.steps[0])]
        if not ready:
            return False
        stream = ready[self.choose(len(ready)) if len(ready) > 1 else 0]
        step = stream.steps[0]
        if isinstance(step, _Batch):
            if step.pieces:
                step.pieces.pop(self.choose(len(step.pieces)) if len(step.pieces) > 1 else 0).copy()
            if step.pieces:
                return True
        stream.steps.popleft()
        if isinstance(step, tuple) and step[0] == "record":
            step[1].happened = True
            self._changed.notify_all()
        elif callable(step):
            self._compute(step)
        return True

    def _compute(self, work: Callable[[], None]) -> None:
        if self._is_driven:
            work()
            return
        try:
            work()
        except BaseException as error:
            self.failures.append(error)

    @staticmethod
    def _may_begin(step: Any) -> bool:
        return not (isinstance(step, tuple) and step[0] == "wait") or step[1].happened


class StoresWithoutFence(LazyDevice):
    """Bug: stores do not wait for the step that writes their blocks."""

    def wait(self, stream: LazyStream, event: LazyEvent) -> None:
        if stream.name != "stores":
            super().wait(stream, event)


class LoadsWithoutFence(LazyDevice):
    """Bug: loads do not wait for compute that still reads or writes their blocks."""

    def wait(self, stream: LazyStream, event: LazyEvent) -> None:
        if stream.name != "loads":
            super().wait(stream, event)


class WithoutCompletion(LazyDevice):
    """Bug: results of copies are reported before their events."""

    def wait_for(self, event: LazyEvent) -> None:
        if event.stream is self.compute:
            super().wait_for(event)


__all__ = [
    "Choose",
    "LazyDevice",
    "LazyEvent",
    "LazyStream",
    "LoadsWithoutFence",
    "StoresWithoutFence",
    "WithoutCompletion",
]
