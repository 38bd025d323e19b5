"""Records of a disk tier over plain Python tables: the reference for `RecordTable`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, overload

import numpy as np

from hybridkv.tiers.contract import Extends, Key, Refusal, Slot
from hybridkv.tiers.disk.format.layout import ADDRESS_BITS, number_of
from hybridkv.tiers.disk.format.snapshot import Numbers
from hybridkv.tiers.disk.index.change_log import ChangeLog, Cut
from hybridkv.tiers.disk.index.found import FoundRecords
from hybridkv.tiers.disk.index.records import Record, cost_of
from hybridkv.tiers.disk.index.segments import Segment, SegmentTable
from hybridkv.tiers.disk.index.snapshot_source import RecordColumns
from hybridkv.tiers.disk.options import DiskSizes
from hybridkv.tiers.ledger import KeyState
from hybridkv.tiers.yielding import pieces
from kits.plain_ledger import KeyLedger, LruPolicy

_RESERVED, _COMMITTED = KeyState.RESERVED, KeyState.COMMITTED
_LIST_BITS = 32
"""A place is the number of a list times 2^32, plus a position in it."""


class PlainRecord(Record):
    """Record with its last use; a higher number is more recent."""

    last_used: int = 0


class PlacedKeys(Sequence[Key]):
    """Keys that are looked up, a part at a time, by their places in append-only lists."""

    def __init__(self, key_lists: Sequence[Sequence[Key]], places: Numbers) -> None:
        self._key_lists = key_lists
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, part: int) -> Key: ...

    @overload
    def __getitem__(self, part: slice) -> list[Key]: ...

    def __getitem__(self, part: int | slice) -> Key | list[Key]:
        lists, mask = self._key_lists, (1 << _LIST_BITS) - 1
        if isinstance(part, int):
            place = int(self._places[part])
            return lists[place >> _LIST_BITS][place & mask]
        return [lists[place >> _LIST_BITS][place & mask] for place in self._places[part].tolist()]

    def last(self, count: int) -> PlacedKeys:
        """The last `count` of them."""
        return PlacedKeys(self._key_lists, self._places[len(self._places) - count :])


class PlainSource(NamedTuple):
    """Tables of an index with append-only lists of keys."""

    by_key: Mapping[Key, PlainRecord]
    key_lists: Sequence[Sequence[Key]]
    """By segment. A key may be in several lists, or belong to no record any more."""

    def committed(self, cut: Cut) -> RecordColumns:
        counts = list(map(len, self.key_lists))
        columns = np.empty((4, sum(counts)), dtype=np.uint64)
        end = 0
        for number, count in enumerate(counts):
            for part in pieces(count):
                cut.require_wanted()
                rows = self._rows(number, part)
                columns[:, end : end + len(rows)] = np.array(rows, dtype=np.uint64).reshape(-1, 4).T
                end += len(rows)
        return self._in_order(columns[:, :end])

    def _rows(self, number: int, part: slice) -> list[tuple[int, int, int, int]]:
        """(last use, address, payload bytes, place) of the records that a part of a list refers to."""
        find, committed = self.by_key.get, KeyState.COMMITTED
        rows = []
        for place, key in enumerate(self.key_lists[number][part], (number << _LIST_BITS) + part.start):
            record = find(key)
            if record is not None and record.state is committed:
                rows.append((record.last_used, record.address, record.payload_bytes, place))
        return rows

    def _in_order(self, columns: Numbers) -> RecordColumns:
        """Sorts in place and keeps each address once: an address in two lists was read twice."""
        order = np.argsort(columns[0], kind="stable")
        for column in columns[1:]:
            column[:] = column[order]
        _, addresses, payload_bytes, places = columns
        order = np.argsort(addresses, kind="stable")
        in_row = addresses[order]
        is_last = np.ones(len(order), dtype=np.bool_)
        is_last[order[:-1]] = in_row[:-1] != in_row[1:]
        if not is_last.all():
            places, addresses, payload_bytes = places[is_last], addresses[is_last], payload_bytes[is_last]
        return RecordColumns(PlacedKeys(self.key_lists, places), addresses, payload_bytes)  # type: ignore[arg-type]


class _RecordSpace:
    """The ledger's space and its observer: positions of records."""

    def __init__(self, segments: SegmentTable, log: ChangeLog) -> None:
        self._segments = segments
        self._log = log
        self.num_uses = 0
        self.key_lists: dict[int, list[Key]] = {}
        """For each segment the keys of every record that was ever in it; most may be elsewhere by now, or gone."""

    def lies_at(self, key: Key, address: int) -> None:
        self.key_lists.setdefault(number_of(address), []).append(key)

    def take(self, key: Key, num_bytes: int, cost: int) -> PlainRecord:
        segments = self._segments
        address = segments.append(cost)
        self.lies_at(key, address)
        segments.change_live(address, cost)
        segments.hold(address, is_writing=True)
        self._log.reserved(address, num_bytes)
        return PlainRecord(cost, _RESERVED, 0, key, address, num_bytes, 0)

    def free(self, entry: PlainRecord) -> None:
        self._segments.change_live(entry.address, -entry.cost)

    def keep_only(self, entries: Iterable[PlainRecord]) -> None:
        self._segments.forget_records()
        self.key_lists = {}
        for record in entries:
            self._segments.change_live(record.address, record.cost)

    def on_written(self, entry: PlainRecord) -> None:
        self._segments.release(entry.address, is_writing=True)
        if entry.state is _COMMITTED:
            self.num_uses = entry.last_used = self.num_uses + 1
            self._log.committed(entry.address, entry.payload_bytes, entry.key)

    def on_pinned(self, entry: PlainRecord) -> None:
        self._segments.hold(entry.address, is_writing=False)
        self.num_uses = entry.last_used = self.num_uses + 1

    def on_unpinned(self, entry: PlainRecord) -> None:
        self._segments.release(entry.address, is_writing=False)
        if entry.state is _COMMITTED:
            self.num_uses = entry.last_used = self.num_uses + 1
            self._log.used((entry.address,))

    def on_used(self, entries: Iterable[PlainRecord]) -> None:
        addresses, num_uses = [], self.num_uses
        for record in entries:
            num_uses += 1
            record.last_used = num_uses
            addresses.append(record.address)
        self.num_uses = num_uses
        self._log.used(addresses)

    def on_deleted(self, entry: PlainRecord) -> None:
        self._log.gone(entry.address)


