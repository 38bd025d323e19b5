"""What shall be copied to one slower tier, in order, until there is a way and a place for it.

A chunk waits here while as much is on its way as may be, and while the slow tier says that asking again may help. What
needs others before it goes only when those are in the slow tier or on their way there, so whatever stops the queue, the
slow tier has beginnings. What waits is not protected in the fast tier: a store that needs the room is worth more than a
copy, and what is evicted meanwhile is dropped here, with all that needs it.

What failed takes with it what needs it: that is dropped while it waits, and withdrawn from the slow tier where it is on
its way, or was faster.

The order of use follows, in both tiers: beginnings are copied first, and pinned for it, so each would be evicted before
its end. `touch` waits until what was asked for before it has come, and then says how it should be.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Failure, FailureReason, Key, Refusal, Slot, TierIndex
from hybridkv.tiers.stack.moves import Direction, MoveResult
from hybridkv.tiers.stack.options import SlowerTierOptions
from hybridkv.tiers.stack.traffic import Traffic


class PathPlace(NamedTuple):
    """Where a chunk stands among those that are used together.

    Args:
        needs: what must be in the slow tier, or on its way there, so that the chunk is worth anything there.
        path_bytes: what its path takes up from its beginning on, the chunk included, in each slower tier as
            `TierStack.costs` says; empty if nobody knows. What is beyond the whole of a tier is not copied there: it
            would only push out its own beginning.
        prefix: more that it needs, which nothing says is there: looked up once, when its turn comes.
    """

    needs: tuple[Key, ...] = ()
    path_bytes: tuple[int, ...] = ()
    prefix: tuple[Key, ...] = ()


ALONE = PathPlace()

PATIENCE_S = 1.0
"""Nobody stays awake longer for what waits where nothing moves: what takes nothing for so long may do so for ever."""


def holds_all(index: TierIndex, keys: Sequence[Key]) -> bool:
    """Whether a tier lacks none of these, whatever it was asked."""
    if index.leading(keys) < len(keys):
        return False
    return not (index.answers_late and any(map(index.lacks, keys)))


class Gate(enum.Enum):
    """Whether the slow tier may be written to."""

    OPEN = "write"
    PROBE = "write once, and see what comes of it"
    BUSY = "wait: it is being tried, or nothing can be for a moment"
    SHUT = "keep away: what waits is dropped"


class _Next(enum.Enum):
    """What to do with the chunk whose turn it is, where it is not dropped."""

    SENT = "it is on its way now"
    GONE = "it is there, or on its way"
    LATER = "wait"
    PARKED = "wait apart, for what it needs"


@dataclass(slots=True, eq=False)
class _Batch:
    """What was sent and touched in a row, whose order of use is put right when all of it has come."""

    num_left: int = 0
    """Of what was sent, what is on its way in time, or waits to be sent again."""
    order: list[Key] = field(default_factory=list)
    """What was sent, and what was touched behind it."""
    num_touched: int = 0
    """Keys of touches among them."""


@dataclass(slots=True, eq=False)
class _Waiting:
    number: int
    """What needs others has a greater one."""
    key: Key
    place: PathPlace
    num_bytes: int = 0
    """Known when it was first tried."""
    batch: _Batch | None = None
    """While that counts it."""
    is_late: bool = False
    is_forgotten: bool = False


@dataclass(frozen=True, slots=True)
class _Touch:
    keys: tuple[Key, ...]


class Cascades:
    """The way down to one slower tier. What moves is `traffic`'s.

    Args:
        near: index of the fast tier.
        far: index of the slow tier.
        traffic: what is on its way.
        options: bounds.
        plan: makes a move of a chunk, from its place in the fast tier to that in the slow one.
        position: of the slow tier among those of its stack.
    """

    def __init__(
        self,
        near: TierIndex,
        far: TierIndex,
        traffic: Traffic,
        options: SlowerTierOptions,
        plan: Callable[[Key, Slot, Slot], None],
        position: int,
    ) -> None:
        self._near = near
        self._far = far
        self._traffic = traffic
        self._options = options
        self._plan_move = plan
        self._position = position
        self._max_bytes = min(
            options.cascading_share * near.capacity_bytes, options.arriving_share * far.capacity_bytes
        )
        self._numbers = itertools.count()
        self._again: list[tuple[int, _Waiting]] = []
        """A heap of what is sent again, before all else: it was there first."""
        self._queue: deque[_Waiting | _Touch] = deque()
        self.parked: dict[Key, list[_Waiting]] = {}
        """By what they need, which the fast tier is about to hold."""
        self._parked_keys: set[Key] = set()
        self._keys: set[Key] = set()
        """Of all chunks in these."""
        self._is_blocked = False
        """The first of them was tried, and nothing has changed since."""
        self._has_news = False
        self._moving: dict[Key, _Waiting] = {}
        self._landed: dict[Key, _Waiting] = {}
        """What came before something that it needs."""
        self._closed: _Batch | None = None
        """Its order is put right when the last of it has come."""
        self._batch = _Batch()
        """What was sent and touched since that was closed."""
        self._num_touched = 0
        """Keys of all touches that wait."""
        self.since_s = 0.0
        """When something came to its end well, was sent for the first time, or began to wait where nothing did."""
        self._patient_s = 0.0
        """When something came to its end well, or began to wait where nothing did and something was sent since the last
        that began so."""
        self._has_sent = True

    @property
    def has_something(self) -> bool:
        """Whether there is a chunk or a touch whose turn may have come."""
        return bool(self._queue or self._again)

    @property
    def has_news(self) -> bool:
        """Whether something was added since `pump`, and may go."""
        return self._has_news and not self._is_blocked

    @property
    def is_full(self) -> bool:
        """Whether no more may wait."""
        return len(self._keys) >= self._options.max_waiting

    @property
    def num_waiting(self) -> int:
        """Chunks that may still go."""
        return len(self._keys)

    def keeps_awake(self, now_s: float) -> bool:
        """Whether to come again soon for what waits, though nothing moves. What is not worth that waits for whoever
        comes next."""
        return bool(self._keys) and now_s - self._patient_s < PATIENCE_S

    def add(self, key: Key, place: PathPlace, now_s: float) -> MoveResult | None:
        """A chunk that the slow tier should have, behind all that was added before. Why not, where it is dropped."""
        if key in self._keys or not self._far.lacks(key):
            return None
        if self.is_full:
            return MoveResult.DROPPED_BUSY
        if not self._keys:
            self.since_s = now_s
            self._is_blocked = False
            if self._has_sent:
                self._patient_s, self._has_sent = now_s, False
        self._has_news = True
        self._keys.add(key)
        self._queue.append(_Waiting(next(self._numbers), key, place))
        return None

    def on_near(self, key: Key) -> None:
        """The fast tier holds a chunk now, or never will: what waited for it goes behind it."""
        if not self.parked:
            return
        ended = deque([key])
        while ended:
            for waiting in self.parked.pop(ended.popleft(), ()):
                self._parked_keys.discard(waiting.key)
                waiting.number = next(self._numbers)
                self._queue.append(waiting)
                ended.append(waiting.key)
                self._is_blocked = False

    def touch(self, keys: Sequence[Key]) -> None:
        """Make keys the most recently used in the slow tier, the last one most, when what was added before is there;
        then in the fast tier too, where what moves is pinned meanwhile.

        At once where more wait for that than chunks may.
        """
        is_idle = not (self._queue or self._again or self._is_ordering)
        if is_idle or self._num_touched + len(keys) > self._options.max_waiting:
            self._far.touch(keys)
            return
        self._num_touched += len(keys)
        self._queue.append(_Touch(tuple(keys)))

    # What goes.

    def pump(self, gate: Callable[[], Gate], now_s: float) -> list[MoveResult]:
        """Send what may go now. Why others are dropped, one for each.

        Args:
            gate: whether the slow tier may be written to.
            now_s: what waits behind something that is sent now for the first time waits anew.
        """
        dropped: list[MoveResult] = []
        self._has_news = False
        is_open = gate() if self._keys else Gate.OPEN
        while self._again or self._queue:
            item = self._again[0][1] if self._again else self._queue[0]
            if isinstance(item, _Touch):
                self._reach(item)
                self._queue.popleft()
                continue
            is_first = item.batch is None
            then = self._try(item, is_open)
            self._is_blocked = then is _Next.LATER
            if then is _Next.LATER:
                break
            if self._again:
                heapq.heappop(self._again)
            else:
                self._queue.popleft()
            if then is _Next.PARKED:
                continue
            self._keys.discard(item.key)
            if then is _Next.SENT:
                self.since_s = now_s if is_first else self.since_s
                is_open = gate() if is_open is Gate.PROBE else is_open
            elif isinstance(then, MoveResult):
                dropped.append(then)
                self._lose(item)
        return dropped

    @property
    def _is_ordering(self) -> bool:
        """Whether something is on its way behind which a touch has to wait."""
        return self._closed is not None or self._batch.num_left > 0

    def _reach(self, touch: _Touch) -> None:
        """At once, so that what comes next pushes out others first; and again when what is on its way has come."""
        self._far.touch(touch.keys)
        if not self._is_ordering:
            self._num_touched -= len(touch.keys)
            self._near.touch(touch.keys)
            self._batch.order.clear()
            return
        self._batch.order += touch.keys
        self._batch.num_touched += len(touch.keys)
        if self._closed is None:
            self._closed, self._batch = self._batch, _Batch()

    def _try(self, waiting: _Waiting, gate: Gate) -> _Next | MoveResult:
        key, place = waiting.key, waiting.place
        if gate is Gate.SHUT:
            return MoveResult.DROPPED_OPEN
        if gate is Gate.BUSY:
            return _Next.LATER
        moving, far = self._moving, self._far
        room_bytes = self._room_bytes
        if waiting.num_bytes > room_bytes or room_bytes <= 0 or len(moving) >= self._options.max_cascading:
            return self._wait_or(MoveResult.DROPPED_BUSY)
        if key in moving:  # withdrawn on its way
            return MoveResult.DROPPED_BUSY if moving[key].is_late else _Next.LATER
        for need in place.needs:
            if far.lacks(need):
                return self._miss(waiting, need)
        if place.prefix:
            if not holds_all(far, place.prefix):
                return MoveResult.DROPPED_ORPHAN
            waiting.place = place._replace(prefix=())
        if place.path_bytes and place.path_bytes[self._position] > far.capacity_bytes:
            return MoveResult.DROPPED_NO_ROOM
        near = self._near.pin(key)
        if near is None:
            return MoveResult.DROPPED_EVICTED
        num_bytes = waiting.num_bytes = near.num_bytes
        fits = num_bytes <= room_bytes
        then = self._send(waiting, near) if fits else self._wait_or(MoveResult.DROPPED_BUSY)
        if then is not _Next.SENT:
            self._near.unpin(key)
        return then

    @property
    def _room_bytes(self) -> float:
        """Of what may be on its way at one time; a chunk alone may be larger than that."""
        moving_bytes = self._traffic.bytes_moving[Direction.CASCADE]
        return self._max_bytes - moving_bytes if moving_bytes else math.inf

    def _wait_or(self, otherwise: MoveResult) -> _Next | MoveResult:
        """Wait for what is on its way, unless all of that is late: who knows when it ends."""
        return _Next.LATER if self._traffic.num_in_time[Direction.CASCADE] else otherwise

    def _miss(self, waiting: _Waiting, need: Key) -> _Next | MoveResult:
        """What another store is about to bring is waited for, apart: it comes behind in the queue."""
        if need not in self._parked_keys and self._near.lookup(need) is not LookupResult.PENDING:
            return MoveResult.DROPPED_ORPHAN
        self.parked.setdefault(need, []).append(waiting)
        self._parked_keys.add(waiting.key)
        return _Next.PARKED

    def _send(self, waiting: _Waiting, near: Slot) -> _Next | MoveResult:
        far = self._far.reserve(waiting.key, waiting.num_bytes)
        if isinstance(far, Slot):
            self._has_sent = True
            self._plan_move(waiting.key, near, far)
            self._moving[waiting.key] = waiting
            if waiting.batch is None:
                batch = waiting.batch = self._batch
                if not batch.num_left and self._closed is None:
                    batch.order.clear()
                batch.num_left += 1
                batch.order.append(waiting.key)
            return _Next.SENT
        if far is Refusal.PRESENT:
            return _Next.GONE
        if far is Refusal.BUSY:
            return _Next.LATER
        # What is on its way holds its place, but may be evicted when it is there.
        return self._wait_or(MoveResult.DROPPED_NO_ROOM) if far is Refusal.NO_ROOM else MoveResult.DROPPED_NO_ROOM

    def _touch_what_came(self) -> None:
        """Each batch in its order, and above it what was sent and touched since, as far as that has come.

        Chunks overtake each other on their way, and what follows must push out neither before what is older than both.
        """
        while self._closed is not None and not self._closed.num_left:
            self._num_touched -= self._closed.num_touched
            order = [*dict.fromkeys(reversed(self._closed.order))][::-1]  # each where it was named last
            self._far.touch(order)
            self._near.touch(order)
            self._closed = None
            if self._batch.num_touched:
                self._closed, self._batch = self._batch, _Batch()
                if self._closed.num_left:
                    self._far.touch(self._closed.order)
            else:
                self._far.touch(self._batch.order)

    # What came of it.

    def on_late(self, key: Key) -> None:
        """A move is late: no touch waits for it any more."""
        waiting = self._moving[key]
        waiting.is_late = True
        self._count_off(waiting)

    def on_ended(self, key: Key, failure: Failure | None, now_s: float) -> bool:
        """A move has ended. Whether it is made again, before what needs it, because the medium had no room for it."""
        waiting = self._moving.pop(key)
        self._is_blocked = False
        if failure is None:
            self.since_s = self._patient_s = now_s
            self._land(waiting)
        elif failure.reason is FailureReason.BUSY and not (waiting.is_late or waiting.is_forgotten):
            heapq.heappush(self._again, (waiting.number, waiting))
            self._keys.add(key)
            return True
        else:
            self._lose(waiting)
        self._count_off(waiting)
        return False

    def _count_off(self, waiting: _Waiting) -> None:
        if waiting.batch is not None:
            waiting.batch.num_left -= 1
            waiting.batch = None
            if self._closed is not None and not self._closed.num_left:
                self._touch_what_came()

    def _land(self, waiting: _Waiting) -> None:
        if self._is_on_its_way(waiting, self._landed):
            self._landed[waiting.key] = waiting
            if len(self._landed) > self._options.max_cascading:
                self._forget_landed()
        elif self._landed and not self._moving and not self._again:
            self._landed.clear()

    def _is_on_its_way(self, waiting: _Waiting, landed: Mapping[Key, _Waiting]) -> bool:
        """Whether something that it needs may still fail."""
        moving, keys = self._moving, self._keys
        return any(need in moving or need in landed or need in keys for need in waiting.place.needs)

    def _forget_landed(self) -> None:
        """What needs nothing any more that may fail; and the oldest, where that is not enough."""
        kept: dict[Key, _Waiting] = {}
        for waiting in sorted(self._landed.values(), key=lambda each: each.number):
            if self._is_on_its_way(waiting, kept):
                kept[waiting.key] = waiting
        self._landed = dict(list(kept.items())[-(self._options.max_cascading // 2 + 1) :])

    def _lose(self, waiting: _Waiting) -> None:
        """It was on its way, and will not come: what needs it and went behind it is worth nothing without it."""
        if waiting.batch is None and not waiting.is_late:
            return
        self._count_off(waiting)
        lost = {waiting.key}
        behind = (each for each in (*self._landed.values(), *self._moving.values()) if each.number > waiting.number)
        for each in sorted(behind, key=lambda each: each.number):
            if not lost.isdisjoint(each.place.needs):
                lost.add(each.key)
                self._landed.pop(each.key, None)
                self._far.invalidate(each.key)

    def give_up(self, before_s: float) -> list[MoveResult]:
        """Drop what waits where nothing has come to its end well since `before_s`."""
        if not self._keys or self.since_s > before_s:
            return []
        dropped = [MoveResult.DROPPED_LATE] * len(self._keys)
        again, queue = self._again, self._queue
        self._drop_all()
        for _, waiting in again:
            self._lose(waiting)
        for item in queue:
            if isinstance(item, _Touch):
                self._reach(item)
        return dropped

    def _drop_all(self) -> None:
        self._again, self._queue, self._is_blocked, self._has_news = [], deque(), False, False
        self.parked.clear()
        self._parked_keys.clear()
        self._keys.clear()

    def clear(self) -> None:
        """Forget what waits. What moves comes to its end, and is not made again."""
        self._drop_all()
        for waiting in self._moving.values():
            waiting.is_forgotten = True
        self._landed.clear()
        self._closed, self._batch = None, _Batch()
        self._num_touched = 0
