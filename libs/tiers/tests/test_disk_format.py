"""Bytes on disk equal the description in FORMAT.md and the golden files."""

from __future__ import annotations

import re
from pathlib import Path

import disk_store
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.tiers.disk.format import changes, snapshot
from hybridkv.tiers.disk.format.layout import (
    LARGEST_EPOCH,
    LARGEST_KEY_BYTES,
    LARGEST_NUMBER,
    LARGEST_SEGMENT_BYTES,
    PAGE_BYTES,
    address_of,
    checksum,
    is_place,
    is_place_of,
    number_of,
    offset_of,
    record_bytes,
)
from hybridkv.tiers.disk.format.segment import (
    RECORD_MAGIC,
    SEAL_MAGIC,
    SEGMENT_MAGIC,
    RecordHeader,
    SegmentHeader,
    decode_record,
    decode_seal,
    decode_segment,
    encode_record,
    encode_seal,
    encode_segment,
)
from hybridkv.tiers.disk.format.withdrawals import (
    EPOCH_MAGIC,
    JOURNAL_HEAD_BYTES,
    JOURNAL_MAGIC,
    JournalEntry,
    Withdrawals,
    decode_epoch,
    decode_journal,
    digest_of,
    encode_epoch,
    encode_journal_entry,
    encode_journal_head,
    next_epoch,
    num_journal_entries,
)

GOLDEN = Path(__file__).parent / "golden"
NAMESPACE = bytes(range(32))
KEY = bytes(range(100, 132))
PAYLOAD = b"0123456789" * 10
SEGMENT = SegmentHeader(3, 17, 5, 1 << 20, NAMESPACE)
RECORD = RecordHeader(3, address_of(17, 8192), len(PAYLOAD), NAMESPACE, checksum(PAYLOAD), KEY)
WITHDRAWALS = [
    JournalEntry(digest_of(KEY), address_of(18, 0), address_of(17, 8192)),
    JournalEntry(digest_of(b"other"), address_of(19, 4096), address_of(2, 8192)),
]
ADDRESSES = [address_of(17, 8192), address_of(3, 8192)]
SNAPSHOT = snapshot.Snapshot(
    5, 17, 19, address_of(17, 65536), [address_of(16, 8192)], [KEY, b"other"], ADDRESSES, [100, 5]
)
BASE = bytes(range(50, 66))
CHANGES_HEAD = changes.encode_head(NAMESPACE, BASE)
BATCHES: list[list[changes.Change]] = [
    [changes.Reserved(address_of(17, 65536), 100), changes.Committed(address_of(17, 65536), 100, KEY)],
    [changes.Used(address_of(3, 8192)), changes.Relocated(address_of(3, 8192), address_of(18, 8192))],
    [changes.Gone(address_of(17, 65536))],
]


def encode_changes(batches: list[list[changes.Change]]) -> bytes:
    data = CHANGES_HEAD
    for batch in batches:
        data += changes.encode_batch(batch, changes.checksum_of(data))
    return data


keys = st.binary(min_size=1, max_size=LARGEST_KEY_BYTES)
addresses = st.builds(address_of, st.integers(0, LARGEST_NUMBER), st.integers(2, (1 << 20) - 2).map(PAGE_BYTES.__mul__))
places = addresses.flatmap(
    lambda address: st.tuples(st.just(address), st.integers(1, LARGEST_SEGMENT_BYTES - PAGE_BYTES - offset_of(address)))
)

FILES = {
    "segment": encode_segment(SEGMENT),
    "seal": encode_seal(SEGMENT, 65536),
    "record": encode_record(RECORD).ljust(PAGE_BYTES, b"\0") + PAYLOAD.ljust(PAGE_BYTES, b"\0"),
    "journal": encode_journal_head(NAMESPACE) + b"".join(map(encode_journal_entry, WITHDRAWALS)),
    "snapshot": disk_store.encoded_snapshot(SNAPSHOT, NAMESPACE),
    "changes": encode_changes(BATCHES),
    "epoch": encode_epoch(5, NAMESPACE),
}


