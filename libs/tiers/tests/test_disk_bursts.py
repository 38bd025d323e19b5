"""What comes in a burst comes back: of all that was offered the disk keeps what can be resumed, as far as it has room.

The measure is tokens that can be resumed from the disk alone over tokens that were offered and fit. Chunks, hits of
single keys and bytes say nothing of it: an end without its beginning counts for all three.
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
from hybridkv.tiers.disk import DiskIndex, DiskOptions, Fsync, InlineJanitor, plan_sizes
from hybridkv.tiers.disk.maintenance.janitor import Task
from hybridkv.tiers.disk.maintenance.maintenance import MAX_CHORES_IN_A_ROW

KIB, MIB = 1 << 10, 1 << 20
SIZES = (128 * KIB, 40 * KIB)
"""Of a chunk of attention, and of a state."""
OPTIONS = DiskOptions(capacity_bytes=64 * MIB, fsync=Fsync.NONE, max_in_flight=2)
NUM_FITTING = 288
"""Chunks, with a state each, that the disk has room for."""


def share(burst: Burst) -> float:
    return burst.resumable_tokens / burst.fitting_tokens


@pytest.mark.parametrize(
    ("num_prompts", "has_thread", "is_paced"),
    thinned([(*case, is_paced) for case in [(1, True), (3, False), (12, True)] for is_paced in (False, True)], 3),
)
def test_what_fits_can_be_resumed_whether_it_comes_at_once_or_not(
    tmp_path: Path, num_prompts: int, has_thread: bool, is_paced: bool
) -> None:
    janitor = None if has_thread else InlineJanitor()
    with Burst(tmp_path / "store", OPTIONS, 256 * MIB, SIZES, janitor) as burst:
        for number in range(num_prompts):
            burst.offer(b"%d" % number, 0, NUM_FITTING // num_prompts)
            if is_paced:
                burst.settle()
        burst.settle()
        assert share(burst) >= 0.98, (burst.cascades(), burst.far.used_bytes / burst.far.capacity_bytes)


@pytest.mark.parametrize(
    ("num_prompts", "num_steps", "is_paced"),
    thinned([(*case, is_paced) for case in [(1, 6), (1, 1), (6, 1), (6, 4)] for is_paced in (False, True)], 7),
)
def test_of_more_than_fits_the_disk_loses_ends_and_not_beginnings(
    tmp_path: Path, num_prompts: int, num_steps: int, is_paced: bool
) -> None:
    """Twice as much as there is room for, also where one prompt alone is that long, and comes in steps."""
    with Burst(tmp_path / "store", OPTIONS, 256 * MIB, SIZES, InlineJanitor()) as burst:
        chunks = 2 * NUM_FITTING // num_prompts // num_steps
        for number in range(num_prompts):
            for step in range(num_steps):
                burst.offer(b"%d" % number, step * chunks, chunks)
                if is_paced:
                    burst.settle()
        burst.settle()
        assert share(burst) >= 0.98, (burst.cascades(), burst.far.used_bytes / burst.far.capacity_bytes)


@pytest.mark.parametrize("is_paced", [False, pytest.param(True, marks=pytest.mark.full)], ids=["burst", "paced"])
@pytest.mark.parametrize(
    ("num_prompts", "num_turns"),
    [pytest.param(4, 3, marks=pytest.mark.full), pytest.param(4, 6, marks=pytest.mark.full), (4, 24)],
)
def test_prompts_that_grow_in_turns_fill_the_disk_with_what_can_be_resumed(
    tmp_path: Path, num_prompts: int, num_turns: int, is_paced: bool
) -> None:
    """Four times as much as there is room for: each turn of a prompt comes behind turns of all others."""
    with Burst(tmp_path / "store", OPTIONS, 256 * MIB, SIZES, InlineJanitor()) as burst:
        chunks = 4 * NUM_FITTING // num_prompts // num_turns
        for turn in range(num_turns):
            for number in range(num_prompts):
                burst.offer(b"%d" % number, turn * chunks, chunks)
                if is_paced:
                    burst.settle()
        burst.settle()
        assert share(burst) >= 0.98, (burst.cascades(), burst.far.used_bytes / burst.far.capacity_bytes)


def test_an_end_without_its_beginning_counts_for_nothing(tmp_path: Path) -> None:
    """The negative control of the measure."""
    with Burst(tmp_path / "store", OPTIONS, 64 * MIB, SIZES, InlineJanitor()) as burst:
        burst.offer(b"a", 0, 20)
        burst.settle()
        assert burst.resumable(b"a") == 20 * CHUNK_TOKENS
        burst.far.invalidate(burst.key(b"a", (0, CHUNK_TOKENS)))
        assert burst.resumable(b"a") == 0 and burst.far.num_keys == 39


class HeldJanitor(InlineJanitor):
    """Runs a task when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Task] = []

    def submit(self, task: Task) -> bool:
        self.tasks.append(task)
        return True

    def run(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


def test_a_segment_that_is_being_made_is_a_reason_to_ask_again(tmp_path: Path) -> None:
    janitor = HeldJanitor()
    index = DiskIndex(str(tmp_path / "store"), disk_store.FINGERPRINT, OPTIONS, janitor)
    answers: list[Slot | Refusal] = []
    while not answers or isinstance(answers[-1], Slot):
        answers.append(index.reserve(b"%d" % len(answers), SIZES[0]))
    assert answers[-1] is Refusal.BUSY and len(answers) < NUM_FITTING
    for _ in range(3):  # a snapshot was before it
        janitor.run()
        index.take_disk_counts()
    assert isinstance(index.reserve(b"later", SIZES[0]), Slot)
    janitor.run()
    index.close()


def held_index(path: Path, clock: disk_store.Clock) -> tuple[DiskIndex, HeldJanitor, list[bytes]]:
    """Every segment but the last empty one holds a chunk that somebody reads: their keys."""
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


def test_work_that_makes_no_room_is_no_reason_to_ask_again(tmp_path: Path) -> None:
    clock = disk_store.Clock()
    index, janitor, pinned = held_index(tmp_path / "store", clock)
    assert index.reserve(b"more", 4000) is Refusal.NO_ROOM, "nothing is on its way"
    clock.now_s += 1000
    assert index.reserve(b"more", 4000) is Refusal.NO_ROOM and janitor.tasks, "a snapshot is"
    for key in pinned:
        index.unpin(key)
    assert index.reserve(b"more", 4000) is Refusal.BUSY, "behind it a segment can be emptied now"
    settle(index, janitor)
    assert isinstance(index.reserve(b"more", 4000), Slot)
    settle(index, janitor)
    index.close()


def test_what_rests_after_it_failed_is_no_reason_to_ask_again(tmp_path: Path) -> None:
    """Also while a snapshot is written. What was given up for it may be deleted, and then there is nothing more."""
    clock, io, janitor = disk_store.Clock(), disk_faults.FaultyIO(), HeldJanitor()
    options = disk_store.options_for(4 * 8192, num_spare=3, close_timeout_s=0.0)
    index = DiskIndex(str(tmp_path / "store"), disk_store.FINGERPRINT, options, janitor, io, clock)
    settle(index, janitor)
    io.failing["allocate"] = errno.EIO
    for number in range(8):
        assert isinstance(index.reserve(b"%d" % number, 4000), Slot) and index.commit(b"%d" % number)
        settle(index, janitor)
    clock.now_s += options.snapshot_interval_s
    assert index.reserve(b"more", 4000) is Refusal.BUSY and janitor.tasks, "a segment is tried again"
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
def test_as_many_segments_are_ready_as_a_burst_fills_within_a_part_of_the_capacity(
    tmp_path: Path, burst_bytes: int, ready_segments: int | None, expected: int
) -> None:
    options = msgspec.structs.replace(OPTIONS, burst_bytes=burst_bytes, ready_segments=ready_segments)
    index = disk_store.make_index(tmp_path / "store", options)
    assert index._segments.allocated_bytes == expected * plan_sizes(options, 1).segment_bytes
    index.close()


def test_more_segments_than_an_opening_makes_in_a_row_are_all_used(tmp_path: Path) -> None:
    """What came of the last piece of file work of an opening is heard of too: a segment that nobody knew would lie
    there for good, its space counted."""
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
