"""The life of every key of a disk tier, in memory: reserved, committed, doomed; pinned; least recently used first.

Changes segments' counts along with it, and tells a log what changed. Knows no file, and does not decide where a record
goes or when one is evicted.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.disk.change_log import ChangeLog
from hybridkv.tiers.disk.layout import number_of, record_bytes
from hybridkv.tiers.disk.segments import SegmentTable
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.leftovers import Leftovers
from hybridkv.tiers.tally import Tally


class State(enum.Enum):
    """Of a record. A value."""

    RESERVED = ("reserved", LookupResult.PENDING)
    COMMITTED = ("committed", LookupResult.HIT)
    DOOMED_WRITE = ("invalidated while it is being stored", LookupResult.MISS)
    DOOMED_READ = ("invalidated while it is pinned", LookupResult.MISS)

    def __init__(self, words: str, answer: LookupResult) -> None:
        self.words = words
        self.answer = answer


class Record(msgspec.Struct, gc=False, eq=False):
    """One key's record. Another thread may read it at any time, but for `num_pins`.

    It is in no cycle, so Python's collector of garbage is told not to look at it: there may be millions.
    """

    key: Key
    address: int
    payload_bytes: int
    state: State
    num_pins: int = 0
    last_used: int = 0
    """Higher: more recently. What keeps the order here is `RecordTable.evictable`; this is for a snapshot."""

    @property
    def cost(self) -> int:
        return record_bytes(self.payload_bytes)

    @property
    def slot(self) -> Slot:
        return Slot(((self.address, self.payload_bytes),))


class Forgotten(NamedTuple):
    """What was withdrawn at once."""

    num_withdrawn: int
    leftovers: Leftovers
    """The tables as they were. Who still reads them has to be done before they are freed."""


class RecordTable:
    """All records of a namespace."""

    def __init__(self, segments: SegmentTable, log: ChangeLog) -> None:
        self._segments = segments
        self.log = log
        self.by_key: dict[Key, Record] = {}
        # Committed and unpinned, least recently used first: exactly what may be evicted.
        self.evictable: OrderedDict[Key, Record] = OrderedDict()
        self.evictable_bytes = 0
        self.reserved_now: dict[Key, Record] = {}
        """Doomed ones included: somebody may be writing them."""
        self.pinned_now: dict[Key, Record] = {}
        """Doomed ones included: somebody may be reading them."""
        self.used_bytes = 0
        self.num_doomed = 0
        self.generation = 0
        self._num_uses = 0
        self.tally = Tally()

    def touch(self, keys: Iterable[Key]) -> None:
        used = []
        for key in keys:
            record = self.evictable.get(key)
            if record is not None:
                self.evictable.move_to_end(key)
                self._use(record)
                used.append(record.address)
        self.log.used(used)

    def _use(self, record: Record) -> None:
        self._num_uses += 1
        record.last_used = self._num_uses

    def restore(self, found: Iterable[tuple[Key, int, int]]) -> None:
        """(key, address, payload bytes) of records that an opening found, least recently used first."""
        by_number, live_bytes = self._segments.by_number, dict.fromkeys(self._segments.by_number, 0)
        costs: dict[int, int] = {}  # there are few sizes and many records
        for key, address, payload_bytes in found:
            record = Record(key, address, payload_bytes, State.COMMITTED)
            self._num_uses += 1
            record.last_used = self._num_uses
            number = number_of(address)
            cost = costs.get(payload_bytes)
            if cost is None:
                cost = costs[payload_bytes] = record_bytes(payload_bytes)
            live_bytes[number] += cost
            by_number[number].keys.append(key)
            self.by_key[key] = self.evictable[key] = record
        for number, num_bytes in live_bytes.items():
            by_number[number].live_bytes += num_bytes
            self._segments.refile(by_number[number])
            self.evictable_bytes += num_bytes
            self.used_bytes += num_bytes

    def reserve(self, key: Key, address: int, payload_bytes: int) -> Record:
        record = Record(key, address, payload_bytes, State.RESERVED)
        self._segments.change_live(address, record.cost)
        self._segments.hold(address, is_writing=True)
        self.by_key[key] = record
        self.reserved_now[key] = record
        self.used_bytes += record.cost
        self.log.reserved(address, payload_bytes)
        self.generation += 1
        self.tally.reservations += 1
        return record

    def reserved(self, operation: str, key: Key) -> Record:
        """The record of a reserved key; `TierProtocolError` when it is not one."""
        record = self.by_key.get(key)
        if record is None:
            raise TierProtocolError(f"{operation}: expected a reserved key, got unknown key {key.hex()}")
        if record.state not in (State.RESERVED, State.DOOMED_WRITE):
            raise TierProtocolError(f"{operation}: expected a reserved key, got {key.hex()} ({record.state.words})")
        return record

    def commit(self, key: Key) -> bool:
        record = self.reserved("commit", key)
        del self.reserved_now[key]
        self._segments.release(record.address, is_writing=True)
        if record.state is State.DOOMED_WRITE:
            self._forget_doomed(record)
            return False
        record.state = State.COMMITTED
        self._make_evictable(record)
        self.generation += 1
        self.tally.commits += 1
        self.log.committed(record.address, record.payload_bytes, key)
        return True

    def abort(self, key: Key) -> Record:
        record = self.reserved("abort", key)
        del self.reserved_now[key]
        self._segments.release(record.address, is_writing=True)
        if record.state is State.DOOMED_WRITE:
            self._forget_doomed(record)
        else:
            self._forget(record)
            self.generation += 1
            self.log.gone(record.address)
        self.tally.aborts += 1
        return record

    def invalidate(self, key: Key) -> Record | None:
        """The record that is offered no more, None when none was."""
        record = self.by_key.get(key)
        if record is None or record.state.answer is LookupResult.MISS:
            return None
        if record.state is State.RESERVED:
            record.state = State.DOOMED_WRITE
            self.num_doomed += 1
        elif record.num_pins:
            record.state = State.DOOMED_READ
            self.num_doomed += 1
        else:
            self._make_unevictable(record)
            self._forget(record)
        self.generation += 1
        self.tally.invalidations += 1
        self.log.gone(record.address)
        return record

    def forget(self) -> Forgotten:
        """`invalidate` everything at once, and log nothing: the caller gives up the log, or has closed it.

        Begins new tables with copies of what is pinned or reserved, so that it costs nothing for every other record,
        and whoever reads the old ones reads what was there.
        """
        num_withdrawn = len(self.by_key) - self.num_doomed
        leftovers = Leftovers(self.evictable, self.by_key, *self._segments.forget_keys())
        self.reserved_now = {key: _doomed(record) for key, record in self.reserved_now.items()}
        self.pinned_now = {key: _doomed(record) for key, record in self.pinned_now.items()}
        self.by_key = self.reserved_now | self.pinned_now
        self.evictable = OrderedDict()
        self.evictable_bytes = self.used_bytes = 0
        self.num_doomed = len(self.by_key)
        for record in self.by_key.values():
            self.used_bytes += record.cost
            self._segments.change_live(record.address, record.cost)
        self.generation += num_withdrawn
        self.tally.invalidations += num_withdrawn
        return Forgotten(num_withdrawn, leftovers)

    def pin(self, key: Key) -> Slot | None:
        record = self.by_key.get(key)
        if record is None or record.state is not State.COMMITTED:
            return None
        if not record.num_pins:
            self._make_unevictable(record)
            self._segments.hold(record.address, is_writing=False)
            self._use(record)
            self.pinned_now[key] = record
        record.num_pins += 1
        return record.slot

    def unpin(self, key: Key) -> None:
        record = self.by_key.get(key)
        if record is None or not record.num_pins:
            raise TierProtocolError(f"unpin: expected a pinned key, got {key.hex()}")
        record.num_pins -= 1
        if record.num_pins:
            return
        del self.pinned_now[key]
        self._segments.release(record.address, is_writing=False)
        if record.state is State.COMMITTED:
            self._make_evictable(record)
            self.log.used((record.address,))
        else:
            self._forget_doomed(record)

    def evict(self, record: Record) -> None:
        """Give up a record that is committed and not pinned."""
        self._make_unevictable(record)
        self._forget(record)
        self.generation += 1
        self.log.gone(record.address)
        self.tally.evictions += 1
        self.tally.evicted_bytes += record.cost

    def oldest(self) -> Record:
        """What goes first. There is one."""
        return next(iter(self.evictable.values()))

    def move(self, record: Record, address: int) -> None:
        """A record that is committed and not pinned lies elsewhere now."""
        self._segments.change_live(address, record.cost)
        self._segments.change_live(record.address, -record.cost)
        self.log.moved(record.address, address)
        record.address = address

    def _make_evictable(self, record: Record) -> None:
        self._use(record)
        self.evictable[record.key] = record
        self.evictable_bytes += record.cost

    def _make_unevictable(self, record: Record) -> None:
        del self.evictable[record.key]
        self.evictable_bytes -= record.cost

    def _forget_doomed(self, record: Record) -> None:
        self.num_doomed -= 1
        self._forget(record)

    def _forget(self, record: Record) -> None:
        del self.by_key[record.key]
        cost = record.cost
        self.used_bytes -= cost
        self._segments.change_live(record.address, -cost)


def _doomed(record: Record) -> Record:
    """A copy that is not offered."""
    state = State.DOOMED_READ if record.num_pins else State.DOOMED_WRITE
    return msgspec.structs.replace(record, state=state)
