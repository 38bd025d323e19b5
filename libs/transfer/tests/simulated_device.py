"""A GPU simulated on the CPU for the plan of csrc/cuda/job.cc. It executes work in every order that CUDA allows.

Its GPU memory is host memory. Queued work runs only when a thread waits, and only until the awaited event. The two
queues then advance in random order, limited only by events. The runs of one copy are executed in any order. So a
missing event causes a wrong byte in some order. tests/gpu tests the calls of CUDA and their times.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import patience
from kernel_simulation import ROW_WORDS, row_pointer, simulate_table, simulation

from hybridkv.transfer import CopyRuns
from hybridkv.transfer.cuda import CopyTuning, CudaError, MemoryKind
from hybridkv.transfer.cuda.device import merge_ranges
from hybridkv.transfer.pinned import REGISTRATION_BYTES

TIMEOUT_S = patience.seconds(6.0)
SMALL = CopyTuning(large_run_bytes=4096, direct_job_bytes=512, staging_bytes=32768, tile_bytes=256, num_blocks=2)
KERNEL, TRANSFER = 0, 1
"""The two queues."""
WARPS = 4

_INT, _U64, _POINTER = ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int64)
_CALLS = {
    "wait_for_caller": (_INT,),
    "record": (_INT, _INT),
    "wait": (_INT, _INT, _INT),
    "launch": (_INT, _U64, _U64, _U64),
    "host_wait": (_INT,),
    "transfer": (_POINTER, _POINTER, _POINTER, _U64),
    "drain": (),
}
"""`Calls` of csrc/cuda/simulation.cc: their names in order, and their arguments."""


class Calls(ctypes.Structure):
    _fields_ = tuple((name, ctypes.CFUNCTYPE(_INT, *taken)) for name, taken in _CALLS.items())


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()


@dataclass
class Step:
    """One operation in a queue. If it has an `event`, `run` may start only after this event."""

    run: Callable[[], None]
    event: Event | None = None


class SimulatedJob:
    """A job that was enqueued, and the events after its last step in each queue."""

    def __init__(self, device: SimulatedDevice, ends: tuple[Event, Event]) -> None:
        self._device, self._ends = device, ends

    def synchronize(self) -> None:
        self._device.advance(lambda: all(end.happened.is_set() for end in self._ends))
        self._device.log.append("synchronized")
        if self._device.fail_on == "synchronize":
            raise CudaError("synchronize: cudaErrorUnknown")


class SimulatedDevice:
    """Simulated GPU. `tuning` has the limits of its jobs; `fail_on` names a call that fails."""

    def __init__(self, seed: int = 0, tuning: CopyTuning = SMALL) -> None:
        self.tuning = tuning
        self.kinds: dict[int, MemoryKind] = {}
        self.compute = Event()
        self.compute.happened.set()
        self.is_stuck = threading.Event()
        """Set once a thread can only wait for compute."""
        self.fail_on: str | None = None
        self.log: list[str] = []
        self.transfers: list[CopyRuns] = []
        self.tables: list[list[tuple[int, int, int]]] = []
        """The copies of the copy engines and of the kernel."""
        self._random = random.Random(seed)
        self._staging = np.full(tuning.staging_bytes, 0x5A, dtype=np.uint8)
        self._table = np.zeros((int(simulation().hybridkv_job_table_rows()), ROW_WORDS), dtype=np.int64)
        self._read: dict[int, Event] = {}  # of each table in host memory: set when the GPU has read it
        self._ranges: list[tuple[int, int]] = []
        self._failure: CudaError | None = None
        self._lock = threading.RLock()
        """Held while steps are added or executed."""
        self._caller = self.compute
        self._queues: tuple[deque[Step], deque[Step]] = (deque(), deque())
        self._recorded: dict[tuple[int, int], Event] = {}
        sizes = tuning.large_run_bytes, tuning.direct_job_bytes, tuning.part_bytes, tuning.tile_bytes
        self._calls = Calls(*(prototype(self._guarded(name)) for name, prototype in Calls._fields_))
        self._copier = ctypes.c_void_p(
            simulation().hybridkv_simulate_copier(
                ctypes.c_uint64(self.staging_address),
                (ctypes.c_uint64 * 5)(*sizes, REGISTRATION_BYTES),
                ctypes.byref(self._calls),
            )
        )
        weakref.finalize(self, simulation().hybridkv_simulate_close, self._copier)

    @property
    def staging_address(self) -> int:
        return int(self._staging.ctypes.data)

    def memory_kind(self, address: int) -> MemoryKind:
        """The kind that a test has set; otherwise GPU memory and pinned memory alternate."""
        if address not in self.kinds:
            self.kinds[address] = MemoryKind.DEVICE if len(self.kinds) % 2 == 0 else MemoryKind.PINNED
        return self.kinds[address]

    def register(self, address: int, num_bytes: int) -> None:
        self._ranges.append((address, address + num_bytes))

    def caller_event(self) -> Event:
        self._call("caller_event")
        return self.compute

    def enqueue(self, runs: CopyRuns, caller: Event) -> SimulatedJob:
        self._caller, self._failure = caller, None
        ranges = np.array(merge_ranges(self._ranges), dtype=np.uint64).reshape(-1, 2)
        failed = simulation().hybridkv_simulate_enqueue(
            self._copier, *row_pointer(runs), ctypes.c_void_p(ranges.ctypes.data), ctypes.c_uint64(len(ranges))
        )
        assert bool(failed) == (self._failure is not None)
        if self._failure is not None:
            raise self._failure
        ends = Event(), Event()
        for queue, end in enumerate(ends):
            self._enqueue(queue, end.happened.set)
        self.log.append("enqueued")
        return SimulatedJob(self, ends)

    def copy(self, runs: CopyRuns) -> None:
        self.enqueue(runs, self.compute).synchronize()

    def _guarded(self, name: str) -> Callable[..., int]:
        """Keeps exceptions out of C++ frames. The first exception is the failure of the job."""

        def call(*arguments: Any) -> int:
            try:
                getattr(self, f"_{name}")(*arguments)
            except CudaError as error:
                self._failure = self._failure or error
                return 1
            except BaseException as error:  # an error of the test
                self._failure = self._failure or CudaError(f"{type(error).__name__}: {error}")
                return 1
            return 0

        return call

    def _enqueue(self, queue: int, run: Callable[[], None], event: Event | None = None) -> None:
        with self._lock:
            self._queues[queue].append(Step(run, event))

    def _wait_for_caller(self, queue: int) -> None:
        self._enqueue(queue, lambda: None, self._caller)

    def _record(self, queue: int, part: int) -> None:
        event = Event()
        self._recorded[queue, part] = event
        self._enqueue(queue, event.happened.set)

    def _wait(self, queue: int, other: int, part: int) -> None:
        self._enqueue(queue, lambda: None, self._recorded[other, part])

    def _host_wait(self, table: int) -> None:
        if table in self._read:  # not if its launch failed
            self.advance(self._read[table].happened.is_set)

    def _launch(self, table: int, rows: int, count: int, num_tiles: int) -> None:
        """The host has just filled `rows`, so the GPU must have read the earlier rows there."""
        if table in self._read:
            assert self._read[table].happened.is_set(), "a table was overwritten before the GPU had read it"
        self._call("launch")
        words = np.frombuffer((ctypes.c_int64 * (count * ROW_WORDS)).from_address(rows), dtype=np.int64)
        wanted = words.reshape(count, ROW_WORDS).copy()
        self.tables.append(fragments(wanted))
        is_read = self._read[table] = Event()

        def read() -> None:
            ctypes.memmove(self._table.ctypes.data, rows, count * ROW_WORDS * 8)
            is_read.happened.set()

        def run() -> None:
            if not np.array_equal(self._table[:count], wanted):  # the addresses may be arbitrary
                raise CudaError("the kernel received another table")
            simulate_table(self._table[:count], num_tiles, self.tuning.tile_bytes, WARPS)

        self._enqueue(KERNEL, read)
        self._enqueue(KERNEL, run)

    def _transfer(self, sources: Any, destinations: Any, sizes: Any, count: int) -> None:
        self._call("transfer")
        columns = [np.ctypeslib.as_array(column, (count,)).copy() for column in (sources, destinations, sizes)]
        runs = CopyRuns(*columns)
        self.transfers.append(runs)
        self._enqueue(TRANSFER, lambda: self._copy(runs))

    def _drain(self) -> None:
        self.advance(lambda: not any(self._queues))
        self._call("drain")

    def advance(self, is_enough: Callable[[], bool]) -> None:
        """Execute steps until `is_enough`."""
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            with self._lock:
                if is_enough():
                    return
                ready = [queue for queue in self._queues if queue and _may_begin(queue[0])]
                if ready:
                    self._random.choice(ready).popleft().run()
                    continue
            self.is_stuck.set()
            self.compute.happened.wait(TIMEOUT_S)
            if time.monotonic() > end_s:
                raise CudaError("the queues wait for each other")

    def _copy(self, runs: CopyRuns) -> None:
        triples = runs.triples()
        self._random.shuffle(triples)
        for source, destination, num_bytes in triples:
            ctypes.memmove(destination, source, num_bytes)

    def _call(self, name: str) -> None:
        self.log.append(name)
        if name == self.fail_on:
            raise CudaError(f"{name}: cudaErrorUnknown")


def _may_begin(step: Step) -> bool:
    return step.event is None or step.event.happened.is_set()


def fragments(rows: np.ndarray[Any, np.dtype[np.int64]]) -> list[tuple[int, int, int]]:
    """The copies of a table, row by row: (source, destination, num_bytes)."""
    return [
        (source + i * source_step, destination + i * destination_step, size)
        for source, destination, source_step, destination_step, size, count, _, _ in rows.tolist()
        for i in range(count)
    ]