@pytest.mark.parametrize("name", FILES)
def test_encoders_write_the_golden_files(name: str) -> None:
    assert FILES[name] == (GOLDEN / f"disk_v1_{name}.bin").read_bytes()


def test_decoders_read_the_golden_files() -> None:
    data = {name: (GOLDEN / f"disk_v1_{name}.bin").read_bytes() for name in FILES}
    assert decode_segment(data["segment"]) == SEGMENT
    assert decode_seal(data["seal"], SEGMENT) == 65536
    assert decode_record(data["record"]) == RECORD
    assert decode_journal(data["journal"], NAMESPACE) == WITHDRAWALS
    assert decoded_snapshot(data["snapshot"]) == SNAPSHOT
    assert changes.decode(data["changes"], NAMESPACE, BASE) == decoded(BATCHES)
    assert decode_epoch(data["epoch"], NAMESPACE) == 5


def decoded(batches: list[list[changes.Change]]) -> changes.Decoded:
    data = encode_changes(batches)
    flat = [change for batch in batches for change in batch]
    return changes.Decoded(flat, len(data), changes.checksum_of(data), is_whole=True)


def test_a_segment_on_disk_is_laid_out_as_described(tmp_path: Path) -> None:
    options = disk_store.options_for(4 * 8192, direct=False)
    index = disk_store.make_index(tmp_path / "store", options)
    medium = disk_store.make_medium(tmp_path / "store", options)
    assert disk_store.store(index, medium, KEY, PAYLOAD)
    slot = index.pin(KEY)
    assert slot is not None
    data = disk_store.segment_path(tmp_path / "store", slot).read_bytes()
    namespace = disk_store.FINGERPRINT.digest()
    header = SegmentHeader(0, 0, 0, len(data), namespace)
    record = RECORD._replace(rank=0, address=8192, namespace=namespace)
    expected = encode_segment(header) + bytes(PAGE_BYTES)
    expected += encode_record(record).ljust(PAGE_BYTES, b"\0") + PAYLOAD.ljust(PAGE_BYTES, b"\0")
    assert data == expected.ljust(len(data), b"\0")
    index.unpin(KEY)
    medium.close()
    index.close()


@pytest.mark.parametrize("name", ["segment", "seal", "record", "snapshot", "changes"])
def test_another_version_is_not_read(name: str) -> None:
    data = bytearray(FILES[name])
    data[8] ^= 2
    decoders = {
        "segment": decode_segment,
        "seal": lambda page: decode_seal(page, SEGMENT),
        "record": decode_record,
        "snapshot": lambda page: snapshot.decode(bytes(page), NAMESPACE),
        "changes": lambda page: changes.decode(bytes(page), NAMESPACE, BASE),
    }
    assert decoders[name](data) is None  # type: ignore[operator]


def test_a_stored_fingerprint_is_readable_and_whole(tmp_path: Path) -> None:
    index = disk_store.make_index(tmp_path / "store", disk_store.options_for(8192))
    index.close()
    path = tmp_path / "store" / disk_store.FINGERPRINT.digest().hex() / "namespace.json"
    assert msgspec.json.decode(path.read_bytes(), type=type(disk_store.FINGERPRINT)) == disk_store.FINGERPRINT


@given(st.integers(0, (1 << 31) - 1), st.integers(0, (1 << 32) - 1))
def test_an_address_is_a_number_and_an_offset(number: int, offset: int) -> None:
    address = address_of(number, offset)
    assert (number_of(address), offset_of(address)) == (number, offset)
    assert address < 1 << 63


@given(st.integers(1, 1 << 30))
def test_a_record_takes_a_header_page_and_whole_pages(payload_bytes: int) -> None:
    taken = record_bytes(payload_bytes)
    assert taken % PAGE_BYTES == 0
    assert PAGE_BYTES + payload_bytes <= taken < 2 * PAGE_BYTES + payload_bytes


