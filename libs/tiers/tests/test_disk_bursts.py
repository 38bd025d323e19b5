"""Bursts of prompts: the disk keeps as many resumable tokens as fit.

Measured as tokens that can be resumed from the disk alone, over tokens that were offered and fit. Chunks, hits of
single keys and bytes measure nothing here: an end without its beginning counts for all three.
"""

from __future__ import annotations

import errno
from pathlib import Path

import disk_faults
import disk_store
import msgspec
import pytest
from disk_bursts import CHUNK_TOKENS, Burst
from examples import thinned

from hybridkv.tiers import Refusal, Slot
from hybridkv.tiers.disk import DiskIndex, DiskOptions, Fsync, plan_sizes
from hybridkv.tiers.disk.maintenance.janitor import Task
from hybridkv.tiers.disk.maintenance.maintenance import MAX_CHORES_IN_A_ROW
from kits.tiers.inline_janitor import InlineJanitor

KIB, MIB = 1 << 10, 1 << 20
SIZES = (128 * KIB, 40 * KIB)
"""Bytes of a chunk of attention, and of a state."""
OPTIONS = DiskOptions(capacity_bytes=64 * MIB, fsync=Fsync.NONE, max_in_flight=2)
NUM_FITTING = 288
"""Chunks, with a state each, that the disk has room for."""


def share(burst: Burst) -> float:
    return burst.resumable_tokens / burst.fitting_tokens


