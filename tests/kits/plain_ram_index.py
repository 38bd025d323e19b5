"""Index of host memory over plain Python tables: the reference for `RamIndex`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hybridkv.tiers.contract import Extends, Key, NewChunk, Refusal, Slot
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.ledger import Entry, KeyState
from hybridkv.tiers.ram.sizes import count_granules, count_keys, round_up_to_granules
from kits.plain_ledger import KeyLedger, LruPolicy

_RESERVED = KeyState.RESERVED


class SlotEntry(Entry):
    """Entry with the granules of a chunk."""

    slot: Slot


class GranuleAllocator:
    """The `Space` of host memory: `num_granules` granules of `granule_bytes` each, from offset 0.

    Requests cost whole granules, and the caller has checked that enough are free.
    """

    __slots__ = ("_count_by_first", "_first_by_last", "granule_bytes", "num_granules")

    def __init__(self, num_granules: int, granule_bytes: int) -> None:
        self.num_granules = num_granules
        self.granule_bytes = granule_bytes
        self._count_by_first: dict[int, int] = {}
        self._first_by_last: dict[int, int] = {}
        self._give_back(0, num_granules)

    def take(self, key: Key, num_bytes: int, cost: int) -> SlotEntry:
        """Allocates a slot of exactly `num_bytes`."""
        granule_bytes = self.granule_bytes
        wanted = cost // granule_bytes
        first, count = self._take_run(wanted)
        if count == wanted:
            return SlotEntry(cost, _RESERVED, 0, Slot(((first * granule_bytes, num_bytes),)))
        runs = [(first, count)]
        while wanted := wanted - count:
            first, count = self._take_run(wanted)
            runs.append((first, count))
        return SlotEntry(cost, _RESERVED, 0, self._slot(runs, cost - num_bytes))

    def _take_run(self, wanted: int) -> tuple[int, int]:
        """Takes the wanted number of granules from one free run, or all that it has."""
        first, count = self._count_by_first.popitem()
        last = first + count - 1
        if count <= wanted:
            del self._first_by_last[last]
            return first, count
        self._count_by_first[first + wanted] = count - wanted
        self._first_by_last[last] = first + wanted
        return first, wanted

    def _slot(self, runs: list[tuple[int, int]], spare_bytes: int) -> Slot:
        """Free runs are maximal, so taken runs are never adjacent and each is an extent."""
        granule_bytes = self.granule_bytes
        extents = [(first * granule_bytes, count * granule_bytes) for first, count in sorted(runs)]
        offset, length = extents[-1]
        extents[-1] = (offset, length - spare_bytes)
        return Slot(tuple(extents))

    def free(self, entry: SlotEntry) -> None:
        for offset, num_bytes in entry.slot.extents:
            self._give_back(offset // self.granule_bytes, -(-num_bytes // self.granule_bytes))

    def keep_only(self, entries: Iterable[SlotEntry]) -> None:
        self._count_by_first, self._first_by_last = {}, {}
        first = 0
        for offset, num_bytes in sorted(extent for entry in entries for extent in entry.slot.extents):
            start = offset // self.granule_bytes
            if start > first:
                self._give_back(first, start - first)
            first = start + -(-num_bytes // self.granule_bytes)
        if first < self.num_granules:
            self._give_back(first, self.num_granules - first)

    def _give_back(self, first: int, count: int) -> None:
        before = self._first_by_last.pop(first - 1, None)
        if before is not None:
            count += self._count_by_first.pop(before)
            first = before
        after = self._count_by_first.pop(first + count, None)
        if after is not None:
            del self._first_by_last[first + count + after - 1]
            count += after
        self._count_by_first[first] = count
        self._first_by_last[first + count - 1] = first


class PlainRamIndex(KeyLedger[SlotEntry]):
    """Has the members of `RamIndex`."""

    max_index_bytes = 0  # not counted

    def __init__(self, capacity_bytes: int, granule_bytes: int, smallest_bytes: int = 1) -> None:
        num_granules = count_granules(capacity_bytes, granule_bytes)
        self.max_keys = count_keys(num_granules, granule_bytes, smallest_bytes)
        order: LruPolicy[SlotEntry] = LruPolicy()
        space = GranuleAllocator(num_granules, granule_bytes)
        super().__init__(space, order, num_granules * granule_bytes, max_keys=self.max_keys)
        self.granule_bytes = granule_bytes
        self.before_reserving: Callable[[], None] | None = None
        """Called before space is taken (only that evicts), so that memory that peers read can be pinned first."""

    def find(self, key: Key) -> Slot | None:
        """Slot of a committed key. Other threads may call it; the answer may be outdated when they get it."""
        entry = self.by_key.get(key)
        return entry.slot if entry is not None and entry.state is KeyState.COMMITTED else None

    def cost(self, num_bytes: int) -> int:
        return round_up_to_granules(self.granule_bytes, num_bytes)

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        if self.before_reserving is not None:
            self.before_reserving()
        cost = self.cost(num_bytes)
        refusal = self.reserve_refusal(key, cost, extends)
        if refusal is not None:
            return self.tally.refuse(refusal)
        if self.used_bytes + cost > self.capacity_bytes or len(self.by_key) >= self.max_keys:
            self.make_room(cost, extends=extends)
        return self.take(key, num_bytes, cost, extends).slot

    def reserve_all(self, chunks: Sequence[NewChunk]) -> list[Slot | Refusal]:
        return [self.reserve(*chunk) for chunk in chunks]

    def clear(self) -> int:
        return self.forget_all()

    def close(self) -> None:
        self.is_closed = True
        self.clear()
