"""The native record queue does the same for a medium as Python, and a blocked call holds up no other."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import disk_faults
import disk_store
import msgspec
import pytest

from hybridkv.tiers import Completion, FailureReason, Slot, Ticket, TierConfigurationError
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, FileIO, Fsync
from hybridkv.tiers.disk.format.layout import PAGE_BYTES
from hybridkv.tiers.disk.index import records
from hybridkv.tiers.disk.medium import disk_medium
from hybridkv.tiers.native import RecordQueue
from kits.plain_disk_medium import PlainDiskMedium

OPTIONS = disk_store.options_for(16 * 8192, num_spare=3, batch_bytes=8 * PAGE_BYTES)


def media(path: Path, options: DiskOptions, io: FileIO | None = None) -> tuple[DiskMedium, DiskMedium]:
    """Medium of the product, and its model."""
    digest = disk_store.FINGERPRINT.digest()
    return (
        DiskMedium(str(path), digest, 0, options, io),
        PlainDiskMedium(str(path), digest, 0, options, io),
    )


def reserve(index: DiskIndex, key: bytes, num_bytes: int) -> Slot:
    slot = index.reserve(key, num_bytes)
    assert isinstance(slot, Slot)
    return slot


def reserve_elsewhere(index: DiskIndex) -> Slot:
    """Slot in another segment than the one reserved before."""
    reserve(index, b"gap", 60_000)
    index.abort(b"gap")
    return reserve(index, b"elsewhere", 60_000)


def load(medium: DiskMedium, key: bytes, slot: Slot) -> tuple[Completion, bytes]:
    destination = bytearray(slot.num_bytes)
    medium.load(Ticket(1), key, slot, [destination])
    [completion] = disk_store.finish(medium)
    return completion, bytes(destination)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 20_000])
def test_native_and_python_write_the_same_file(tmp_path: Path, direct: bool, num_bytes: int) -> None:
    chunk = random.Random(num_bytes).randbytes(num_bytes)
    files = []
    for number in range(2):
        path = tmp_path / str(number)
        options = msgspec.structs.replace(OPTIONS, direct=direct)
        index = disk_store.make_index(path, options)
        slot = reserve(index, b"key", num_bytes)
        both = media(path, options)
        both[number].store(Ticket(1), b"key", slot, [chunk])
        [stored] = disk_store.finish(both[number])
        assert stored.failure is None
        for medium in both:
            assert load(medium, b"key", slot) == (Completion(Ticket(1), checksum=stored.checksum), chunk)
            medium.close()
        files.append(disk_store.segment_path(path, slot).read_bytes())
        index.close()
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "damage",
    [
        "nothing",
        "header",
        "header checksum",
        "payload",
        "payload checksum",
        "zeros",
        "another key",
        "another place",
        "cut",
    ],
)
def test_native_and_python_report_the_same_damage(tmp_path: Path, damage: str) -> None:
    options = msgspec.structs.replace(OPTIONS, direct=False)
    index = disk_store.make_index(tmp_path / "store", options)
    both = media(tmp_path / "store", options)
    slots = {}
    for key in (b"key", b"kez"):
        slots[key] = reserve(index, key, 5000)
        both[0].store(Ticket(1), key, slots[key], [key * 1666 + b"??"])
        assert disk_store.finish(both[0])[0].failure is None
    file, first = disk_store.segment_path(tmp_path / "store", slots[b"key"]), disk_store.payload_offset(slots[b"key"])
    page = first - PAGE_BYTES
    key, slot = b"key", slots[b"key"]
    if damage == "cut":
        os.truncate(file, first + 4096)
    elif damage == "another key":
        key = b"kez"
    elif damage in ("another place", "zeros"):
        data = file.read_bytes()
        other = disk_store.payload_offset(slots[b"kez"]) - PAGE_BYTES
        record = data[other : other + first - page + 8192] if damage == "another place" else bytes(12288)
        file.write_bytes(data[:page] + record + data[page + len(record) :])
    elif damage != "nothing":
        places = {
            "header": page + 20,
            "payload checksum": page + 64,
            "header checksum": page + 83,
            "payload": first + 4999,
        }
        disk_store.flip(file, places[damage])
    native, python = (load(medium, key, slot)[0] for medium in both)
    assert native == python
    assert (native.failure is None) == (damage == "nothing")
    for medium in both:
        medium.close()
    index.close()


def test_a_blocked_call_holds_up_no_other_call_and_no_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_queue = RecordQueue
    event = threading.Event()

    class StandsStill:
        """Holds back loads of b"stuck" until the event."""

        def __init__(self, *arguments: int) -> None:
            self.queue = make_queue(*arguments)
            self.stuck_tags: set[int] = set()
            self.held: list[tuple[int, int, int, bytes, bytes]] = []

        def submit(self, tag: int, is_store: bool, *rest: Any) -> bool:
            if not is_store and b"stuck" in rest[4]:
                self.stuck_tags.add(tag)
            return self.queue.submit(tag, is_store, *rest)

        def take(self) -> list[tuple[int, int, int, bytes, bytes]]:
            self.held += self.queue.take()
            taken = [end for end in self.held if event.is_set() or end[0] not in self.stuck_tags]
            self.held = [end for end in self.held if end not in taken]
            return taken

        def wait_until_idle(self, timeout_s: float) -> bool:
            return self.queue.wait_until_idle(timeout_s) and (not self.stuck_tags or event.wait(timeout_s))

        def close(self, timeout_s: float) -> bool:
            return self.queue.close(timeout_s) and (not self.stuck_tags or event.wait(timeout_s))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.queue, name)

    monkeypatch.setattr("hybridkv.tiers.disk.medium.disk_medium.RecordQueue", StandsStill)
    options = msgspec.structs.replace(OPTIONS, close_timeout_s=0.05)
    index = disk_store.make_index(tmp_path / "store", options)
    medium, _ = media(tmp_path / "store", options)
    slots = {}
    for key in (b"good", b"stuck"):
        assert disk_store.store(index, medium, key, key * 1000)
        slot = index.pin(key)
        assert slot is not None
        slots[key] = slot
    destination = bytearray(5000)
    medium.load(Ticket(1), b"stuck", slots[b"stuck"], [destination])
    completion, data = load_beside(medium, b"good", slots[b"good"])
    assert completion.failure is None and data == b"good" * 1000
    assert not medium.drain(0.0)
    medium.close()
    medium.load(Ticket(3), b"good", slots[b"good"], [bytearray(4000)])
    [refused] = medium.poll()
    assert refused.ticket == 3 and refused.failure is not None and refused.failure.reason is FailureReason.CLOSED
    event.set()
    assert [completion.ticket for completion in disk_store.finish(medium)] == [1]
    assert destination == b"stuck" * 1000
    index.close()


def load_beside(medium: DiskMedium, key: bytes, slot: Slot) -> tuple[Completion, bytes]:
    """`load` while another operation is blocked."""
    destination = bytearray(slot.num_bytes)
    medium.load(Ticket(2), key, slot, [destination])
    end_s = time.monotonic() + disk_faults.TIMEOUT_S
    while not (completions := medium.poll()):
        assert time.monotonic() < end_s
        medium.drain(0.01)
    [completion] = completions
    assert completion.ticket == 2
    return completion, bytes(destination)


def test_a_blocked_open_holds_up_no_operation_on_open_files(tmp_path: Path) -> None:
    io = disk_faults.FaultyIO()
    options = msgspec.structs.replace(OPTIONS, max_queued=1, max_in_flight=1)
    index = disk_store.make_index(tmp_path / "store", options)
    medium = DiskMedium(str(tmp_path / "store"), index.namespace, 0, options, io)
    assert disk_store.store(index, medium, b"good", b"x" * 100)
    elsewhere = reserve_elsewhere(index)
    event = io.stalled["open"] = threading.Event()
    for ticket in range(3):
        medium.store(Ticket(ticket), b"elsewhere", elsewhere, [b"y" * 60_000])
    [refused] = medium.poll()
    assert refused.ticket == 2 and refused.failure is not None and refused.failure.reason is FailureReason.BUSY
    good = index.pin(b"good")
    assert good is not None
    completion, data = load_beside(medium, b"good", good)
    assert completion.failure is None and data == b"x" * 100
    io.failing["open"] = 5
    event.set()
    failures = [completion.failure for completion in disk_store.finish(medium)]
    assert [failure.reason for failure in failures if failure is not None] == [FailureReason.IO] * 2
    io.failing.clear()
    assert load(medium, b"good", good)[0].failure is None
    medium.close()
    index.close()


@pytest.mark.parametrize("medium_type", [DiskMedium, PlainDiskMedium])
def test_a_failed_close_of_a_file_fails_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, medium_type: type[DiskMedium]
) -> None:
    io = disk_faults.FaultyIO()
    options = disk_store.options_for(2 * 8192, num_spare=9, max_in_flight=2, max_open_files=2)
    index = disk_store.make_index(tmp_path / "store", options)
    medium = medium_type(str(tmp_path / "store"), index.namespace, 0, options, io)
    assert disk_store.store(index, medium, b"first", b"x" * 100)
    io.failing["close"] = 5
    for number in range(20):
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 100)
    assert "a segment could not be closed" in caplog.text
    io.failing.clear()
    medium.close()
    index.close()


def test_an_operation_that_cannot_begin_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_queue = RecordQueue

    class HasNoMemory:
        def __init__(self, *arguments: int) -> None:
            self.queue = make_queue(*arguments)

        def submit(self, *arguments: object) -> bool:
            raise MemoryError("none left")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.queue, name)

    monkeypatch.setattr("hybridkv.tiers.disk.medium.disk_medium.RecordQueue", HasNoMemory)
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    medium, _ = media(tmp_path / "store", OPTIONS)
    slot = reserve(index, b"key", 100)
    for _ in range(2):  # the first opens the file, and the second finds it open
        medium.store(Ticket(1), b"key", slot, [b"x" * 100])
        [completion] = disk_store.finish(medium)
        assert completion.failure is not None and "none left" in completion.failure.detail
    medium.close()
    index.close()


def test_operations_are_refused_until_a_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_queue = RecordQueue
    errors: list[Exception] = [MemoryError(), RuntimeError("Resource temporarily unavailable")] * 2

    def make_when_there_is_one(*arguments: int) -> Any:
        if errors:
            raise errors.pop()
        return make_queue(*arguments)

    monkeypatch.setattr("hybridkv.tiers.disk.medium.disk_medium.RecordQueue", make_when_there_is_one)
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    medium, _ = media(tmp_path / "store", OPTIONS)
    slot = reserve(index, b"key", 100)
    for _ in range(3):
        medium.store(Ticket(1), b"key", slot, [b"x" * 100])
        [completion] = disk_store.finish(medium)
        assert completion.failure is not None and completion.failure.detail == "no thread could be started"
    assert caplog.text.count("gets no thread (Resource temporarily unavailable)") == 1
    medium.store(Ticket(1), b"key", slot, [b"x" * 100])
    assert disk_store.finish(medium)[0].failure is None
    medium.close()
    index.close()


def test_a_medium_that_never_got_a_thread_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_none(*arguments: int) -> Any:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr("hybridkv.tiers.disk.medium.disk_medium.RecordQueue", make_none)
    medium, _ = media(tmp_path, OPTIONS)
    assert medium.drain(0.0) and medium.poll() == []
    medium.close()


def test_the_reason_for_threads_instead_of_io_uring_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_queue = RecordQueue

    class RefusedRing:
        uring_error = errno.EPERM

        def __init__(self, *arguments: int) -> None:
            self.queue = make_queue(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.queue, name)

    monkeypatch.setattr("hybridkv.tiers.disk.medium.disk_medium.RecordQueue", RefusedRing)
    disk_medium._log_refused_uring.cache_clear()
    with caplog.at_level("INFO", logger="hybridkv.tiers.disk"):
        for _ in range(2):
            media(tmp_path, OPTIONS)[0].close()
    assert caplog.text.count("refuses io_uring (Operation not permitted)") == 1
    disk_medium._log_refused_uring.cache_clear()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.EMFILE])
def test_a_temporary_lack_of_a_ring_is_retried_at_each_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    make_queue = RecordQueue
    errors = [number, 0, number]

    class LackingRing:
        def __init__(self, *arguments: int) -> None:
            self.queue = make_queue(*arguments)
            self.uring_error = errors.pop()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.queue, name)

    monkeypatch.setattr("hybridkv.tiers.disk.medium.disk_medium.RecordQueue", LackingRing)
    with caplog.at_level("INFO", logger="hybridkv.tiers.disk"):
        for _ in range(3):
            media(tmp_path, OPTIONS)[0].close()
    said = [record for record in caplog.records if os.strerror(number) in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"] * 2
    assert "until the tier is opened again" in said[0].getMessage() and not errors


def test_without_direct_io_auto_uses_the_page_cache(tmp_path: Path) -> None:
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    medium, _ = media(tmp_path / "store", OPTIONS, disk_faults.WithoutDirect())
    assert disk_store.store(index, medium, b"key", b"x" * 5000)
    medium.close()
    demanding, _ = media(tmp_path / "store", msgspec.structs.replace(OPTIONS, direct=True), disk_faults.WithoutDirect())
    slot = index.pin(b"key")
    assert slot is not None
    failure = load(demanding, b"key", slot)[0].failure
    assert failure is not None and "EINVAL" in failure.detail
    demanding.close()
    index.close()


def test_refused_direct_io_calls_are_repeated_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with some file systems: the file opens, and then each call fails."""
    make_queue = RecordQueue

    class RefusesDirect:
        def __init__(self, *arguments: int) -> None:
            self.queue = make_queue(*arguments)
            self.direct_tags: set[int] = set()

        def submit(self, tag: int, is_store: bool, fd: int, offset: int, is_direct: bool, *rest: Any) -> bool:
            self.direct_tags |= {tag} if is_direct else set()
            return self.queue.submit(tag, is_store, fd, offset, is_direct, *rest)

        def take(self) -> list[tuple[int, int, int, bytes, bytes]]:
            taken = self.queue.take()
            return [(end[0], 1, errno.EINVAL, b"", b"") if end[0] in self.direct_tags else end for end in taken]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.queue, name)

    monkeypatch.setattr("hybridkv.tiers.disk.medium.disk_medium.RecordQueue", RefusesDirect)
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    medium, _ = media(tmp_path / "store", OPTIONS)
    for number in range(3):
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 5000)
        loaded = disk_store.load(index, medium, b"%d" % number)
        assert loaded is not None and loaded[0].failure is None and loaded[1] == b"x" * 5000
    medium.close()
    demanding, _ = media(tmp_path / "store", msgspec.structs.replace(OPTIONS, direct=True))
    slot = index.pin(b"0")
    assert slot is not None
    failure = load(demanding, b"0", slot)[0].failure
    assert failure is not None and "EINVAL" in failure.detail
    demanding.close()
    index.close()


