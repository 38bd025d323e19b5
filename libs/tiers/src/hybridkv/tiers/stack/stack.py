"""Scheduler half of a stack: one primary tier and any number of secondary tiers, the nearest first.

A lookup moves no chunk. The caller chooses a boundary at which every group can resume, and acquires a promotion lease
on the chunks of that boundary. The stack promotes each missing chunk of a lease from the nearest usable tier that holds
the chunk. Chunks stored in the primary tier cascade in the background, within limits, to each secondary tier that lacks
them, if the `CascadePolicy` of the tier includes them. Promoted chunks cascade to other tiers only after a call of
`cascade`, because a promotion does not include the keys that a chunk extends. Prefetches promote chunks before a
request waits for them (`prefetches.py`). A tier starts no prefetch while it promotes for a lease.

The stack moves no bytes: `take_moves` returns the moves for the media, `on_move` records their outcomes.

No call blocks, except `clear` and `close`: a disk's index waits a limited time for its files. A lease waits until all
its chunks have arrived, one of them is lost, or the deadline passes. Lookups, `acquire`, `lease`, `prefetch`,
`take_moves` and `tick` check the deadlines. The space of a timed-out promotion stays reserved until the media report
its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import UNSPECIFIED, Extends, Key, NewChunk, Refusal, Slot, TierIndex
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.stack.health import BreakerState
from hybridkv.tiers.stack.in_flight import SharedMoves
from hybridkv.tiers.stack.leases import PromotionLease, PromotionLeases, StackDeadlines
from hybridkv.tiers.stack.moves import Direction, MoveOutcome, StackCounts, TierMove
from hybridkv.tiers.stack.options import SecondaryTierOptions
from hybridkv.tiers.stack.prefetches import Prefetches
from hybridkv.tiers.stack.promotions import Promotions
from hybridkv.tiers.stack.secondary import SecondaryTier, SecondaryTierState, StackContext
from hybridkv.tiers.stack.view import StackView

# Every call uses these members. An attribute lookup on an enum takes more time than a module variable.
_PENDING, _HIT = LookupResult.PENDING, LookupResult.HIT
_PROMOTE = Direction.PROMOTE


class TierStack:
    """One primary tier and any number of secondary tiers. Not thread-safe: one thread uses it, as every `TierIndex`.

    `lookup`, `leading`, `last_held`, `any_pending`, `start_lookup` and `expected_lookup_times` are those of
    `StackView`. Lookups in `primary` use no secondary tier.

    Args:
        primary: index of the primary tier.
        secondary: the secondary tiers, the nearest first.
        num_ranks: number of ranks. Each rank reports the outcome of every move.
        clock: seconds.

    Raises:
        TierConfigurationError: two tiers have the same name.
    """

    def __init__(
        self, primary: TierIndex, secondary: Sequence[SecondaryTier], num_ranks: int, clock: Callable[[], float]
    ) -> None:
        names = [tier.name for tier in secondary]
        if len(set(names)) != len(names):
            raise TierConfigurationError("secondary", "unique names", names)
        self.primary = primary
        """Index of the primary tier."""
        self._clock = clock
        self._moves = SharedMoves(num_ranks)
        self._context = StackContext(primary, clock, self._moves)
        self._tiers = tuple(
            SecondaryTierState(tier, position, len(names), self._context) for position, tier in enumerate(secondary)
        )
        self._cascading = tuple(tier for tier in self._tiers if tier.queue is not None)
        self._eager = tuple(tier for tier in self._cascading if tier.is_eager)
        self._queues = tuple(tier.queue for tier in self._tiers if tier.queue is not None)
        self.secondary: Mapping[str, TierIndex] = {tier.name: tier.index for tier in secondary}
        """Indexes of the secondary tiers by name, the nearest first."""
        self._nearest = names[0] if names else ""
        self._by_name = {tier.name: tier for tier in self._tiers}
        self._load_timeout_s = max(
            (tier.load_timeout_s for tier in self._tiers), default=SecondaryTierOptions().load_timeout_s
        )
        """Time limit of a waiting lease: the longest `load_timeout_s` of all tiers."""
        self.has_async_lookups = any(tier.index.has_async_lookups for tier in secondary)
        """True if a secondary tier needs async lookups."""
        self._leases = PromotionLeases(primary, self._load_timeout_s)
        self._deadlines = StackDeadlines(self._tiers, self._leases, self._context)
        self._check_deadlines = self._deadlines.check
        self._view = StackView(self._context, self._tiers, self._check_deadlines)
        # Without secondary tiers, only the primary tier can hold a key, and no deadline changes an answer.
        view: StackView | TierIndex = self._view if self._tiers else primary
        self.lookup, self.leading = view.lookup, view.leading
        self.last_held, self.any_pending = view.last_held, view.any_pending
        self.start_lookup, self.expected_lookup_times = self._view.start_lookup, self._view.expected_lookup_times
        self._promotions = Promotions(primary, self._tiers, self._pump_new)
        self._prefetches = Prefetches(primary, self._promotions, self._load_timeout_s, self._touch_all)

    def breaker_state(self, direction: Direction, tier: str) -> BreakerState:
        """State of the breaker of one direction of a secondary tier."""
        self._check_deadlines()
        return self._by_name[tier].health.state(direction)

    @property
    def load_timeout_s(self) -> float:
        """Time limit of a waiting lease, and of a prefetch."""
        return self._load_timeout_s

    # Lookups.

    @property
    def generation(self) -> int:
        """Changes whenever the answer of any lookup may have changed."""
        self._check_deadlines()
        return self._view.generation

    @property
    def lookup_wait_s(self) -> float:
        """Longest time, in seconds, from `start_lookup` until every key is answered or counts as missing. 0 if no tier
        accepts an async lookup now."""
        self._check_deadlines()
        return self._view.lookup_wait_s

    def measured_lookups(self) -> dict[str, tuple[float, float, float]]:
        """Times of each tier that has answered an async lookup, by tier name: the time limit of a lookup, then the two
        times of `expected_lookup_times`. All in seconds."""
        return {
            tier.name: (tier.async_lookup_timeout_s, tier.index.answer_s, tier.read_s_per_byte)
            for tier in self._tiers
            if tier.index.has_async_lookups and tier.index.lookup_counts.num_answered
        }

    def is_lookup_pending(self, key: Key) -> bool:
        """True if a key is PENDING only because of async lookups."""
        self._check_deadlines()
        return self._view.is_lookup_pending(key)

    def missing_in_cascading(self, key: Key) -> bool:
        """True if a secondary tier lacks this key. Tiers with the policy NOTHING do not count."""
        return any(tier.index.lacks(key) for tier in self._cascading)

    def in_all_eager_secondaries(self, keys: Sequence[Key]) -> bool:
        """True if every secondary tier with the policy ALL holds or is storing all these keys."""
        return all(_leading_held(tier.index, keys) == len(keys) for tier in self._eager)

    def leading_cascading(self, keys: Sequence[Key]) -> int:
        """Number of leading keys that every secondary tier holds or is storing. Tiers with the policy NOTHING do not
        count."""
        for tier in self._cascading:
            keys = keys[: _leading_held(tier.index, keys)]
        return len(keys)

    # The primary tier alone.

    def in_primary(self, key: Key) -> bool:
        """True if the primary tier holds the key now."""
        return self.primary.lookup(key) is _HIT

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        """Pin keys in the primary tier, all or none, and return their slots."""
        slots = self.primary.pin_all(keys)
        if slots is not None:
            self._prefetches.on_used(keys)
        return slots

    def unpin_all(self, keys: Iterable[Key]) -> None:
        """Undo one `pin_all`."""
        self.primary.unpin_all(keys)

    def invalidate_primary(self, key: Key) -> None:
        """Invalidate a key in the primary tier alone, because its bytes there are bad or replaced. The bytes in
        secondary tiers are verified when they are read."""
        self.primary.invalidate(key)

    # Leases.

    def acquire(self, owner: str, keys: Sequence[Key], since_s: float | None = None) -> PromotionLease | Refusal:
        """Lease chunks: pin the chunks that are in the primary tier, and promote the others.

        Call it with keys that were all HIT or PENDING. Releases an older lease of this owner. A refusal pins nothing:
        PRESENT if a key is gone or has a timed-out promotion; BUSY if too much is in flight, during a backoff, or while
        prefetches use the space; NO_ROOM or TOO_LARGE if the primary tier cannot hold all chunks at once.

        Args:
            owner: owner of the lease.
            keys: keys of the chunks. After the release, the chunks that the lease waited for are evicted first, the
                last to arrive first; then the other chunks, the last key first.
            since_s: time at which the owner started to wait, by the stack's clock; None: now. The deadline counts from
                this time.
        """
        self._check_deadlines()
        self._prefetches.on_acquire(owner)
        if owner in self._leases.by_owner:
            self.release(owner)
        lease = PromotionLease(owner, self._clock() if since_s is None else since_s, source=self._nearest)
        timed_out_keys, pinned, pin, lookup = (
            self._moves.timed_out_keys,
            lease.pinned,
            self.primary.pin,
            self.primary.lookup,
        )
        missing: list[Key] = []
        refusal: Refusal | None = None
        rest = keys
        if timed_out_keys.isdisjoint(keys) and self.primary.pin_all(keys) is not None:
            pinned += keys
            rest = ()
        for key in rest:
            if key in timed_out_keys:
                refusal = Refusal.PRESENT
            elif pin(key) is not None:
                pinned.append(key)
            elif lookup(key) is _PENDING:
                lease.waiting.add(key)
            else:
                missing.append(key)
        if missing and refusal is None:
            refusal = self._promotions.promote(missing)
        if refusal is not None:
            self._leases.unpin(lease)
            if refusal is Refusal.NO_ROOM and self._prefetches.yield_to(owner, self._clock()):
                return Refusal.BUSY
            return refusal
        self._prefetches.on_used(keys)
        lease.waiting.update(missing)
        self._leases.by_owner[owner] = lease
        if lease.waiting:
            lease.source = self._farthest_source(lease.waiting)
            self._context.wake_at(lease.since_s + self._load_timeout_s)
        return lease

    def _farthest_source(self, keys: Iterable[Key]) -> str:
        """Farthest tier from which one of these keys is promoted. The nearest tier if none is promoted."""
        source_by_key = self._moves.source_by_key
        names = {source_by_key[key] for key in keys if key in source_by_key}
        return next((name for name in reversed(self._by_name) if name in names), self._nearest)

    def lease(self, owner: str) -> PromotionLease | None:
        """Current lease of this owner; None if there is none. See `PromotionLeases.current`."""
        self._check_deadlines()
        return self._leases.current(owner)

    def release(self, owner: str) -> None:
        """End a lease. Promotions in flight still arrive."""
        self._leases.release(owner)

    # Prefetches.

    def prefetch(self, keys: Sequence[Key], most_bytes: int) -> None:
        """Promote the keys that the primary tier lacks, in order, before a request waits for them.

        A prefetch pins no chunk, needs no release and returns no result; `take_counts` counts the results. The prefetch
        starts at the next `take_moves`, after the promotions of leases. It ends at the first chunk that cannot be
        promoted, or after `load_timeout_s`; the chunks before stay promoted.

        Args:
            keys: keys of one prefix, from its beginning; each key after the keys that it needs. The last key is evicted
                first.
            most_bytes: limit of unused prefetched bytes of one rank in the primary tier, these chunks included.
        """
        self._check_deadlines()
        self._prefetches.add(keys, most_bytes, self._clock())

    def limit_prefetches(self, most_bytes: int) -> None:
        """Set a second limit of unused prefetched bytes, for all prefixes, also for prefixes added before. The smaller
        limit applies."""
        self._prefetches.most_bytes = most_bytes

    def end_prefetches(self) -> None:
        """Stop all prefetches. Chunks in flight still arrive."""
        self._prefetches.drop_waiting()

    def _touch_all(self, keys: list[Key]) -> None:
        """Make keys the most recently used in every tier, the last one most. Unused prefetched chunks still count as
        unused."""
        self.primary.touch(keys)
        for tier in self._tiers:
            tier.index.touch(keys)

    # Stores.

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        """Reserve space in the primary tier."""
        self._pump_new()
        slot = self.primary.reserve(key, num_bytes, extends)
        if isinstance(slot, Slot):
            self._prefetches.on_kept((key,))
        return slot

    def reserve_all(self, chunks: Sequence[NewChunk]) -> list[Slot | Refusal]:
        """`reserve` for each chunk."""
        self._pump_new()
        slots = self.primary.reserve_all(chunks)
        stored = [chunk[0] for chunk, slot in zip(chunks, slots, strict=True) if isinstance(slot, Slot)]
        self._prefetches.on_kept(stored)
        return slots

    def commit(self, key: Key, extends: Extends = ()) -> bool:
        """Commit a stored chunk in the primary tier, and queue its cascades."""
        return self.commit_all([(key, extends)])[0]

    def commit_all(self, chunks: Sequence[tuple[Key, Extends]], primary_only: Collection[Key] = ()) -> list[bool]:
        """Commit chunks, in order. `chunks` has the key of each chunk, and the keys that it extends; only the chunk is
        committed. Keys in `primary_only` do not cascade."""
        are_stored = self.primary.commit_all([key for key, _ in chunks])
        if self._tiers:
            for (key, extends), is_stored in zip(chunks, are_stored, strict=True):
                self._on_committed(key, extends, is_stored, key not in primary_only)
            for tier in self._cascading:
                tier.announce_queued()
        return are_stored

    def _on_committed(self, key: Key, extends: Extends, is_stored: bool, cascades: bool) -> None:
        if self._leases.by_owner:
            self._leases.on_arrived(key) if is_stored else self._leases.on_lost(key)
        for tier in self._cascading:
            if is_stored and cascades:
                tier.cascade(key, extends, is_reuse=False)
        self._requeue_parked(key)

    def abort(self, key: Key) -> None:
        """Abort a reservation in the primary tier."""
        self.primary.abort(key)
        self._leases.on_lost(key)
        self._requeue_parked(key)

    def touch(self, keys: Sequence[Key], extends: Sequence[Extends] = ()) -> None:
        """Make keys the most recently used in every tier, the last one most, and set the keys that each key extends.

        Prefetched keys leave the list of unused keys, but no use of them is counted.
        """
        self._prefetches.on_kept(keys)
        self.primary.touch(keys, extends)
        for tier in self._tiers:
            tier.index.touch(keys, extends)

    def touch_primary(self, keys: Sequence[Key]) -> None:
        """Make keys the most recently used in the primary tier alone. For keys that are found or kept, but not read."""
        self._prefetches.on_kept(keys)
        self.primary.touch(keys)

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> None:
        """Invalidate a key in every tier."""
        self.primary.invalidate(key, reason)
        for tier in self._tiers:
            tier.index.invalidate(key, reason)

    def clear(self) -> None:
        """Invalidate every key in every tier, and fail every lease. Moves in flight end without an effect."""
        self.primary.clear()
        for tier in self._tiers:
            tier.index.clear()
        for tier in self._cascading:
            tier.clear()
        self._prefetches.clear()
        self._leases.fail_all()

    def cascade(self, key: Key, extends: Extends = (), *, is_reuse: bool = True) -> None:
        """Queue a chunk of the primary tier for each secondary tier that lacks it, according to the `CascadePolicy`.

        Args:
            key: key of the chunk.
            extends: keys, as for `TierIndex.reserve`. The chunk is sent to a tier only if the tier has `extends[-1]` or
                is storing it.
            is_reuse: True if the chunk was found by a request that did not store it.

        Chunks are sent in the order of the calls, so call this for a chunk after the chunk that it extends. They are
        sent before the next reservation in the primary tier, or at `take_moves`.
        """
        for tier in self._cascading:
            tier.cascade(key, extends, is_reuse=is_reuse)

    def num_waiting(self, tier: str) -> int:
        """Number of chunks in the cascade queue of a tier."""
        return self._by_name[tier].num_waiting

    def _pump_new(self) -> None:
        """Send newly queued chunks before a reservation can evict them. Sent chunks are pinned in the primary tier."""
        for tier in self._cascading:
            if tier.has_new:
                self._check_deadlines()
                tier.pump()

    # Moves.

    def take_moves(self) -> list[TierMove]:
        """Moves for the media to carry out, in order."""
        self._check_deadlines()
        for tier in self._cascading:
            tier.pump()
        self._prefetches.pump(self._clock())
        for queue in self._queues:
            queue.end_batch()
        moves = self._moves
        planned, moves.planned = moves.planned, []
        return planned

    def on_move(self, move_id: int, outcome: MoveOutcome) -> None:
        """Record the outcome of a move on some ranks. The move ends when all ranks have reported."""
        tier = self._tiers[move_id % len(self._tiers)]
        in_flight = tier.report(move_id, outcome)
        if in_flight is None or in_flight.move.direction is not _PROMOTE:
            return
        key = in_flight.move.key
        is_present = in_flight.failure is None and self.primary.commit(key)
        if is_present:
            self._leases.on_arrived(key)
        else:
            if in_flight.failure is not None:
                self.primary.abort(key)
            self._leases.on_lost(key)
        self._prefetches.on_ended(key, is_present, self._clock())
        self._requeue_parked(key)
        if in_flight.failure is not None:
            tier.pump()  # this key is no longer PENDING, so chunks that need it can be dropped now

    def _requeue_parked(self, key: Key) -> None:
        """Requeue the chunks parked for a key that is no longer PENDING in the primary tier."""
        for queue in self._queues:
            if queue.parked:
                queue.on_primary_resolved(key)

    def tick(self) -> None:
        """Apply timeouts; call it once a step."""
        self._deadlines.tick()
        for tier in self._cascading:
            tier.pump()

    def has_live_moves(self) -> bool:
        """True if the caller should step again: a move may still end in time, or may start soon. Timed-out moves and
        queued chunks without progress for one second do not count."""
        self._check_deadlines()
        self._pump_new()
        return any(tier.needs_step() for tier in self._tiers) or self._prefetches.needs_step(self._clock())

    def take_counts(self) -> StackCounts:
        """Counts since the last call."""
        by_tier = {tier.name: tier.take_counts() for tier in self._tiers}
        return StackCounts(by_tier, self._leases.take_timeouts(), *self._prefetches.take_counts())

    def close(self) -> None:
        """Close all tiers. Call it after the media have ended their moves. Secondary media keep their chunks."""
        for owner in list(self._leases.by_owner):
            self.release(owner)
        for tier in self._cascading:
            tier.clear()
        self.primary.close()
        for tier in self._tiers:
            tier.index.close()


def _leading_held(index: TierIndex, keys: Sequence[Key]) -> int:
    """Number of leading keys that a tier holds or is storing. Keys that are only in an async lookup do not count."""
    num_held = index.leading(keys)
    if index.has_async_lookups:
        return next((place for place, key in enumerate(keys[:num_held]) if index.lacks(key)), num_held)
    return num_held
