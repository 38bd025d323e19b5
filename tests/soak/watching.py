"""A disk index that records its promises in the ledger, and revokes them before it removes a chunk.

An index evicts records by itself, also while it is opened, without reporting it. So evictions and withdrawals are
watched where the record table performs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybridkv.planner import LookupResult
from hybridkv.tiers import Refusal, Slot
from hybridkv.tiers.contract import UNSPECIFIED
from hybridkv.tiers.disk import DiskIndex
from hybridkv.tiers.disk.index.records import Record, RecordTable
from soak.ledger import Log

SEGMENT_BITS = 32


def segment_of(slot: Slot) -> int:
    return slot.first_offset >> SEGMENT_BITS


class WatchedIndex(DiskIndex):
    """Args as of `DiskIndex`. Call `tell` right after creating one.

    Attributes:
        is_there: whether the files of a segment exist; used while the directory may be lost.
        on_withdrawal: called with the reason of each withdrawal.
    """

    log: Log
    is_there: Callable[[int], bool]
    on_withdrawal: Callable[[str], None]

    segments: dict[bytes, int]
    """The segment of each reserved key."""

    def tell(self, log: Log, is_there: Callable[[int], bool], on_withdrawal: Callable[[str], None]) -> None:
        self.segments = {}
        self.log, self.is_there, self.on_withdrawal = log, is_there, on_withdrawal

    def reserve(self, key: bytes, num_bytes: int, *more: Any, **named: Any) -> Slot | Refusal:
        slot = super().reserve(key, num_bytes, *more, **named)
        if isinstance(slot, Slot):
            self.log.say(f"begun {key.hex()}")
            self.segments[key] = segment_of(slot)
        return slot

    def commit(self, key: bytes) -> bool:
        is_committed = super().commit(key)
        segment = self.segments.pop(key)
        # A committed key may be evicted before the call ends.
        if self.lookup(key) is LookupResult.HIT and (not self.log.ledger.is_unsettled or self.is_there(segment)):
            self.log.say(f"committed {key.hex()} {segment}")
        return is_committed

    def abort(self, key: bytes) -> None:
        self.segments.pop(key)
        super().abort(key)

    def clear(self) -> int:
        self.log.say("withdrawn")
        return super().clear()

    def close(self) -> None:
        # Closing drops all keys, but the next index must find them.
        self.log.is_silent = True
        super().close()
        self.log.is_silent = False

    def invalidate(self, key: bytes, reason: str = UNSPECIFIED) -> bool:
        is_withdrawn = super().invalidate(key, reason)
        if is_withdrawn:
            self.on_withdrawal(str(reason))
        return is_withdrawn


@contextmanager
def watched_records(log: Log) -> Iterator[None]:
    """While the block runs, log each record that leaves a table or moves in it."""
    evict, withdraw, relocate = RecordTable._evicted, RecordTable.withdraw, RecordTable.relocate

    def say_gone(key: bytes) -> None:
        if key in log.ledger.must and not log.is_silent:
            log.say(f"gone {key.hex()}")

    def evicts(table: RecordTable, key: bytes, record: Record) -> None:
        say_gone(key)
        evict(table, key, record)

    def withdraws(table: RecordTable, key: bytes) -> Record | None:
        say_gone(key)
        return withdraw(table, key)

    def relocates(table: RecordTable, record: Record, address: int) -> None:
        relocate(table, record, address)
        log.say(f"moved {record.key.hex()} {address >> SEGMENT_BITS}")

    watched = {"_evicted": evicts, "withdraw": withdraws, "relocate": relocates}
    former = {name: getattr(RecordTable, name) for name in watched}
    for name, method in watched.items():
        setattr(RecordTable, name, method)
    try:
        yield
    finally:
        for name, method in former.items():
            setattr(RecordTable, name, method)