def test_an_fsync_interval_syncs_stores_together_and_at_close(tmp_path: Path) -> None:
    io = disk_faults.FaultyIO()
    clock = disk_store.Clock()
    options = msgspec.structs.replace(OPTIONS, fsync=Fsync.INTERVAL)
    index = disk_store.make_index(tmp_path / "store", options)
    medium = DiskMedium(str(tmp_path / "store"), index.namespace, 0, options, io, clock)
    for number in range(3):
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 100)
    assert io.count("fdatasync") == 0
    clock.now_s += options.fsync_interval_s
    medium.close()
    assert io.count("fdatasync") >= 1
    index.close()
    other = DiskMedium(str(tmp_path / "store"), index.namespace, 0, options, io, clock)
    before = io.count("fdatasync")
    other.close()
    assert io.count("fdatasync") == before, "nothing was stored"


def test_memory_is_referenced_until_it_is_no_longer_written(tmp_path: Path) -> None:
    """Checked with a destination that the test could resize otherwise."""
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    medium, _ = media(tmp_path / "store", OPTIONS)
    assert disk_store.store(index, medium, b"key", b"x" * 5000)
    slot = index.pin(b"key")
    assert slot is not None
    destination = bytearray(5000)
    medium.load(Ticket(1), b"key", slot, [destination])
    with pytest.raises(BufferError, match="export"):
        destination.extend(b"more")
    disk_store.finish(medium)
    destination.extend(b"more")
    medium.close()
    index.close()


def test_a_store_without_memory_for_its_table_is_refused_and_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: object) -> None:
        raise MemoryError

    options = disk_store.options_for(8 * 8192)
    with monkeypatch.context() as patch:
        patch.setattr(records, "RecordLedger", refused)
        with pytest.raises(TierConfigurationError, match="max_records"):
            disk_store.make_index(tmp_path / "store", options)
    disk_store.make_index(tmp_path / "store", options).close()
