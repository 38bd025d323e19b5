"""A GPU simulated on the CPU for the plan of csrc/cuda/job.cc. It executes work in every order that CUDA allows.

Its GPU memory is host memory. Queued work runs only when the host waits, and only until the awaited event. The two
queues then advance in random order, limited only by events. The runs of one copy are executed in any order. So a
missing event causes a wrong byte in some order. tests/gpu tests the calls of CUDA and their times.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import patience
from kernel_simulation import ROW_WORDS, row_pointer, simulate_table, simulation

from hybridkv.transfer import CopyRuns
from hybridkv.transfer.cuda import CopyTuning, CudaError, MemoryKind
from hybridkv.transfer.cuda.device import NUM_PARTS, merge_ranges
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
    "host_wait": (_INT, _INT),
    "upload": (_INT, _INT, _U64, _U64),
    "launch": (_INT, _U64, _U64),
    "transfer": (_POINTER, _POINTER, _POINTER, _U64),
    "finish": (),
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


class SimulatedDevice:
    """Simulated GPU. `tuning` has the limits of its jobs; `fail_on` names a call that fails."""

    def __init__(self, seed: int = 0, tuning: CopyTuning = SMALL) -> None:
        self.tuning = tuning
        self.kinds: dict[int, MemoryKind] = {}
        self.compute = Event()
        self.compute.happened.set()
        self.is_stuck = threading.Event()
        """Set once the host can only wait for compute."""
        self.fail_on: str | None = None
        self.log: list[str] = []
        self.transfers: list[CopyRuns] = []
        self.tables: list[list[tuple[int, int, int]]] = []
        """The copies of the copy engines and of the kernel."""
        self._random = random.Random(seed)
        self._staging = np.full(tuning.staging_bytes, 0x5A, dtype=np.uint8)
        part_rows = int(simulation().hybridkv_job_part_rows())
        self._device_rows = np.zeros((NUM_PARTS, part_rows, ROW_WORDS), dtype=np.int64)
        self._wanted: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}  # the last table of each part
        self._host_rows: dict[int, Event] = {}  # key: address of the rows; value: set after their upload
        self._ranges: list[tuple[int, int]] = []
        self._failure: CudaError | None = None

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

    def copy(self, runs: CopyRuns, caller: Event) -> None:
        self._caller = caller
        self._queues: tuple[deque[Step], deque[Step]] = (deque(), deque())
        self._recorded: dict[tuple[int, int], Event] = {}
        self._failure = None
        tuning = self.tuning
        sizes = (tuning.large_run_bytes, tuning.direct_job_bytes, tuning.part_bytes, tuning.tile_bytes)
        limits = (ctypes.c_uint64 * 5)(*sizes, REGISTRATION_BYTES)
        ranges = np.array(merge_ranges(self._ranges), dtype=np.uint64).reshape(-1, 2)
        made = [prototype(self._guarded(name)) for name, prototype in Calls._fields_]
        failed = simulation().hybridkv_play_job(
            *row_pointer(runs),
            ctypes.c_void_p(ranges.ctypes.data),
            ctypes.c_uint64(len(ranges)),
            ctypes.c_uint64(self.staging_address),
            limits,
            ctypes.byref(Calls(*made)),
        )
        assert bool(failed) == (self._failure is not None)
        if self._failure is not None:
            raise self._failure

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

    def _wait_for_caller(self, queue: int) -> None:
        self._queues[queue].append(Step(lambda: None, self._caller))

    def _record(self, queue: int, part: int) -> None:
        event = Event()
        self._recorded[queue, part] = event
        self._queues[queue].append(Step(event.happened.set))

    def _wait(self, queue: int, other: int, part: int) -> None:
        self._queues[queue].append(Step(lambda: None, self._recorded[other, part]))

    def _host_wait(self, other: int, part: int) -> None:
        self._advance(self._recorded[other, part].happened.is_set)

    def _upload(self, queue: int, part: int, rows: int, count: int) -> None:
        """The host has just filled `rows`, so the earlier upload from this address must have completed."""
        if rows in self._host_rows:
            assert self._host_rows[rows].happened.is_set(), "a table was overwritten before the GPU had read it"
        event = self._host_rows[rows] = Event()
        place = int(self._device_rows[part].ctypes.data)

        def upload() -> None:
            ctypes.memmove(place, rows, count * ROW_WORDS * 8)
            event.happened.set()

        self._queues[queue].append(Step(upload))
        words = np.frombuffer((ctypes.c_int64 * (count * ROW_WORDS)).from_address(rows), dtype=np.int64)
        self._wanted[part] = words.reshape(count, ROW_WORDS).copy()
        self.tables.append(fragments(self._wanted[part]))

    def _launch(self, part: int, count: int, num_tiles: int) -> None:
        self._call("launch")
        rows, wanted = self._device_rows[part, :count], self._wanted[part]

        def run() -> None:
            if not np.array_equal(rows, wanted):  # the addresses may be arbitrary
                raise CudaError("the kernel received another table")
            simulate_table(rows, num_tiles, self.tuning.tile_bytes, WARPS)

        self._queues[KERNEL].append(Step(run))

    def _transfer(self, sources: Any, destinations: Any, sizes: Any, count: int) -> None:
        self._call("transfer")
        columns = [np.ctypeslib.as_array(column, (count,)).copy() for column in (sources, destinations, sizes)]
        runs = CopyRuns(*columns)
        self.transfers.append(runs)
        self._queues[TRANSFER].append(Step(lambda: self._copy(runs)))

    def _finish(self) -> None:
        self._advance(lambda: not any(self._queues))
        self._call("finish")

    def _advance(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            ready = [queue for queue in self._queues if queue and _may_begin(queue[0])]
            if not ready:
                self.is_stuck.set()
                if self.compute.happened.wait(TIMEOUT_S):
                    continue
                raise CudaError("the queues wait for each other")
            self._random.choice(ready).popleft().run()

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
