"""A GPU played on the CPU, as hostile as CUDA allows.

It is host memory that is called a GPU's. Nothing happens before `finish`, and then the two queues advance in an order
drawn by chance, held back by events alone; the runs of one copy happen in any order. So an event that is missing is a
wrong byte sooner or later. It says nothing about CUDA's own calls, about kernels or about time: tests/gpu does.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque

import numpy as np
import patience

from hybridkv.transfer import CopyRuns
from hybridkv.transfer.cuda import CopyTuning, CudaError, MemoryKind, Queue, fragment_table

TIMEOUT_S = patience.seconds(6.0)
SMALL = CopyTuning(large_run_bytes=4096, direct_job_bytes=512, staging_bytes=16384, tile_bytes=256, num_blocks=2)


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()


class PlayedDevice:
    def __init__(self, seed: int = 0, tuning: CopyTuning = SMALL, has_kernels: bool = True) -> None:
        self.tuning = tuning
        self.has_kernels = has_kernels
        self.kinds: dict[int, MemoryKind] = {}
        self.compute = Event()
        self.compute.happened.set()
        self.is_stuck = threading.Event()
        """Set once `finish` can only wait for compute."""
        self.fail_on: str | None = None
        self.log: list[str] = []
        self._random = random.Random(seed)
        self._staging = np.full(tuning.staging_bytes, 0x5A, dtype=np.uint8)
        self._queues: dict[Queue, deque[tuple[str, Event | CopyRuns]]] = {queue: deque() for queue in Queue}

    @property
    def staging_address(self) -> int:
        return int(self._staging.ctypes.data)

    def memory_kind(self, address: int) -> MemoryKind:
        """As a test said; else every other registration is the GPU's."""
        if address not in self.kinds:
            self.kinds[address] = MemoryKind.DEVICE if len(self.kinds) % 2 == 0 else MemoryKind.PINNED
        return self.kinds[address]

    def register(self, address: int, num_bytes: int, kind: MemoryKind) -> None:
        self._call("register")

    def caller_event(self) -> Event:
        self._call("caller_event")
        return self.compute

    def record(self, queue: Queue) -> Event:
        event = Event()
        self._queues[queue].append(("record", event))
        return event

    def wait(self, queue: Queue, event: Event) -> None:
        self._queues[queue].append(("wait", event))

    def copy_by_kernel(self, runs: CopyRuns) -> None:
        self._call("copy_by_kernel")
        assert self.has_kernels
        table = fragment_table(runs, self.tuning.tile_bytes)
        triples = []
        for source, destination, source_step, destination_step, size, count, _, _ in table.rows.tolist():
            triples += [(source + i * source_step, destination + i * destination_step, size) for i in range(count)]
        self._queues[Queue.KERNEL].append(("copy", CopyRuns.of(triples)))

    def copy_by_transfer(self, runs: CopyRuns) -> None:
        self._call("copy_by_transfer")
        self._queues[Queue.TRANSFER].append(("copy", runs))

    def finish(self) -> None:
        while any(self._queues.values()):
            ready = [queue for queue, waiting in self._queues.items() if waiting and self._may_begin(waiting[0])]
            if not ready:
                self.is_stuck.set()
                if self.compute.happened.wait(TIMEOUT_S):
                    continue
                raise CudaError("synchronize: the queues wait for each other")
            kind, what = self._queues[self._random.choice(ready)].popleft()
            if isinstance(what, CopyRuns):
                self._copy(what)
            elif kind == "record":
                what.happened.set()
        self._call("finish")

    def _may_begin(self, step: tuple[str, Event | CopyRuns]) -> bool:
        kind, what = step
        return kind != "wait" or (isinstance(what, Event) and what.happened.is_set())

    def _copy(self, runs: CopyRuns) -> None:
        triples = runs.triples()
        self._random.shuffle(triples)
        for source, destination, num_bytes in triples:
            ctypes.memmove(destination, source, num_bytes)

    def _call(self, name: str) -> None:
        self.log.append(name)
        if name == self.fail_on:
            raise CudaError(f"{name}: cudaErrorUnknown")
