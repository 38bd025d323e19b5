"""Leases: chunks that this engine keeps for peers for a limited time.

Lookups of peers arrive at any time, also while the engine is idle, but only the engine's thread may change the index.
So the connection's thread answers a lookup and only reads the index. The engine's thread pins the chunk later, in
`apply`, which the RAM index calls before each reservation. Only reservations evict, so this is early enough.

A chunk may still be evicted or invalidated between lookup and pin. Then the reader finds another seal, no seal or a
wrong digest, and its load fails. Leases make loads likely to succeed; correctness does not depend on them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.peer.options import MAX_EXTENTS, PeerOptions
from hybridkv.tiers.ram import RamIndex

Reader: TypeAlias = int
"""Connection of a peer."""


@dataclass(slots=True)
class _KeyLease:
    key: Key
    slot: Slot
    until_s: float
    is_pinned: bool = False


class PeerLeases:
    """Leases of all peers, within limits. Thread-safe, except `apply` and `close`, which the index's thread calls.

    Args:
        index: the RAM index.
        options: limits.
        clock: seconds.
    """

    def __init__(self, index: RamIndex, options: PeerOptions, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self.lease_s = options.lease_s
        self._max_leases = options.max_leases
        self._max_bytes = int(options.leased_share * index.capacity_bytes)
        self._lock = threading.Lock()
        self._live: OrderedDict[tuple[Reader, Key], _KeyLease] = OrderedDict()
        """In order of expiry, since all leases have the same duration."""
        self._bytes = 0
        self._to_pin: dict[tuple[Reader, Key], _KeyLease] = {}
        """Leases that were granted since the last `apply` and are not pinned."""
        self._to_unpin: list[Key] = []
        """Keys of pinned leases that ended since the last `apply`."""

    @property
    def num_bytes(self) -> int:
        """Leased bytes. A chunk leased to two peers counts twice."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._live)

    # Any thread.

    def grant(self, reader: Reader, keys: Sequence[Key]) -> list[Slot | None]:
        """Lease keys to a peer for `lease_s`. Returns the slot of each; None if it is absent or cannot be leased. The
        slots have at most `MAX_EXTENTS` extents in all: that many fit into one reply."""
        slots: list[Slot | None] = []
        num_left = MAX_EXTENTS
        with self._lock:
            now_s = self._clock()
            self._expire(now_s)
            for key in keys:
                slot = self._lease(reader, key, now_s, num_left)
                slots.append(slot)
                num_left -= 0 if slot is None else len(slot.extents)
        return slots

    def _lease(self, reader: Reader, key: Key, now_s: float, max_extents: int) -> Slot | None:
        slot = self._index.find(key)
        if slot is None or len(slot.extents) > max_extents:
            return None
        known = self._live.get((reader, key))
        if known is not None and known.slot == slot:
            known.until_s = now_s + self.lease_s
            self._live.move_to_end((reader, key))
            if not known.is_pinned:
                self._to_pin[reader, key] = known
            return slot
        if known is not None:
            self._end((reader, key))
        if len(self._live) >= self._max_leases or self._bytes + slot.num_bytes > self._max_bytes:
            return None
        lease = _KeyLease(key, slot, now_s + self.lease_s)
        self._live[reader, key] = self._to_pin[reader, key] = lease
        self._bytes += slot.num_bytes
        return slot

    def end(self, reader: Reader, keys: Iterable[Key]) -> None:
        """End the leases of these keys. Keys without a lease are ignored."""
        with self._lock:
            for key in keys:
                self._end((reader, key))

    def end_all(self, reader: Reader) -> None:
        """End all leases of a closed connection."""
        with self._lock:
            for name in [name for name in self._live if name[0] == reader]:
                self._end(name)

    def _end(self, name: tuple[Reader, Key]) -> None:
        lease = self._live.pop(name, None)
        if lease is None:
            return
        self._bytes -= lease.slot.num_bytes
        self._to_pin.pop(name, None)
        if lease.is_pinned:
            self._to_unpin.append(lease.key)

    def _expire(self, now_s: float) -> None:
        while self._live:
            name, lease = next(iter(self._live.items()))
            if now_s < lease.until_s:
                return
            self._end(name)

    # The index's thread.

    def apply(self) -> None:
        """Pin the chunks of new leases, and unpin the chunks of ended leases. Called before each reservation; cheap
        without leases."""
        if not self._live and not self._to_unpin:
            return
        with self._lock:
            self._expire(self._clock())
            to_pin, self._to_pin = self._to_pin, {}
            to_unpin, self._to_unpin = self._to_unpin, []
            for key in to_unpin:
                self._index.unpin(key)
            for lease in to_pin.values():
                self._pin(lease)

    def _pin(self, lease: _KeyLease) -> None:
        slot = self._index.pin(lease.key)
        lease.is_pinned = slot is not None
        if slot is not None and slot != lease.slot:
            # The chunk was evicted, and stored again in another slot.
            self._index.unpin(lease.key)
            lease.is_pinned = False

    def close(self) -> None:
        """End every lease, and grant no more. Called on the index's thread; peers may still send lookups."""
        with self._lock:
            self._max_leases = 0
            for name in list(self._live):
                self._end(name)
        self.apply()
