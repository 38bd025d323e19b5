"""Admission of loads: which loads may hold blocks of the engine at the same time, without a deadlock.

After its load, a request keeps its blocks until it is scheduled. If two such requests both need more blocks than are
free, they wait for each other. The engine reserves blocks to prevent this, but it counts the empty entries of a window
group's table as blocks, so for such models it reserves too few. This module counts, for each load, all blocks that the
request needs to be scheduled, and delays a load that does not fit beside the others.

`LoadAdmission` counts the blocks of each request. The decisions are functions of a `Room`. `RoomBounds` limits waits.
"""

from __future__ import annotations

import enum
import functools
from typing import Final

import msgspec

from hybridkv.planner.groups import CacheSpec, GroupKind, GroupSpec

MAX_GATED_POLLS: Final = 256
"""Maximum number of steps that a request waits for room beside other loads. Then the request is computed."""
MAX_GATE_S: Final = 60.0
"""Longest wait for room in seconds, even if steps are slow."""
_KEPT_COUNTS = 1024
"""Maximum number of cached block counts, by request length. A waiting request is counted in every step."""


class Verdict(enum.Enum):
    """Answer to a load that needs blocks."""

    ADMIT = enum.auto()
    WAIT = enum.auto()
    """The load does not fit beside the others yet."""
    REFUSE = enum.auto()
    """The load would wait for itself, or has waited too long: the request is computed."""


# In CPython 3.11, access to an enum member takes longer than most other operations here.
_ADMIT, _WAIT, _REFUSE = Verdict.ADMIT, Verdict.WAIT, Verdict.REFUSE


class Room(msgspec.Struct, frozen=True):
    """Blocks of the engine, as one request that wants to load sees them.

    Args:
        needed_blocks: blocks that the request needs to be scheduled.
        held_by_others: blocks of other requests that got them for a load and were not scheduled since.
        reserved_blocks: blocks that the engine reserves for requests after a failed load, including this request.
        has_failed: a load of this request failed, and the request was not scheduled since.
        pool_blocks: all blocks of the engine.
        free_blocks: free blocks of the engine.
    """

    needed_blocks: int
    held_by_others: int
    reserved_blocks: int
    has_failed: bool
    pool_blocks: int
    free_blocks: int

    @property
    def must_let_pass(self) -> bool:
        """True if other requests wait after a failed load, and this request does not.

        These requests wait until no request holds blocks for a load, so no new request may get blocks.
        """
        return self.reserved_blocks > 0 and not self.has_failed


class RoomBounds(msgspec.Struct, frozen=True):
    """Limits of the wait for room.

    Args:
        polls: maximum number of counted `RetryLater` replies to a request; None: no limit.
        seconds: longest wait, from its first poll.
        loads_end: every load ends in bounded time. Then two kinds of polls are not counted: those of a request with a
            failed load that waits for requests with blocks, and those of a request that waits for requests with a
            failed load.
    """

    polls: int | None = MAX_GATED_POLLS
    seconds: float = MAX_GATE_S
    loads_end: bool = True


class RoomWait(msgspec.Struct, frozen=True):
    """Waits of one request for room.

    Args:
        polls: number of counted polls of all waits.
        since_s: time of the first poll of this wait; None if the request does not wait.
    """

    polls: int = 0
    since_s: float | None = None

    def ended(self) -> RoomWait:
        """Value after the request was offered its load. Keeps the number of polls, which limits all waits together."""
        return self if self.since_s is None else RoomWait(self.polls)


NOT_WAITED: Final = RoomWait()


def admit(room: Room) -> Verdict:
    """Decides whether a request may get blocks for a load now.

    Always ADMIT if no other request holds blocks for a load, and no request waits after a failed load.
    """
    others = room.held_by_others
    if room.must_let_pass or (others and (room.has_failed or others + room.needed_blocks > room.pool_blocks)):
        return _WAIT
    if room.has_failed and room.needed_blocks + room.reserved_blocks > room.free_blocks:
        # The engine still reserves blocks for the failed load, and the next load must fit beside them.
        return _REFUSE
    return _ADMIT


def gate_lookup(
    room: Room, wait: RoomWait, now_s: float, bounds: RoomBounds, failed_loads: int = 0
) -> tuple[Verdict, RoomWait]:
    """Decides whether a lookup for a request is useful now.

    After a failed load the engine puts the request before all requests that have loaded, and schedules none of them
    while the first request does not fit. If the connector replies that it needs more time, the engine schedules the
    loaded requests. If every load ends, a request with a failed load waits beyond the limits while it does not fit, so
    that the loaded requests can run. So does a request that was scheduled since its failed load, and then preempted:
    once it waits, vLLM 0.30 keeps it before requests that load later.

    Args:
        room: blocks now.
        wait: wait so far.
        now_s: the time.
        bounds: limits of the wait.
        failed_loads: number of failed loads of this request, ever.
    """
    if room.held_by_others and (room.has_failed or failed_loads):
        verdict, wait = _wait(wait, now_s, bounds, counts_polls=not bounds.loads_end)
        if verdict is _REFUSE and bounds.loads_end and room.needed_blocks > room.free_blocks:
            return _WAIT, wait
        return verdict, wait
    return _ADMIT, wait


