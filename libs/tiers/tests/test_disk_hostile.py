"""Files with right checksums and wrong fields: an opening ends, stays in bounds, and the store works afterwards.

Every kind of file with its fields at the extremes, beside a whole store. Bounds are counted: bytes read, against the
size of the files on disk; memory, by a limit of the process. `HYBRIDKV_HOSTILE_FACTOR` multiplies the number of stores
tried.
"""

from __future__ import annotations

import os
import resource
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import disk_store
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridkv.planner import LookupResult
from hybridkv.tiers.disk import FileIO
from hybridkv.tiers.disk.format import changes, snapshot
from hybridkv.tiers.disk.format.layout import LARGEST_FIRST_NUMBER, LARGEST_NUMBER, address_of, checksum, segment_name
from hybridkv.tiers.disk.format.segment import (
    RECORD_MAGIC,
    RecordHeader,
    SegmentHeader,
    encode_record,
    encode_seal,
    encode_segment,
)
from hybridkv.tiers.disk.format.withdrawals import (
    JournalEntry,
    digest_of,
    encode_epoch,
    encode_journal_entry,
    encode_journal_head,
)

FACTOR = float(os.environ.get("HYBRIDKV_HOSTILE_FACTOR", "1"))
OPTIONS = disk_store.options_for(8 * 8192, direct=False)
SEGMENT_BYTES = OPTIONS.segment_bytes or 0
DIGEST = disk_store.FINGERPRINT.digest()
CHUNK = b"x" * 4000
FRESH = b"fresh"
MIB = 1 << 20
MEMORY_BYTES = 2048 * MIB
"""Address space that an opening may take: hardly more than the stacks of its threads."""

