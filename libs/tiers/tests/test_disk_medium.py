"""Reads and writes of segments: aligned or not, batched or alone, synced or not."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import disk_faults
import disk_store
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.tiers import FailureReason, Slot, Ticket
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, FileIO, Fsync
from hybridkv.tiers.disk.format.layout import PAGE_BYTES, address_of
from hybridkv.tiers.ram import RamArena, RamIndex
from kits.plain_disk_medium import SharedSync
from kits.tiers.copying import CopyingMedium

OPTIONS = disk_store.options_for(64 * 8192, num_spare=3, batch_bytes=8 * PAGE_BYTES)


def tier(path: Path, options: DiskOptions = OPTIONS, io: FileIO | None = None) -> tuple[DiskIndex, DiskMedium]:
    return disk_store.make_index(path, options), disk_store.make_medium(path, options, io)


def close(index: DiskIndex, medium: DiskMedium) -> None:
    medium.close()
    index.close()


def reserve(index: DiskIndex, key: bytes, num_bytes: int) -> Slot:
    slot = index.reserve(key, num_bytes)
    assert isinstance(slot, Slot)
    return slot


def parts_of(memory: memoryview, cuts: list[int]) -> list[memoryview]:
    places = sorted({0, len(memory), *(cut % (len(memory) + 1) for cut in cuts)})
    return [memory[first:last] for first, last in pairwise(places)]


def aligned(num_bytes: int, shift: int) -> memoryview:
    """Memory that begins `shift` bytes after a page boundary."""
    memory = np.zeros(num_bytes + 2 * PAGE_BYTES, dtype=np.uint8)
    first = -memory.ctypes.data % PAGE_BYTES + shift
    return memoryview(memory)[first : first + num_bytes]


@pytest.mark.parametrize("direct", [True, False, "auto"])
@pytest.mark.parametrize("io", [FileIO, disk_faults.InPieces])
def test_any_memory_is_stored_and_loaded(tmp_path: Path, direct: bool | str, io: type[FileIO]) -> None:
    index, medium = tier(tmp_path / "store", msgspec.structs.replace(OPTIONS, direct=direct), io())
    numbers = iter(range(10_000))

    @settings(max_examples=40, deadline=None)
    @given(
        num_bytes=st.integers(1, 12 * PAGE_BYTES),
        shifts=st.tuples(st.sampled_from([0, 1, 512]), st.sampled_from([0, 7])),
        cuts=st.lists(st.sampled_from([1, 100, PAGE_BYTES, 2 * PAGE_BYTES, 5 * PAGE_BYTES + 3]), max_size=4),
    )
    def check(num_bytes: int, shifts: tuple[int, int], cuts: list[int]) -> None:
        key = b"%d" % next(numbers)
        slot = reserve(index, key, num_bytes)
        source, destination = aligned(num_bytes, shifts[0]), aligned(num_bytes, shifts[1])
        source[:] = random.Random(num_bytes).randbytes(num_bytes)
        medium.store(Ticket(1), key, slot, parts_of(source, cuts))
        [stored] = disk_store.finish(medium)
        medium.load(Ticket(2), key, slot, parts_of(destination, cuts[1:]))
        [loaded] = disk_store.finish(medium)
        assert stored.failure is None and loaded.failure is None
        assert destination == source
        assert stored.checksum == loaded.checksum == xxhash.xxh3_128_digest(source)
        index.abort(key)

    check()
    close(index, medium)


def test_memory_of_an_arena_is_written_without_a_copy(tmp_path: Path) -> None:
    """Scattered granules and a trimmed end, without a copy of a whole page."""
    near = RamIndex(16 * PAGE_BYTES, PAGE_BYTES)
    arena = RamArena(16 * PAGE_BYTES, PAGE_BYTES)
    for number in range(16):
        near.reserve(bytes([number]), PAGE_BYTES)
    for number in (2, 3, 7, 12):
        near.abort(bytes([number]))
    num_bytes = 3 * PAGE_BYTES + 100
    place = near.reserve(b"key", num_bytes)
    assert isinstance(place, Slot) and len(place.extents) == 3
    chunk = random.Random(1).randbytes(num_bytes)
    copies = CopyingMedium(arena)
    copies.store(Ticket(1), b"key", place, [chunk])
    assert copies.poll()[0].failure is None
    index, medium = tier(tmp_path / "store")
    slot = reserve(index, b"key", num_bytes)
    medium.store(Ticket(1), b"key", slot, arena.views(place))
    [stored] = disk_store.finish(medium)
    assert stored.checksum == arena.sealed_checksum(b"key", place)
    arena.discard(place)
    for view in arena.views(place):
        view[:] = bytes(len(view))
    medium.load(Ticket(2), b"key", slot, arena.views(place))
    [loaded] = disk_store.finish(medium)
    assert loaded.checksum is not None
    assert arena.seal_all([(b"key", place)], [loaded.checksum]) == [None]
    assert arena.check_all([(b"key", place)]) == [None]
    close(index, medium)


def test_adjacent_chunks_are_moved_together(tmp_path: Path) -> None:
    io = disk_faults.FaultyIO()
    options = msgspec.structs.replace(OPTIONS, max_in_flight=1, batch_bytes=1 << 20)
    index, medium = tier(tmp_path / "store", options, io)
    keys = [b"%d" % number for number in range(9)]
    slots = [reserve(index, key, 5000) for key in keys]
    for call in ("pwritev", "preadv"):
        event = io.stalled["open"] = threading.Event()
        io.has_stalled.clear()
        medium._cache.forget(0)
        for ticket, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            if call == "pwritev":
                medium.store(Ticket(ticket), key, slot, [key * 5000])
            else:
                medium.load(Ticket(ticket), key, slot, [bytearray(5000)])
            assert io.has_stalled.wait(disk_faults.TIMEOUT_S)  # the first one is in flight alone
        event.set()
        assert {completion.failure for completion in disk_store.finish(medium)} == {None}
        assert io.count(call) == 2
    close(index, medium)


def test_a_load_goes_before_queued_stores(tmp_path: Path) -> None:
    io = disk_faults.FaultyIO()
    index, medium = tier(tmp_path / "store", msgspec.structs.replace(OPTIONS, max_in_flight=1), io)
    assert disk_store.store(index, medium, b"key", b"x" * 100)
    slot = index.pin(b"key")
    assert slot is not None
    event = io.stalled["pwritev"] = threading.Event()
    for number in range(4):
        # Gaps between them, so that each is moved alone.
        medium.store(Ticket(number), b"%d" % number, reserve(index, b"%d" % number, 100), [b"x" * 100])
        reserve(index, b"gap %d" % number, 100)
        assert io.has_stalled.wait(disk_faults.TIMEOUT_S)
    medium.load(Ticket(9), b"key", slot, [bytearray(100)])
    event.set()
    order = [completion.ticket for completion in disk_store.finish(medium)]
    assert order == [0, 9, 1, 2, 3]
    close(index, medium)


def test_without_direct_io_auto_uses_the_page_cache_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        index, medium = tier(tmp_path / "store", OPTIONS, disk_faults.WithoutDirect())
        for number in range(3):
            assert disk_store.store(index, medium, b"%d" % number, b"x" * 5000)
    assert [record.getMessage().count("O_DIRECT") for record in caplog.records].count(1) == 1
    close(index, medium)


def test_required_direct_io_fails_without_support(tmp_path: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, direct=True)
    index, medium = tier(tmp_path / "store", options, disk_faults.WithoutDirect())
    slot = reserve(index, b"key", 100)
    medium.store(Ticket(1), b"key", slot, [b"x" * 100])
    [completion] = disk_store.finish(medium)
    assert completion.failure is not None and completion.failure.reason is FailureReason.IO
    assert "EINVAL" in completion.failure.detail
    close(index, medium)


@pytest.mark.parametrize(("fsync", "expected"), [(Fsync.NONE, 0), (Fsync.ALWAYS, 3)])
def test_stores_are_synced_only_with_fsync_always(tmp_path: Path, fsync: Fsync, expected: int) -> None:
    io = disk_faults.FaultyIO()
    index, medium = tier(tmp_path / "store", msgspec.structs.replace(OPTIONS, fsync=fsync), io)
    for number in range(3):
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 100)
    assert io.count("fdatasync") == expected
    close(index, medium)
    assert io.count("fdatasync") == expected


def test_an_fsync_interval_syncs_stores_together_and_at_close(tmp_path: Path) -> None:
    io = disk_faults.FaultyIO()
    clock = disk_store.Clock()
    options = msgspec.structs.replace(OPTIONS, fsync=Fsync.INTERVAL, max_in_flight=1)
    index = disk_store.make_index(tmp_path / "store", options)
    medium = DiskMedium(str(tmp_path / "store"), index.namespace, 0, options, io, clock)
    for number in range(3):
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 100)
    assert io.count("fdatasync") == 0
    clock.now_s += options.fsync_interval_s
    event = io.stalled["fdatasync"] = threading.Event()
    assert disk_store.store(index, medium, b"3", b"x" * 100)
    assert io.has_stalled.wait(disk_faults.TIMEOUT_S)
    event.set()
    assert disk_store.store(index, medium, b"4", b"x" * 100)
    assert io.count("fdatasync") == 1
    close(index, medium)
    assert io.count("fdatasync") == 2


@pytest.mark.parametrize("error", [MemoryError(), ValueError("a bug"), OSError(errno.EIO, "no")])
def test_the_sync_thread_survives_any_error_of_a_sync(tmp_path: Path, error: Exception) -> None:
    has_failed, synced = threading.Event(), threading.Event()
    errors = [error]

    class OnceIO(FileIO):
        def fdatasync(self, fd: int) -> None:
            if errors:
                has_failed.set()
                raise errors.pop()
            super().fdatasync(fd)
            synced.set()

    options = msgspec.structs.replace(OPTIONS, fsync=Fsync.INTERVAL, fsync_interval_s=0.001, max_in_flight=1)
    index = disk_store.make_index(tmp_path / "store", options)
    medium = DiskMedium(str(tmp_path / "store"), index.namespace, 0, options, OnceIO())
    assert disk_store.store(index, medium, b"first", b"x" * 100)
    assert has_failed.wait(disk_faults.TIMEOUT_S)
    assert disk_store.store(index, medium, b"second", b"x" * 100)
    assert synced.wait(disk_faults.TIMEOUT_S)
    close(index, medium)


def test_a_store_fails_if_its_sync_fails(tmp_path: Path) -> None:
    io = disk_faults.FaultyIO()
    index, medium = tier(tmp_path / "store", msgspec.structs.replace(OPTIONS, fsync=Fsync.ALWAYS), io)
    io.failing["fdatasync"] = 5
    assert not disk_store.store(index, medium, b"key", b"x")
    io.failing.clear()
    close(index, medium)


class LosingIO(FileIO):
    """A write-back that fails once: the first sync reports it, when the test allows, and no later one does."""

    def __init__(self) -> None:
        self.is_syncing = threading.Event()
        self.may_end = threading.Event()
        self.has_written = threading.Event()
        self.num_syncs = 0
        self.is_failing = True

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        done = super().pwritev(fd, buffers, offset)
        if self.is_syncing.is_set():
            self.has_written.set()
        return done

    def fdatasync(self, fd: int) -> None:
        self.num_syncs += 1
        if self.num_syncs == 1:
            self.is_syncing.set()
            assert self.may_end.wait(disk_store.TIMEOUT_S)
            if self.is_failing:
                raise OSError(errno.EIO, "writing back went wrong")
        super().fdatasync(fd)


@pytest.mark.parametrize("is_failing", [True, False])
def test_a_failed_sync_fails_every_store_begun_before_its_end(tmp_path: Path, is_failing: bool) -> None:
    io = LosingIO()
    io.is_failing = is_failing
    index, medium = tier(tmp_path / "store", msgspec.structs.replace(OPTIONS, fsync=Fsync.ALWAYS, direct=False), io)
    medium.store(Ticket(1), b"first", reserve(index, b"first", 100), [bytes(100)])
    assert io.is_syncing.wait(disk_store.TIMEOUT_S)
    medium.store(Ticket(2), b"second", reserve(index, b"second", 100), [bytes(100)])
    assert io.has_written.wait(disk_store.TIMEOUT_S)
    io.may_end.set()
    reasons = {done.ticket: done.failure.reason if done.failure else None for done in disk_store.finish(medium)}
    expected = FailureReason.IO if is_failing else None
    assert reasons == {Ticket(1): expected, Ticket(2): expected}
    assert disk_store.store(index, medium, b"third", bytes(100)), "a later write is not affected"
    assert io.num_syncs == 3
    medium.close()
    index.close()


def test_waiting_threads_share_the_next_sync() -> None:
    syncs = SharedSync()
    calls: list[str] = []
    is_running, may_end = threading.Event(), threading.Event()

    def first() -> None:
        is_running.set()
        assert may_end.wait(disk_store.TIMEOUT_S)
        calls.append("first")

    threads = [threading.Thread(target=syncs.sync, args=(first, 0))]
    threads[0].start()
    assert is_running.wait(disk_store.TIMEOUT_S)
    threads += [threading.Thread(target=syncs.sync, args=(lambda: calls.append("other"), 0)) for _ in range(3)]
    for thread in threads[1:]:
        thread.start()
    may_end.set()
    for thread in threads:
        thread.join(disk_store.TIMEOUT_S)
    assert calls[0] == "first" and 1 <= len(calls[1:]) <= 3
    with pytest.raises(ZeroDivisionError):
        syncs.sync(lambda: calls.append(str(1 // 0)), 0)
    with pytest.raises(OSError, match="Input/output error"):
        syncs.sync(lambda: calls.append("other"), 0)
    syncs.sync(lambda: calls.append("last"), syncs.num_failed)
    assert calls[-1] == "last"


def test_a_medium_built_first_finds_files_that_the_index_makes_later(tmp_path: Path) -> None:
    medium = disk_store.make_medium(tmp_path / "store", OPTIONS)
    slot = Slot(((address_of(0, 8192), 100),))
    medium.load(Ticket(1), b"key", slot, [bytearray(100)])
    [completion] = disk_store.finish(medium)
    assert completion.failure is not None and completion.failure.reason is FailureReason.MISSING
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    assert disk_store.store(index, medium, b"key", b"x" * 100)
    close(index, medium)


def test_a_medium_makes_no_file(tmp_path: Path) -> None:
    medium = disk_store.make_medium(tmp_path / "store", OPTIONS)
    medium.store(Ticket(1), b"key", Slot(((address_of(0, 8192), 100),)), [b"x" * 100])
    [completion] = disk_store.finish(medium)
    assert completion.failure is not None and completion.failure.reason is FailureReason.IO
    assert not (tmp_path / "store").exists()
    medium.close()


def test_max_open_files_is_not_exceeded(tmp_path: Path) -> None:
    options = disk_store.options_for(2 * 8192, num_spare=9, max_in_flight=2, max_open_files=2)
    index, medium = tier(tmp_path / "store", options)
    for number in range(60):
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 100)
        assert len(medium._cache._open) <= 2
    close(index, medium)


@pytest.mark.parametrize("extents", [((-4096, 10),), ((100, 10),), ((0, 0),), ((1 << 62, 10),), ((0, 5), (8192, 5))])
def test_an_invalid_slot_fails(tmp_path: Path, extents: tuple[tuple[int, int], ...]) -> None:
    index, medium = tier(tmp_path / "store")
    medium.load(Ticket(1), b"key", Slot(extents), [bytearray(10)])
    [completion] = disk_store.finish(medium)
    assert completion.failure is not None
    assert completion.failure.reason in (FailureReason.IO, FailureReason.MISSING)
    close(index, medium)