def snapshot_of(
    records: list[tuple[bytes, tuple[int, int]]], pending: list[int], numbers: tuple[int, int, int, int]
) -> snapshot.Snapshot:
    keys, addresses, sizes = [], [], []
    for key, (address, payload_bytes) in records:
        keys.append(key)
        addresses.append(address)
        sizes.append(payload_bytes)
    return snapshot.Snapshot(*numbers, pending, keys, addresses, sizes)


def decoded_snapshot(data: bytes, max_records: int = 1 << 32) -> snapshot.Snapshot | None:
    """Decoded snapshot with lists as columns."""
    saved = snapshot.decode(data, NAMESPACE, max_records)
    if saved is None:
        return None
    return saved._replace(addresses=list(map(int, saved.addresses)), payload_bytes=list(map(int, saved.payload_bytes)))


NUMBERS = (1, 2, 3, address_of(2, 8192))


@given(st.lists(st.tuples(keys, places)), st.lists(addresses))
def test_snapshots_decode_to_what_was_encoded(records: list[tuple[bytes, tuple[int, int]]], pending: list[int]) -> None:
    saved = snapshot_of(records, pending, NUMBERS)
    assert decoded_snapshot(disk_store.encoded_snapshot(saved, NAMESPACE)) == saved


@given(st.lists(st.tuples(keys, places)), st.integers(0, 4))
def test_a_snapshot_with_too_many_records_keeps_the_last_used(
    records: list[tuple[bytes, tuple[int, int]]], max_records: int
) -> None:
    data = disk_store.encoded_snapshot(snapshot_of(records, [], NUMBERS), NAMESPACE)
    kept = snapshot_of(records[max(len(records) - max_records, 0) :], [], NUMBERS)
    assert decoded_snapshot(data, max_records) == kept


extremes = [0, 1, PAGE_BYTES, 8192, 8193, (1 << 31) - 1, 1 << 31, (1 << 32) - 8192, (1 << 32) - 4096, 1 << 32]
extremes += [address_of(LARGEST_NUMBER, offset) for offset in (0, 4096, 8192, (1 << 32) - 8192, (1 << 32) - 4096)]
extremes += [1 << 63, (1 << 63) + 8192, (1 << 64) - 4096, (1 << 64) - 1]
any_number = st.one_of(st.sampled_from(extremes), addresses, st.integers(0, (1 << 64) - 1))


@given(any_number, any_number)
def test_an_impossible_address_or_size_is_damage(address: int, payload_bytes: int) -> None:
    is_possible = is_place_of(address, payload_bytes)
    fields = (NUMBERS[0], 2, 1 << 31, 1 << 63)
    saved = snapshot_of([(KEY, (address, payload_bytes))], [], fields)
    assert (snapshot.decode(disk_store.encoded_snapshot(saved, NAMESPACE), NAMESPACE) is not None) == is_possible
    saved = snapshot_of([], [address], fields)
    assert (snapshot.decode(disk_store.encoded_snapshot(saved, NAMESPACE), NAMESPACE) is not None) == is_place_of(
        address, 1
    )
    record = RECORD._replace(address=address, payload_bytes=payload_bytes)
    assert (decode_record(encode_record(record).ljust(PAGE_BYTES, b"\0")) is not None) == is_possible
    batches: list[list[changes.Change]] = [[changes.Committed(address, payload_bytes, KEY)]]
    found = changes.decode(encode_changes(batches), NAMESPACE, BASE)
    assert found is not None and found.is_whole == is_possible
    entries = [WITHDRAWALS[0], JournalEntry(bytes(16), 1 << 63, address)]
    data = encode_journal_head(NAMESPACE) + b"".join(map(encode_journal_entry, entries))
    assert decode_journal(data, NAMESPACE) == entries[: 1 + is_place(address)]
    assert num_journal_entries(data) == 2


