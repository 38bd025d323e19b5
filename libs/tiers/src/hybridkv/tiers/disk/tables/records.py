"""The records of a disk tier as a ledger knows them: each has an address in a segment, and a time of its last use.

Changes segments' counts along with a record's life, and tells a log what changed. Knows no file, and does not decide
where a record goes or when one is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.disk.format.layout import ADDRESS_BITS, record_bytes
from hybridkv.tiers.disk.options import DiskSizes
from hybridkv.tiers.disk.tables.change_log import ChangeLog
from hybridkv.tiers.disk.tables.segments import SegmentTable
from hybridkv.tiers.ledger import Entry, EvictionOrder, KeyLedger, KeyState, LeastRecentlyUsed
from hybridkv.tiers.leftovers import Table

MAX_SIZES = 1024
"""Of payloads, whose cost is remembered: all records that cost the same then share one number."""

cost_of = lru_cache(MAX_SIZES)(record_bytes)
"""What a record of a payload of so many bytes takes up."""
_RESERVED, _COMMITTED = KeyState.RESERVED, KeyState.COMMITTED


class Record(Entry):
    """One key's record. Another thread may read it at any time, but for `num_pins`."""

    key: Key
    address: int
    payload_bytes: int
    last_used: int
    """Higher: more recently. What keeps the order here is the ledger's; this is for a snapshot."""

    @property
    def slot(self) -> Slot:
        return Slot(((self.address, self.payload_bytes),))


class _RecordSpace:
    """Where records lie: the ledger's space and its witness."""

    def __init__(self, segments: SegmentTable, log: ChangeLog) -> None:
        self._segments = segments
        self._log = log
        self.num_uses = 0

    def take(self, key: Key, num_bytes: int, cost: int) -> Record:
        segments = self._segments
        address = segments.append(key, cost)
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


class RecordTable(KeyLedger[Record]):
    """All records of a namespace."""

    def __init__(self, segments: SegmentTable, log: ChangeLog, sizes: DiskSizes) -> None:
        self._segments = segments
        self._record_space = _RecordSpace(segments, log)
        self.log = log
        order: EvictionOrder[Record] = LeastRecentlyUsed()
        largest_bytes = min(sizes.room_bytes, sizes.usable_bytes)
        super().__init__(
            self._record_space, order, sizes.usable_bytes, self._record_space, largest_bytes, sizes.max_records
        )

    def restore(self, found: Iterable[tuple[Key, int, int]]) -> None:
        """(key, address, payload bytes) of records that an opening found, least recently used first."""
        by_number, live_bytes = self._segments.by_number, dict.fromkeys(self._segments.by_number, 0)
        by_key, track, num_uses = self.by_key, self.evictable.track, 0
        costs: dict[int, int] = {}  # asked for without a call, as `number_of` is: there are millions
        for key, address, payload_bytes in found:
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
        """A record that is committed and not pinned lies elsewhere now."""
        self._segments.change_live(address, record.cost)
        self._segments.change_live(record.address, -record.cost)
        self.log.relocated(record.address, address)
        record.address = address
