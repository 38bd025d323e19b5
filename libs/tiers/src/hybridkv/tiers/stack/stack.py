"""The deciding half of a RAM tier over a slow one.

Nothing is read from the slow tier until a caller that knows a boundary at which every group can resume says which
chunks it needs; then those are promoted, and only those. What is stored in the fast tier cascades behind the caller's
back, within bounds. Moves no byte: `take_moves` says what the media must do, `on_move` hears how it ended.

No caller waits here. A wait is a `Hold` that is not ready, and it ends: when its chunks have come, when one is lost, or
when the deadline passes, which every answer looks at. Bytes that come later than that still find the space that was
reserved for them, which nobody else was given meanwhile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import UNSPECIFIED, Failure, FailureReason, Key, Refusal, Slot, TierIndex
from hybridkv.tiers.stack.breaker import BreakerState
from hybridkv.tiers.stack.cascades import ALONE, Cascades, Gate, PathPlace
from hybridkv.tiers.stack.hold import Hold, HoldFailure
from hybridkv.tiers.stack.moves import Direction, MoveOutcome, MoveResult, StackCounts, TierMove
from hybridkv.tiers.stack.options import StackOptions
from hybridkv.tiers.stack.tally import StackTally
from hybridkv.tiers.stack.traffic import Traffic
from hybridkv.tiers.stack.ways import Ways

_KEEPS_KEY = (FailureReason.BUSY, FailureReason.CLOSED)
"""Failures that say nothing about the chunk itself."""


class TierStack:
    """A fast tier, and perhaps a slow one under it. Used by one thread, as every `TierIndex`.

    Args:
        near: index of the fast tier.
        far: index of the slow tier, None for a stack of one.
        num_ranks: media that report every move.
        clock: seconds.
        options: bounds.
    """

    def __init__(
        self,
        near: TierIndex,
        far: TierIndex | None,
        num_ranks: int,
        clock: Callable[[], float],
        options: StackOptions | None = None,
    ) -> None:
        self.near = near
        self.far = far
        self._clock = clock
        self._options = options or StackOptions()
        self._ways = Ways(self._options.breaker, self._options.shortage)
        self._late_changes = 0
        """How often a late promotion began to hide its chunk, or gave it back."""
        self._holds: dict[str, Hold] = {}
        self._traffic = Traffic(num_ranks)
        self._counts = StackTally()
        self._ticked_s = self._noticed_s = clock()
        """When `tick` was called last, and when a deadline was last looked for without it."""
        self._due_s = math.inf
        """Nothing that waits changes before."""
        self._cascades = None if far is None else Cascades(near, far, self._traffic, self._options, self._plan_cascade)

    # What is stored.

    @property
    def generation(self) -> int:
        """Changes whenever the answer of any lookup may have changed."""
        self._look_at_clock()
        far = self.far.generation if self.far is not None else 0
        return self.near.generation + far + self._late_changes + self._ways.revision

    def breaker_state(self, direction: Direction) -> BreakerState:
        """Whether the slow tier is used in this direction, left alone, or tried."""
        self._look_at_clock()
        return self._ways.state(direction)

    def _asks_far(self) -> bool:
        """Whether the slow tier may be asked for anything now: one promotion at a time is its probe, and what it never
        answered takes up no more of the fast tier than may move at one time."""
        if self.far is None or not self._may_move(Direction.PROMOTE):
            return False
        return self._traffic.late_bytes <= self._options.promoting_share * self.near.capacity_bytes

    def _may_move(self, direction: Direction) -> bool:
        return self._ways.allows(direction, self._traffic.num_in_time[direction])

    def lookup(self, key: Key) -> LookupResult:
        """HIT when either tier holds it and may be asked for it; MISS while its promotion is late."""
        self._look_at_clock()
        return self._lookup(key)

    def _lookup(self, key: Key) -> LookupResult:
        if key in self._traffic.late_keys:
            return LookupResult.MISS
        answer = self.near.lookup(key)
        if answer is LookupResult.MISS and self.far is not None and self._asks_far():
            return self.far.lookup(key)
        return answer

    def leading(self, keys: Sequence[Key]) -> int:
        """How many keys in a row, from the first, are HIT or PENDING."""
        self._look_at_clock()
        if self._traffic.late_keys:
            keys = list(itertools.takewhile(lambda key: key not in self._traffic.late_keys, keys))
        held = self.near.leading(keys)
        if self.far is None or not self._asks_far():
            return held
        indexes, turn = (self.far, self.near), 0
        idle = 0
        while held < len(keys) and idle < 2:
            more = indexes[turn].leading(keys[held:])
            idle = 0 if more else idle + 1
            held, turn = held + more, 1 - turn
        return held

    def last_held(self, keys: Sequence[Key]) -> int | None:
        """Position of the last key that is HIT or PENDING, None if there is none."""
        self._look_at_clock()
        place = self._last_held(keys)
        while place is not None and keys[place] in self._traffic.late_keys:
            place = self._last_held(keys[:place])
        return place

    def _last_held(self, keys: Sequence[Key]) -> int | None:
        near = self.near.last_held(keys)
        if self.far is None or not self._asks_far():
            return near
        first = 0 if near is None else near + 1
        far = self.far.last_held(keys[first:])
        return near if far is None else first + far

    def any_pending(self, keys: Iterable[Key]) -> bool:
        """Whether one of these keys is PENDING."""
        if self.far is None:
            return self.near.any_pending(keys)
        self._look_at_clock()
        return any(self._lookup(key) is LookupResult.PENDING for key in keys)

    def in_near(self, key: Key) -> bool:
        """Whether the fast tier holds it now."""
        return self.near.lookup(key) is LookupResult.HIT

    # Holds.

    def acquire(self, owner: str, keys: Sequence[Key], since_s: float | None = None) -> Hold | Refusal:
        """Claim chunks that were all HIT or PENDING: pin what the fast tier holds, and promote the rest.

        An older hold of this owner is released. On a refusal nothing is held: PRESENT when a key is gone meanwhile,
        BUSY when as much is on its way as may be or nothing can be tried for a moment, NO_ROOM or TOO_LARGE when the
        fast tier cannot take it all at once.

        Args:
            owner: whose claim it is.
            keys: in the order in which they should outlive each other: the first is the most recently used later.
            since_s: when its owner began to wait, by the stack's clock; None: now. Its deadline counts from then.
        """
        self._look_at_clock()
        self.release(owner)
        hold = Hold(owner, self._clock() if since_s is None else since_s)
        wanted: list[Key] = []
        refusal: Refusal | None = None
        for key in keys:
            if key in self._traffic.late_keys:
                refusal = Refusal.PRESENT
            elif self.near.pin(key) is not None:
                hold.pinned.append(key)
            elif self.near.lookup(key) is LookupResult.PENDING:
                hold.waiting.add(key)
            else:
                wanted.append(key)
        if wanted and refusal is None:
            refusal = self._promote(wanted)
        if refusal is not None:
            self._unpin(hold)
            return refusal
        hold.waiting.update(wanted)
        self._holds[owner] = hold
        if hold.waiting:
            self._due_s = min(self._due_s, hold.since_s + self._options.load_timeout_s)
        return hold

    def hold(self, owner: str) -> Hold | None:
        """The claim of this owner, as it is now."""
        self._look_at_clock()
        return self._holds.get(owner)

    def release(self, owner: str) -> None:
        """Give up a claim. What is on its way up still comes, for whoever wants it."""
        hold = self._holds.pop(owner, None)
        if hold is not None:
            self._unpin(hold)

    def _unpin(self, hold: Hold) -> None:
        self.near.unpin_all(reversed(hold.pinned))
        hold.pinned.clear()
        hold.waiting.clear()

    def _fail(self, hold: Hold, failure: HoldFailure) -> None:
        self._unpin(hold)
        hold.failure = failure

    def _promote(self, keys: Sequence[Key]) -> Refusal | None:
        """All of them or none."""
        if self.far is None or not self._asks_far():
            return Refusal.PRESENT
        sources = self.far.pin_all(keys)
        if sources is None:
            return Refusal.PRESENT
        refusal = self._why_not_promote(sum(slot.num_bytes for slot in sources))
        self._pump_news()
        refusal = refusal or self._plan_promotions(keys, sources)
        if refusal is not None:
            self.far.unpin_all(keys)
        return refusal

    def _plan_promotions(self, keys: Sequence[Key], sources: Sequence[Slot]) -> Refusal | None:
        """All of them, or why one has no space in the fast tier, which then gives up nothing for those behind it."""
        reserved: list[Slot] = []
        for key, far in zip(keys, sources, strict=True):
            near = self.near.reserve(key, far.num_bytes)
            if isinstance(near, Refusal):
                for earlier in keys[: len(reserved)]:
                    self.near.abort(earlier)
                return near
            reserved.append(near)
        for key, near, far in zip(keys, reserved, sources, strict=True):
            self._plan(Direction.PROMOTE, key, near, far)
        return None

    def _why_not_promote(self, num_bytes: int) -> Refusal | None:
        if num_bytes > self.near.capacity_bytes:
            return Refusal.TOO_LARGE
        if self._ways.rests(Direction.PROMOTE):
            return Refusal.BUSY
        moving = self._traffic.bytes_moving[Direction.PROMOTE]
        if moving and moving + num_bytes > self._options.promoting_share * self.near.capacity_bytes:
            return Refusal.BUSY
        return None

    # What the caller does to the fast tier, with what follows for the slow one.

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        """Space in the fast tier."""
        self._pump_news()
        return self.near.reserve(key, num_bytes)

    def reserve_all(self, chunks: Sequence[tuple[Key, int]]) -> list[Slot | Refusal]:
        """Space in the fast tier for each key and its number of bytes, where there is some."""
        self._pump_news()
        return self.near.reserve_all(chunks)

    def commit(self, key: Key, place: PathPlace = ALONE) -> bool:
        """The fast tier holds a stored chunk: offer it, and let it cascade from its place on a path."""
        is_stored = self.near.commit(key)
        self._on_near(key, is_stored)
        if is_stored:
            self.cascade(key, place)
        if self._cascades is not None:
            self._cascades.on_near(key)
        return is_stored

    def abort(self, key: Key) -> None:
        self.near.abort(key)
        self._on_near(key, False)
        if self._cascades is not None:
            self._cascades.on_near(key)

    def touch(self, keys: Sequence[Key]) -> None:
        """Make keys the most recently used in both tiers, the last one most.

        Where something is to cascade by now, once more in both when that has come, so that it can be among them.
        """
        self.near.touch(keys)
        if self._cascades is not None:
            self._pump_news()
            self._cascades.touch(keys)

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> None:
        """Never offer what is stored under this key again, anywhere."""
        self.near.invalidate(key, reason)
        if self.far is not None:
            self.far.invalidate(key, reason)

    def clear(self) -> None:
        """`invalidate` everything, and let every hold fail. What moves comes to nothing."""
        self.near.clear()
        if self.far is not None:
            self.far.clear()
        if self._cascades is not None:
            self._cascades.clear()
        for hold in self._holds.values():
            self._fail(hold, HoldFailure.LOST)

    def cascade(self, key: Key, place: PathPlace = ALONE) -> None:
        """Copy a chunk that the fast tier holds to the slow one, if that lacks it, when its turn comes.

        Chunks go in the order of these calls; one that needs others is called for after them. They are looked at
        together: before anything else can come into the fast tier, at the next `touch`, or when the moves are taken.
        """
        if self._cascades is not None:
            if self._cascades.is_full and self._cascades.has_news:
                self._pump()
            dropped = self._cascades.add(key, place, self._clock())
            if dropped is not None:
                self._drop(dropped)

    def far_cost(self, num_bytes: int) -> int:
        """What a chunk of so many bytes takes up of the slow tier, for `PathPlace.path_bytes`."""
        return 0 if self.far is None else self.far.cost(num_bytes)

    @property
    def far_bytes(self) -> int:
        """What the slow tier has room for."""
        return 0 if self.far is None else self.far.capacity_bytes

    @property
    def num_waiting(self) -> int:
        """Chunks that wait for their way down."""
        return 0 if self._cascades is None else self._cascades.num_waiting

    def _pump_news(self) -> None:
        """What was added goes, and is pinned for it, before anything can push it out of the fast tier."""
        if self._cascades is not None and self._cascades.has_news:
            self._look_at_clock()
            self._pump()

    def _pump(self) -> None:
        if self._cascades is not None:
            for dropped in self._cascades.pump(self._gate, self._clock()):
                self._drop(dropped)
            if self._cascades.num_waiting:
                self._due_s = min(self._due_s, self._cascades.since_s + self._options.load_timeout_s)

    def _gate(self) -> Gate:
        """Whether one more chunk may be written to the slow tier now."""
        state = self._ways.state(Direction.CASCADE)
        if state is BreakerState.OPEN:
            return Gate.SHUT
        if self._ways.rests(Direction.CASCADE):
            return Gate.BUSY
        if state is BreakerState.PROBING:
            return Gate.BUSY if self._traffic.num_in_time[Direction.CASCADE] else Gate.PROBE
        return Gate.OPEN

    def _plan_cascade(self, key: Key, near: Slot, far: Slot) -> None:
        self._plan(Direction.CASCADE, key, near, far)

    def _drop(self, dropped: MoveResult) -> None:
        self._counts.moved(Direction.CASCADE, dropped)

    # Moves.

    def _plan(self, direction: Direction, key: Key, near: Slot, far: Slot) -> None:
        now_s = self._clock()
        self._traffic.plan(direction, key, near, far, now_s)
        self._due_s = min(self._due_s, now_s + self._options.load_timeout_s)

    def take_moves(self) -> list[TierMove]:
        """What the media must do next, in order."""
        self._look_at_clock()
        self._pump()
        return self._traffic.take_planned()

    def on_move(self, move_id: int, outcome: MoveOutcome) -> None:
        """Ranks are done with a move; the last of them ends it."""
        moving = self._traffic.report(move_id, outcome)
        if moving is None:
            return
        move, failure = moving.move, moving.failure
        if not moving.is_late:  # else it was counted as a failure when it became late
            self._ways.ended(move.direction, failure, self._clock())
            if failure is not None:
                self._due_s = min(self._due_s, self._ways.next_end_s)
        if move.direction is Direction.PROMOTE:
            self._late_changes += moving.is_late
            self._end_promotion(move.key, failure)
        elif self._end_cascade(move.key, failure):
            return
        result = MoveResult.DONE if failure is None else MoveResult.FAILED
        self._counts.moved(move.direction, result, moving.num_bytes, failure)
        if failure is not None:
            self._pump()

    def _end_promotion(self, key: Key, failure: Failure | None) -> None:
        assert self.far is not None
        self.far.unpin(key)
        if failure is None:
            self._on_near(key, self.near.commit(key))
            return
        self.near.abort(key)
        if failure.reason not in _KEEPS_KEY:
            self.far.invalidate(key, failure.reason)
        self._on_near(key, False)

    def _end_cascade(self, key: Key, failure: Failure | None) -> bool:
        """Whether it is made again."""
        assert self.far is not None and self._cascades is not None
        if failure is None:
            self.far.commit(key)
        else:
            self.far.abort(key)
            if failure.reason is FailureReason.CHECKSUM:
                # What was read for the copy is not what was sealed: the fast tier's bytes are bad.
                self.near.invalidate(key, failure.reason)
        self.near.unpin(key)
        return self._cascades.on_ended(key, failure, self._clock())

    def _on_near(self, key: Key, is_held: bool) -> None:
        """A key that was on its way into the fast tier has come, or never will."""
        for hold in self._holds.values():
            if key in hold.waiting:
                if is_held and self.near.pin(key) is not None:
                    hold.waiting.discard(key)
                    hold.pinned.append(key)
                else:
                    self._fail(hold, HoldFailure.LOST)

    # Time.

    def tick(self) -> None:
        """Let what has waited too long fail; call it once a step.

        A claim fails at its time. The slow tier is blamed one call later, when the caller had the chance to hear of it:
        between two calls it may have stood still itself, with the news of a move still to come.
        """
        now_s = self._clock()
        self._blame_before(self._ticked_s, now_s)
        self._ticked_s = now_s
        self._pass_time(now_s)
        self._pump()

    def _look_at_clock(self) -> None:
        """Deadlines hold though nobody calls `tick`. Where nothing waits this is one comparison.

        What somebody asks for says less than a step about what he could hear of meanwhile, so the slow tier is blamed a
        whole time limit after a move was first found late.
        """
        if self._due_s == math.inf:
            return
        now_s = self._clock()
        if now_s < self._due_s:
            return
        if now_s - self._noticed_s >= self._options.load_timeout_s:
            self._blame_before(self._noticed_s, now_s)
            self._noticed_s = now_s
        self._pass_time(now_s)

    def _pass_time(self, now_s: float) -> None:
        limit_s = self._options.load_timeout_s
        self._ways.tick(now_s)
        due_s = max(self._traffic.oldest_in_time_s(), self._noticed_s) + limit_s
        if self._cascades is not None and self._cascades.num_waiting:
            due_s = min(due_s, max(self._cascades.since_s, self._noticed_s) + limit_s)
        for hold in self._holds.values():
            if hold.waiting and now_s - hold.since_s >= limit_s:
                self._fail(hold, HoldFailure.TIMEOUT)
                self._counts.timeouts += 1
            elif hold.waiting:
                due_s = min(due_s, hold.since_s + limit_s)
        self._due_s = min(due_s, self._ways.next_end_s)

    def _blame_before(self, heard_s: float, now_s: float) -> None:
        """The slow tier is to blame for what was late at a time when the caller might have heard of its end."""
        for moving in self._traffic.give_up(heard_s - self._options.load_timeout_s):
            self._late_changes += moving.is_late_promotion
            self._ways.late(moving.move.direction, now_s)
            if self._cascades is not None and moving.move.direction is Direction.CASCADE:
                self._cascades.on_late(moving.move.key)
        if self._cascades is not None:
            for dropped in self._cascades.give_up(heard_s - self._options.load_timeout_s):
                self._drop(dropped)

    def has_moves_alive(self) -> bool:
        """Whether a move may still end in time, or is to be made soon. One that is late is not worth staying awake for,
        nor is what a slow tier lets wait that takes nothing."""
        self._look_at_clock()
        self._pump_news()
        if self._traffic.has_some_in_time():
            return True
        return self._cascades is not None and self._cascades.keeps_awake(self._clock())

    # Ends.

    def take_counts(self) -> StackCounts:
        """What happened since the last call."""
        counts, self._counts = self._counts, StackTally()
        return counts.as_counts(self._ways.take_openings())

    def close(self) -> None:
        """Close both tiers. Call it after the media have ended their moves: what a slow tier holds stays there."""
        for owner in list(self._holds):
            self.release(owner)
        if self._cascades is not None:
            self._cascades.clear()
        self.near.close()
        if self.far is not None:
            self.far.close()