@pytest.mark.parametrize(
    "numbers",
    [
        (1 << 63, 2, 3, 0),
        (1, 4, 3, 0),
        (1, 2, (1 << 31) + 1, 0),
        (1, 2, 3, address_of(3, 4096)),
        (1, 2, 3, address_of(1, 512)),
    ],
)
def test_a_snapshot_with_an_impossible_end_is_damaged(numbers: tuple[int, int, int, int]) -> None:
    assert snapshot.decode(disk_store.encoded_snapshot(snapshot_of([], [], numbers), NAMESPACE), NAMESPACE) is None
    possible = (LARGEST_EPOCH, 1 << 31, 1 << 31, 1 << 63)
    assert snapshot.decode(disk_store.encoded_snapshot(snapshot_of([], [], possible), NAMESPACE), NAMESPACE) is not None


@pytest.mark.parametrize(("key", "expected"), [(b"", False), (b"k", True), (b"k" * 256, True), (b"k" * 257, False)])
def test_a_snapshot_with_an_impossible_key_is_damaged(key: bytes, expected: bool) -> None:
    saved = snapshot_of([(key, (address_of(1, 8192), 1))], [], NUMBERS)
    assert (snapshot.decode(disk_store.encoded_snapshot(saved, NAMESPACE), NAMESPACE) is not None) == expected


def test_a_snapshot_with_key_lengths_beyond_its_bytes_is_damaged() -> None:
    body = bytearray(FILES["snapshot"][:-16])
    at = body.index(KEY + b"other") - 4
    assert body[at : at + 4] == bytes([32, 0, 5, 0])
    body[at + 2] = 6
    assert snapshot.decode(bytes(body) + checksum(body), NAMESPACE) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("number", 1 << 31), ("epoch", 1 << 63), *(("segment_bytes", size) for size in (0, 12288, 20481, 1 << 33))],
)
def test_an_impossible_segment_header_is_damaged(field: str, value: int) -> None:
    assert decode_segment(encode_segment(SEGMENT._replace(**{field: value}))) is None


@pytest.mark.parametrize(("end_offset", "expected"), [(0, None), (4096, None), (65537, None), ((1 << 20) + 4096, None)])
def test_a_seal_with_an_impossible_end_is_damaged(end_offset: int, expected: None) -> None:
    assert decode_seal(encode_seal(SEGMENT, end_offset), SEGMENT) is expected
    assert decode_seal(encode_seal(SEGMENT, 1 << 20), SEGMENT) == 1 << 20


def test_an_impossible_epoch_is_damaged_and_never_chosen() -> None:
    assert decode_epoch(encode_epoch(LARGEST_EPOCH + 1, NAMESPACE), NAMESPACE) is None
    assert decode_epoch(encode_epoch(LARGEST_EPOCH, NAMESPACE), NAMESPACE) == LARGEST_EPOCH
    assert (next_epoch(4), next_epoch(LARGEST_EPOCH)) == (5, 0)


any_change = st.one_of(
    places.map(lambda place: changes.Reserved(*place)),
    st.builds(lambda place, key: changes.Committed(*place, key), places, keys),
    st.builds(changes.Relocated, addresses, addresses),
    st.builds(changes.Gone, addresses),
    st.builds(changes.Used, addresses),
)
some_batches = st.lists(st.lists(any_change, min_size=1, max_size=4), max_size=4)


@given(some_batches)
def test_changes_decode_to_what_was_encoded(batches: list[list[changes.Change]]) -> None:
    assert changes.decode(encode_changes(batches), NAMESPACE, BASE) == decoded(batches)


