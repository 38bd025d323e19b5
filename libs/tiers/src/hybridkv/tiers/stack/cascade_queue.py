"""Cascade queue: the chunks to copy from the primary tier to one secondary tier, in order.

A chunk waits while the limits of moves in flight are reached, and while the secondary tier refuses chunks with BUSY. A
chunk needs the last key of its `extends`: it is sent only when that key is in the secondary tier or in flight to it. So
each prefix is copied from its beginning, and has no gap if the queue stops. Waiting chunks are not pinned in the
primary tier, because new stores are worth more than copies. If a waiting chunk is evicted, the queue drops this chunk
and the waiting chunks that need it.

If the cascade of a chunk fails with BUSY, it is retried. After another failure, the chunks that need this chunk are
dropped if they wait, and invalidated in the secondary tier if they are in flight or have arrived.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import BatchedIndex, Extends, Failure, FailureReason, Key, Refusal, Slot, TierIndex
from hybridkv.tiers.stack.in_flight import InFlightMoves
from hybridkv.tiers.stack.moves import Direction, MoveResult
from hybridkv.tiers.stack.options import SecondaryTierOptions

MAX_PREPARED = 512
"""Limit of chunks that are announced to the secondary tier before they are reserved."""
STEP_AGAIN_S = 1.0
"""Seconds after the last progress in which the queue requests further engine steps. Limited, because a tier that
accepts no chunk may never recover."""


class WriteGate(enum.Enum):
    """Permission to write to the secondary tier."""

    OPEN = "write"
    PROBE = "write one chunk, then wait for its outcome"
    BUSY = "wait: a probe is in flight, or the tier backs off"
    SHUT = "do not write: drop the queue"


class _QueueStep(enum.Enum):
    """Result of an attempt to send the first chunk of the queue, if the chunk is not dropped."""

    SENT = "in flight now"
    PRESENT = "in the secondary tier, or in flight"
    LATER = "wait"
    PARKED = "wait outside the queue for a chunk that it needs"


@dataclass(slots=True, eq=False)
class _QueuedChunk:
    """A chunk to copy."""

    number: int
    """Position in the order of sends. Greater than the number of the chunk that this chunk extends."""
    key: Key
    extends: Extends
    num_bytes: int = 0
    """0 until the first attempt to send it."""
    was_sent: bool = False
    is_timed_out: bool = False
    is_forgotten: bool = False


class CascadeQueue:
    """Cascades to one secondary tier: the waiting chunks, and bookkeeping of the chunks in flight.

    Args:
        primary: index of the primary tier.
        secondary: index of the secondary tier.
        in_flight: moves in flight of this tier.
        options: bounds.
        plan: adds a move of a chunk from its primary slot to its secondary slot.
    """

    def __init__(
        self,
        primary: TierIndex,
        secondary: TierIndex,
        in_flight: InFlightMoves,
        options: SecondaryTierOptions,
        plan: Callable[[Key, Slot, Slot], None],
    ) -> None:
        self._primary, self._secondary = primary, secondary
        self._batched = secondary if isinstance(secondary, BatchedIndex) else None
        self._in_flight = in_flight
        self._options = options
        self._plan_move = plan
        self._max_bytes = min(
            options.cascading_share * primary.capacity_bytes, options.arriving_share * secondary.capacity_bytes
        )
        self._numbers = itertools.count()
        self._retries: list[tuple[int, _QueuedChunk]] = []
        """Heap of the chunks to send again, before the queue."""
        self._queue: deque[_QueuedChunk] = deque()
        self.parked: dict[Key, list[_QueuedChunk]] = {}
        """Chunks that wait for a key, by that key. The key is PENDING in the primary tier, or its chunk is parked."""
        self._parked_keys: set[Key] = set()
        self._keys: set[Key] = set()
        """Keys of all waiting chunks: retries, queued and parked."""
        self._is_blocked = False
        """True if the first chunk could not be sent at the last attempt, and nothing has changed since."""
        self._has_new = False
        self._moving: dict[Key, _QueuedChunk] = {}
        self._arrived: dict[Key, _QueuedChunk] = {}
        """Chunks that have arrived, but need a chunk that may still fail."""
        self.since_s = 0.0
        """Time of the last progress: a success, a first send, or a chunk added to an empty queue."""
        self._awake_since_s = 0.0
        """Start of the time in which the queue requests steps: the last success, or the first addition to an empty
        queue after a send."""
        self._has_sent = True

    @property
    def has_queued(self) -> bool:
        """True if a chunk waits and is not parked."""
        return bool(self._queue or self._retries)

    @property
    def has_new(self) -> bool:
        """True if a chunk was added since the last `pump` and may be sent."""
        return self._has_new and not self._is_blocked

    @property
    def is_full(self) -> bool:
        return len(self._keys) >= self._options.max_waiting

    @property
    def num_waiting(self) -> int:
        """Number of waiting chunks."""
        return len(self._keys)

    def needs_step(self, now_s: float) -> bool:
        """True if the caller should step again soon, even if no move is in flight. If False, waiting chunks are sent in
        the next step that has another reason."""
        return bool(self._keys) and now_s - self._awake_since_s < STEP_AGAIN_S

    def add(self, key: Key, extends: Extends, now_s: float) -> MoveResult | None:
        """Queue a chunk if the secondary tier lacks it. Returns the reason if the chunk is dropped, else None."""
        if key in self._keys or not self._secondary.lacks(key):
            return None
        if self.is_full:
            return MoveResult.DROPPED_BUSY
        if not self._keys:
            self.since_s = now_s
            self._is_blocked = False
            if self._has_sent:
                self._awake_since_s, self._has_sent = now_s, False
        self._has_new = True
        self._keys.add(key)
        self._queue.append(_QueuedChunk(next(self._numbers), key, extends))
        return None

    def on_primary_resolved(self, key: Key) -> None:
        """Append the chunks parked for a key to the queue, then the chunks parked for these chunks. Call it when the
        key is no longer PENDING in the primary tier."""
        if not self.parked:
            return
        resolved = deque([key])
        while resolved:
            for chunk in self.parked.pop(resolved.popleft(), ()):
                self._parked_keys.discard(chunk.key)
                chunk.number = next(self._numbers)
                self._queue.append(chunk)
                resolved.append(chunk.key)
                self._is_blocked = False

    def pump(self, gate: Callable[[], WriteGate], now_s: float) -> list[MoveResult]:
        """Send chunks in order, until one has to wait. Returns one reason for each dropped chunk.

        Args:
            gate: returns the permission to write to the secondary tier.
            now_s: current time. The first send of a chunk is progress (`since_s`).
        """
        dropped: list[MoveResult] = []
        self._has_new = False
        write_gate = gate() if self._keys else WriteGate.OPEN
        self.announce_queued(write_gate)
        while self._retries or self._queue:
            chunk = self._retries[0][1] if self._retries else self._queue[0]
            is_first = not chunk.was_sent
            step = self._try(chunk, write_gate)
            self._is_blocked = step is _QueueStep.LATER
            if step is _QueueStep.LATER:
                break
            if self._retries:
                heapq.heappop(self._retries)
            else:
                self._queue.popleft()
            if step is _QueueStep.PARKED:
                continue
            self._keys.discard(chunk.key)
            if step is _QueueStep.SENT:
                self.since_s = now_s if is_first else self.since_s
                write_gate = gate() if write_gate is WriteGate.PROBE else write_gate
            elif isinstance(step, MoveResult):
                dropped.append(step)
                self._on_lost(chunk)
        return dropped

    def announce_queued(self, gate: WriteGate) -> None:
        """Announce the first chunks of the queue together. The tier then looks them up together, not one by one."""
        num_chunks = {WriteGate.OPEN: MAX_PREPARED, WriteGate.PROBE: 1}.get(gate, 0)
        if self._batched is not None and num_chunks and self._queue:
            self._batched.prepare_stores([chunk.key for chunk in islice(self._queue, num_chunks)])

    def _try(self, chunk: _QueuedChunk, gate: WriteGate) -> _QueueStep | MoveResult:
        key, extends = chunk.key, chunk.extends
        if gate is WriteGate.SHUT:
            return MoveResult.DROPPED_OPEN
        if gate is WriteGate.BUSY:
            return _QueueStep.LATER
        moving, secondary = self._moving, self._secondary
        budget_bytes = self._budget_bytes
        if chunk.num_bytes > budget_bytes or budget_bytes <= 0 or len(moving) >= self._options.max_cascading:
            return self._wait_or(MoveResult.DROPPED_BUSY)
        if key in moving:  # invalidated while in flight
            return MoveResult.DROPPED_BUSY if moving[key].is_timed_out else _QueueStep.LATER
        if extends and secondary.lacks(extends[-1]):
            return self._park(chunk, extends[-1])
        slot = self._primary.pin(key)
        if slot is None:
            return MoveResult.DROPPED_EVICTED
        num_bytes = chunk.num_bytes = slot.num_bytes
        fits = num_bytes <= budget_bytes
        step = self._send(chunk, slot) if fits else self._wait_or(MoveResult.DROPPED_BUSY)
        if step is not _QueueStep.SENT:
            self._primary.unpin(key)
        return step

    @property
    def _budget_bytes(self) -> float:
        """Number of bytes that may still be sent. Infinite if no cascade is in flight, so that a chunk larger than the
        limit is sent alone."""
        moving_bytes = self._in_flight.bytes_in_flight[Direction.CASCADE]
        return self._max_bytes - moving_bytes if moving_bytes else math.inf

    def _wait_or(self, otherwise: MoveResult) -> _QueueStep | MoveResult:
        """LATER while a cascade is in flight that has not timed out, else `otherwise`."""
        return _QueueStep.LATER if self._in_flight.num_live[Direction.CASCADE] else otherwise

    def _park(self, chunk: _QueuedChunk, needed: Key) -> _QueueStep | MoveResult:
        """Park a chunk while the key that it needs is PENDING in the primary tier or parked. If the key is neither, the
        chunk is dropped."""
        if needed not in self._parked_keys and self._primary.lookup(needed) is not LookupResult.PENDING:
            return MoveResult.DROPPED_ORPHAN
        self.parked.setdefault(needed, []).append(chunk)
        self._parked_keys.add(chunk.key)
        return _QueueStep.PARKED

    def _send(self, chunk: _QueuedChunk, primary: Slot) -> _QueueStep | MoveResult:
        secondary = self._secondary.reserve(chunk.key, chunk.num_bytes, chunk.extends)
        if isinstance(secondary, Slot):
            self._has_sent = True
            self._plan_move(chunk.key, primary, secondary)
            self._moving[chunk.key] = chunk
            chunk.was_sent = True
            return _QueueStep.SENT
        if secondary is Refusal.PRESENT:
            return _QueueStep.PRESENT
        if secondary is Refusal.BUSY:
            return _QueueStep.LATER
        # Chunks in flight cannot be evicted before they arrive. After that there may be room.
        is_waiting = secondary is Refusal.NO_ROOM
        return self._wait_or(MoveResult.DROPPED_NO_ROOM) if is_waiting else MoveResult.DROPPED_NO_ROOM

    def end_batch(self) -> None:
        """End the batch of chunks sent since the last call."""
        if self._batched is not None:
            self._batched.end_batch()

    def on_timeout(self, key: Key) -> None:
        """Record that a cascade timed out."""
        self._moving[key].is_timed_out = True

    def on_ended(self, key: Key, failure: Failure | None, now_s: float) -> bool:
        """Record the end of a cascade. True if the cascade is retried because the medium was BUSY."""
        chunk = self._moving.pop(key)
        self._is_blocked = False
        if failure is None:
            self.since_s = self._awake_since_s = now_s
            self._on_arrived(chunk)
        elif failure.reason is FailureReason.BUSY and not (chunk.is_timed_out or chunk.is_forgotten):
            if key in self._keys:  # invalidated while in flight, and added again: sent at its new place
                self._on_lost(chunk)
            else:
                heapq.heappush(self._retries, (chunk.number, chunk))
                self._keys.add(key)
            return True
        else:
            self._on_lost(chunk)
        return False

    def _on_arrived(self, chunk: _QueuedChunk) -> None:
        if self._may_lose_needed(chunk, self._arrived):
            self._arrived[chunk.key] = chunk
            if len(self._arrived) > self._options.max_cascading:
                self._trim_arrived()
        elif self._arrived and not self._moving and not self._retries:
            self._arrived.clear()

    def _may_lose_needed(self, chunk: _QueuedChunk, arrived: Mapping[Key, _QueuedChunk]) -> bool:
        """True if the chunk that this chunk needs may still fail."""
        return any(needed in self._moving or needed in arrived or needed in self._keys for needed in chunk.extends[-1:])

    def _trim_arrived(self) -> None:
        """Forget arrived chunks that depend on no chunk that can still fail; then the oldest, if too many are left."""
        kept: dict[Key, _QueuedChunk] = {}
        for chunk in sorted(self._arrived.values(), key=lambda each: each.number):
            if self._may_lose_needed(chunk, kept):
                kept[chunk.key] = chunk
        self._arrived = dict(list(kept.items())[-(self._options.max_cascading // 2 + 1) :])

    def _on_lost(self, chunk: _QueuedChunk) -> None:
        """Invalidate the chunks that need a lost chunk, directly or not, and were sent after it. Does nothing for a
        chunk that was never sent."""
        if not chunk.was_sent:
            return
        lost = {chunk.key}
        later = (each for each in (*self._arrived.values(), *self._moving.values()) if each.number > chunk.number)
        for each in sorted(later, key=lambda each: each.number):
            if not lost.isdisjoint(each.extends[-1:]):
                lost.add(each.key)
                each.is_forgotten = True
                self._arrived.pop(each.key, None)
                self._secondary.invalidate(each.key)

    def time_out(self, before_s: float) -> list[MoveResult]:
        """Drop all waiting chunks if there was no progress since `before_s`. Invalidates sent chunks that need a
        dropped retry."""
        if not self._keys or self.since_s > before_s:
            return []
        dropped = [MoveResult.DROPPED_LATE] * len(self._keys)
        retries = self._retries
        self._drop_all()
        for _, chunk in retries:
            self._on_lost(chunk)
        return dropped

    def _drop_all(self) -> None:
        self._retries, self._queue, self._is_blocked, self._has_new = [], deque(), False, False
        self.parked.clear()
        self._parked_keys.clear()
        self._keys.clear()

    def clear(self) -> None:
        """Forget the waiting chunks. Cascades in flight still end, but are not retried."""
        self._drop_all()
        for chunk in self._moving.values():
            chunk.is_forgotten = True
        self._arrived.clear()
