"""What shall be copied to the slow tier, in order, until there is a way and a place for it.

A chunk waits here while as much is on its way as may be, and while the slow tier says that asking again may help. What
needs others before it goes only when those are in the slow tier or on their way there, so whatever stops the queue, the
slow tier has beginnings. What waits is not protected in the fast tier: a store that needs the room is worth more than a
copy, and what is evicted meanwhile is dropped here, with all that needs it.

The order of use follows: beginnings are copied first, so each would be evicted before its end. `touch` waits until
what was asked for before it has come, and then says how it should be.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Failure, FailureReason, Key, Refusal, Slot, TierIndex
from hybridkv.tiers.stack.moves import Direction, MoveResult
from hybridkv.tiers.stack.options import StackOptions
from hybridkv.tiers.stack.traffic import Traffic


class PathPlace(NamedTuple):
    """Where a chunk stands among those that are used together.

    Args:
        needs: what must be in the slow tier, or on its way there, so that the chunk is worth anything there.
        path_bytes: what its path takes up there from its beginning on, the chunk included, as `TierIndex.cost` says; 0
            if nobody knows. What is beyond the whole of the slow tier is not copied: it would only push out its own
            beginning.
    """

    needs: tuple[Key, ...] = ()
    path_bytes: int = 0


ALONE = PathPlace()


class Gate(enum.Enum):
    """Whether the slow tier may be written to."""

    OPEN = "write"
    BUSY = "wait: it is being tried, or nothing can be for a moment"
    SHUT = "keep away: what waits is dropped"


class _Next(enum.Enum):
    """What to do with the chunk whose turn it is, where it is not dropped."""

    GONE = "it is there, or on its way"
    LATER = "wait"


@dataclass(frozen=True, slots=True)
class _Waiting:
    number: int
    key: Key
    place: PathPlace


@dataclass(frozen=True, slots=True)
class _Touch:
    keys: tuple[Key, ...]


class Cascades:
    """The way down of one stack. What moves is `traffic`'s.

    Args:
        near: index of the fast tier.
        far: index of the slow tier.
        traffic: what is on its way.
        options: bounds.
        plan: makes a move of a chunk, from its place in the fast tier to that in the slow one.
    """

    def __init__(
        self,
        near: TierIndex,
        far: TierIndex,
        traffic: Traffic,
        options: StackOptions,
        plan: Callable[[Key, Slot, Slot], None],
    ) -> None:
        self._near = near
        self._far = far
        self._traffic = traffic
        self._options = options
        self._plan_move = plan
        self._max_bytes = min(
            options.cascading_share * near.capacity_bytes, options.arriving_share * far.capacity_bytes
        )
        self._numbers = itertools.count()
        self._queue: list[tuple[int, _Waiting | _Touch]] = []
        """A heap: what is tried again has its old number."""
        self._keys: set[Key] = set()
        """Of the chunks in it."""
        self._num_touched = 0
        """Keys of the touches in it and behind it."""
        self._moving: dict[Key, _Waiting] = {}
        self._touches: deque[tuple[int, _Touch]] = deque()
        """Whose turn it is, each with the last move that was planned before it."""
        self.since_s = 0.0
        """When something came to its end well, or began to wait where nothing did."""

    @property
    def num_waiting(self) -> int:
        """Chunks that may still go."""
        return len(self._keys)

    def add(self, key: Key, place: PathPlace, now_s: float) -> MoveResult | None:
        """A chunk that the slow tier should have, behind all that was added before. Why not, where it is dropped."""
        if key in self._keys or self._far.lookup(key) is not LookupResult.MISS:
            return None
        if len(self._keys) >= self._options.max_waiting:
            return MoveResult.DROPPED_BUSY
        if not self._keys:
            self.since_s = now_s
        self._push(_Waiting(next(self._numbers), key, place))
        return None

    def _push(self, waiting: _Waiting) -> None:
        heapq.heappush(self._queue, (waiting.number, waiting))
        self._keys.add(waiting.key)

    def touch(self, keys: Sequence[Key]) -> None:
        """Make keys the most recently used in the slow tier, the last one most, when what was added before is there.

        At once where more wait for that than chunks may.
        """
        is_idle = not self._queue and not self._touches and self._traffic.oldest_cascade() is None
        if is_idle or self._num_touched + len(keys) > self._options.max_waiting:
            self._far.touch(keys)
            return
        self._num_touched += len(keys)
        heapq.heappush(self._queue, (next(self._numbers), _Touch(tuple(keys))))

    # What goes.

    def pump(self, gate: Callable[[], Gate]) -> list[MoveResult]:
        """Send what may go now. Why others are dropped, one for each."""
        dropped = []
        while self._queue:
            item = self._queue[0][1]
            if isinstance(item, _Waiting):
                then = self._try(item, gate())
                if then is _Next.LATER:
                    break
                if isinstance(then, MoveResult):
                    dropped.append(then)
                self._keys.discard(item.key)
            else:
                self._reach(item)
            heapq.heappop(self._queue)
        self._touch_what_came()
        return dropped

    def _reach(self, touch: _Touch) -> None:
        """At once, so that what comes next pushes out others first; and again when what is on its way has come."""
        self._far.touch(touch.keys)
        if self._traffic.oldest_cascade() is None:
            self._num_touched -= len(touch.keys)
        else:
            self._touches.append((self._traffic.last_move_id, touch))

    def _try(self, waiting: _Waiting, gate: Gate) -> _Next | MoveResult:
        key, place = waiting.key, waiting.place
        if gate is Gate.SHUT:
            return MoveResult.DROPPED_OPEN
        if self._far.lookup(key) is not LookupResult.MISS:
            return _Next.GONE
        if any(self._far.lookup(need) is LookupResult.MISS for need in place.needs):
            return MoveResult.DROPPED_ORPHAN
        if place.path_bytes > self._far.capacity_bytes:
            return MoveResult.DROPPED_NO_ROOM
        if gate is Gate.BUSY or len(self._moving) >= self._options.max_cascading:
            return _Next.LATER
        near = self._near.pin(key)
        if near is None:
            return MoveResult.DROPPED_EVICTED
        then = self._plan(waiting, near)
        if then is not _Next.GONE or key not in self._moving:
            self._near.unpin(key)
        return then

    def _plan(self, waiting: _Waiting, near: Slot) -> _Next | MoveResult:
        moving = self._traffic.bytes_moving[Direction.CASCADE]
        if moving and moving + near.num_bytes > self._max_bytes:
            return _Next.LATER
        far = self._far.reserve(waiting.key, near.num_bytes)
        if isinstance(far, Slot):
            self._plan_move(waiting.key, near, far)
            self._moving[waiting.key] = waiting
            return _Next.GONE
        if far is Refusal.PRESENT:
            return _Next.GONE
        # What is on its way holds its place, but may be evicted when it is there.
        may_change = far is Refusal.BUSY or (far is Refusal.NO_ROOM and moving)
        return _Next.LATER if may_change else MoveResult.DROPPED_NO_ROOM

    def _touch_what_came(self) -> None:
        while self._touches:
            oldest = self._traffic.oldest_cascade()
            if oldest is not None and oldest <= self._touches[0][0]:
                return
            keys = self._touches.popleft()[1].keys
            self._num_touched -= len(keys)
            self._far.touch(keys)

    # What came of it.

    def on_ended(self, key: Key, failure: Failure | None, is_late: bool, now_s: float) -> None:
        """A move has ended. One that the medium had no room for is made again, before what needs it."""
        waiting = self._moving.pop(key)
        if failure is None:
            self.since_s = now_s
        elif failure.reason is FailureReason.BUSY and not is_late:
            self._push(waiting)

    def give_up(self, before_s: float) -> list[MoveResult]:
        """Drop what waits where nothing has come to its end well since `before_s`."""
        if not self._keys or self.since_s > before_s:
            return []
        dropped = [MoveResult.DROPPED_LATE] * len(self._keys)
        self._keys.clear()
        touches = [item for _, item in sorted(self._queue, key=lambda each: each[0]) if isinstance(item, _Touch)]
        self._queue.clear()
        for touch in touches:
            self._reach(touch)
        self._touch_what_came()
        return dropped

    def clear(self) -> None:
        """Forget what waits. What moves comes to its end."""
        self._keys.clear()
        self._queue.clear()
        self._touches.clear()
        self._num_touched = 0
