"""Fences of the engines that copy in streams, on a device that runs work in any legal order (`lazy_device`).

A step of the test is a step of an inference engine: a forward pass writes and reads blocks, blocks are stored, and
blocks are loaded over blocks that pending compute still reads or zeroes. Hypothesis draws every order: the time of each
submission, the next stream, the next piece of a batch. Blocks hold the number of their last writer, so a read before
this writer, or after the reuse of the block, finds another number. Each control leaves out one fence.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lazy_device import (
    TIMEOUT_S,
    LazyDevice,
    LazyStream,
    LoadsWithoutFence,
    StoresWithoutFence,
    WithoutCompletion,
)

from hybridkv.transfer import CopyRuns, JobId, StreamCopyEngine

ORDERS = int(os.environ.get("HYBRIDKV_STREAM_ORDERS", "300"))
BLOCKS = SLOTS = 6
BLOCK_BYTES = 32
STEPS = 14
MOST_IN_A_JOB = 3
DRAWN_BYTES = 300


class WrongBytesError(AssertionError):
    """A block or a slot holds the bytes of another writer."""


class Tape:
    """Numbers that hypothesis drew, then zeros."""

    def __init__(self, drawn: bytes = b"") -> None:
        self._drawn = iter(drawn)

    def __call__(self, below: int) -> int:
        return next(self._drawn, 0) % below


@dataclass(slots=True)
class DrawnCopy:
    is_store: bool
    blocks: list[int]
    slots: list[int]
    numbers: list[int]
    """The expected values of the destinations after the copy."""
    local: list[int] = field(default_factory=list)
    """Blocks from which other blocks of this copy are copied."""


class Rig:
    """Random but legal steps of an inference engine: forward passes, stores and loads.

    Args:
        device: the device that runs all work.
        reuses_early: control: blocks are written and slots are read before the result of their job.
    """

    def __init__(self, device: LazyDevice, *, reuses_early: bool = False) -> None:
        self.device = device
        self.reuses_early = reuses_early
        self.cache = torch.zeros(BLOCKS, BLOCK_BYTES // 8, dtype=torch.int64)
        self.arena = np.zeros((SLOTS, BLOCK_BYTES // 8), dtype=np.int64)
        device.pin(self.arena.view(np.uint8).reshape(-1))
        self.stores = StreamCopyEngine(device)
        self.loads = StreamCopyEngine(device)
        for engine in (self.stores, self.loads):
            engine.register(self.cache.data_ptr(), self.cache.nbytes, "kv cache")
            engine.register(int(self.arena.ctypes.data), self.arena.nbytes, "arena")
        self.choose: Tape = Tape()
        self.job_id = 0
        self.jobs: dict[JobId, DrawnCopy] = {}
        self._forget()

    def _forget(self) -> None:
        self.number = 0
        self.cache.zero_()
        self.blocks = [0] * BLOCKS
        """The expected number of each block after all enqueued work."""
        self.slots: list[int | None] = [None] * SLOTS

    def run(self, drawn: bytes) -> None:
        self._forget()
        self.choose = self.device.choose = Tape(drawn)
        steps = (self.forward, self.store, self.load, self.load, self.let_happen, self.let_happen)
        for _ in range(STEPS):
            steps[self.choose(len(steps))]()
            self.end_jobs()
        while self.jobs:
            self.device.drain()
            self.end_jobs()
        self.device.drain()
        self._read(list(range(BLOCKS)))
        self.device.drain()

    def forward(self) -> None:
        """Compute that writes some blocks and reads others."""
        written = self._draw(self._writable())
        numbers = [self._next() for _ in written]
        self._write(written, numbers)
        self._read(self._draw(self._readable()))

    def store(self) -> None:
        busy = {slot for job in self.jobs.values() for slot in job.slots}
        free = [slot for slot in range(SLOTS) if slot not in busy]
        blocks = self._draw(self._readable())[: len(free)]
        if not blocks:
            return
        first = self.choose(len(free) - len(blocks) + 1)
        slots = free[first : first + len(blocks)]
        # The forward pass of this step writes the blocks that are stored at its end.
        fresh = [block for block in blocks if block in self._writable()]
        self._write(fresh, [self._next() for _ in fresh])
        job = DrawnCopy(True, blocks, slots, [self.blocks[block] for block in blocks])
        for slot in slots:
            self.slots[slot] = None
        self._submit(job, [(self._block(block), self._slot(slot)) for block, slot in zip(blocks, slots, strict=True)])

    def load(self) -> None:
        busy = {slot for job in self.jobs.values() for slot in job.slots if job.is_store}
        held = [slot for slot in range(SLOTS) if self.slots[slot] is not None and slot not in busy]
        blocks = self._writable()
        slots = self._draw(held)[: len(blocks)]
        local = self._draw([block for block in self._readable() if block not in blocks[: len(slots)]])
        local = local[: max(0, len(blocks) - len(slots))]
        targets = [block for block in blocks if block not in local][: len(slots) + len(local)]
        if len(targets) < len(slots) + len(local) or not targets:
            return
        if self.choose(2):
            # The earlier owners of these blocks still read them, and new blocks are zeroed.
            self._read(targets)
            self._write(targets, [0] * len(targets))
        sources = [(self._slot(slot), self.slots[slot]) for slot in slots]
        sources += [(self._block(block), self.blocks[block]) for block in local]
        numbers = [number for _, number in sources if number is not None]
        job = DrawnCopy(False, targets, slots, numbers, local)
        for target, number in zip(targets, numbers, strict=True):
            self.blocks[target] = number
        self._submit(job, [(source, self._block(block)) for (source, _), block in zip(sources, targets, strict=True)])

    def let_happen(self) -> None:
        self.device.advance(self.choose(12))

    def end_jobs(self) -> None:
        """Takes the results of completed jobs. Waits for each result, so that equal tapes give equal runs."""
        for engine, is_store in ((self.stores, True), (self.loads, False)):
            of_engine = [job_id for job_id, job in self.jobs.items() if job.is_store is is_store]
            stream = engine._copies._stream
            assert isinstance(stream, LazyStream)
            pending = sum(isinstance(step, tuple) and step[0] == "record" for step in stream.steps)
            assert engine.wait(of_engine[: len(of_engine) - pending], TIMEOUT_S)
            for result in engine.poll():
                job = self.jobs.pop(result.job_id)
                if result.failure is not None:
                    raise WrongBytesError(result.failure)
                if job.is_store:
                    for slot, number in zip(job.slots, job.numbers, strict=True):
                        self.slots[slot] = number

    def close(self) -> None:
        """Completes all work in flight, right or wrong."""
        while any(stream.steps for stream in self.device.streams):
            with contextlib.suppress(WrongBytesError):
                self.device.drain()
        for engine in (self.stores, self.loads):
            engine.close()

    def _submit(self, job: DrawnCopy, pairs: list[tuple[int, int]]) -> None:
        self.job_id += 1
        self.jobs[JobId(self.job_id)] = job
        runs = CopyRuns.of([(source, destination, BLOCK_BYTES) for source, destination in pairs])
        engine = self.stores if job.is_store else self.loads
        stream = engine._copies._stream
        assert isinstance(stream, LazyStream)
        enqueued = stream.num_records + 1
        assert engine.submit(JobId(self.job_id), lambda: runs, after=lambda: self._verify(job))
        assert self.device.wait_for_record(stream, enqueued)

    def _verify(self, job: DrawnCopy) -> str | None:
        """Checks the stored slots on the thread that ends jobs, while other batches are copied, as at a seal."""
        if not job.is_store:
            return None
        return self._differs("slot", job.slots, self.arena[job.slots], job.numbers)

    @staticmethod
    def _differs(name: str, places: list[int], found: np.ndarray, numbers: list[int]) -> str | None:  # type: ignore[type-arg]
        for place, words, number in zip(places, found, numbers, strict=True):
            if (words != number).any():
                return f"{name} {place}: expected {number}, got {words.tolist()}"
        return None

    def _write(self, blocks: list[int], numbers: list[int]) -> None:
        for block, number in zip(blocks, numbers, strict=True):
            self.blocks[block] = number
        values = torch.tensor(numbers, dtype=torch.int64)[:, None]

        def write() -> None:
            self.cache[blocks] = values

        self.device.launch(write)

    def _read(self, blocks: list[int]) -> None:
        numbers = [self.blocks[block] for block in blocks]

        def read() -> None:
            differs = self._differs("block", blocks, self.cache[blocks].numpy(), numbers)
            if differs is not None:
                raise WrongBytesError(differs)

        self.device.launch(read)

    def _writable(self) -> list[int]:
        """Blocks that no job holds. Blocks of a store are pinned; blocks of a load belong to waiting requests."""
        if self.reuses_early:
            return list(range(BLOCKS))
        busy = {block for job in self.jobs.values() for block in (*job.blocks, *job.local)}
        return [block for block in range(BLOCKS) if block not in busy]

    def _readable(self) -> list[int]:
        """Blocks that no load writes."""
        if self.reuses_early:
            return list(range(BLOCKS))
        busy = {block for job in self.jobs.values() if not job.is_store for block in job.blocks}
        return [block for block in range(BLOCKS) if block not in busy]

    def _draw(self, among: list[int]) -> list[int]:
        left, drawn = list(among), []
        for _ in range(min(len(left), self.choose(MOST_IN_A_JOB + 1))):
            drawn.append(left.pop(self.choose(len(left))))
        return drawn

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _block(self, block: int) -> int:
        return self.cache.data_ptr() + block * BLOCK_BYTES

    def _slot(self, slot: int) -> int:
        return int(self.arena.ctypes.data) + slot * BLOCK_BYTES


def orders(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that runs a `given` test with this many orders: the same orders in every short run."""
    return settings(
        max_examples=number,
        derandomize=number < 1000,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


DRAWN = st.binary(min_size=DRAWN_BYTES, max_size=DRAWN_BYTES)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(LazyDevice(Tape(), is_driven=True))
    yield made
    made.close()


def test_no_order_reads_a_block_before_its_writer_or_after_its_reuse(rig: Rig) -> None:
    @orders(ORDERS)
    @given(DRAWN)
    def check(drawn: bytes) -> None:
        rig.run(drawn)

    check()
    assert rig.job_id > ORDERS, "jobs"


class AnySourceOrder(LazyDevice):
    """Also reads sources on the device in any order."""

    def swap_blocks_batch(self, *columns: np.ndarray, is_src_access_order_any: bool) -> None:  # type: ignore[type-arg, override]
        super().swap_blocks_batch(*columns, is_src_access_order_any=True)


@pytest.mark.parametrize("device", [StoresWithoutFence, LoadsWithoutFence, WithoutCompletion, AnySourceOrder])
def test_each_missing_fence_is_detected(device: type[LazyDevice]) -> None:
    assert finds_a_wrong_byte(lambda: Rig(device(Tape(), is_driven=True)))


def test_reuse_before_the_result_is_detected() -> None:
    assert finds_a_wrong_byte(lambda: Rig(LazyDevice(Tape(), is_driven=True), reuses_early=True))


def finds_a_wrong_byte(make: Callable[[], Rig]) -> bool:
    rig = make()
    try:
        for seed in range(300):
            rig.run(random.Random(seed).randbytes(DRAWN_BYTES))
    except WrongBytesError:
        return True
    finally:
        rig.close()
    return False