def gate_load(room: Room, wait: RoomWait, now_s: float, bounds: RoomBounds) -> tuple[Verdict, RoomWait]:
    """Decides whether a request with a hit may get blocks now, as `admit` does, within the limits of the wait.

    The caller ends the wait with `RoomWait.ended` when it offers the load.
    """
    verdict = admit(room)
    if verdict is _WAIT:
        return _wait(wait, now_s, bounds, counts_polls=not (room.must_let_pass and bounds.loads_end))
    return verdict, wait


def _wait(wait: RoomWait, now_s: float, bounds: RoomBounds, *, counts_polls: bool) -> tuple[Verdict, RoomWait]:
    """Records one more poll. Refuses beyond the limits.

    Without `counts_polls`, only the time counts. The engine may keep the awaited requests from running for many steps:
    behind other adapters, or behind requests with a higher priority.
    """
    polls, since_s = wait.polls + counts_polls, now_s if wait.since_s is None else wait.since_s
    if polls != wait.polls or since_s != wait.since_s:
        wait = RoomWait(polls, since_s)
    has_time = now_s - since_s < bounds.seconds
    return (_WAIT if has_time and (bounds.polls is None or polls <= bounds.polls) else _REFUSE), wait


def blocks_to_run(group: GroupSpec, num_tokens: int, max_in_flight_tokens: int) -> int:
    """Upper bound of the blocks of one group that a request of `num_tokens` needs to be scheduled.

    Args:
        group: the group.
        num_tokens: tokens of the request.
        max_in_flight_tokens: tokens that the engine may schedule before it gives back blocks that left a window.
    """
    everything = -(-num_tokens // group.block_tokens) + 1
    match group.kind:
        case GroupKind.WINDOW | GroupKind.CHUNKED:
            kept = (group.window_tokens or group.align_tokens or 0) + max_in_flight_tokens
            return min(everything, -(-kept // group.block_tokens) + 1)
        case GroupKind.RECURRENT | GroupKind.SCRATCH:
            # The running state, the one before it, a copy of a shared one and a checkpoint.
            return min(everything, 4)
        case GroupKind.FULL:
            return everything


class LoadAdmission:
    """Block counts of requests that got blocks for a load and were not scheduled since.

    Args:
        spec: the model's groups.
        max_in_flight_tokens: tokens that the engine may schedule before it gives back blocks that left a window.
    """

    def __init__(self, spec: CacheSpec, max_in_flight_tokens: int) -> None:
        self._groups = spec.groups
        self._max_in_flight_tokens = max_in_flight_tokens
        self._held: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._num_held = self._num_failed = 0
        self._deferrals: set[str] = set()
        """Requests with a failed load and no lookup since."""
        self.is_idle = True
        """True if no request holds blocks or waits after a failed load: then there is room for every load."""
        self._kept_counts = functools.lru_cache(_KEPT_COUNTS)(self._count)

    def blocks(self, num_tokens: int) -> int:
        """Upper bound of the blocks that a request of `num_tokens` needs to be scheduled."""
        return self._kept_counts(num_tokens)

    def _count(self, num_tokens: int) -> int:
        return sum(blocks_to_run(group, num_tokens, self._max_in_flight_tokens) for group in self._groups)

    def take(self, request_id: str, num_tokens: int) -> None:
        """Records that a request got blocks for a load."""
        self._drop_held(request_id)
        self._held[request_id] = blocks = self.blocks(num_tokens)
        self._num_held += blocks
        self.is_idle = False

    def fail(self, request_id: str, num_tokens: int) -> None:
        """Records a failed load. The request's blocks are free. The engine reserves the same number for the request."""
        self._drop_held(request_id)
        self._drop_failed(request_id)
        self._failed[request_id] = blocks = self.blocks(num_tokens)
        self._num_failed += blocks
        self._deferrals.add(request_id)
        self.is_idle = False

    def take_deferral(self, request_id: str) -> bool:
        """Whether to reply to this lookup that the connector needs more time: True once after each failed load.

        The engine first schedules the requests that waited for a load or for the next input of a session, in order,
        and stops at the first request that does not fit. These requests hold blocks, except a request with a failed
        load. If that request does not fit beside the later ones, none of them can continue. The deferral moves it to
        the requests without blocks (in vLLM 0.30, it only lets the others pass in this step).
        """
        if request_id not in self._deferrals:
            return False
        self._deferrals.remove(request_id)
        return True

    def give_back(self, request_id: str) -> None:
        """Records that the request was scheduled or has ended."""
        if not self.is_idle:
            self._drop_held(request_id)
            self._drop_failed(request_id)
            self._deferrals.discard(request_id)
            self.is_idle = not self._held and not self._failed

    def _drop_held(self, request_id: str) -> None:
        self._num_held -= self._held.pop(request_id, 0)

    def _drop_failed(self, request_id: str) -> None:
        self._num_failed -= self._failed.pop(request_id, 0)

    def room(self, request_id: str, num_tokens: int, pool_blocks: int, free_blocks: int) -> Room:
        """Blocks as this request sees them, in a pool of `pool_blocks`."""
        return Room(
            self._kept_counts(num_tokens),
            self._num_held - self._held.get(request_id, 0),
            self._num_failed,
            request_id in self._failed,
            pool_blocks,
            free_blocks,
        )
