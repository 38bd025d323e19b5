"""Records that an opening finds after each kind of end, and those that it no longer finds."""

from __future__ import annotations

import random
from pathlib import Path

import disk_store
import msgspec
import pytest
from test_disk_bursts import HeldJanitor

from hybridkv.planner import LookupResult
from hybridkv.tiers import Slot, Ticket
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, Fsync
from hybridkv.tiers.disk.format.layout import number_of
from hybridkv.tiers.disk.recovery.scanner import SCAN_THREADS

RANKS = {"tensor_parallel_size": 2}
OPTIONS = disk_store.options_for(8 * 8192, num_ranks=2, max_quarantined=16)


def chunk(key: bytes) -> bytes:
    return random.Random(key.hex()).randbytes(4000)


def opened(path: Path, clock: disk_store.Clock | None = None) -> tuple[DiskIndex, list[DiskMedium]]:
    index = disk_store.make_index(path, OPTIONS, clock=clock, **RANKS)
    return index, [disk_store.make_medium(path, OPTIONS, rank=rank, **RANKS) for rank in range(2)]


def end(index: DiskIndex, media: list[DiskMedium], is_killed: bool = False) -> None:
    for medium in media:
        medium.close()
    if is_killed:  # nothing more is written, and the lock is free
        index._namespace.close()
    else:
        index.close()


def offered(path: Path) -> dict[bytes, bytes]:
    """Every key that the next process finds, with the bytes that rank 1 loads."""
    index, media = opened(path)
    found = {}
    for key in list(disk_store.records_of(index)):
        loaded = disk_store.load(index, media[1], key)
        assert loaded is not None and loaded[0].failure is None
        found[key] = loaded[1]
    end(index, media)
    return found


def directory_of(path: Path) -> Path:
    return path / disk_store.fingerprint(**RANKS).digest().hex()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_committed_chunk_is_found_by_the_next_process(tmp_path: Path, is_killed: bool) -> None:
    index, media = opened(tmp_path / "store")
    keys = [b"a", b"b", b"c"]
    for key in keys:
        assert disk_store.store(index, media, key, chunk(key))
    end(index, media, is_killed)
    assert offered(tmp_path / "store") == {key: chunk(key) for key in keys}


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_chunk_written_by_every_rank_is_found_without_a_commit(tmp_path: Path, is_killed: bool) -> None:
    """As when an engine ends: its workers finish their writes, and no scheduler commits them."""
    index, media = opened(tmp_path / "store")
    slot = index.reserve(b"a", 4000)
    assert isinstance(slot, Slot)
    for medium in media:
        medium.store(Ticket(1), b"a", slot, [chunk(b"a")])
        assert medium.drain(10.0)
    end(index, media, is_killed)
    assert offered(tmp_path / "store") == {b"a": chunk(b"a")}


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_chunk_that_one_rank_did_not_store_is_not_found(tmp_path: Path, is_killed: bool) -> None:
    index, media = opened(tmp_path / "store")
    slot = index.reserve(b"a", 4000)
    assert isinstance(slot, Slot)
    media[0].store(Ticket(1), b"a", slot, [chunk(b"a")])
    assert disk_store.finish(media[0])[0].failure is None
    end(index, media, is_killed)
    assert offered(tmp_path / "store") == {}


