"""Corruption on disk is detected or harmless: a load never returns bytes that were not stored.

Every bit of one record is flipped, padding included, and every bit of every metadata file and of the fields of a
segment's header and seal. Of the unused zeros on those pages, one bit of each byte is flipped. The first ring makes one
flip in seven: at least one in each byte of which all bits are flipped.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import disk_store
import pytest
from examples import thinned

from hybridkv.tiers import Completion, FailureReason, Slot, Ticket
from hybridkv.tiers.disk import DiskIndex, FileIO
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.format.layout import PAGE_BYTES, SEGMENT_HEAD_BYTES, address_of
from hybridkv.tiers.disk.format.segment import RECORD_HEAD_BYTES
from hybridkv.tiers.disk.index.found import FoundRecord
from hybridkv.tiers.disk.recovery.recovery import recover

OPTIONS = disk_store.options_for(4 * 8192, direct=False, max_quarantined=16)
CHUNKS = {
    b"key %d" % number: random.Random(number).randbytes(size) for number, size in enumerate([300, 4096, 77, 1000])
}
WITHDRAWN = {b"withdrawn": b"?" * 50}
MAX_METADATA_BYTES = 1 << 20


class Loader:
    """Loads every record that an opening recovers, also those that an index would not return."""

    def __init__(self, path: Path) -> None:
        self.medium = disk_store.make_medium(path, OPTIONS)

    def load(self, record: FoundRecord) -> tuple[Completion, bytes]:
        destination = bytearray(record.payload_bytes)
        self.medium.load(Ticket(1), record.key, Slot(((record.address, len(destination)),)), [destination])
        [completion] = disk_store.finish(self.medium)
        return completion, bytes(destination)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Store with four chunks, one withdrawn chunk, and every metadata file."""
    path = tmp_path / "store"
    index = disk_store.make_index(path, OPTIONS)
    medium = disk_store.make_medium(path, OPTIONS)
    for key, chunk in (WITHDRAWN | CHUNKS).items():
        if key == b"key 3":
            index.invalidate(b"withdrawn")
        assert disk_store.store(index, medium, key, chunk)
    index.clear()
    for key, chunk in (WITHDRAWN | CHUNKS).items():
        if key == b"key 3":
            index.invalidate(b"withdrawn")
        assert disk_store.store(index, medium, key, chunk)
    medium.close()
    index.close()
    return path


@pytest.fixture
def loader(path: Path) -> Iterator[Loader]:
    loader = Loader(path)
    yield loader
    loader.medium.close()


@pytest.fixture
def namespace(path: Path) -> Iterator[Namespace]:
    """Namespace opened beside the store, to recover it again and again."""
    namespace = Namespace(FileIO(), str(path), disk_store.FINGERPRINT)
    yield namespace
    namespace.close()


def directory_of(path: Path) -> Path:
    return path / disk_store.FINGERPRINT.digest().hex()


def found_in(namespace: Namespace) -> list[FoundRecord]:
    return list(recover(namespace, MAX_METADATA_BYTES, OPTIONS.max_records).records.in_order())


def offered(namespace: Namespace, loader: Loader) -> set[bytes]:
    """Keys that an opening recovers and a load verifies. Asserts that no load returns wrong bytes."""
    found = set()
    for record in found_in(namespace):
        completion, data = loader.load(record)
        if completion.failure is None:
            assert data == (WITHDRAWN | CHUNKS)[record.key], f"wrong bytes for {record.key!r}"
            found.add(record.key)
    return found


