"""What peers were told that this engine holds, and for how long it stays: the scheduler's half of who is asked.

Peers ask at any time, also while the engine does nothing, and the index belongs to the engine's thread. So a question
is answered on the thread that it arrives on, which looks at the index's table and changes nothing in it; the pin that
goes with the answer is made by the engine's thread, before it takes space for anything else: `settle`, which the index
of host memory calls first in each reservation. Nothing is evicted but by a reservation, so that is soon enough. A chunk
that left between the look and the pin is one whose lease nobody keeps: its reader finds another seal, or none, or a
digest that is not that of the bytes. No lease is needed for what is read to be right, only for it to be of use.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.peer.options import PeerOptions

Reader: TypeAlias = int
"""One connection of a peer."""


class LeasableIndex(Protocol):
    """Index of host memory, as far as leases need it."""

    @property
    def capacity_bytes(self) -> int: ...

    def find(self, key: Key) -> Slot | None:
        """Where a committed key lies. Any thread may ask; what it is told may be over when it looks."""
        ...

    def pin(self, key: Key) -> Slot | None:
        """On the index's own thread, as the next."""
        ...

    def unpin(self, key: Key) -> None: ...


class LeaseCounts(msgspec.Struct, frozen=True):
    """Since the last call. Merging is addition."""

    asked: int = 0
    """Keys."""
    held: int = 0
    refused: int = 0
    """That are here and could not be leased, because as much was as may be."""
    expired: int = 0
    """Leases that their readers did not give back."""
    lost: int = 0
    """Of chunks that had left before they were pinned."""


@dataclass(slots=True)
class _Lease:
    key: Key
    slot: Slot
    until_s: float
    is_pinned: bool = False
    is_over: bool = False


class PeerLeases:
    """Answers what peers ask, within bounds. `settle` is for the index's thread, everything else for any.

    Args:
        index: of host memory.
        options: bounds.
        clock: seconds.
    """

    def __init__(self, index: LeasableIndex, options: PeerOptions, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self.lease_s = options.lease_s
        self._max_leases = options.max_leases
        self._max_bytes = int(options.leased_share * index.capacity_bytes)
        self._lock = threading.Lock()
        self._live: OrderedDict[tuple[Reader, Key], _Lease] = OrderedDict()
        """The one that ends first comes first: each lasts as long as the others."""
        self._bytes = 0
        self._changes: deque[_Lease] = deque()
        """Leases that began or ended, for the index's thread."""
        self._counts = [0, 0, 0, 0, 0]

    @property
    def num_bytes(self) -> int:
        """That peers were promised. A chunk that two were promised counts twice."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._live)

    # Any thread.

    def answer(self, reader: Reader, keys: Sequence[Key]) -> list[Slot | None]:
        """Where each lies, which stays there for `lease_s` unless it is given up; None for what is not to be had."""
        with self._lock:
            now_s = self._clock()
            self._expire(now_s)
            slots = [self._lease(reader, key, now_s) for key in keys]
            self._counts[0] += len(slots)
            self._counts[1] += sum(slot is not None for slot in slots)
        return slots

    def _lease(self, reader: Reader, key: Key, now_s: float) -> Slot | None:
        slot = self._index.find(key)
        if slot is None:
            return None
        known = self._live.get((reader, key))
        if known is not None and known.slot == slot:
            known.until_s = now_s + self.lease_s
            self._live.move_to_end((reader, key))
            return slot
        if known is not None:
            self._end((reader, key))
        if len(self._live) >= self._max_leases or self._bytes + slot.num_bytes > self._max_bytes:
            self._counts[2] += 1
            return None
        lease = _Lease(key, slot, now_s + self.lease_s)
        self._live[reader, key] = lease
        self._bytes += slot.num_bytes
        self._changes.append(lease)
        return slot

    def give_up(self, reader: Reader, keys: Iterable[Key]) -> None:
        """These are needed no more. What was not promised is passed over."""
        with self._lock:
            for key in keys:
                self._end((reader, key))

    def leave(self, reader: Reader) -> None:
        """A peer's connection ended."""
        with self._lock:
            for name in [name for name in self._live if name[0] == reader]:
                self._end(name)

    def _end(self, name: tuple[Reader, Key]) -> bool:
        lease = self._live.pop(name, None)
        if lease is None:
            return False
        self._bytes -= lease.slot.num_bytes
        lease.is_over = True
        self._changes.append(lease)
        return True

    def _expire(self, now_s: float) -> None:
        while self._live:
            name, lease = next(iter(self._live.items()))
            if now_s < lease.until_s:
                return
            self._end(name)
            self._counts[3] += 1

    def take_counts(self) -> LeaseCounts:
        """What happened since the last call."""
        with self._lock:
            counts, self._counts = self._counts, [0, 0, 0, 0, 0]
        return LeaseCounts(*counts)

    # The index's thread.

    def settle(self) -> None:
        """Pin what was promised and unpin what is needed no more, before something else takes its space.

        Costs next to nothing while no peer asks.
        """
        if not self._live and not self._changes:
            return
        with self._lock:
            self._expire(self._clock())
            changes, self._changes = self._changes, deque()
            for lease in changes:
                if lease.is_over:
                    if lease.is_pinned:
                        lease.is_pinned = False
                        self._index.unpin(lease.key)
                elif not lease.is_pinned:
                    self._keep(lease)

    def _keep(self, lease: _Lease) -> None:
        slot = self._index.pin(lease.key)
        lease.is_pinned = slot is not None
        if slot is not None and slot != lease.slot:
            # It left, and came back to another place.
            self._index.unpin(lease.key)
            lease.is_pinned = False
        self._counts[4] += not lease.is_pinned

    def close(self) -> None:
        """Every lease ends. On the index's thread; peers may still ask, and are promised nothing."""
        with self._lock:
            self._max_leases = 0
            for name in list(self._live):
                self._end(name)
        self.settle()
