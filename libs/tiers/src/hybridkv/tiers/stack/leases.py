"""Promotion leases: chunks that a request keeps pinned in the primary tier, or waits for, until it releases the lease.

Also the deadlines of a stack: of leases, of moves, and of backoffs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

import msgspec

from hybridkv.tiers.contract import Key, TierIndex
from hybridkv.tiers.stack.secondary import SecondaryTierState, StackContext

_NEVER_S = math.inf


class LeaseFailure(enum.StrEnum):
    """Why a promotion lease failed."""

    TIMEOUT = "timeout"
    """A chunk did not arrive in time."""
    LOST = "lost"
    """A chunk could not be promoted or stored, or was invalidated."""


class PromotionLease(msgspec.Struct):
    """Chunks that one request uses. Created by `TierStack.acquire`, ended by `TierStack.release`."""

    owner: str
    since_s: float
    pinned: list[Key] = []
    """Pinned in the primary tier."""
    waiting: set[Key] = set()
    """Not in the primary tier yet: being promoted or stored."""
    source: str = ""
    """Farthest tier from which a waiting chunk is promoted, even if another request started the promotion. The nearest
    secondary tier if no chunk is being promoted."""
    failure: LeaseFailure | None = None
    """If set, the lease pins no chunk any more."""

    @property
    def is_ready(self) -> bool:
        return not self.waiting and self.failure is None


class PromotionLeases:
    """All leases of one stack.

    Args:
        primary: index of the primary tier.
        timeout_s: time limit of a waiting lease.
    """

    def __init__(self, primary: TierIndex, timeout_s: float) -> None:
        self._primary = primary
        self.timeout_s = timeout_s
        self.by_owner: dict[str, PromotionLease] = {}
        self._timeouts = 0

    def current(self, owner: str) -> PromotionLease | None:
        """Lease of this owner, None if there is none. The lease fails with LOST if one of its chunks was invalidated
        after the pin, because no load can pin that chunk again."""
        lease = self.by_owner.get(owner)
        if lease is not None and lease.pinned and not self._are_offered(lease.pinned):
            self._fail(lease, LeaseFailure.LOST)
        return lease

    def _are_offered(self, keys: Sequence[Key]) -> bool:
        return self._primary.leading(keys) == len(keys) and not self._primary.any_pending(keys)

    def release(self, owner: str) -> None:
        """End a lease, if there is one."""
        lease = self.by_owner.pop(owner, None)
        if lease is not None:
            self.unpin(lease)

    def unpin(self, lease: PromotionLease) -> None:
        """Unpin the chunks of a lease and end its wait."""
        self._primary.unpin_all(reversed(lease.pinned))
        lease.pinned.clear()
        lease.waiting.clear()

    def _fail(self, lease: PromotionLease, failure: LeaseFailure) -> None:
        self.unpin(lease)
        lease.failure = failure

    def on_arrived(self, key: Key) -> None:
        """Pin a chunk that arrived in the primary tier, once for each lease that waits for it."""
        for lease in self.by_owner.values():
            if key in lease.waiting:
                lease.waiting.discard(key)
                self._primary.pin(key)
                lease.pinned.append(key)

    def on_lost(self, key: Key) -> None:
        """Fail the leases that wait for a chunk that will not arrive."""
        for lease in self.by_owner.values():
            if key in lease.waiting:
                self._fail(lease, LeaseFailure.LOST)

    def fail_all(self) -> None:
        """Fail every lease with LOST."""
        for lease in self.by_owner.values():
            self._fail(lease, LeaseFailure.LOST)

    def time_out_waiters(self, keys: Iterable[Key]) -> None:
        """Fail the leases that wait for one of these keys. The failure is TIMEOUT."""
        for key in keys:
            waiters = [lease for lease in self.by_owner.values() if key in lease.waiting]
            for lease in waiters:
                self._fail(lease, LeaseFailure.TIMEOUT)
            self._timeouts += len(waiters)

    def pass_time(self, now_s: float) -> float:
        """Fail the leases that still wait at their deadline. Returns the next deadline."""
        limit_s, due_s = self.timeout_s, math.inf
        for lease in self.by_owner.values():
            if lease.waiting and now_s - lease.since_s >= limit_s:
                self._fail(lease, LeaseFailure.TIMEOUT)
                self._timeouts += 1
            elif lease.waiting:
                due_s = min(due_s, lease.since_s + limit_s)
        return due_s

    def take_timeouts(self) -> int:
        """Timed-out leases since the last call."""
        timeouts, self._timeouts = self._timeouts, 0
        return timeouts


class StackDeadlines:
    """All deadlines of one stack.

    Args:
        tiers: secondary tiers of the stack.
        leases: promotion leases of the stack.
        context: shared state; has the time of the next deadline.
    """

    def __init__(self, tiers: Sequence[SecondaryTierState], leases: PromotionLeases, context: StackContext) -> None:
        self._tiers = tiers
        self._leases = leases
        self._context = context
        self._clock = context.clock
        self._ticked_s = context.clock()
        """Time of the last `tick`."""

    def tick(self) -> None:
        """Apply timeouts; call it once a step.

        A lease fails at its deadline. A move times out one call after its deadline, because the caller may have been
        stalled between two calls. So the caller can still report a move that ended in time.
        """
        now_s = self._clock()
        for tier in self._tiers:
            timed_out = tier.time_out(self._ticked_s, now_s)
            if timed_out:
                self._time_out_waiters(tier, timed_out)
        self._ticked_s = now_s
        self._pass_time(now_s)

    def check(self) -> None:
        """Apply due timeouts without a `tick`. Costs one comparison if there is no deadline."""
        due_s = self._context.due_s
        if due_s == _NEVER_S:
            return
        now_s = self._clock()
        if now_s < due_s:
            return
        for tier in self._tiers:
            self._time_out_waiters(tier, tier.check_timeouts(now_s))
        self._pass_time(now_s)

    def _time_out_waiters(self, tier: SecondaryTierState, keys: Sequence[Key]) -> None:
        """Fail leases that wait for these keys, if the time limit of this tier is shorter than the limit of leases."""
        if tier.load_timeout_s < self._leases.timeout_s:
            self._leases.time_out_waiters(keys)

    def _pass_time(self, now_s: float) -> None:
        due_s = _NEVER_S
        for tier in self._tiers:
            due_s = min(due_s, tier.pass_time(now_s))
        self._context.due_s = min(due_s, self._leases.pass_time(now_s))
