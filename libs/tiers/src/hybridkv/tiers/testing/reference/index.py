"""The executable specification of `TierIndex`: every answer is computed from first principles, over all keys.

Other indices are tested against it. It is slow on purpose and not meant to serve an engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import UNSPECIFIED, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.errors import TierConfigurationError, TierProtocolError
from hybridkv.tiers.tally import Tally


@dataclass
class _Chunk:
    num_bytes: int
    place: int
    is_reserved: bool = True
    is_doomed: bool = False
    num_pins: int = 0
    last_used: int = 0


class ReferenceIndex:
    """A `TierIndex` whose slots are numbered places, each as large as the whole tier.

    A chunk takes up whole multiples of `granule_bytes`, so that it can be compared with tiers that round up.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int = 1) -> None:
        if granule_bytes <= 0:
            raise TierConfigurationError("granule_bytes", "a number > 0", granule_bytes)
        if capacity_bytes < granule_bytes:
            raise TierConfigurationError("capacity_bytes", f"at least {granule_bytes}", capacity_bytes)
        self._granule_bytes = granule_bytes
        self._capacity_bytes = capacity_bytes // granule_bytes * granule_bytes
        self._chunks: dict[Key, _Chunk] = {}
        self._clock = 0
        self._generation = 0
        self._is_closed = False
        self._tally = Tally()

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return sum(self.cost(chunk.num_bytes) for chunk in self._chunks.values())

    @property
    def num_keys(self) -> int:
        return sum(not chunk.is_doomed for chunk in self._chunks.values())

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def answers_late(self) -> bool:
        return False

    def ask(self, keys: Iterable[Key], deadline_s: float) -> None:
        """Everything is known."""

    def lacks(self, key: Key) -> bool:
        return not self._is_held(key)

    def lookup(self, key: Key) -> LookupResult:
        chunk = self._chunks.get(key)
        if chunk is None or chunk.is_doomed:
            return LookupResult.MISS
        return LookupResult.PENDING if chunk.is_reserved else LookupResult.HIT

    def leading(self, keys: Iterable[Key]) -> int:
        return sum(1 for _ in itertools.takewhile(self._is_held, keys))

    def last_held(self, keys: Sequence[Key]) -> int | None:
        return max((place for place, key in enumerate(keys) if self._is_held(key)), default=None)

    def any_pending(self, keys: Iterable[Key]) -> bool:
        return any(self.lookup(key) is LookupResult.PENDING for key in keys)

    def _is_held(self, key: Key) -> bool:
        return self.lookup(key) is not LookupResult.MISS

    def is_doomed(self, key: Key) -> bool:
        """Whether it was invalidated while somebody still writes or reads it."""
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.is_doomed

    def touch(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if self.lookup(key) is LookupResult.HIT:
                self._chunks[key].last_used = self._now()

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        victims = self._victims()
        refusal = self._why_not(key, self.cost(num_bytes), victims)
        if refusal is not None:
            return self._tally.refuse(refusal)
        while self.used_bytes + self.cost(num_bytes) > self._capacity_bytes:
            self._evict(victims.pop(0))
        used_places = {chunk.place for chunk in self._chunks.values()}
        place = next(place for place in itertools.count() if place not in used_places)
        self._chunks[key] = _Chunk(num_bytes, place)
        self._generation += 1
        self._tally.reservations += 1
        return self._slot(self._chunks[key])

    def reserve_all(self, chunks: Sequence[tuple[Key, int]]) -> list[Slot | Refusal]:
        return [self.reserve(key, num_bytes) for key, num_bytes in chunks]

    def _why_not(self, key: Key, cost: int, victims: list[Key]) -> Refusal | None:
        if self._is_closed:
            return Refusal.CLOSED
        if key in self._chunks:
            return Refusal.PRESENT
        if cost > self._capacity_bytes:
            return Refusal.TOO_LARGE
        evictable_bytes = sum(self.cost(self._chunks[victim].num_bytes) for victim in victims)
        if cost > self._capacity_bytes - self.used_bytes + evictable_bytes:
            return Refusal.NO_ROOM
        return None

    def _victims(self) -> list[Key]:
        """What may be evicted, first to go first."""
        keys = [key for key, chunk in self._chunks.items() if not chunk.is_reserved and not chunk.num_pins]
        return sorted(keys, key=lambda key: self._chunks[key].last_used)

    def _evict(self, key: Key) -> None:
        self._tally.evictions += 1
        self._tally.evicted_bytes += self.cost(self._chunks.pop(key).num_bytes)
        self._generation += 1

    def commit(self, key: Key) -> bool:
        chunk = self._reserved_chunk("commit", key)
        if chunk.is_doomed:
            del self._chunks[key]
            return False
        chunk.is_reserved = False
        chunk.last_used = self._now()
        self._generation += 1
        self._tally.commits += 1
        return True

    def abort(self, key: Key) -> None:
        chunk = self._reserved_chunk("abort", key)
        del self._chunks[key]
        if not chunk.is_doomed:
            self._generation += 1
        self._tally.aborts += 1

    def _reserved_chunk(self, operation: str, key: Key) -> _Chunk:
        chunk = self._chunks.get(key)
        if chunk is None or not chunk.is_reserved:
            raise TierProtocolError(f"{operation}: expected a reserved key, got {key.hex()}")
        return chunk

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        if self.lookup(key) is LookupResult.MISS:
            return False
        chunk = self._chunks[key]
        if chunk.is_reserved or chunk.num_pins:
            chunk.is_doomed = True
        else:
            del self._chunks[key]
        self._generation += 1
        self._tally.invalidations += 1
        return True

    def pin(self, key: Key) -> Slot | None:
        if self.lookup(key) is not LookupResult.HIT:
            return None
        chunk = self._chunks[key]
        chunk.num_pins += 1
        return self._slot(chunk)

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        if any(self.lookup(key) is not LookupResult.HIT for key in keys):
            return None
        return [slot for key in keys if (slot := self.pin(key)) is not None]

    def unpin(self, key: Key) -> None:
        chunk = self._chunks.get(key)
        if chunk is None or not chunk.num_pins:
            raise TierProtocolError(f"unpin: expected a pinned key, got {key.hex()}")
        chunk.num_pins -= 1
        if not chunk.num_pins:
            chunk.last_used = self._now()
            if chunk.is_doomed:
                del self._chunks[key]

    def unpin_all(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.unpin(key)

    def clear(self) -> int:
        return sum(self.invalidate(key) for key in list(self._chunks))

    def take_counts(self) -> TierCounts:
        return self._tally.take()

    def close(self) -> None:
        self._is_closed = True
        self.clear()

    def cost(self, num_bytes: int) -> int:
        return -(-num_bytes // self._granule_bytes) * self._granule_bytes

    def _slot(self, chunk: _Chunk) -> Slot:
        return Slot(((chunk.place * self._capacity_bytes, chunk.num_bytes),))

    def _now(self) -> int:
        self._clock += 1
        return self._clock
