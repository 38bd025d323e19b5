"""A disk index that says in the ledger what it promises, and takes back before it takes away.

An index gives up records by itself, while it is opened too, and says so to nobody: what evicts and withdraws is watched
at the one place where that happens.
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
    """Args as of `DiskIndex`. Whoever makes one calls `tell` at once.

    Attributes:
        is_there: whether a segment has its files; asked while the directory may be a lost one.
        on_withdrawal: is told the reason of each.
    """

    log: Log
    is_there: Callable[[int], bool]
    on_withdrawal: Callable[[str], None]

    segments: dict[bytes, int]
    """Where reserved keys lie."""

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
        # What is committed may be evicted before the call ends.
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
        # It forgets all of them, and the next one is to know them.
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
    """While it lasts, each record that leaves a table, or moves in it, is said to have."""
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
