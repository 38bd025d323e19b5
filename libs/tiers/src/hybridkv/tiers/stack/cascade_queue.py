"""What shall be copied to one slower tier, in order, until there is a way and a place for it.

A chunk waits here while as much is on its way as may be, and while the slower tier says that asking again may help.
What needs others before it goes only when those are there or on their way, so whatever stops the queue, the slower tier
has beginnings. What waits is not protected in the fast tier: a store that
needs the room is worth more than a copy, and what is evicted meanwhile is dropped here, with all that needs it.

What failed takes with it what needs it: that is dropped while it waits, and withdrawn from the slower tier where it is
on its way, or was faster.

The order of use follows, in both tiers (`order.py`).
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Failure, FailureReason, GathersPlaces, Key, Refusal, Slot
from hybridkv.tiers.stack.in_flight import Traffic
from hybridkv.tiers.stack.moves import Direction, MoveResult
from hybridkv.tiers.stack.options import SlowerTierOptions
from hybridkv.tiers.stack.order import Batch, UseOrder
from hybridkv.tiers.stack.path import PathPosition, holds_all

PATIENCE_S = 1.0
"""Nobody stays awake longer for what waits where nothing moves: what takes nothing for so long may do so for ever."""


class Gate(enum.Enum):
    """Whether the slower tier may be written to."""

    OPEN = "write"
    PROBE = "write once, and see what comes of it"
    BUSY = "wait: it is being tried, or nothing can be for a moment"
    SHUT = "keep away: what waits is dropped"


class Next(enum.Enum):
    """What to do with the chunk whose turn it is, where it is not dropped."""

    SENT = "it is on its way now"
    GONE = "it is there, or on its way"
    LATER = "wait"
    PARKED = "wait apart, for what it needs"


@dataclass(slots=True, eq=False)
class Waiting:
    """A chunk that is to be copied."""

    number: int
    """What needs others has a greater one."""
    key: Key
    on_path: PathPosition
    num_bytes: int = 0
    """Known when it was first tried."""
    batch: Batch | None = None
    """While that counts it."""
    is_late: bool = False
    is_forgotten: bool = False


@dataclass(frozen=True, slots=True)
class Touch:
    """Keys that are to be the most recently used when what is before them has come."""

    keys: tuple[Key, ...]


class Cascades:
    """The way down to one slower tier. What moves is `traffic`'s.

    Args:
        order: of use, in the fast tier and in the slower one.
        traffic: what is on its way.
        options: bounds.
        plan: makes a move of a chunk, from its place in the fast tier to that in the slow one.
        position: of the slower tier among those of its stack.
    """

    def __init__(
        self,
        order: UseOrder,
        traffic: Traffic,
        options: SlowerTierOptions,
        plan: Callable[[Key, Slot, Slot], None],
        position: int,
    ) -> None:
        self._order = order
        self._near, self._far = order.near, order.far
        self._gathers = order.far if isinstance(order.far, GathersPlaces) else None
        self._traffic = traffic
        self._options = options
        self._plan_move = plan
        self._position = position
        self._max_bytes = min(
            options.cascading_share * order.near.capacity_bytes, options.arriving_share * order.far.capacity_bytes
        )
        self._numbers = itertools.count()
        self._again: list[tuple[int, Waiting]] = []
        """A heap of what is sent again, before all else: it was there first."""
        self._queue: deque[Waiting | Touch] = deque()
        self.parked: dict[Key, list[Waiting]] = {}
        """By what they need, which the fast tier is about to hold."""
        self._parked_keys: set[Key] = set()
        self._keys: set[Key] = set()
        """Of all chunks in these."""
        self._is_blocked = False
        """The first of them was tried, and nothing has changed since."""
        self._has_news = False
        self._moving: dict[Key, Waiting] = {}
        self._landed: dict[Key, Waiting] = {}
        """What came before something that it needs."""
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

    def add(self, key: Key, on_path: PathPosition, now_s: float) -> MoveResult | None:
        """A chunk that the slower tier should have, behind all that was added before. Why not, where it is dropped."""
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
        self._queue.append(Waiting(next(self._numbers), key, on_path))
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
        """Make keys the most recently used in the slower tier, the last one most, when what was added before is there;
        then in the fast tier too, where what moves is pinned meanwhile.

        At once where more wait for that than chunks may.
        """
        is_idle = not (self._queue or self._again or self._order.is_ordering)
        if is_idle or self._order.num_touched + len(keys) > self._options.max_waiting:
            self._far.touch(keys)
            return
        self._order.num_touched += len(keys)
        self._queue.append(Touch(tuple(keys)))

    # What goes.

    def pump(self, gate: Callable[[], Gate], now_s: float) -> list[MoveResult]:
        """Send what may go now. Why others are dropped, one for each.

        Args:
            gate: whether the slower tier may be written to.
            now_s: what waits behind something that is sent now for the first time waits anew.
        """
        dropped: list[MoveResult] = []
        self._has_news = False
        is_open = gate() if self._keys else Gate.OPEN
        while self._again or self._queue:
            item = self._again[0][1] if self._again else self._queue[0]
            if isinstance(item, Touch):
                self._order.reach(item.keys)
                self._queue.popleft()
                continue
            is_first = item.batch is None
            then = self._try(item, is_open)
            self._is_blocked = then is Next.LATER
            if then is Next.LATER:
                break
            if self._again:
                heapq.heappop(self._again)
            else:
                self._queue.popleft()
            if then is Next.PARKED:
                continue
            self._keys.discard(item.key)
            if then is Next.SENT:
                self.since_s = now_s if is_first else self.since_s
                is_open = gate() if is_open is Gate.PROBE else is_open
            elif isinstance(then, MoveResult):
                dropped.append(then)
                self._lose(item)
        return dropped

    def _try(self, waiting: Waiting, gate: Gate) -> Next | MoveResult:
        key, on_path = waiting.key, waiting.on_path
        if gate is Gate.SHUT:
            return MoveResult.DROPPED_OPEN
        if gate is Gate.BUSY:
            return Next.LATER
        moving, far = self._moving, self._far
        room_bytes = self._room_bytes
        if waiting.num_bytes > room_bytes or room_bytes <= 0 or len(moving) >= self._options.max_cascading:
            return self._wait_or(MoveResult.DROPPED_BUSY)
        if key in moving:  # withdrawn on its way
            return MoveResult.DROPPED_BUSY if moving[key].is_late else Next.LATER
        for need in on_path.needs:
            if far.lacks(need):
                return self._miss(waiting, need)
        if on_path.prefix:
            if not holds_all(far, on_path.prefix):
                return MoveResult.DROPPED_ORPHAN
            waiting.on_path = on_path._replace(prefix=())
        if on_path.path_bytes and on_path.path_bytes[self._position] > far.capacity_bytes:
            return MoveResult.DROPPED_NO_ROOM
        near = self._near.pin(key)
        if near is None:
            return MoveResult.DROPPED_EVICTED
        num_bytes = waiting.num_bytes = near.num_bytes
        fits = num_bytes <= room_bytes
        then = self._send(waiting, near) if fits else self._wait_or(MoveResult.DROPPED_BUSY)
        if then is not Next.SENT:
            self._near.unpin(key)
        return then

    @property
    def _room_bytes(self) -> float:
        """Of what may be on its way at one time; a chunk alone may be larger than that."""
        moving_bytes = self._traffic.bytes_moving[Direction.CASCADE]
        return self._max_bytes - moving_bytes if moving_bytes else math.inf

    def _wait_or(self, otherwise: MoveResult) -> Next | MoveResult:
        """Wait for what is on its way, unless all of that is late: who knows when it ends."""
        return Next.LATER if self._traffic.num_in_time[Direction.CASCADE] else otherwise

    def _miss(self, waiting: Waiting, need: Key) -> Next | MoveResult:
        """What another store is about to bring is waited for, apart: it comes behind in the queue."""
        if need not in self._parked_keys and self._near.lookup(need) is not LookupResult.PENDING:
            return MoveResult.DROPPED_ORPHAN
        self.parked.setdefault(need, []).append(waiting)
        self._parked_keys.add(waiting.key)
        return Next.PARKED

    def _send(self, waiting: Waiting, near: Slot) -> Next | MoveResult:
        if self._gathers is not None:
            self._gathers.follows(waiting.key, waiting.on_path.needs)
        far = self._far.reserve(waiting.key, waiting.num_bytes)
        if isinstance(far, Slot):
            self._has_sent = True
            self._plan_move(waiting.key, near, far)
            self._moving[waiting.key] = waiting
            if waiting.batch is None:
                waiting.batch = self._order.sent(waiting.key)
            return Next.SENT
        if far is Refusal.PRESENT:
            return Next.GONE
        if far is Refusal.BUSY:
            return Next.LATER
        # What is on its way holds its place, but may be evicted when it is there.
        return self._wait_or(MoveResult.DROPPED_NO_ROOM) if far is Refusal.NO_ROOM else MoveResult.DROPPED_NO_ROOM

    def end_batch(self) -> None:
        """What was sent since the last call is handed out now."""
        if self._gathers is not None:
            self._gathers.end_batch()

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

    def _count_off(self, waiting: Waiting) -> None:
        if waiting.batch is not None:
            batch, waiting.batch = waiting.batch, None
            self._order.count_off(batch)

    def _land(self, waiting: Waiting) -> None:
        if self._is_on_its_way(waiting, self._landed):
            self._landed[waiting.key] = waiting
            if len(self._landed) > self._options.max_cascading:
                self._forget_landed()
        elif self._landed and not self._moving and not self._again:
            self._landed.clear()

    def _is_on_its_way(self, waiting: Waiting, landed: Mapping[Key, Waiting]) -> bool:
        """Whether something that it needs may still fail."""
        moving, keys = self._moving, self._keys
        return any(need in moving or need in landed or need in keys for need in waiting.on_path.needs)

    def _forget_landed(self) -> None:
        """What needs nothing any more that may fail; and the oldest, where that is not enough."""
        kept: dict[Key, Waiting] = {}
        for waiting in sorted(self._landed.values(), key=lambda each: each.number):
            if self._is_on_its_way(waiting, kept):
                kept[waiting.key] = waiting
        self._landed = dict(list(kept.items())[-(self._options.max_cascading // 2 + 1) :])

    def _lose(self, waiting: Waiting) -> None:
        """It was on its way, and will not come: what needs it and went behind it is worth nothing without it."""
        if waiting.batch is None and not waiting.is_late:
            return
        self._count_off(waiting)
        lost = {waiting.key}
        behind = (each for each in (*self._landed.values(), *self._moving.values()) if each.number > waiting.number)
        for each in sorted(behind, key=lambda each: each.number):
            if not lost.isdisjoint(each.on_path.needs):
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
            if isinstance(item, Touch):
                self._order.reach(item.keys)
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
        self._order.clear()