@pytest.mark.parametrize("withdraw", ["invalidate", "abort", "clear"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_withdrawn_chunk_is_not_found_again(tmp_path: Path, withdraw: str, is_killed: bool) -> None:
    index, media = opened(tmp_path / "store")
    if withdraw == "abort":
        slot = index.reserve(b"a", 4000)
        assert isinstance(slot, Slot)
        for medium in media:
            medium.store(Ticket(1), b"a", slot, [chunk(b"a")])
            assert disk_store.finish(medium)[0].failure is None
        index.abort(b"a")
    else:
        assert disk_store.store(index, media, b"a", chunk(b"a"))
        assert index.invalidate(b"a") if withdraw == "invalidate" else index.clear()
    end(index, media, is_killed)
    assert offered(tmp_path / "store") == {}


def test_a_withdrawn_key_can_be_stored_again(tmp_path: Path) -> None:
    index, media = opened(tmp_path / "store")
    assert disk_store.store(index, media, b"a", b"at first")
    assert index.invalidate(b"a", "checksum")
    assert disk_store.store(index, media, b"a", b"anew")
    end(index, media, is_killed=True)
    assert offered(tmp_path / "store") == {b"a": b"anew"}


def test_a_chunk_stored_after_a_withdrawal_during_the_creation_of_its_segment_is_found(tmp_path: Path) -> None:
    path, clock, janitor = tmp_path / "store", disk_store.Clock(), HeldJanitor()
    options = disk_store.options_for(6 * 12288, num_spare=5, close_timeout_s=0.0)
    index = DiskIndex(str(path), disk_store.FINGERPRINT, options, janitor, None, clock)
    medium = disk_store.make_medium(path, options)

    def settle() -> None:
        for _ in range(4):
            index.take_disk_counts()
            janitor.run()
            clock.now_s += 6.0

    settle()
    assert disk_store.store(index, medium, b"other", bytes(5000))
    assert isinstance(index.reserve(b"key", 5000), Slot)
    settle()
    for file in (path / index.namespace.hex() / "rank-0").iterdir():
        file.unlink()
    index.invalidate(b"other", "missing")
    segments = index._segments
    while segments.creating is None or segments.open is not None or segments.ready:
        if janitor.tasks:
            janitor.tasks.pop(0)()
        index.take_disk_counts()
    index.abort(b"key")
    settle()
    assert disk_store.store(index, medium, b"key", bytes(5000))
    settle()
    medium.close()
    index.close()
    reopened = disk_store.make_index(path, options)
    assert reopened.lookup(b"key") is LookupResult.HIT
    reopened.close()


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    index, media = opened(tmp_path / "store")
    keys = [bytes([number]) for number in range(8)]
    for key in keys:
        assert disk_store.store(index, media, key, chunk(key))
    index.touch([keys[0], keys[1]])
    end(index, media)
    index, media = opened(tmp_path / "store")
    for number in range(6):
        assert disk_store.store(index, media, b"new %d" % number, chunk(b"new"))
    assert [key for key in keys if index.lookup(key) is LookupResult.HIT] == [keys[0], keys[1]]
    end(index, media)


def test_a_record_committed_after_a_snapshot_is_found_at_any_address(tmp_path: Path) -> None:
    clock = disk_store.Clock()
    index, media = opened(tmp_path / "store", clock)
    slot = index.reserve(b"early", 4000)
    assert isinstance(slot, Slot)
    for number in range(20):
        assert disk_store.store(index, media, b"%d" % number, chunk(b"%d" % number))
    clock.now_s += 1000
    assert index.take_disk_counts().snapshots == 2  # the first one at the start
    for medium in media:
        medium.store(Ticket(1), b"early", slot, [chunk(b"early")])
        assert disk_store.finish(medium)[0].failure is None
    assert index.commit(b"early")
    end(index, media, is_killed=True)
    assert offered(tmp_path / "store")[b"early"] == chunk(b"early")


def test_a_snapshot_saves_reading_the_segments_that_it_covers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index, media = opened(tmp_path / "store")
    for number in range(40):
        assert disk_store.store(index, media, b"%d" % number, chunk(b"%d" % number))
    end(index, media)
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        index, media = opened(tmp_path / "store")
    [line] = [record.getMessage() for record in caplog.records if "opened in" in record.getMessage()]
    assert "8 records, " in line and "(0 of " in line
    end(index, media)


@pytest.mark.parametrize("damage", ["missing", "damaged", "of another version"])
def test_a_store_without_its_snapshot_reads_its_segments(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "store"
    index, media = opened(path)
    for key in (b"a", b"b"):
        assert disk_store.store(index, media, key, chunk(key))
    end(index, media)
    snapshot = directory_of(path) / "snapshot"
    if damage == "missing":
        snapshot.unlink()
    else:
        disk_store.flip(snapshot, 8 if damage == "of another version" else 60)
    assert offered(path) == {key: chunk(key) for key in (b"a", b"b")}


def test_segments_read_in_parallel_are_found_in_order(tmp_path: Path) -> None:
    options = DiskOptions(capacity_bytes=4 << 20, segment_bytes=8192 + 5 * 8192, fsync=Fsync.NONE)
    index, medium = (make(tmp_path / "store", options) for make in (disk_store.make_index, disk_store.make_medium))
    keys = [b"%d" % number for number in range(10 * SCAN_THREADS)]
    for key in keys:
        assert disk_store.store(index, medium, key, chunk(key))
    assert len({number_of(record.address) for record in disk_store.records_of(index).values()}) > SCAN_THREADS
    medium.close()
    index.close()
    (snapshot,) = (tmp_path / "store").rglob("snapshot")
    snapshot.unlink()
    index, medium = (make(tmp_path / "store", options) for make in (disk_store.make_index, disk_store.make_medium))
    assert list(disk_store.records_of(index)) == keys
    for key in keys:
        loaded = disk_store.load(index, medium, key)
        assert loaded is not None and loaded == (loaded[0], chunk(key)) and loaded[0].failure is None
    medium.close()
    index.close()


def test_segments_and_records_of_another_version_are_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "store"
    index, media = opened(path)
    slots = {}
    for key in (b"a", b"b"):
        assert disk_store.store(index, media, key, chunk(key))
        slots[key] = index.pin(key)
    end(index, media, is_killed=True)
    slot = slots[b"a"]
    assert slot is not None
    file = disk_store.segment_path(path, slot, rank=1, **RANKS)
    disk_store.flip(file, disk_store.payload_offset(slot) - 4096 + 8, mask=2)
    assert offered(path) == {b"b": chunk(b"b")}
    disk_store.flip(file, 8, mask=2)
    (directory_of(path) / "snapshot").unlink()
    assert offered(path) == {}


def test_a_lost_epoch_offers_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    index, media = opened(path)
    assert disk_store.store(index, media, b"a", chunk(b"a"))
    end(index, media)
    (directory_of(path) / "epoch").unlink()
    assert offered(path) == {}


def test_segment_numbers_are_never_reused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    numbers: list[int] = []
    for life in range(4):
        index, media = opened(path)
        assert disk_store.store(index, media, b"%d" % life, chunk(b"a"))
        slot = index.pin(b"%d" % life)
        assert slot is not None
        numbers.append(number_of(slot.first_offset))
        index.unpin(b"%d" % life)
        index.clear()
        end(index, media, is_killed=life % 2 == 0)
    assert numbers == sorted(set(numbers))


def test_another_capacity_keeps_the_records_that_fit(tmp_path: Path) -> None:
    path = tmp_path / "store"
    index, media = opened(path)
    for number in range(8):
        assert disk_store.store(index, media, b"%d" % number, chunk(b"%d" % number))
    end(index, media)
    for num_chunks, expected in ((12, 8), (3, 3)):
        options = disk_store.options_for(num_chunks * 8192, num_ranks=2, num_spare=5)
        index = disk_store.make_index(path, options, **RANKS)
        medium = disk_store.make_medium(path, options, rank=1, **RANKS)
        kept = list(disk_store.records_of(index))
        assert kept == [b"%d" % number for number in range(8 - expected, 8)]
        for key in kept:
            loaded = disk_store.load(index, medium, key)
            assert loaded is not None and loaded[1] == chunk(key)
        assert disk_store.disk_bytes(path) <= options.capacity_bytes
        medium.close()
        index.close()


def test_a_torn_record_in_an_open_segment_is_not_found(tmp_path: Path) -> None:
    path = tmp_path / "store"
    index, media = opened(path)
    for key in (b"a", b"b", b"c"):
        assert disk_store.store(index, media, key, chunk(key))
    slot = index.pin(b"b")
    assert slot is not None
    end(index, media, is_killed=True)
    disk_store.flip(disk_store.segment_path(path, slot, rank=0, **RANKS), disk_store.payload_offset(slot) + 3999)
    assert set(offered(path)) == {b"a", b"c"}


def test_a_snapshot_stays_within_its_share(tmp_path: Path) -> None:
    path = tmp_path / "store"
    options = msgspec.structs.replace(disk_store.options_for(8 * 8192), max_records=8)
    index = disk_store.make_index(path, options)
    medium = disk_store.make_medium(path, options)
    for number in range(8):
        assert disk_store.store(index, medium, b"%d" % number * 256, b"x")
    index.close()
    medium.close()
    assert disk_store.disk_bytes(path) <= options.capacity_bytes
    index = disk_store.make_index(path, options)
    assert index.num_keys == 8
    index.close()
