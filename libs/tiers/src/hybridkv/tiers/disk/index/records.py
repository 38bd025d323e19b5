"""Records of a disk tier: each has an address in a segment and a position in the LRU order.

The table itself is C++ (`csrc/ledger`); this module also updates the segment table and the change log. It touches no
file, and decides neither the address of a record nor the time of an eviction.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.planner import LookupResult
from hybridkv.tiers.changes import MAX_CHANGED_KEYS, Changes
from hybridkv.tiers.contract import Extends, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.disk.format.layout import ADDRESS_BITS, PAGE_BYTES, record_bytes
from hybridkv.tiers.disk.format.snapshot import Numbers
from hybridkv.tiers.disk.index.change_log import ChangeLog
from hybridkv.tiers.disk.index.found import FoundRecord, FoundRecords
from hybridkv.tiers.disk.index.segments import Segment, SegmentTable
from hybridkv.tiers.disk.index.snapshot_source import WalkedSource
from hybridkv.tiers.disk.options import DiskSizes
from hybridkv.tiers.errors import TierConfigurationError, TierProtocolError
from hybridkv.tiers.ledger import Entry, KeyState
from hybridkv.tiers.native import RecordLedger

MAX_SIZES = 1024
"""Number of payload sizes with a cached cost. Records with the same payload size share one integer object."""

cost_of = lru_cache(MAX_SIZES)(record_bytes)
"""Size of a record in its segment, from the size of its payload."""


class Record(Entry):
    """Copy of the record of one key, made by `RecordTable`."""

    key: Key
    address: int
    payload_bytes: int

    @property
    def slot(self) -> Slot:
        return Slot(((self.address, self.payload_bytes),))


if TYPE_CHECKING:
    _Ledger = RecordLedger[LookupResult, Refusal, KeyState, Slot]
else:
    _Ledger = RecordLedger

_ANSWERS = (LookupResult.MISS, LookupResult.PENDING, LookupResult.HIT)
_REFUSALS = (Refusal.NO_ROOM, Refusal.TOO_LARGE, Refusal.PRESENT, Refusal.CLOSED)
_STATES = (KeyState.RESERVED, KeyState.COMMITTED, KeyState.DELETED_WHILE_WRITTEN, KeyState.DELETED_WHILE_PINNED)
_SEED_BYTES = 8
_MOST_KEYS = (1 << 32) - 2
_ADDRESS_BYTES = 8


class RecordTable:
    """All records of a namespace, with the calls of a `TierIndex` and calls for maintenance.

    `find`, `reserved` (being written, deleted records included), `in_use` (`reserved`, and pinned records) and
    `movable_in` (committed and unpinned, by address) return copies. `reserve_refusal`, `make_room` and `reserve` are
    the steps of a reservation; the caller checks the room in segments between these steps. `withdraw` is `invalidate`
    and returns the record or None. `relocate` moves a committed, unpinned record to another address. `close` refuses
    later reservations. `restore` adds the records that recovery found.
    """

    def __init__(self, segments: SegmentTable, log: ChangeLog, sizes: DiskSizes) -> None:
        self._segments = segments
        self.log = log
        largest_bytes = min(sizes.segment_room_bytes, sizes.usable_bytes)
        # Random, so that an attacker cannot choose prompts that collide in the hash table.
        seed = int.from_bytes(os.urandom(_SEED_BYTES), "little")
        try:
            self._ledger: _Ledger = RecordLedger(
                sizes.usable_bytes // PAGE_BYTES,
                largest_bytes // PAGE_BYTES,
                min(sizes.max_records, _MOST_KEYS),
                seed,
                _ANSWERS,
                _REFUSALS,
                _STATES,
                Slot,
                TierProtocolError,
            )
        except MemoryError as error:
            raise TierConfigurationError(
                "max_records",
                "a table that fits into the address space",
                sizes.max_records,
                hint="raise the limit (ulimit -v, vm.overcommit_memory), or lower max_records",
            ) from error
        ledger = self._ledger
        self.lacks, self.lookup = ledger.lacks, ledger.lookup
        self.leading, self.last_held, self.any_pending = ledger.leading, ledger.last_held, ledger.any_pending
        self.eviction_order = ledger.eviction_order
        self.close = ledger.refuse_all
        self._surplus: list[FoundRecord] = []
        """Records found at the start beyond `max_keys`. The first `make_room` evicts these records."""

    # Queries.

    @property
    def num_keys(self) -> int:
        return self._ledger.num_keys

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    @property
    def generation(self) -> int:
        return self._ledger.generation

    @property
    def is_closed(self) -> bool:
        return self._ledger.is_closed

    @property
    def has_evictable(self) -> bool:
        return self._ledger.has_evictable

    @property
    def max_keys(self) -> int:
        return self._ledger.max_keys

    @property
    def max_index_bytes(self) -> int:
        return self._ledger.max_index_bytes

    def find(self, key: Key) -> Record | None:
        row = self._ledger.find(key)
        return None if row is None else _record(*row)

    def reserved(self) -> list[Record]:
        return [_record(*row) for row in self._ledger.reserved()]

    def in_use(self) -> list[Record]:
        return [_record(*row) for row in self._ledger.in_use()]

    def movable_in(self, segment: Segment) -> list[Record]:
        return [_record(*row) for row in self._ledger.movable_in(segment.number)]

    def take_counts(self) -> TierCounts:
        return TierCounts(*self._ledger.take_tally())

    def watch(self) -> None:
        self._ledger.watch_at_most(MAX_CHANGED_KEYS)

    def take_changes(self) -> Changes:
        return Changes(*self._ledger.take_changed())

    def source(self) -> WalkedSource:
        return WalkedSource(self._ledger, self._ledger.begin_walk())

    # Reservations.

    def reserve_refusal(self, key: Key, cost: int, extends: Extends = ()) -> Refusal | None:
        return self._ledger.why_not(key, cost // PAGE_BYTES, extends)

    def count_refusal(self, refusal: Refusal) -> Refusal:
        self._ledger.count_refusal(refusal)
        return refusal

    def make_room(self, cost: int, num_keys: int = 1, extends: Extends = ()) -> None:
        for found in self._surplus:
            record = _record(*found, KeyState.COMMITTED, 0)
            self._segments.change_live(record.address, record.cost)
            self._ledger.count_evicted(record.cost // PAGE_BYTES)
            self._evicted(record.key, record)
        self._surplus.clear()
        for row in self._ledger.make_room(cost // PAGE_BYTES, num_keys, extends):
            self._evicted(row[0], _record(*row))

    def reserve(self, key: Key, num_bytes: int, cost: int, extends: Extends = ()) -> Slot:
        segments = self._segments
        address = segments.append(cost)
        segments.change_live(address, cost)
        segments.hold(address, is_writing=True)
        self.log.reserved(address, num_bytes)
        return self._ledger.take(key, num_bytes, address, extends)

    def evict_next(self) -> Record:
        row = self._ledger.evict_next()
        assert row is not None, "there is something to evict"
        record = _record(*row)
        self._evicted(record.key, record)
        return record

    def evict(self, key: Key) -> None:
        record = self.find(key)
        if record is None or not self._ledger.evict(key):
            raise TierProtocolError(f"evict: expected a key that is committed and not pinned, got {key.hex()}")
        self._evicted(key, record)

    def _evicted(self, key: Key, record: Record) -> None:
        self.log.gone(record.address)
        self._segments.change_live(record.address, -record.cost)

    # Life cycle of a key.

    def commit(self, key: Key) -> bool:
        return self.commit_all((key,))[0]

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        segments, log = self._segments, self.log
        ended, is_all = self._ledger.commit_all(keys)
        for key, (address, payload_bytes, is_offered) in zip(keys, ended, strict=False):
            segments.release(address, is_writing=True)
            if is_offered:
                log.committed(address, payload_bytes, key)
            else:
                segments.change_live(address, -cost_of(payload_bytes))
        if not is_all:
            self._ledger.raise_not_reserved(keys[len(ended)])
        return [is_offered for _, _, is_offered in ended]

    def abort(self, key: Key) -> None:
        record = self.find(key)
        self._ledger.abort(key)
        assert record is not None, "it was reserved"
        self._segments.release(record.address, is_writing=True)
        if record.state is KeyState.RESERVED:
            self.log.gone(record.address)
        self._segments.change_live(record.address, -record.cost)

    def withdraw(self, key: Key) -> Record | None:
        record = self.find(key)
        if record is None or not self._ledger.invalidate(key):
            return None
        self.log.gone(record.address)
        if record.state is KeyState.COMMITTED and not record.num_pins:
            self._segments.change_live(record.address, -record.cost)
        return record

    def withdraw_in(self, segment: Segment) -> None:
        for row in self._ledger.held_in(segment.number):
            self.withdraw(row[0])

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        if used := self._ledger.touch(keys, extends):
            self.log.used(array("Q", used))

    def pin(self, key: Key) -> Slot | None:
        slots = self.pin_all((key,))
        return None if slots is None else slots[0]

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        pinned = self._ledger.pin_all(keys)
        if pinned is None:
            return None
        slots, held = pinned
        for address, count in _by_segment(held):
            self._segments.hold(address, is_writing=False, count=count)
        return slots

    def unpin(self, key: Key) -> None:
        self.unpin_all((key,))

    def unpin_all(self, keys: Iterable[Key]) -> None:
        keys, segments = list(keys), self._segments
        used, freed, num_done = self._ledger.unpin_all(keys)
        for address, count in _by_segment(used):
            segments.release(address, is_writing=False, count=count)
        if used:
            self.log.used(array("Q", used))
        for address, payload_bytes in freed:
            segments.release(address, is_writing=False)
            segments.change_live(address, -cost_of(payload_bytes))
        if num_done < len(keys):
            self._ledger.raise_not_pinned(keys[num_done])

    def relocate(self, record: Record, address: int) -> None:
        self._segments.change_live(address, record.cost)
        self._segments.change_live(record.address, -record.cost)
        self.log.relocated(record.address, address)
        self._ledger.relocate(record.key, address)

    def drop_segment(self, number: int) -> None:
        self._ledger.drop_segment(number)

    def forget_all(self) -> int:
        num_withdrawn = self._ledger.forget_all()
        self._segments.forget_records()
        for record in self.in_use():
            self._segments.change_live(record.address, record.cost)
        return num_withdrawn

    def restore(self, found: FoundRecords) -> None:
        known = found.columns_as_known()
        if known is None or len(known[0]) > self.max_keys or not self._take_in(*known):
            self._restore(*found.columns())

    def _restore(self, keys: list[Key], addresses: Numbers, payload_bytes: Numbers) -> None:
        num_surplus = max(0, len(keys) - self.max_keys)
        if num_surplus:
            columns = keys, addresses.tolist(), payload_bytes.tolist()
            self._surplus = [FoundRecord(*row) for row in zip(*(c[:num_surplus] for c in columns), strict=True)]
            keys = keys[num_surplus:]
            addresses, payload_bytes = addresses[num_surplus:], payload_bytes[num_surplus:]
        is_all = self._take_in(keys, addresses, payload_bytes)
        assert is_all, "each key is there once"

    def _take_in(self, keys: Sequence[Key], addresses: Numbers, payload_bytes: Numbers) -> bool:
        """Add records. False, and no record added, if a key occurs twice."""
        num_restored = self._ledger.restore(keys, addresses.tobytes(), payload_bytes.tobytes())
        if num_restored < len(keys):
            self._ledger.forget_all()
            self._ledger.take_tally()
            return False
        page = np.uint64(PAGE_BYTES)
        costs = page + (payload_bytes + page - np.uint64(1)) // page * page
        numbers, places = np.unique(addresses >> np.uint64(ADDRESS_BITS), return_inverse=True)
        live_pages = np.bincount(places, weights=costs // page, minlength=len(numbers))
        for number, num_pages in zip(numbers.tolist(), live_pages.tolist(), strict=True):
            segment = self._segments.by_number[number]
            segment.live_bytes += int(num_pages) * PAGE_BYTES
            self._segments.refile(segment)
        return True


def _record(key: Key, address: int, payload_bytes: int, state: KeyState, num_pins: int) -> Record:
    return Record(cost_of(payload_bytes), state, num_pins, key, address, payload_bytes)


def _by_segment(addresses: bytes) -> Iterable[tuple[int, int]]:
    """For each segment with some of these addresses: one address in the segment, and the number of addresses there."""
    if len(addresses) == _ADDRESS_BYTES:
        return ((int.from_bytes(addresses, sys.byteorder), 1),)
    each = np.frombuffer(addresses, np.uint64)
    numbers, counts = np.unique(each >> np.uint64(ADDRESS_BITS), return_counts=True)
    return zip((numbers << np.uint64(ADDRESS_BITS)).tolist(), counts.tolist(), strict=True)