PLACE = address_of(17, 65536)
IMPOSSIBLE: list[changes.Change] = [
    changes.Used(PLACE + 1),
    changes.Gone(address_of(LARGEST_NUMBER + 1, 65536)),
    changes.Relocated(PLACE + 512, PLACE),
    changes.Relocated(PLACE, address_of(LARGEST_NUMBER + 1, 0)),
    changes.Relocated(address_of(17, 4096), PLACE),
    changes.Relocated(PLACE, address_of(18, 0)),
    changes.Reserved(PLACE - 1, 100),
    changes.Reserved(PLACE, 0),
    changes.Reserved(PLACE, LARGEST_SEGMENT_BYTES - 65536 - 4095),
    changes.Committed(PLACE, 0, KEY),
    changes.Committed(PLACE, LARGEST_SEGMENT_BYTES + 1, KEY),
    changes.Committed(PLACE, 100, b""),
    changes.Committed(PLACE, 100, b"k" * (LARGEST_KEY_BYTES + 1)),
]


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_an_impossible_change_ends_the_reading(change: changes.Change) -> None:
    """Its writer used another format, or its memory was damaged."""
    batches = [[changes.Used(PLACE)], [changes.Gone(PLACE), change], [changes.Used(PLACE)]]
    expected = decoded(batches[:1])._replace(is_whole=False)
    assert changes.decode(encode_changes(batches), NAMESPACE, BASE) == expected


@given(some_batches, st.data())
def test_only_whole_batches_before_the_damage_are_read(
    batches: list[list[changes.Change]], data: st.DataObject
) -> None:
    whole = encode_changes(batches)
    place = data.draw(st.integers(0, len(whole) - 1))
    torn = whole[:place]
    flipped = torn + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
    num_before = max((n for n in range(len(batches) + 1) if len(encode_changes(batches[:n])) <= place), default=None)
    for damaged in (torn, flipped):
        found = changes.decode(damaged, NAMESPACE, BASE)
        if num_before is None:
            assert found is None
        else:
            end = len(encode_changes(batches[:num_before]))
            expected = decoded(batches[:num_before])._replace(is_whole=len(damaged) == end)
            assert found == expected


@given(st.lists(any_change, min_size=1), st.lists(any_change, min_size=1))
def test_a_batch_counts_only_after_the_batch_it_was_written_after(
    first: list[changes.Change], second: list[changes.Change]
) -> None:
    alone = encode_changes([first])
    spliced = alone + changes.encode_batch(second, changes.checksum_of(CHANGES_HEAD))
    found = changes.decode(spliced, NAMESPACE, BASE)
    assert found is not None and (found.changes, found.end_offset) == (first, len(alone))
    assert changes.decode(alone, NAMESPACE, bytes(16)) is None


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 4))
def test_withdrawals_keep_the_last_of_each_key_within_their_bound(numbers: list[int], max_entries: int) -> None:
    withdrawals = Withdrawals(max_entries)
    forgotten = sum(
        withdrawals.add(JournalEntry(digest_of(b"%d" % number), position + 1, 0))
        for position, number in enumerate(numbers)
    )
    kept = list(dict.fromkeys(reversed(numbers)))[:max_entries]
    assert len(withdrawals) == len(kept)
    assert forgotten == 0 or len(withdrawals) == max_entries
    for number in kept:
        last = len(numbers) - 1 - numbers[::-1].index(number)
        assert withdrawals.covers(b"%d" % number, last)
        assert not withdrawals.covers(b"%d" % number, last + 1)


def test_format_md_names_every_magic_and_every_size() -> None:
    words = (Path(__file__).parent.parent / "src/hybridkv/tiers/disk/format/FORMAT.md").read_text()
    magics = [SEGMENT_MAGIC, SEAL_MAGIC, RECORD_MAGIC]
    magics += [JOURNAL_MAGIC, snapshot.SNAPSHOT_MAGIC, changes.CHANGES_MAGIC, EPOCH_MAGIC]
    assert len(set(magics)) == len(magics), "each kind of file begins with its own magic"
    for magic in magics:
        assert magic.hex(" ") in words
    tables = re.findall(r"(?:^\|.*\n)+", words, flags=re.MULTILINE)
    ends = {
        "segment": 88,
        "seal": 88,
        "record": 80,
        "journal": JOURNAL_HEAD_BYTES,
        "epoch": 72,
        "changes": changes.HEAD_BYTES,
    }
    for name, end in ends.items():
        assert any(f"| {end - 16} | 16 |" in table for table in tables), name