@pytest.mark.parametrize(
    ("num_prompts", "has_thread", "is_paced"),
    thinned([(*case, is_paced) for case in [(1, True), (3, False), (12, True)] for is_paced in (False, True)], 3),
)
def test_prompts_that_fit_are_resumable_in_a_burst_and_paced(
    tmp_path: Path, num_prompts: int, has_thread: bool, is_paced: bool
) -> None:
    janitor = None if has_thread else InlineJanitor()
    with Burst(tmp_path / "store", OPTIONS, 256 * MIB, SIZES, janitor) as burst:
        for number in range(num_prompts):
            burst.offer(b"%d" % number, 0, NUM_FITTING // num_prompts)
            if is_paced:
                burst.settle()
        burst.settle()
        assert share(burst) >= 0.98, (burst.cascades(), burst.secondary.used_bytes / burst.secondary.capacity_bytes)


@pytest.mark.parametrize(
    ("num_prompts", "num_steps", "is_paced"),
    thinned([(*case, is_paced) for case in [(1, 6), (1, 1), (6, 1), (6, 4)] for is_paced in (False, True)], 7),
)
def test_a_full_disk_evicts_ends_and_keeps_beginnings(
    tmp_path: Path, num_prompts: int, num_steps: int, is_paced: bool
) -> None:
    """Twice as many chunks as fit, also as one long prompt that comes in steps."""
    with Burst(tmp_path / "store", OPTIONS, 256 * MIB, SIZES, InlineJanitor()) as burst:
        chunks = 2 * NUM_FITTING // num_prompts // num_steps
        for number in range(num_prompts):
            for step in range(num_steps):
                burst.offer(b"%d" % number, step * chunks, chunks)
                if is_paced:
                    burst.settle()
        burst.settle()
        assert share(burst) >= 0.98, (burst.cascades(), burst.secondary.used_bytes / burst.secondary.capacity_bytes)


@pytest.mark.parametrize("is_paced", [False, pytest.param(True, marks=pytest.mark.full)], ids=["burst", "paced"])
@pytest.mark.parametrize(
    ("num_prompts", "num_turns"),
    [pytest.param(4, 3, marks=pytest.mark.full), pytest.param(4, 6, marks=pytest.mark.full), (4, 24)],
)
def test_prompts_that_grow_in_turns_fill_the_disk_with_resumable_chunks(
    tmp_path: Path, num_prompts: int, num_turns: int, is_paced: bool
) -> None:
    """Four times as many chunks as fit: each turn of a prompt follows turns of all others."""
    with Burst(tmp_path / "store", OPTIONS, 256 * MIB, SIZES, InlineJanitor()) as burst:
        chunks = 4 * NUM_FITTING // num_prompts // num_turns
        for turn in range(num_turns):
            for number in range(num_prompts):
                burst.offer(b"%d" % number, turn * chunks, chunks)
                if is_paced:
                    burst.settle()
        burst.settle()
        assert share(burst) >= 0.98, (burst.cascades(), burst.secondary.used_bytes / burst.secondary.capacity_bytes)


def test_an_end_without_its_beginning_counts_as_zero(tmp_path: Path) -> None:
    """Negative control of the measure."""
    with Burst(tmp_path / "store", OPTIONS, 64 * MIB, SIZES, InlineJanitor()) as burst:
        burst.offer(b"a", 0, 20)
        burst.settle()
        assert burst.resumable(b"a") == 20 * CHUNK_TOKENS
        burst.secondary.invalidate(burst.key(b"a", (0, CHUNK_TOKENS)))
        assert burst.resumable(b"a") == 0 and burst.secondary.num_keys == 39


class HeldJanitor(InlineJanitor):
    """Janitor that runs tasks when a test calls `run`."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Task] = []

    def submit(self, task: Task) -> bool:
        self.tasks.append(task)
        return True

    def run(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


def test_reserve_is_busy_while_a_segment_is_being_made(tmp_path: Path) -> None:
    janitor = HeldJanitor()
    index = DiskIndex(str(tmp_path / "store"), disk_store.FINGERPRINT, OPTIONS, janitor)
    answers: list[Slot | Refusal] = []
    while not answers or isinstance(answers[-1], Slot):
        answers.append(index.reserve(b"%d" % len(answers), SIZES[0]))
    assert answers[-1] is Refusal.BUSY and len(answers) < NUM_FITTING
    for _ in range(3):  # a snapshot runs first
        janitor.run()
        index.take_disk_counts()
    assert isinstance(index.reserve(b"later", SIZES[0]), Slot)
    janitor.run()
    index.close()


def held_index(path: Path, clock: disk_store.Clock) -> tuple[DiskIndex, HeldJanitor, list[bytes]]:
    """An index and its pinned keys: every segment but the last empty one holds a pinned chunk."""
    options, janitor = disk_store.options_for(4 * 8192, num_spare=3), HeldJanitor()
    index = DiskIndex(str(path), disk_store.FINGERPRINT, options, janitor, None, clock)
    pinned: list[bytes] = []
    for number in range(12):
        settle(index, janitor)
        key = b"%d" % number
        assert isinstance(index.reserve(key, 4000), Slot) and index.commit(key)
        if number % 4 == 0:
            assert index.pin(key) is not None
            pinned.append(key)
    settle(index, janitor)
    return index, janitor, pinned


def settle(index: DiskIndex, janitor: HeldJanitor) -> None:
    index.take_disk_counts()
    while janitor.tasks:
        janitor.run()
        index.take_disk_counts()


def test_reserve_has_no_room_while_file_work_frees_no_segment(tmp_path: Path) -> None:
    clock = disk_store.Clock()
    index, janitor, pinned = held_index(tmp_path / "store", clock)
    assert index.reserve(b"more", 4000) is Refusal.NO_ROOM, "no file work is in flight"
    clock.now_s += 1000
    assert index.reserve(b"more", 4000) is Refusal.NO_ROOM and janitor.tasks, "a snapshot is in flight"
    for key in pinned:
        index.unpin(key)
    assert index.reserve(b"more", 4000) is Refusal.BUSY, "after the snapshot a segment can be emptied"
    settle(index, janitor)
    assert isinstance(index.reserve(b"more", 4000), Slot)
    settle(index, janitor)
    index.close()


def test_reserve_has_no_room_while_failed_file_work_backs_off(tmp_path: Path) -> None:
    """Also while a snapshot is written. Records given up for it may be deleted, and then no work is left."""
    clock, io, janitor = disk_store.Clock(), disk_faults.FaultyIO(), HeldJanitor()
    options = disk_store.options_for(4 * 8192, num_spare=3, close_timeout_s=0.0)
    index = DiskIndex(str(tmp_path / "store"), disk_store.FINGERPRINT, options, janitor, io, clock)
    settle(index, janitor)
    io.failing["allocate"] = errno.EIO
    for number in range(8):
        assert isinstance(index.reserve(b"%d" % number, 4000), Slot) and index.commit(b"%d" % number)
        settle(index, janitor)
    clock.now_s += options.snapshot_interval_s
    assert index.reserve(b"more", 4000) is Refusal.BUSY and janitor.tasks, "making a segment is tried again"
    settle(index, janitor)
    clock.now_s += options.retry_interval_s / 2
    index.touch([b"7"])
    assert index.reserve(b"more", 4000) is Refusal.NO_ROOM
    index.clear()
    clock.now_s += options.retry_interval_s
    assert index.reserve(b"more", 4000) is Refusal.BUSY, "an epoch is written, and then a segment is made"
    settle(index, janitor)
    clock.now_s += options.snapshot_interval_s
    io.failing.clear()
    assert index.reserve(b"more", 4000) is Refusal.BUSY, "it is tried again"
    settle(index, janitor)
    assert isinstance(index.reserve(b"more", 4000), Slot)
    settle(index, janitor)
    index.close()


@pytest.mark.parametrize(
    ("burst_bytes", "ready_segments", "expected"), [(0, None, 2), (4 * MIB, None, 5), (1 << 40, None, 7), (0, 3, 3)]
)
def test_ready_segments_cover_a_burst_up_to_a_share_of_the_capacity(
    tmp_path: Path, burst_bytes: int, ready_segments: int | None, expected: int
) -> None:
    options = msgspec.structs.replace(OPTIONS, burst_bytes=burst_bytes, ready_segments=ready_segments)
    index = disk_store.make_index(tmp_path / "store", options)
    assert index._segments.allocated_bytes == expected * plan_sizes(options, 1).segment_bytes
    index.close()


def test_all_segments_made_by_an_opening_are_used(tmp_path: Path) -> None:
    """The result of an opening's last piece of file work is processed too: otherwise a segment would stay unused on
    disk, with its space counted.
    """
    count = 2 * MAX_CHORES_IN_A_ROW
    options = disk_store.options_for(16 << 12, num_spare=9)
    segment_bytes = options.segment_bytes or 0
    options = msgspec.structs.replace(
        options, capacity_bytes=options.capacity_bytes + count * segment_bytes, ready_segments=MAX_CHORES_IN_A_ROW
    )
    index = disk_store.make_index(tmp_path / "store", options)
    segments = list((tmp_path / "store").glob("*/rank-0/segment-*"))
    assert len(segments) == MAX_CHORES_IN_A_ROW
    assert index._segments.allocated_bytes == len(segments) * segment_bytes
    index.close()
