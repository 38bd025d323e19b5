"""State of one secondary tier in a stack: breakers, moves in flight, open lookups, cascade queue, counts.

Each tier has separate state, so a slow, full or dead tier does not stop the others. One thing is shared: timed-out
promotions of all tiers count against the limit of promotions of each tier. The stack selects the tier for each chunk,
and manages the promotion leases.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.tiers.contract import (
    Extends,
    Failure,
    FailureReason,
    HintedLookups,
    Key,
    LookupCounts,
    Refusal,
    Slot,
    TierIndex,
)
from hybridkv.tiers.stack.cascade_queue import CascadeQueue, WriteGate
from hybridkv.tiers.stack.health import BreakerState, TierHealth
from hybridkv.tiers.stack.in_flight import InFlightMove, InFlightMoves, SharedMoves
from hybridkv.tiers.stack.moves import Direction, MoveCounts, MoveOutcome, MoveResult, MoveTally
from hybridkv.tiers.stack.options import CascadePolicy, SecondaryTierOptions

_PROMOTE, _DONE, _FAILED = Direction.PROMOTE, MoveResult.DONE, MoveResult.FAILED
FIRST_READ_S_PER_BYTE = 1e-9
"""Expected seconds to promote one byte before the first promotion, and long after the last one."""
FIRST_READ_BYTES = 1 << 20
"""First value of the moving average of the bytes of a busy period of promotions."""
HALF_LIFE_S = 30.0
NEW_SHARE = 0.25
"""Share of the newest measurement in a moving average."""
_CHUNK_IS_NOT_AT_FAULT = (FailureReason.BUSY, FailureReason.CLOSED)
"""Failures that the chunk did not cause. The chunk is not invalidated after them."""


@dataclass(frozen=True, slots=True)
class SecondaryTier:
    """A secondary tier, as configured for a stack.

    Args:
        name: names the tier in moves and counts; unique in the stack.
        index: index of the tier.
        options: options of the tier.
    """

    name: str
    index: TierIndex
    options: SecondaryTierOptions = field(default_factory=SecondaryTierOptions)


@dataclass(slots=True)
class StackContext:
    """State that the parts of one stack share.

    Args:
        primary: index of the primary tier.
        clock: seconds.
        moves: shared state of all moves.
    """

    primary: TierIndex
    clock: Callable[[], float]
    moves: SharedMoves
    due_s: float = math.inf
    """Time of the next deadline or backoff end."""

    def wake_at(self, due_s: float) -> None:
        """Add a deadline."""
        self.due_s = min(self.due_s, due_s)


class _OpenLookup(NamedTuple):
    deadline_s: float
    before: LookupCounts
    """Lookup counts of the tier when the lookup was sent."""


class SecondaryTierState:
    """Runtime state of one secondary tier.

    Args:
        tier: configuration of the tier.
        position: index among the secondary tiers; the nearest is 0.
        num_tiers: number of secondary tiers.
        context: state shared with the stack.
    """

    def __init__(self, tier: SecondaryTier, position: int, num_tiers: int, context: StackContext) -> None:
        self.name, self.index, self._options = tier.name, tier.index, tier.options
        self._context, self._primary, self._clock = context, context.primary, context.clock
        self.health = TierHealth(tier.options.breaker, tier.options.shortage)
        self.in_flight = InFlightMoves(tier.name, itertools.count(position + num_tiers, num_tiers), context.moves)
        self.num_timeout_events = 0
        """Number of promotions that timed out, plus number of timed-out promotions that ended. Each of these events
        changes a lookup answer."""
        self._counts = MoveTally()
        self._lookups: deque[_OpenLookup] = deque()
        """Lookups without an answer, the oldest first."""
        self._max_promoting_bytes = tier.options.promoting_share * context.primary.capacity_bytes
        self._read_s, self._read_bytes = FIRST_READ_BYTES * FIRST_READ_S_PER_BYTE, float(FIRST_READ_BYTES)
        self._measured_s = context.clock()
        """Moving averages of seconds and bytes of a busy period of promotions, and time of the last measurement."""
        self._reading_since_s = 0.0
        self._num_read_bytes = 0
        """Start of the current busy period of promotions, and bytes that have arrived since."""
        self._checked_s = context.clock()
        """Time of the last check by `check_timeouts`."""
        self.queue: CascadeQueue | None = None
        """None if no chunk cascades to this tier."""
        self.is_eager = tier.options.cascades is CascadePolicy.ALL
        """True if chunks cascade when they are stored, not only when they are reused."""
        if tier.options.cascades is not CascadePolicy.NOTHING:
            self.queue = CascadeQueue(context.primary, tier.index, self.in_flight, tier.options, self._plan_cascade)

    @property
    def load_timeout_s(self) -> float:
        return self._options.load_timeout_s

    @property
    def async_lookup_timeout_s(self) -> float:
        """Time limit of an async lookup, at most `load_timeout_s`."""
        return min(self._options.async_lookup_timeout_s, self._options.load_timeout_s)

    def is_usable(self) -> bool:
        """True if chunks may be looked up in this tier and promoted from it now.

        While the breaker of promotions is probing, False if a promotion is in flight. If timed-out promotions of all
        tiers reserve more than `promoting_share`, only tiers without timed-out promotions are usable.
        """
        in_flight, health = self.in_flight, self.health
        if in_flight.timed_out_bytes and self._context.moves.timed_out_bytes > self._max_promoting_bytes:
            return False
        return health.can_promote or health.allows(_PROMOTE, in_flight.num_live[_PROMOTE])

    def accepts_lookup(self) -> bool:
        """True if an async lookup may be sent now. Always False for a tier without async lookups. May report answered
        and timed-out lookups to the breaker."""
        if not self.index.has_async_lookups or not self.is_usable():
            return False
        if self._lookups and not self.health.allows_lookup(len(self._lookups)):
            self._check_lookups(self._clock())  # the probe may have been answered before its deadline
        return self.health.allows_lookup(len(self._lookups))

    def start_lookup(self, keys: Sequence[Key], now_s: float, hinted: Sequence[tuple[str, int]] = ()) -> None:
        """Send an async lookup. If the index raises an exception, the breaker counts the lookup as timed out. `hinted`:
        addresses for `HintedLookups`."""
        if not keys:
            return
        index, deadline_s = self.index, now_s + self.async_lookup_timeout_s
        try:
            before = index.lookup_counts
            if hinted and isinstance(index, HintedLookups):
                index.start_lookup_at(hinted, keys, deadline_s)
            else:
                index.start_lookup(keys, deadline_s)
        except Exception:  # an error of a remote tier must not stop the engine
            self.health.on_lookup_timeout(now_s)
            self._context.wake_at(self.health.next_change_s)
            return
        self._lookups.append(_OpenLookup(deadline_s, before))
        self._context.wake_at(deadline_s)

    def has_open_lookups(self) -> bool:
        """True if a lookup is open: the tier has not answered it, and its deadline has not passed. Reports the other
        lookups to the breaker."""
        if self._lookups:
            self._check_lookups(self._clock())
        return bool(self._lookups)

    def _check_lookups(self, now_s: float) -> None:
        """Report answered and timed-out lookups to the breaker.

        One answer counts for every lookup sent before it, since it shows that the tier works. A lookup counts as
        neither if its keys were all withdrawn, or not sent.
        """
        lookups = self._lookups
        while lookups:
            (deadline_s, before), counts = lookups[0], self.index.lookup_counts
            if counts.num_answered > before.num_answered:
                self.health.on_lookup_answered()
            elif now_s < deadline_s:
                break
            elif counts.num_timed_out > before.num_timed_out:
                self.health.on_lookup_timeout(now_s)
            lookups.popleft()

    def promote_refusal(self, num_bytes: int) -> Refusal | None:
        """Reason why this many bytes cannot be promoted now for a waiting request. None if they can."""
        in_flight = self.in_flight
        return self._refusal(num_bytes, in_flight.bytes_in_flight[_PROMOTE] - in_flight.prefetching_bytes)

    def prefetch_refusal(self, num_bytes: int) -> Refusal | None:
        """Reason why this many bytes cannot be prefetched now. None if they can. `num_bytes` is 0 for an unknown size.

        BUSY while promotions with waiting requests are in flight, because they go first; during a backoff; and at a
        limit. CLOSED if promotions are not usable or are probing: a prefetch is never a probe.
        """
        in_flight = self.in_flight
        if not self.health.can_promote:
            return Refusal.CLOSED
        if in_flight.num_live[_PROMOTE] > in_flight.num_prefetching:
            return Refusal.BUSY
        if in_flight.num_prefetching >= self._options.max_prefetching:
            return Refusal.BUSY
        return self._refusal(num_bytes, in_flight.bytes_in_flight[_PROMOTE])

    def _refusal(self, num_bytes: int, moving: int) -> Refusal | None:
        if num_bytes > self._primary.capacity_bytes:
            return Refusal.TOO_LARGE
        if self.health.is_backing_off(_PROMOTE):
            return Refusal.BUSY
        # If no other promotion of this tier is in flight, any size is allowed, also after timeouts of other tiers.
        if moving and moving + self._context.moves.timed_out_bytes + num_bytes > self._max_promoting_bytes:
            return Refusal.BUSY
        return None

    def plan(self, direction: Direction, key: Key, primary: Slot, secondary: Slot, is_prefetch: bool = False) -> None:
        """Plan a move between two slots."""
        now_s = self._clock()
        if direction is _PROMOTE and not self.in_flight.num_live[_PROMOTE]:
            self._reading_since_s, self._num_read_bytes = now_s, 0
        self.in_flight.plan(direction, key, primary, secondary, now_s, is_prefetch)
        self._context.wake_at(now_s + self._options.load_timeout_s)

    def _plan_cascade(self, key: Key, primary: Slot, secondary: Slot) -> None:
        self.plan(Direction.CASCADE, key, primary, secondary)

    def cascade(self, key: Key, extends: Extends, *, is_reuse: bool) -> None:
        """Queue a chunk for this tier, if the policy includes the chunk and the tier lacks it. Pumps a full queue
        first."""
        queue = self.queue
        if queue is not None and (is_reuse or self.is_eager):
            if queue.is_full and queue.has_new:
                self.pump()
            dropped = queue.add(key, extends, self._clock())
            if dropped is not None:
                self._drop(dropped)

    @property
    def num_waiting(self) -> int:
        """Number of chunks in the cascade queue."""
        return 0 if self.queue is None else self.queue.num_waiting

    def clear(self) -> None:
        """Empty the cascade queue."""
        if self.queue is not None:
            self.queue.clear()

    @property
    def has_new(self) -> bool:
        """True if a chunk was queued since the last `pump` and may be sent."""
        return self.queue is not None and self.queue.has_new

    def pump(self) -> None:
        """Send the queued chunks that may be sent now. Counts the chunks that the queue drops, for example because they
        were evicted, find no room, or the breaker is open."""
        queue = self.queue
        if queue is not None and queue.has_queued:
            for dropped in queue.pump(self._gate, self._clock()):
                self._drop(dropped)
            if queue.num_waiting:
                self._context.wake_at(queue.since_s + self._options.load_timeout_s)

    def announce_queued(self) -> None:
        """If a chunk was queued since the last `pump`, announce the first chunks of the queue to the tier. The tier can
        look them up while the engine computes a step."""
        queue = self.queue
        if queue is not None and queue.has_new:
            queue.announce_queued(self._gate())

    def _gate(self) -> WriteGate:
        state = self.health.state(Direction.CASCADE)
        if state is BreakerState.OPEN:
            return WriteGate.SHUT
        if self.health.is_backing_off(Direction.CASCADE):
            return WriteGate.BUSY
        if state is BreakerState.PROBING:
            return WriteGate.BUSY if self.in_flight.num_live[Direction.CASCADE] else WriteGate.PROBE
        return WriteGate.OPEN

    def _drop(self, dropped: MoveResult) -> None:
        self._counts.add(Direction.CASCADE, dropped)

    def report(self, move_id: int, outcome: MoveOutcome) -> InFlightMove | None:
        """Record the outcome of a move on some ranks. When all ranks have reported, updates breakers and index, for a
        cascade also the primary index, and returns the move; else returns None."""
        in_flight = self.in_flight.report(move_id, outcome)
        if in_flight is None:
            return None
        move, failure, health = in_flight.move, in_flight.failure, self.health
        direction = move.direction
        # The breaker has counted a timed-out move as a failure already.
        if (failure is not None or direction in health.degraded) and not in_flight.is_timed_out:
            health.on_move(direction, failure, self._clock())
            self._context.wake_at(health.next_change_s)
        if direction is _PROMOTE:
            self.num_timeout_events += in_flight.is_timed_out
            if failure is None and not in_flight.is_timed_out:
                self._measure_read(in_flight.num_bytes)
            # Before the unpin, which may drop an expired entry: the index must still know the place of the wrong bytes.
            if failure is not None and failure.reason not in _CHUNK_IS_NOT_AT_FAULT:
                self.index.invalidate(move.key, failure.reason)
            self.index.unpin(move.key)
        elif self._end_or_retry_cascade(move.key, failure):
            return in_flight
        self._counts.add(direction, _DONE if failure is None else _FAILED, in_flight.num_bytes, failure)
        if failure is not None and direction is not _PROMOTE:
            self.pump()
        return in_flight

    def _measure_read(self, num_bytes: int) -> None:
        """Count the bytes of a promotion. At the end of a busy period, update the moving averages."""
        self._num_read_bytes += num_bytes
        if not self.in_flight.num_live[_PROMOTE]:
            now_s = self._clock()
            self._read_s += (now_s - self._reading_since_s - self._read_s) * NEW_SHARE
            self._read_bytes += (self._num_read_bytes - self._read_bytes) * NEW_SHARE
            self._measured_s = now_s

    @property
    def read_s_per_byte(self) -> float:
        """Expected seconds to promote one byte of one rank. The weight of the measurements halves in each
        `HALF_LIFE_S` after the last one, so a slow tier is tried again."""
        share: float = 0.5 ** ((self._clock() - self._measured_s) / HALF_LIFE_S)
        return FIRST_READ_S_PER_BYTE + (self._read_s / self._read_bytes - FIRST_READ_S_PER_BYTE) * share

    def _end_or_retry_cascade(self, key: Key, failure: Failure | None) -> bool:
        """Record the end of a cascade in both indexes. True if the cascade is retried."""
        assert self.queue is not None
        primary = self._primary
        if failure is None:
            self.index.commit(key)
        else:
            self.index.abort(key)
            if failure.reason is FailureReason.CHECKSUM:
                # The copied bytes do not match the seal: the bytes in the primary tier are bad.
                primary.invalidate(key, failure.reason)
        primary.unpin(key)
        return self.queue.on_ended(key, failure, self._clock())

    def check_timeouts(self, now_s: float) -> list[Key]:
        """Check for timeouts, for callers other than `TierStack.tick`. Returns the keys of newly timed-out promotions.

        Checks at most once per `load_timeout_s`, and times out only moves that were overdue at the previous check: a
        caller that only looks up keys may not have polled the media since.
        """
        if now_s - self._checked_s < self._options.load_timeout_s:
            return []
        timed_out = self.time_out(self._checked_s, now_s)
        self._checked_s = now_s
        return timed_out

    def time_out(self, polled_s: float, now_s: float) -> list[Key]:
        """Time out the moves that were overdue at `polled_s`, the last time at which the caller could report their end.
        Also drops all waiting chunks if the queue made no progress in the `load_timeout_s` before `polled_s`. Returns
        the keys of newly timed-out promotions."""
        timed_out: list[Key] = []
        before_s = polled_s - self._options.load_timeout_s
        for in_flight in self.in_flight.time_out(before_s):
            self.health.on_timeout(in_flight.move.direction, now_s)
            if in_flight.move.direction is _PROMOTE:
                self.num_timeout_events += 1
                timed_out.append(in_flight.move.key)
            elif self.queue is not None:
                self.queue.on_timeout(in_flight.move.key)
        if self.queue is not None and self.queue.num_waiting:
            for dropped in self.queue.time_out(before_s):
                self._drop(dropped)
        return timed_out

    def pass_time(self, now_s: float) -> float:
        """Update lookups and breakers. Returns the time of the next change."""
        if self._lookups:
            self._check_lookups(now_s)
        self.health.tick(now_s)
        started_s = self.in_flight.oldest_live_s()
        if self.queue is not None and self.queue.num_waiting:
            started_s = min(started_s, self.queue.since_s)
        lookup_s = self._lookups[0].deadline_s if self._lookups else math.inf
        due_s = max(started_s, self._checked_s) + self._options.load_timeout_s
        return min(due_s, self.health.next_change_s, lookup_s)

    def needs_step(self) -> bool:
        """True if a move may still end in time, or may start soon."""
        if self.in_flight.has_live():
            return True
        return self.num_waiting > 0 and self.queue is not None and self.queue.needs_step(self._clock())

    def take_counts(self) -> MoveCounts:
        """Counts since the last call."""
        counts, self._counts = self._counts, MoveTally()
        return counts.as_counts(self.health.take_openings())