class PlainRecordTable(KeyLedger[PlainRecord]):
    """Has the members of `RecordTable`."""

    max_index_bytes = 0  # not counted

    def __init__(self, segments: SegmentTable, log: ChangeLog, sizes: DiskSizes) -> None:
        self._segments = segments
        self._record_space = _RecordSpace(segments, log)
        self.log = log
        order: LruPolicy[PlainRecord] = LruPolicy()
        largest_bytes = min(sizes.segment_room_bytes, sizes.usable_bytes)
        super().__init__(
            self._record_space, order, sizes.usable_bytes, self._record_space, largest_bytes, sizes.max_records
        )

    @property
    def has_evictable(self) -> bool:
        return bool(self.evictable)

    @property
    def max_keys(self) -> int:
        return self._max_keys

    def find(self, key: Key) -> PlainRecord | None:
        return self.by_key.get(key)

    def reserved(self) -> list[PlainRecord]:
        return list(self.reserved_now.values())

    def in_use(self) -> list[PlainRecord]:
        return [*self.reserved_now.values(), *self.pinned_now.values()]

    def count_refusal(self, refusal: Refusal) -> Refusal:
        return self.tally.refuse(refusal)

    def reserve(self, key: Key, num_bytes: int, cost: int, extends: Extends = ()) -> Slot:
        return self.take(key, num_bytes, cost, extends).slot

    def movable_in(self, segment: Segment) -> list[PlainRecord]:
        return [
            record for record in self._held_in(segment) if record.state is KeyState.COMMITTED and not record.num_pins
        ]

    def withdraw_in(self, segment: Segment) -> None:
        for record in self._held_in(segment):
            self.withdraw(record.key)

    def _held_in(self, segment: Segment) -> list[PlainRecord]:
        """Committed or reserved records in the order of their addresses."""
        found = {}
        for key in self._record_space.key_lists.get(segment.number, ()):
            record = self.by_key.get(key)
            if record is not None and number_of(record.address) == segment.number and key in self._held:
                found[record.address] = record
        return [found[address] for address in sorted(found)]

    def drop_segment(self, number: int) -> None:
        self._record_space.key_lists.pop(number, None)

    def source(self) -> PlainSource:
        return PlainSource(self.by_key, list(self._record_space.key_lists.values()))

    def close(self) -> None:
        self.is_closed = True

    def restore(self, found: FoundRecords) -> None:
        by_number, live_bytes = self._segments.by_number, dict.fromkeys(self._segments.by_number, 0)
        by_key, track, num_uses = self.by_key, self.evictable.track, 0
        costs: dict[int, int] = {}  # computed without calls: there may be millions of records
        for key, address, payload_bytes in found.in_order():
            cost = costs.get(payload_bytes)
            if cost is None:
                cost = costs[payload_bytes] = cost_of(payload_bytes)
            number = address >> ADDRESS_BITS
            num_uses += 1
            record = by_key[key] = PlainRecord(cost, _COMMITTED, 0, key, address, payload_bytes, num_uses)
            track(key, record)
            self._last_use[key] = 0
            live_bytes[number] += cost
            self._record_space.lies_at(key, address)
        self._held.update(by_key)
        self._record_space.num_uses = num_uses
        for number, num_bytes in live_bytes.items():
            by_number[number].live_bytes += num_bytes
            self._segments.refile(by_number[number])
            self.unpinned_bytes += num_bytes
            self.used_bytes += num_bytes

    def relocate(self, record: PlainRecord, address: int) -> None:
        self._record_space.lies_at(record.key, address)
        self._segments.change_live(address, record.cost)
        self._segments.change_live(record.address, -record.cost)
        self.log.relocated(record.address, address)
        record.address = address
