"""Small disk tiers for tests: a fingerprint, options that give exact sizes, a clock that stands still."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import patience

from hybridkv.hashing import Fingerprint, GroupFingerprint, LayerFingerprint
from hybridkv.tiers import Completion, Slot, Ticket, TierMedium
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, FileIO, Fsync, plan_sizes
from hybridkv.tiers.disk.format import snapshot
from hybridkv.tiers.disk.format.layout import SEGMENT_HEAD_BYTES, number_of, offset_of, rank_name, segment_name
from hybridkv.tiers.disk.index.records import Record
from kits.plain_disk_medium import PlainDiskMedium
from kits.tiers.inline_janitor import InlineJanitor

TIMEOUT_S = patience.seconds(6.0)
"""Only a broken tier waits this long."""

FINGERPRINT = Fingerprint(
    facts={"model": "tiny", "dtype": "bfloat16"},
    chunk_tokens=128,
    hash_algorithm="sha256",
    tensor_parallel_size=1,
    groups=(
        GroupFingerprint(
            kind="full",
            block_tokens=16,
            layers=(LayerFingerprint(name="0", page_bytes=8, facts={"dtype": "u8"}),),
        ),
    ),
)


def fingerprint(**changes: object) -> Fingerprint:
    """`FINGERPRINT` with changed fields. Names that are no field change facts."""
    facts = {name: str(value) for name, value in changes.items() if name not in FINGERPRINT.__struct_fields__}
    fields = {name: value for name, value in changes.items() if name not in facts}
    return msgspec.structs.replace(FINGERPRINT, facts=FINGERPRINT.facts | facts, **fields)


def records_of(index: DiskIndex) -> dict[bytes, Record]:
    """All records of an index by key: first in eviction order, then those reserved or pinned."""
    table = index._records
    keys = [*table.eviction_order(), *(record.key for record in table.in_use())]
    return {key: record for key in keys if (record := table.find(key)) is not None}


class Clock:
    """Clock that advances only when a test sets it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def options_for(usable_bytes: int, num_ranks: int = 1, num_spare: int = 9, **more: object) -> DiskOptions:
    """Options with which an index has exactly this capacity: one segment of data plus `num_spare` spare segments."""
    chosen: dict[str, object] = {"fsync": Fsync.NONE, "max_in_flight": 2, "batch_bytes": 1 << 18, "max_quarantined": 64}
    chosen |= more
    segment_bytes = SEGMENT_HEAD_BYTES + usable_bytes
    rough_bytes = 2 * (num_spare + 1) * segment_bytes * num_ranks + (1 << 20)
    share = (num_spare - 3) / (num_spare + 1)
    rough = DiskOptions(capacity_bytes=rough_bytes, segment_bytes=segment_bytes, spare_share=share, **chosen)
    metadata_bytes = plan_sizes(rough, num_ranks).metadata_bytes
    capacity_bytes = metadata_bytes + (num_spare + 1) * segment_bytes * num_ranks
    exact = msgspec.structs.replace(rough, capacity_bytes=capacity_bytes)
    while (sizes := plan_sizes(exact, num_ranks)).data_bytes >= (num_spare + 2) * segment_bytes * num_ranks:
        exact = msgspec.structs.replace(exact, capacity_bytes=exact.capacity_bytes - 4096)
    assert sizes.usable_bytes == usable_bytes, sizes
    return exact


def make_index(
    path: Path, options: DiskOptions, io: FileIO | None = None, clock: Clock | None = None, **changes: object
) -> DiskIndex:
    """Index that does all file work inline, before it returns."""
    return DiskIndex(str(path), fingerprint(**changes), options, InlineJanitor(), io, clock or Clock())


def make_medium(
    path: Path, options: DiskOptions, io: FileIO | None = None, rank: int = 0, **changes: object
) -> DiskMedium:
    make = DiskMedium if io is None else PlainDiskMedium
    return make(str(path), fingerprint(**changes).digest(), rank, options, io)


def disk_bytes(path: Path) -> int:
    """Disk usage of a path and everything below it."""
    total = os.lstat(path).st_blocks * 512
    with os.scandir(path) as entries:
        for entry in entries:
            is_directory = entry.is_dir(follow_symlinks=False)
            total += disk_bytes(Path(entry.path)) if is_directory else entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def segment_path(path: Path, slot: Slot, rank: int = 0, **changes: object) -> Path:
    """Segment file of a slot."""
    number = number_of(slot.first_offset)
    return path / fingerprint(**changes).digest().hex() / rank_name(rank) / segment_name(number)


def payload_offset(slot: Slot) -> int:
    """Offset of the slot's payload in its segment file."""
    return offset_of(slot.first_offset) + 4096


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Flip bits of one byte of a file."""
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def finish(medium: TierMedium) -> list[Completion]:
    assert medium.drain(TIMEOUT_S)
    return medium.poll()


def store(index: DiskIndex, media: DiskMedium | list[DiskMedium], key: bytes, chunk: bytes) -> bool:
    """Reserve, store on every rank, commit. False if it was refused or failed."""
    slot = index.reserve(key, len(chunk))
    if not isinstance(slot, Slot):
        return False
    for medium in media if isinstance(media, list) else [media]:
        medium.store(Ticket(1), key, slot, [chunk])
        [completion] = finish(medium)
        if completion.failure is not None:
            index.abort(key)
            return False
    return index.commit(key)


def load(index: DiskIndex, medium: DiskMedium, key: bytes) -> tuple[Completion, bytes] | None:
    """Pin, load, unpin. None if the key is not found."""
    slot = index.pin(key)
    if slot is None:
        return None
    destination = bytearray(slot.num_bytes)
    medium.load(Ticket(2), key, slot, [destination])
    [completion] = finish(medium)
    index.unpin(key)
    return completion, bytes(destination)


def encoded_snapshot(saved: snapshot.Snapshot, namespace: bytes) -> bytes:
    """All pieces of a small snapshot."""
    return b"".join(snapshot.Encoding(saved, namespace).pieces())
