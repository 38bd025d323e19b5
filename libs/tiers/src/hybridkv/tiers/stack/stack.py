"""The deciding half of a RAM tier over slower ones, the nearest first.

Nothing is read from a slower tier until a caller that knows a boundary at which every group can resume says which
chunks it needs; then those are promoted, each from the nearest tier that holds it and may be asked, and only those.
What is stored in the fast tier cascades behind the caller's back to each slower one that lacks it, within bounds. What
came up from one tier goes to another by the same rule: when a caller offers what it met. A promotion alone is no such
offer, since it says nothing of the path that a chunk is part of. What nobody waits for yet may come up ahead of time,
behind all that somebody does (`prefetches.py`). Moves no byte: `take_moves` says what the media must do, `on_move`
hears how it ended.

No caller waits here. A wait is a `Hold` that is not ready, and it ends: when its chunks have come, when one is lost, or
when the deadline passes, which every answer looks at. Bytes that come later than that still find the space that was
reserved for them, which nobody else was given meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import UNSPECIFIED, Key, Refusal, Slot, TierIndex
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.stack.health import BreakerState
from hybridkv.tiers.stack.in_flight import Planned
from hybridkv.tiers.stack.leases import Deadlines, Hold, Holds
from hybridkv.tiers.stack.moves import Direction, MoveOutcome, StackCounts, TierMove
from hybridkv.tiers.stack.options import SlowerTierOptions
from hybridkv.tiers.stack.path import ALONE, PathPosition, holds_all, leading_held
from hybridkv.tiers.stack.prefetches import Prefetches
from hybridkv.tiers.stack.promotions import Promotions
from hybridkv.tiers.stack.secondary import Common, Level, SlowerTier
from hybridkv.tiers.stack.view import Reading

_MAX_SIZES = 1024
"""Of chunks, whose costs are remembered."""
# An enum's members are looked up by name each time; these are asked for in every call.
_PENDING, _HIT = LookupResult.PENDING, LookupResult.HIT
_PROMOTE = Direction.PROMOTE


class TierStack:
    """A fast tier, and any number of slower ones under it. Used by one thread, as every `TierIndex`.

    Args:
        near: index of the fast tier.
        slower: the others, the nearest first.
        num_ranks: media that report every move.
        clock: seconds.

    Raises:
        TierConfigurationError: two tiers have one name.
    """

    def __init__(
        self, near: TierIndex, slower: Sequence[SlowerTier], num_ranks: int, clock: Callable[[], float]
    ) -> None:
        names = [tier.name for tier in slower]
        if len(set(names)) != len(names):
            raise TierConfigurationError("slower", "names that differ", names)
        self.near = near
        self._clock = clock
        self._planned = Planned(num_ranks)
        self._common = Common(near, clock, self._planned)
        self._levels = tuple(Level(tier, place, len(names), self._common) for place, tier in enumerate(slower))
        self._cascading = tuple(level for level in self._levels if level.cascades is not None)
        self._eager = tuple(level for level in self._cascading if level.is_eager)
        self._queues = tuple(level.cascades for level in self._levels if level.cascades is not None)
        self.slower: Mapping[str, TierIndex] = {tier.name: tier.index for tier in slower}
        """The slower tiers by name, the nearest first."""
        self._nearest = names[0] if names else ""
        self._by_name = {level.name: level for level in self._levels}
        self._load_timeout_s = max(
            (level.load_timeout_s for level in self._levels), default=SlowerTierOptions().load_timeout_s
        )
        """Of a hold."""
        self.has_late = any(tier.index.answers_late for tier in slower)
        """Whether one of them knows more than it says before it is asked."""
        self._holds = Holds(near, self._load_timeout_s)
        self._deadlines = Deadlines(self._levels, self._holds, self._common)
        self._look_at_clock = self._deadlines.look_at_clock
        self._reading = Reading(near, self._levels, self._planned)
        self._promotions = Promotions(near, self._levels, self._pump_news)
        self._prefetches = Prefetches(near, self._promotions, self._load_timeout_s, self._make_recent)
        self._costs: dict[int, tuple[int, ...]] = {}
        """By the bytes of a chunk; there are few sizes."""

    # What there is.

    def breaker_state(self, direction: Direction, tier: str) -> BreakerState:
        """Whether a slower tier is used in this direction, left alone, or tried."""
        self._look_at_clock()
        return self._by_name[tier].ways.state(direction)

    def costs(self, num_bytes: int) -> tuple[int, ...]:
        """What a chunk of so many bytes takes up of each slower tier, for `PathPosition.path_bytes`."""
        costs = self._costs.get(num_bytes)
        if costs is None:
            if len(self._costs) >= _MAX_SIZES:
                self._costs.clear()
            costs = self._costs[num_bytes] = tuple(level.index.cost(num_bytes) for level in self._levels)
        return costs

    @property
    def capacities(self) -> tuple[int, ...]:
        """What each slower tier has room for."""
        return tuple(level.index.capacity_bytes for level in self._levels)

    @property
    def load_timeout_s(self) -> float:
        """How long a hold may wait, or what is brought though nobody waits for it."""
        return self._load_timeout_s

    # What is stored. Where there is no slower tier, nothing has a deadline and the fast one knows all.

    @property
    def generation(self) -> int:
        """Changes whenever the answer of any lookup may have changed."""
        self._look_at_clock()
        return self._reading.generation

    def lookup(self, key: Key) -> LookupResult:
        """HIT when a tier holds it and may be asked for it; MISS while its promotion is late."""
        if not self._levels:
            return self.near.lookup(key)
        self._look_at_clock()
        return self._reading.lookup(key)

    def leading(self, keys: Sequence[Key]) -> int:
        """How many keys in a row, from the first, are HIT or PENDING."""
        if not self._levels:
            return self.near.leading(keys)
        self._look_at_clock()
        return self._reading.leading(keys)

    def last_held(self, keys: Sequence[Key]) -> int | None:
        """Position of the last key that is HIT or PENDING, None if there is none."""
        if not self._levels:
            return self.near.last_held(keys)
        self._look_at_clock()
        return self._reading.last_held(keys)

    def any_pending(self, keys: Iterable[Key]) -> bool:
        """Whether one of these keys is PENDING."""
        if not self._levels:
            return self.near.any_pending(keys)
        self._look_at_clock()
        return self._reading.any_pending(keys)

    @property
    def ask_s(self) -> float:
        """How long `ask` may take until everything is answered or counts as missing; 0 where there is nothing to be
        found out, or nobody to be asked."""
        self._look_at_clock()
        return self._reading.ask_s

    def ask(self, keys: Sequence[Key]) -> None:
        """Let tiers that answer late find out about what no other holds, all of them at once. Each has its own time
        for that, after which what it did not answer counts as missing."""
        self._look_at_clock()
        self._reading.ask(keys, self._clock())

    def is_only_asked(self, key: Key) -> bool:
        """Whether a key is PENDING for no other reason than that tiers were asked about it."""
        self._look_at_clock()
        return self._reading.is_only_asked(key)

    def lacks_below(self, key: Key) -> bool:
        """Whether a slower tier that is given chunks lacks this one."""
        return any(level.index.lacks(key) for level in self._cascading)

    def is_below(self, key: Key) -> bool:
        """Whether a slower tier that is given chunks has this one, or is about to."""
        return any(not level.index.lacks(key) for level in self._cascading)

    def has_all_below(self, keys: Sequence[Key]) -> bool:
        """Whether no slower tier that is given all chunks lacks one of these."""
        return all(holds_all(level.index, keys) for level in self._eager)

    def leading_below(self, keys: Sequence[Key]) -> int:
        """How many keys in a row, from the first, no slower tier that is given chunks lacks."""
        for level in self._cascading:
            keys = keys[: leading_held(level.index, keys)]
        return len(keys)

    # What concerns the fast tier alone.

    @property
    def only_near(self) -> TierIndex:
        """What to ask in place of the stack when the slower tiers are not to be asked."""
        return self.near

    def lookup_near(self, key: Key) -> LookupResult:
        """What the fast tier says."""
        return self.near.lookup(key)

    def leading_near(self, keys: Sequence[Key]) -> int:
        """How many keys in a row, from the first, the fast tier does not say MISS of."""
        return self.near.leading(keys)

    def in_near(self, key: Key) -> bool:
        """Whether the fast tier holds it now."""
        return self.near.lookup(key) is _HIT

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        """Protect what the fast tier holds, all or nothing, and learn where it lies."""
        slots = self.near.pin_all(keys)
        if slots is not None:
            self._prefetches.on_used(keys)
        return slots

    def unpin_all(self, keys: Iterable[Key]) -> None:
        """Undo one `pin_all`."""
        self.near.unpin_all(keys)

    def withdraw(self, key: Key) -> None:
        """The fast tier's bytes are bad, or something better has taken their place there; what a slower tier holds is
        verified when it is read."""
        self.near.invalidate(key)

    # Holds.

    def acquire(self, owner: str, keys: Sequence[Key], since_s: float | None = None) -> Hold | Refusal:
        """Hold chunks that were all HIT or PENDING: pin what the fast tier holds, and promote the rest.

        An older hold of this owner is released. On a refusal nothing is held: PRESENT when a key is gone meanwhile,
        BUSY when as much is on its way as may be, when nothing can be tried for a moment, or while what nobody waited
        for still has the room, NO_ROOM or TOO_LARGE when the fast tier cannot take it all at once.

        Args:
            owner: whose hold it is.
            keys: in the order in which they should outlive each other: the first is the most recently used later.
            since_s: when its owner began to wait, by the stack's clock; None: now. Its deadline counts from then.
        """
        self._look_at_clock()
        self._prefetches.on_asked(owner)
        if owner in self._holds.by_owner:
            self.release(owner)
        hold = Hold(owner, self._clock() if since_s is None else since_s, source=self._nearest)
        late_keys, pinned, pin, lookup = self._planned.late_keys, hold.pinned, self.near.pin, self.near.lookup
        wanted: list[Key] = []
        refusal: Refusal | None = None
        rest = keys
        if late_keys.isdisjoint(keys) and self.near.pin_all(keys) is not None:
            pinned += keys
            rest = ()
        for key in rest:
            if key in late_keys:
                refusal = Refusal.PRESENT
            elif pin(key) is not None:
                pinned.append(key)
            elif lookup(key) is _PENDING:
                hold.waiting.add(key)
            else:
                wanted.append(key)
        if wanted and refusal is None:
            refusal = self._promotions.promote(wanted)
        if refusal is not None:
            self._holds.unpin(hold)
            if refusal is Refusal.NO_ROOM and self._prefetches.gives_way(owner, self._clock()):
                return Refusal.BUSY
            return refusal
        self._prefetches.on_used(keys)
        hold.waiting.update(wanted)
        self._holds.by_owner[owner] = hold
        if hold.waiting:
            hold.source = self._slowest_of(hold.waiting)
            self._common.wake(hold.since_s + self._load_timeout_s)
        return hold

    def _slowest_of(self, keys: Iterable[Key]) -> str:
        """The slowest tier that one of these is on its way from."""
        tiers_of = self._planned.tiers_of
        names = {tiers_of[key] for key in keys if key in tiers_of}
        return next((name for name in reversed(self._by_name) if name in names), self._nearest)

    def prefetch(self, keys: Sequence[Key], most_bytes: int) -> None:
        """Let what the fast tier lacks of these come up one after the other, though nobody waits for it.

        Nothing is pinned or has to be released, and nobody hears of it; `take_counts` says what became of it. It begins
        when moves are taken, behind all holds, and ends at the first chunk that cannot come, or when it takes longer
        than a hold may.

        Args:
            keys: of one prefix, each behind what it needs: that comes first, and outlives it.
            most_bytes: of the fast tier, that all which came so and was not used yet may take up, with these.
        """
        self._look_at_clock()
        self._prefetches.add(keys, most_bytes, self._clock())

    def bound_prefetches(self, most_bytes: int) -> None:
        """No more than this from now on, where `prefetch` was given more: others may want the room by now."""
        self._prefetches.most_bytes = most_bytes

    def end_prefetches(self) -> None:
        """Begin nothing more that nobody waits for."""
        self._prefetches.drop_waiting()

    def _make_recent(self, keys: list[Key]) -> None:
        """As `touch`, of what nobody has used."""
        self.near.touch(keys)
        for level in self._levels:
            level.touch(keys)

    def hold(self, owner: str) -> Hold | None:
        """The hold of this owner, as it is now."""
        self._look_at_clock()
        return self._holds.by_owner.get(owner)

    def release(self, owner: str) -> None:
        """Give up a hold. What is on its way up still comes, for whoever wants it."""
        self._holds.release(owner)

    # What the caller does to the fast tier, with what follows for the slow one.

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        """Space in the fast tier."""
        self._pump_news()
        slot = self.near.reserve(key, num_bytes)
        if isinstance(slot, Slot):
            self._prefetches.forget((key,))
        return slot

    def reserve_all(self, chunks: Sequence[tuple[Key, int]]) -> list[Slot | Refusal]:
        """Space in the fast tier for each key and its number of bytes, where there is some."""
        self._pump_news()
        slots = self.near.reserve_all(chunks)
        stored = [key for (key, _), slot in zip(chunks, slots, strict=True) if isinstance(slot, Slot)]
        self._prefetches.forget(stored)
        return slots

    def commit(self, key: Key, on_path: PathPosition = ALONE) -> bool:
        """The fast tier holds a stored chunk: offer it, and let it cascade from its place on a path."""
        return self.commit_all([(key, on_path)])[0]

    def commit_all(self, chunks: Sequence[tuple[Key, PathPosition | None]]) -> list[bool]:
        """`commit` of each, in their order; what each was answered. One without a place on a path stays where it is."""
        are_stored = self.near.commit_all([key for key, _ in chunks])
        if self._levels:
            for (key, on_path), is_stored in zip(chunks, are_stored, strict=True):
                self._committed(key, on_path, is_stored)
        return are_stored

    def _committed(self, key: Key, on_path: PathPosition | None, is_stored: bool) -> None:
        if self._holds.by_owner:
            self._holds.hand_out(key) if is_stored else self._holds.lose(key)
        for level in self._cascading:
            if is_stored and on_path is not None:
                level.cascade(key, on_path, is_met=False)
        self._unpark(key)

    def abort(self, key: Key) -> None:
        """It will not be stored."""
        self.near.abort(key)
        self._holds.lose(key)
        self._unpark(key)

    def touch(self, keys: Sequence[Key]) -> None:
        """Make keys the most recently used in every tier, the last one most.

        Where something is to cascade by now, once more when that has come, so that it can be among them.
        """
        self._prefetches.on_used(keys)
        self.near.touch(keys)
        self._pump_news()
        for level in self._levels:
            level.touch(keys)

    def touch_near(self, keys: Sequence[Key]) -> None:
        """The same in the fast tier alone, of what is met there or kept, and not read."""
        self._prefetches.forget(keys)
        self.near.touch(keys)

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> None:
        """Never offer what is stored under this key again, anywhere."""
        self.near.invalidate(key, reason)
        for level in self._levels:
            level.index.invalidate(key, reason)

    def clear(self) -> None:
        """`invalidate` everything, and let every hold fail. What moves comes to nothing."""
        self.near.clear()
        for level in self._levels:
            level.index.clear()
        for level in self._cascading:
            level.clear()
        self._prefetches.clear()
        self._holds.lose_all()

    def cascade(self, key: Key, on_path: PathPosition = ALONE, *, is_met: bool = True) -> None:
        """Copy a chunk of the fast tier to each slower one that is given such and lacks it, when its turn comes.

        Args:
            key: of the chunk.
            on_path: its place among those that are used together.
            is_met: whether somebody met it who did not store it.

        Chunks go in the order of these calls; one that needs others is called for after them. They are looked at
        together: before anything else can come into the fast tier, at the next `touch`, or when the moves are taken.
        """
        for level in self._cascading:
            level.cascade(key, on_path, is_met=is_met)

    def num_waiting(self, tier: str) -> int:
        """Chunks that wait for their way down to a tier."""
        return self._by_name[tier].num_waiting

    def _pump_news(self) -> None:
        """What was added goes, and is pinned for it, before anything can push it out of the fast tier."""
        for level in self._cascading:
            if level.has_news:
                self._look_at_clock()
                level.pump()

    # Moves.

    def take_moves(self) -> list[TierMove]:
        """What the media must do next, in order."""
        self._look_at_clock()
        for level in self._cascading:
            level.pump()
        self._prefetches.pump(self._clock())
        for cascades in self._queues:
            cascades.end_batch()
        planned = self._planned
        moves, planned.moves = planned.moves, []
        return moves

    def on_move(self, move_id: int, outcome: MoveOutcome) -> None:
        """Ranks are done with a move; the last of them ends it."""
        level = self._levels[move_id % len(self._levels)]
        moving = level.report(move_id, outcome)
        if moving is None or moving.move.direction is not _PROMOTE:
            return
        key = moving.move.key
        has_come = moving.failure is None and self.near.commit(key)
        if has_come:
            self._holds.hand_out(key)
        else:
            if moving.failure is not None:
                self.near.abort(key)
            self._holds.lose(key)
        self._prefetches.on_ended(key, has_come, self._clock())
        self._unpark(key)
        if moving.failure is not None:
            level.pump()  # now that nothing says any more that the chunk is about to come

    def _unpark(self, key: Key) -> None:
        """What waited for a key of the fast tier goes on, or never will."""
        for cascades in self._queues:
            if cascades.parked:
                cascades.on_near(key)

    # Time.

    def tick(self) -> None:
        """Let what has waited too long fail; call it once a step."""
        self._deadlines.tick()
        for level in self._cascading:
            level.pump()

    def has_moves_alive(self) -> bool:
        """Whether a move may still end in time, or is to be made soon. One that is late is not worth staying awake for,
        nor is what a slower tier lets wait that takes nothing."""
        self._look_at_clock()
        self._pump_news()
        return any(level.keeps_awake() for level in self._levels) or self._prefetches.keeps_awake(self._clock())

    # Ends.

    def take_counts(self) -> StackCounts:
        """What happened since the last call."""
        by_tier = {level.name: level.take_counts() for level in self._levels}
        return StackCounts(by_tier, self._holds.take_timeouts(), *self._prefetches.take_counts())

    def close(self) -> None:
        """Close all tiers. Call it after the media have ended their moves: what a slower tier holds stays there."""
        for owner in list(self._holds.by_owner):
            self.release(owner)
        for level in self._cascading:
            level.clear()
        self.near.close()
        for level in self._levels:
            level.index.close()
