"""The records of a disk tier as a ledger knows them: each has an address in a segment, and a time of its last use.

Changes segments' counts along with a record's life, and tells a log what changed. Knows no file, and does not decide
where a record goes or when one is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybridkv.tiers.contract import Key, Refusal, Slot
from hybridkv.tiers.disk.format.layout import ADDRESS_BITS, number_of
from hybridkv.tiers.disk.options import DiskSizes
from hybridkv.tiers.disk.tables.change_log import ChangeLog
from hybridkv.tiers.disk.tables.found import FoundRecords
from hybridkv.tiers.disk.tables.record import Record, cost_of
from hybridkv.tiers.disk.tables.segments import Segment, SegmentTable
from hybridkv.tiers.disk.tables.snapshot_source import PlainSource
from hybridkv.tiers.ledger import EvictionOrder, KeyLedger, KeyState, LeastRecentlyUsed
from hybridkv.tiers.leftovers import Table

_RESERVED, _COMMITTED = KeyState.RESERVED, KeyState.COMMITTED


ENTRY_BYTES = 500
"""Of Python's objects that stand for one record, about."""


class _RecordSpace:
    """Where records lie: the ledger's space and its witness."""

    def __init__(self, segments: SegmentTable, log: ChangeLog) -> None:
        self._segments = segments
        self._log = log
        self.num_uses = 0

    def take(self, key: Key, num_bytes: int, cost: int) -> Record:
        segments = self._segments
        address = segments.append(cost)
        segments.of(address).keys.append(key)
        segments.change_live(address, cost)
        segments.hold(address, is_writing=True)
        self._log.reserved(address, num_bytes)
        return Record(cost, _RESERVED, 0, key, address, num_bytes, 0)

    def free(self, entry: Record) -> None:
        self._segments.change_live(entry.address, -entry.cost)

    def keep_only(self, entries: Iterable[Record]) -> tuple[Table, ...]:
        key_lists = self._segments.forget_keys()
        for record in entries:
            self._segments.change_live(record.address, record.cost)
        return tuple(key_lists)

    def written(self, entry: Record) -> None:
        self._segments.release(entry.address, is_writing=True)
        if entry.state is _COMMITTED:
            self.num_uses = entry.last_used = self.num_uses + 1
            self._log.committed(entry.address, entry.payload_bytes, entry.key)

    def held(self, entry: Record) -> None:
        self._segments.hold(entry.address, is_writing=False)
        self.num_uses = entry.last_used = self.num_uses + 1

    def released(self, entry: Record) -> None:
        self._segments.release(entry.address, is_writing=False)
        if entry.state is _COMMITTED:
            self.num_uses = entry.last_used = self.num_uses + 1
            self._log.used((entry.address,))

    def used(self, entries: Iterable[Record]) -> None:
        addresses, num_uses = [], self.num_uses
        for record in entries:
            num_uses += 1
            record.last_used = num_uses
            addresses.append(record.address)
        self.num_uses = num_uses
        self._log.used(addresses)

    def gone(self, entry: Record) -> None:
        self._log.gone(entry.address)


class PlainRecordTable(KeyLedger[Record]):
    """All records of a namespace, as `RecordTable` says."""

    is_native = False

    def __init__(self, segments: SegmentTable, log: ChangeLog, sizes: DiskSizes) -> None:
        self._segments = segments
        self._record_space = _RecordSpace(segments, log)
        self.log = log
        order: EvictionOrder[Record] = LeastRecentlyUsed()
        largest_bytes = min(sizes.room_bytes, sizes.usable_bytes)
        super().__init__(
            self._record_space, order, sizes.usable_bytes, self._record_space, largest_bytes, sizes.max_records
        )

    @property
    def has_evictable(self) -> bool:
        return bool(self.evictable)

    @property
    def max_keys(self) -> int:
        return self._max_keys

    @property
    def most_index_bytes(self) -> int:
        return ENTRY_BYTES * self._max_keys

    def find(self, key: Key) -> Record | None:
        return self.by_key.get(key)

    def reserved(self) -> list[Record]:
        return list(self.reserved_now.values())

    def in_use(self) -> list[Record]:
        return [*self.reserved_now.values(), *self.pinned_now.values()]

    def count_refusal(self, refusal: Refusal) -> Refusal:
        return self.tally.refuse(refusal)

    def reserve(self, key: Key, num_bytes: int, cost: int) -> Slot:
        return self.take(key, num_bytes, cost).slot

    def movable_in(self, segment: Segment) -> list[Record]:
        return [
            record for record in self._held_in(segment) if record.state is KeyState.COMMITTED and not record.num_pins
        ]

    def withdraw_in(self, segment: Segment) -> None:
        for record in self._held_in(segment):
            self.withdraw(record.key)

    def _held_in(self, segment: Segment) -> list[Record]:
        """What is committed or reserved, in the order in which it lies there."""
        found = {}
        for key in segment.keys:
            record = self.by_key.get(key)
            if record is not None and number_of(record.address) == segment.number and key in self._held:
                found[record.address] = record
        return [found[address] for address in sorted(found)]

    def drop_segment(self, number: int) -> None:
        """Nothing of it is kept here."""

    def source(self) -> PlainSource:
        return PlainSource(self.by_key, [segment.keys for segment in self._segments.by_number.values()])

    def close(self) -> None:
        self.is_closed = True

    def restore(self, found: FoundRecords) -> None:
        by_number, live_bytes = self._segments.by_number, dict.fromkeys(self._segments.by_number, 0)
        by_key, track, num_uses = self.by_key, self.evictable.track, 0
        costs: dict[int, int] = {}  # asked for without a call, as `number_of` is: there are millions
        for key, address, payload_bytes in found.in_order():
            cost = costs.get(payload_bytes)
            if cost is None:
                cost = costs[payload_bytes] = cost_of(payload_bytes)
            number = address >> ADDRESS_BITS
            num_uses += 1
            record = by_key[key] = Record(cost, _COMMITTED, 0, key, address, payload_bytes, num_uses)
            track(key, record)
            live_bytes[number] += cost
            by_number[number].keys.append(key)
        self._held.update(by_key)
        self._record_space.num_uses = num_uses
        for number, num_bytes in live_bytes.items():
            by_number[number].live_bytes += num_bytes
            self._segments.refile(by_number[number])
            self.evictable_bytes += num_bytes
            self.used_bytes += num_bytes

    def relocate(self, record: Record, address: int) -> None:
        self._segments.of(address).keys.append(record.key)
        self._segments.change_live(address, record.cost)
        self._segments.change_live(record.address, -record.cost)
        self.log.relocated(record.address, address)
        record.address = address