extremes = [0, 1, 2, 4095, 4096, 8191, 8192, 8193, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 4096, (1 << 32) - 1]
extremes += [1 << 32, (1 << 32) + 8192, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1]
any_number = st.one_of(st.sampled_from(extremes), st.integers(0, (1 << 64) - 1))
small_number = st.sampled_from([0, 1, 2, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
segment_numbers = st.sampled_from([0, 1, 2, 3, 4, 7, LARGEST_FIRST_NUMBER, LARGEST_FIRST_NUMBER + 1, LARGEST_NUMBER])
keys = st.sampled_from([b"old 0", b"old 1", FRESH, b"k", b"k" * 256, b"another"])
any_key = st.one_of(keys, st.sampled_from([b"", b"k" * 257, b"k" * 5000]))
pages = st.integers(2, SEGMENT_BYTES // 4096).map((4096).__mul__)
places = st.builds(address_of, segment_numbers, pages)
any_place = st.one_of(places, places, st.builds(address_of, segment_numbers, any_number), any_number).map(
    lambda address: address % (1 << 64)
)
payload_sizes = st.one_of(st.sampled_from([1, 4000, 4096, 4097, 12288]), any_number)


def mostly(right: object, wrong: st.SearchStrategy[int]) -> st.SearchStrategy[int]:
    return st.one_of(st.just(right), st.just(right), st.just(right), wrong)  # type: ignore[arg-type]


class Hostile(NamedTuple):
    """File with its name, its first bytes, more bytes at other offsets, and its size."""

    name: str
    data: bytes
    more: tuple[tuple[int, bytes], ...] = ()
    num_bytes: int | None = None


@st.composite
def segments(draw: st.DrawFn) -> Hostile:
    number = draw(segment_numbers)
    sizes = [0, 1, 4096, 8192, 16384, SEGMENT_BYTES, SEGMENT_BYTES, 1 << 32, (1 << 32) + 4096, 1 << 33]
    num_bytes = draw(st.sampled_from(sizes))
    header = SegmentHeader(
        draw(mostly(0, small_number)),
        draw(mostly(number, any_number)),
        draw(mostly(0, any_number)),
        draw(mostly(num_bytes, any_number)),
        draw(st.sampled_from([DIGEST, DIGEST, DIGEST, bytes(32)])),
    )
    more = []
    if draw(st.booleans()):
        more.append((4096, encode_seal(header, draw(mostly(num_bytes, any_number)))))
    offsets = st.one_of(pages, st.sampled_from([8193, num_bytes // 4096 * 4096 - 8192, num_bytes // 2]))
    for offset in draw(st.lists(offsets.filter(lambda at: 8192 <= at < num_bytes), max_size=4)):
        more.append((offset, draw(records(number, offset, num_bytes))))
    return Hostile(f"rank-0/{segment_name(number)}", encode_segment(header), tuple(more), num_bytes)


@st.composite
def records(draw: st.DrawFn, number: int, offset: int, end: int) -> bytes:
    payload_bytes = draw(st.one_of(payload_sizes, st.just(end - offset - 4096).filter(lambda size: size > 0)))
    header = RecordHeader(
        draw(mostly(0, small_number)),
        draw(mostly(address_of(number, offset), any_place)),
        payload_bytes,
        draw(st.sampled_from([DIGEST, DIGEST, DIGEST, bytes(32)])),
        checksum(CHUNK) if payload_bytes == len(CHUNK) else bytes(16),
        draw(any_key.filter(lambda key: len(key) <= 256)),
    )
    return encode_record(header).ljust(4096, b"\0") + CHUNK


@st.composite
def snapshots(draw: st.DrawFn) -> Hostile:
    rows = draw(st.lists(st.tuples(any_key, any_place, payload_sizes), max_size=5))
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    pending = draw(st.lists(any_place, max_size=4))
    ends = [draw(mostly(right, any_number)) for right in (0, 3, 4, address_of(3, 8192))]
    data = bytearray(disk_store.encoded_snapshot(snapshot.Snapshot(*ends, pending, *columns), DIGEST)[:-16])  # type: ignore[arg-type]
    if draw(st.integers(0, 4)) == 0:
        struct.pack_into("<Q", data, draw(st.sampled_from([80, 88, 96])), draw(any_number))
    return Hostile("snapshot", bytes(data) + checksum(data))


any_change = st.one_of(
    st.builds(changes.Reserved, any_place, payload_sizes),
    st.builds(changes.Committed, any_place, payload_sizes, any_key),
    st.builds(changes.Relocated, any_place, any_place),
    st.builds(changes.Gone, any_place),
    st.builds(changes.Used, any_place),
)
batches = st.lists(st.lists(any_change, min_size=1, max_size=3), min_size=1, max_size=4)
lies = st.one_of(st.none(), st.none(), st.tuples(small_number, small_number))


class HostileChanges(NamedTuple):
    """Changes after the snapshot on disk."""

    batches: list[list[changes.Change]]
    lie: tuple[int, int] | None
    """False byte and change counts of the last batch."""

    def encode(self, base: bytes) -> bytes:
        data = changes.encode_head(DIGEST, base)
        for batch in self.batches:
            data += changes.encode_batch(batch, changes.checksum_of(data))
        if self.lie is not None:
            fields = struct.pack("<II", *self.lie)
            data += fields + checksum(changes.checksum_of(data) + fields)
        return data


withdrawals = st.builds(JournalEntry, keys.map(digest_of), st.one_of(any_place, st.just(1 << 63)), any_place)
journals = st.lists(withdrawals, max_size=5).map(
    lambda entries: Hostile("quarantine", encode_journal_head(DIGEST) + b"".join(map(encode_journal_entry, entries)))
)
epochs = any_number.map(lambda number: Hostile("epoch", encode_epoch(number, DIGEST)))
sparse = st.builds(
    lambda name, num_bytes: Hostile(name, b"", (), num_bytes),
    st.sampled_from(["snapshot", "changes", "quarantine", "epoch", "namespace.json", "LOCK", "snapshot.new"]),
    st.sampled_from([0, 1, 1 << 20, 1 << 32, 1 << 40]),
)
hostile_files = st.lists(st.one_of(segments(), segments(), snapshots(), journals, epochs, sparse), max_size=4)


class Counting(FileIO):
    """Counts bytes read, in all and per call."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.largest_bytes = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.largest_bytes = max(self.largest_bytes, sum(map(len, buffers)))
        done = super().preadv(fd, buffers, offset)
        self.read_bytes += done
        return done


@contextmanager
def limited_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(scope="module", autouse=True)
def file_system_with_holes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without holes, 8 GiB take 8 GiB."""
    with (tmp_path_factory.mktemp("holes") / "file").open("w+b") as file:
        file.truncate(MIB)
        if FileIO().next_data(file.fileno(), 0) != MIB:
            pytest.skip("this file system does not report the holes of its files")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store with some chunks, as a kill leaves it."""
    path = tmp_path_factory.mktemp("template") / "store"
    index = disk_store.make_index(path, OPTIONS)
    medium = disk_store.make_medium(path, OPTIONS)
    for number in range(12):
        assert disk_store.store(index, medium, b"old %d" % number, CHUNK)
    index.touch([b"old 11"])
    medium.close()
    index._namespace.close()
    return path


def write(namespace: Path, files: Sequence[Hostile], behind: HostileChanges | None) -> None:
    for file in files:
        target = namespace / file.name
        with target.open("wb") as opened:
            opened.write(file.data)
            for offset, data in file.more:
                opened.seek(offset)
                opened.write(data)
            if file.num_bytes is not None:
                opened.truncate(file.num_bytes)
        target.chmod(0o600)
    saved = namespace / "snapshot"
    if behind is not None and saved.exists() and saved.stat().st_size < MIB:
        (namespace / "changes").write_bytes(behind.encode(snapshot.checksum_of(saved.read_bytes())))


def use(path: Path, is_killed: bool, is_stored: bool) -> None:
    """Open the store within bounds. Each found chunk fails to load or has its bytes. Then store a chunk unless
    `is_stored`.
    """
    on_disk_bytes = disk_store.disk_bytes(path)
    io = Counting()
    with limited_memory():
        index = disk_store.make_index(path, OPTIONS, io)
    assert io.largest_bytes <= 2 * MIB
    assert io.read_bytes <= 4 * on_disk_bytes + MIB
    medium = disk_store.make_medium(path, OPTIONS)
    assert index.used_bytes <= index.capacity_bytes
    for key, record in list(disk_store.records_of(index).items()):
        if record.payload_bytes <= MIB:
            loaded = disk_store.load(index, medium, key)
            assert loaded is not None and (loaded[0].failure is not None or loaded[1] == CHUNK)
    if is_stored:
        loaded = disk_store.load(index, medium, FRESH)
        assert loaded is not None and (loaded[0].failure, loaded[1]) == (None, CHUNK)
    else:
        index.invalidate(FRESH)
        assert disk_store.store(index, medium, FRESH, CHUNK)
        assert index.lookup(FRESH) is LookupResult.HIT
    assert disk_store.disk_bytes(path) <= OPTIONS.capacity_bytes
    medium.close()
    if is_killed:
        index._namespace.close()
    else:
        index.close()


@given(
    files=hostile_files,
    behind=st.one_of(st.none(), st.builds(HostileChanges, batches, lies)),
    is_killed=st.booleans(),
)
@settings(
    max_examples=int(examples(200, 16) * FACTOR),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
def test_an_opening_ends_and_the_store_works_with_hostile_files(
    template: Path, files: list[Hostile], behind: HostileChanges | None, is_killed: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store"
        shutil.copytree(template, path)
        write(path / DIGEST.hex(), files, behind)
        use(path, is_killed, is_stored=False)
        use(path, is_killed, is_stored=True)
        use(path, is_killed, is_stored=True)


def test_a_store_without_hostile_files_has_all_its_chunks(template: Path, tmp_path: Path) -> None:
    """Control: the cost above is not the cost of every opening."""
    shutil.copytree(template, tmp_path / "store")
    io = Counting()
    index = disk_store.make_index(tmp_path / "store", OPTIONS, io)
    assert index.num_keys == 8 and index.lookup(b"old 11") is LookupResult.HIT
    assert 0 < io.read_bytes < MIB
    index.close()


def segment_of(num_bytes: int, more: Sequence[tuple[int, bytes]], is_sealed: bool = False) -> Hostile:
    header = SegmentHeader(0, 900, 0, num_bytes, DIGEST)
    seal = [(4096, encode_seal(header, num_bytes))] if is_sealed else []
    return Hostile(f"rank-0/{segment_name(900)}", encode_segment(header), (*seal, *more), num_bytes)


@pytest.mark.parametrize("num_bytes", [1 << 32, OPTIONS.capacity_bytes // 4096 * 4096])
@pytest.mark.parametrize("payload_bytes", [4096, None])
def test_an_oversized_segment_costs_no_other_segment(
    template: Path, tmp_path: Path, num_bytes: int, payload_bytes: int | None
) -> None:
    """Whatever sizes it claims."""
    path = tmp_path / "store"
    shutil.copytree(template, path)
    record = (8192, record_at(8192, payload_bytes or num_bytes - 12288))
    write(path / DIGEST.hex(), [segment_of(num_bytes, [record], is_sealed=True)], None)
    index = disk_store.make_index(path, OPTIONS)
    assert index.num_keys == 8 and index.lookup(b"old 11") is LookupResult.HIT
    assert index.lookup(b"hostile 8192") is LookupResult.MISS
    assert disk_store.disk_bytes(path) <= OPTIONS.capacity_bytes
    assert index._maintenance._segments.largest_bytes == SEGMENT_BYTES, (
        "compaction does not move that much at a time either"
    )
    index.close()


def record_at(offset: int, payload_bytes: int) -> bytes:
    header = RecordHeader(0, address_of(900, offset), payload_bytes, DIGEST, bytes(16), b"hostile %d" % offset)
    return encode_record(header)


@pytest.mark.parametrize(("num_bytes", "expected"), [(1 << 26, True), ((1 << 26) + 4096, False)])
def test_a_hole_of_zeros_is_a_whole_record_up_to_a_bound(tmp_path: Path, num_bytes: int, expected: bool) -> None:
    options = disk_store.options_for(16384 + (1 << 26), num_spare=3, direct=False)
    disk_store.make_index(tmp_path / "store", options).close()
    (tmp_path / "store" / DIGEST.hex() / "snapshot").unlink()
    header = RecordHeader(0, address_of(900, 8192), num_bytes, DIGEST, checksum(bytes(num_bytes)), b"zeros")
    hostile = segment_of(options.segment_bytes or 0, [(8192, encode_record(header))])
    write(tmp_path / "store" / DIGEST.hex(), [hostile], None)
    io = Counting()
    index = disk_store.make_index(tmp_path / "store", options, io)
    assert (index.lookup(b"zeros") is LookupResult.HIT) == expected
    assert io.read_bytes < MIB
    index.close()


NUM_PAGES = 2048
NESTED = [(8192 + 4096 * page, record_at(8192 + 4096 * page, 4096 * (NUM_PAGES - page - 3))) for page in range(2000)]
EVERY_PAGE_LIKE_A_RECORD = [(8192 + 4096 * page, RECORD_MAGIC) for page in range(2000)]
EVERY_OTHER_PAGE_A_RECORD = [
    (8192 + 4096 * page, record_at(8192 + 4096 * page, 1) if page % 3 == 0 else RECORD_MAGIC) for page in range(2000)
]


@pytest.mark.parametrize(
    "hostile",
    [
        segment_of(1 << 33, [(8192, record_at(8192, (1 << 33) - 12288))]),
        segment_of(1 << 32, [(8192, record_at(8192, (1 << 32) - 12288))]),
        segment_of(1 << 32, [(8192, record_at(8192, 1)), ((1 << 32) - 8192, record_at((1 << 32) - 8192, 4096))], True),
        segment_of(4096 * NUM_PAGES, EVERY_PAGE_LIKE_A_RECORD),
        segment_of(4096 * NUM_PAGES, EVERY_OTHER_PAGE_A_RECORD),
        segment_of(4096 * NUM_PAGES, NESTED),
    ],
    ids=["8 GiB", "4 GiB", "sealed", "pages like records", "records and pages like them", "nested"],
)
@pytest.mark.parametrize("is_snapshot_there", [True, False])
def test_a_segment_is_read_at_most_once_and_its_holes_never(
    template: Path, tmp_path: Path, hostile: Hostile, is_snapshot_there: bool
) -> None:
    path = tmp_path / "store"
    shutil.copytree(template, path)
    files = [hostile]
    if is_snapshot_there:  # it lists every place as being written
        pending = [address_of(900, offset) for offset, _ in hostile.more if offset >= 8192]
        saved = snapshot.Snapshot(0, 901, 901, address_of(901, 0), pending, [], [], [])
        files.append(Hostile("snapshot", disk_store.encoded_snapshot(saved, DIGEST)))
    else:
        (path / DIGEST.hex() / "snapshot").unlink()
    write(path / DIGEST.hex(), files, None)
    on_disk_bytes = disk_store.disk_bytes(path)
    io = Counting()
    with limited_memory():
        index = disk_store.make_index(path, OPTIONS, io)
    assert io.read_bytes <= 2 * on_disk_bytes + MIB
    assert io.largest_bytes <= 2 * MIB
    medium = disk_store.make_medium(path, OPTIONS)
    assert disk_store.store(index, medium, FRESH, CHUNK)
    medium.close()
    index.close()
    use(path, is_killed=False, is_stored=True)