def flips(path: Path, places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield with each place (offset, mask) changed in turn."""
    with path.open("r+b", buffering=0) as file:
        data = file.read()
        for offset, mask in thinned(places, 13):
            file.seek(offset)
            file.write(bytes([data[offset] ^ mask]))
            yield offset, mask
            file.seek(offset)
            file.write(data[offset : offset + 1])


def every_bit(first: int, last: int) -> list[tuple[int, int]]:
    return [(offset, 1 << bit) for offset in range(first, last) for bit in range(8)]


def the_record(namespace: Namespace, key: bytes) -> FoundRecord:
    return next(record for record in found_in(namespace) if record.key == key)


def test_an_untouched_store_offers_all_chunks(namespace: Namespace, loader: Loader) -> None:
    assert offered(namespace, loader) == set(CHUNKS)


@pytest.mark.parametrize("key", [b"key 0", pytest.param(b"key 1", marks=pytest.mark.full)])
def test_a_flipped_bit_of_a_record_is_detected(path: Path, namespace: Namespace, loader: Loader, key: bytes) -> None:
    record = the_record(namespace, key)
    file = disk_store.segment_path(path, Slot(((record.address, record.payload_bytes),)))
    first = record.address % (1 << 32)
    header_end = first + 80 + len(key) + 16
    payload = range(first + PAGE_BYTES, first + PAGE_BYTES + record.payload_bytes)
    for offset, _ in flips(file, every_bit(first, first + 2 * PAGE_BYTES)):
        completion, data = loader.load(record)
        must_be_found = offset < header_end or offset in payload
        assert must_be_found == (completion.failure is not None), f"byte {offset - first} of the record"
        assert completion.failure is not None or data == CHUNKS[key]
    completion, data = loader.load(record)
    assert completion.failure is None and data == CHUNKS[key]


@pytest.mark.parametrize("name", ["snapshot", "changes", "epoch", "quarantine", "LOCK", "namespace.json"])
@pytest.mark.parametrize("has_snapshot", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_flipped_bit_of_metadata_brings_no_wrong_bytes(
    path: Path, namespace: Namespace, loader: Loader, name: str, has_snapshot: bool
) -> None:
    if not has_snapshot:
        (directory_of(path) / "snapshot").unlink()
    file = directory_of(path) / name
    if not file.exists():
        assert name == "snapshot"
        return
    for offset, mask in flips(file, every_bit(0, file.stat().st_size)):
        found = offered(namespace, loader)
        if name == "quarantine" and not has_snapshot:
            # Two faults at once: a withdrawn chunk may come back, with its own bytes.
            found -= WITHDRAWN.keys()
        assert found == set(CHUNKS), f"byte {offset}, bits {mask}"


@pytest.mark.parametrize("has_snapshot", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_flipped_bit_of_a_segment_head_brings_no_wrong_bytes(
    path: Path, namespace: Namespace, loader: Loader, has_snapshot: bool
) -> None:
    if not has_snapshot:
        (directory_of(path) / "snapshot").unlink()
    record = the_record(namespace, b"key 0")
    file = disk_store.segment_path(path, Slot(((record.address, record.payload_bytes),)))
    places = [*every_bit(0, 88), *every_bit(PAGE_BYTES, PAGE_BYTES + 88)]
    places += [(offset, 1 << offset % 8) for offset in range(88, SEGMENT_HEAD_BYTES)]
    results = {frozenset(offered(namespace, loader)) for _ in flips(file, places)}
    assert results == {frozenset(CHUNKS), frozenset({b"key 3"})}, "key 3 lies in another segment"


def test_a_flipped_bit_of_a_record_header_hides_only_that_record(
    path: Path, namespace: Namespace, loader: Loader
) -> None:
    (directory_of(path) / "snapshot").unlink()
    record = the_record(namespace, b"key 2")
    file = disk_store.segment_path(path, Slot(((record.address, record.payload_bytes),)))
    first = record.address % (1 << 32)
    others = set(CHUNKS) - {b"key 2"}
    for _ in flips(file, every_bit(first, first + RECORD_HEAD_BYTES)):
        assert offered(namespace, loader) in (others, set(CHUNKS))


def test_a_cut_segment_offers_the_remaining_records(path: Path, namespace: Namespace, loader: Loader) -> None:
    record = the_record(namespace, b"key 3")
    file = disk_store.segment_path(path, Slot(((record.address, record.payload_bytes),)))
    data = file.read_bytes()
    chooser = random.Random(3)
    for has_snapshot in (True, False):
        for num_bytes in [0, 1, 100, PAGE_BYTES, *(chooser.randrange(len(data)) for _ in range(100))]:
            file.write_bytes(data[:num_bytes])
            assert offered(namespace, loader) <= set(CHUNKS)
        file.write_bytes(data)
        assert offered(namespace, loader) == set(CHUNKS)
        if has_snapshot:
            (directory_of(path) / "snapshot").unlink()


@pytest.mark.parametrize("name", ["snapshot", "changes", "epoch", "quarantine"])
def test_cut_metadata_brings_no_wrong_bytes(path: Path, namespace: Namespace, loader: Loader, name: str) -> None:
    file = directory_of(path) / name
    data = file.read_bytes()
    for num_bytes in range(len(data)):
        file.write_bytes(data[:num_bytes])
        found = offered(namespace, loader)
        assert found == set(CHUNKS) or (name == "epoch" and num_bytes < len(data) // 2 and not found)


def test_swapped_records_are_detected(path: Path, namespace: Namespace, loader: Loader) -> None:
    records = {record.key: record for record in found_in(namespace)}
    one, other = records[b"key 0"], records[b"key 2"]
    file = disk_store.segment_path(path, Slot(((one.address, one.payload_bytes),)))
    data = bytearray(file.read_bytes())
    first, second = one.address % (1 << 32), other.address % (1 << 32)
    data[first : first + 8192], data[second : second + 8192] = (
        data[second : second + 8192],
        data[first : first + 8192],
    )
    file.write_bytes(data)
    for record in (one, other):
        completion, _ = loader.load(record)
        assert completion.failure is not None and completion.failure.reason is FailureReason.WRONG_KEY
    (directory_of(path) / "snapshot").unlink()
    assert offered(namespace, loader) == {b"key 1", b"key 3"}


def test_a_zeroed_page_is_detected(path: Path, namespace: Namespace, loader: Loader) -> None:
    record = the_record(namespace, b"key 0")
    file = disk_store.segment_path(path, Slot(((record.address, record.payload_bytes),)))
    data = file.read_bytes()
    for page in range(len(data) // PAGE_BYTES):
        offset = page * PAGE_BYTES
        file.write_bytes(data[:offset] + bytes(PAGE_BYTES) + data[offset + PAGE_BYTES :])
        assert offered(namespace, loader) <= set(CHUNKS)
    file.write_bytes(data)


def test_a_stale_snapshot_costs_only_a_scan(path: Path) -> None:
    stale = (directory_of(path) / "snapshot").read_bytes()
    index, medium = reopened(path)
    assert index.invalidate(b"key 0", "checksum")
    assert disk_store.store(index, medium, b"key 0", b"anew")
    assert index.invalidate(b"key 1", "checksum")
    assert disk_store.store(index, medium, b"key 9", b"another")
    medium.close()
    index.close()
    (directory_of(path) / "snapshot").write_bytes(stale)
    index, medium = reopened(path)
    found = {key: disk_store.load(index, medium, key) for key in [*CHUNKS, b"key 9"]}
    assert found[b"key 1"] is None
    expected = CHUNKS | {b"key 0": b"anew", b"key 9": b"another"}
    for key, loaded in found.items():
        assert loaded is None or (loaded[0].failure is None and loaded[1] == expected[key])
    assert sum(loaded is not None for loaded in found.values()) == 4
    medium.close()
    index.close()


def reopened(path: Path) -> tuple[DiskIndex, disk_store.DiskMedium]:
    return disk_store.make_index(path, OPTIONS), disk_store.make_medium(path, OPTIONS)


def test_a_segment_of_another_rank_or_cache_is_not_read(tmp_path: Path) -> None:
    options = disk_store.options_for(4 * 8192, num_ranks=2, direct=False)
    stores = [tmp_path / "a", tmp_path / "b"]
    fingerprints = [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "model": "another"}]
    for path, changes in zip(stores, fingerprints, strict=True):
        index = disk_store.make_index(path, options, **changes)
        media = [disk_store.make_medium(path, options, rank=rank, **changes) for rank in range(2)]
        assert disk_store.store(index, media, b"key", b"bytes of " + path.name.encode())
        for medium in media:
            medium.close()
        index.close()
    slot = Slot(((address_of(0, SEGMENT_HEAD_BYTES), 10),))
    mine = disk_store.segment_path(stores[0], slot, 0, **fingerprints[0])
    others = [
        disk_store.segment_path(stores[0], slot, 1, **fingerprints[0]),
        disk_store.segment_path(stores[1], slot, 0, **fingerprints[1]),
    ]
    original = mine.read_bytes()
    for other in others:
        shutil.copyfile(other, mine)
        medium = disk_store.make_medium(stores[0], options, **fingerprints[0])
        medium.load(Ticket(1), b"key", slot, [bytearray(10)])
        [completion] = disk_store.finish(medium)
        medium.close()
        assert completion.failure is not None and completion.failure.reason is FailureReason.WRONG_KEY
        index = disk_store.make_index(stores[0], options, **fingerprints[0])
        assert index.num_keys == 0
        index._namespace.close()
        mine.parent.mkdir(exist_ok=True)
        mine.write_bytes(original)
