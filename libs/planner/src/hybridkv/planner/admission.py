"""Which loads may hold blocks of the engine at the same time, so that none of them waits for ever.

A request whose load has ended waits, with its blocks, until it is scheduled; nothing can take them from it. Two such
requests that both need more than is left would wait for each other. The engine reserves against that, but counts the
empty entries of a window group's table as blocks, so for such models it reserves too little. Here every load is counted
with all that its request needs to be scheduled, and loads that do not fit beside the others come later.

`LoadAdmission` counts who holds what. What follows from the counts are functions of a `Room`, the same for everyone
whose loads wait for these blocks; `RoomBounds` says how long.
"""

import enum
import functools
from typing import Final

import msgspec

from hybridkv.planner.groups import CacheSpec, GroupKind, GroupSpec

MAX_GATED_POLLS: Final = 256
"""Steps that a request waits for room beside other loads before it is computed instead."""
MAX_GATE_S: Final = 60.0
"""But no longer than this, however long a step takes."""
_KEPT_COUNTS = 1024
"""Lengths of requests whose blocks are remembered: a request that waits is counted in every step."""


class Verdict(enum.Enum):
    """Of a load that asks for blocks."""

    ADMIT = enum.auto()
    WAIT = enum.auto()
    """It does not fit beside the others yet."""
    REFUSE = enum.auto()
    """It would wait for itself, or has waited too long: compute."""


# CPython 3.11 takes longer to look a member up than for most else here.
_ADMIT, _WAIT, _REFUSE = Verdict.ADMIT, Verdict.WAIT, Verdict.REFUSE


class Room(msgspec.Struct, frozen=True):
    """What a request's load must fit beside, in blocks.

    Args:
        needed_blocks: by the request, to be scheduled.
        held_by_others: by other requests that were given blocks for a load and were not scheduled since.
        reserved_blocks: by the engine for requests whose loads failed, this one included.
        has_failed: a load of this request failed, and it was not scheduled since.
        pool_blocks: of the engine.
        free_blocks: of them.
    """

    needed_blocks: int
    held_by_others: int
    reserved_blocks: int
    has_failed: bool
    pool_blocks: int
    free_blocks: int

    @property
    def must_let_pass(self) -> bool:
        """Whether others wait whose loads failed, and this request is none of them.

        They wait until no request holds blocks for a load, so nobody new may.
        """
        return self.reserved_blocks > 0 and not self.has_failed


class RoomBounds(msgspec.Struct, frozen=True):
    """How long a request waits for room.

    Args:
        polls: how often it is told to ask again; None: as often as there is time for.
        seconds: from the first time.
        loads_end: every load ends, in time, whatever becomes of it. Then those that have blocks, or whose loads failed,
            are certain to be scheduled, and waiting for them needs no bound.
    """

    polls: int | None = MAX_GATED_POLLS
    seconds: float = MAX_GATE_S
    loads_end: bool = True


class RoomWait(msgspec.Struct, frozen=True):
    """How often, and since when, a request was told to ask again because there is no room."""

    polls: int = 0
    since_s: float | None = None


NOT_WAITED: Final = RoomWait()


def admit(room: Room) -> Verdict:
    """Whether a request may be given blocks for a load now. One that is alone always may."""
    others = room.held_by_others
    if room.must_let_pass or (others and (room.has_failed or others + room.needed_blocks > room.pool_blocks)):
        return _WAIT
    if room.has_failed and room.needed_blocks + room.reserved_blocks > room.free_blocks:
        # The engine still reserves for its load that failed, and the next must fit beside that.
        return _REFUSE
    return _ADMIT


def gate_lookup(
    room: Room, wait: RoomWait, now_s: float, bounds: RoomBounds, failed_loads: int = 0
) -> tuple[Verdict, RoomWait]:
    """Whether it is worth finding out what a request can load.

    The engine puts a request whose load failed before all that have loaded, and looks no further when it does not fit:
    asked again later, it lets them pass.

    Args:
        room: now.
        wait: what it has waited so far.
        now_s: the time.
        bounds: how long it may.
        failed_loads: of this request, ever.
    """
    if room.held_by_others and (room.has_failed or failed_loads):
        return _wait(wait, now_s, bounds, is_certain=True)
    return _ADMIT, wait


def gate_load(room: Room, wait: RoomWait, now_s: float, bounds: RoomBounds) -> tuple[Verdict, RoomWait]:
    """Whether a request that has something to load may be given blocks for it now, as `admit`, within bounds."""
    verdict = admit(room)
    if verdict is _WAIT:
        return _wait(wait, now_s, bounds, is_certain=room.must_let_pass)
    return verdict, wait


def _wait(wait: RoomWait, now_s: float, bounds: RoomBounds, *, is_certain: bool) -> tuple[Verdict, RoomWait]:
    """One more poll. Others whose turn is certain to come are waited for without a bound, where all loads end; room
    beside loads may never come."""
    since_s: float | None
    if is_certain and bounds.loads_end:
        polls, since_s, has_time = wait.polls, None, True
    else:
        polls, since_s = wait.polls + 1, now_s if wait.since_s is None else wait.since_s
        has_time = now_s - since_s < bounds.seconds
    if polls != wait.polls or since_s != wait.since_s:
        wait = RoomWait(polls, since_s)
    return (_WAIT if has_time and (bounds.polls is None or polls <= bounds.polls) else _REFUSE), wait


def blocks_to_run(group: GroupSpec, num_tokens: int, max_in_flight_tokens: int) -> int:
    """The most blocks of a group that a request of `num_tokens` needs to be scheduled.

    Args:
        group: whose blocks.
        num_tokens: of the request.
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
    """Counts blocks of requests that were given blocks for a load and were not scheduled since.

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
        self.is_idle = True
        """Whether nobody holds blocks and nobody's load has failed: then there is room for every load."""
        self._kept_counts = functools.lru_cache(_KEPT_COUNTS)(self._count)

    def blocks(self, num_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` needs to be scheduled."""
        return self._kept_counts(num_tokens)

    def _count(self, num_tokens: int) -> int:
        return sum(blocks_to_run(group, num_tokens, self._max_in_flight_tokens) for group in self._groups)

    def take(self, request_id: str, num_tokens: int) -> None:
        """A request was given blocks to load into."""
        self._drop_held(request_id)
        self._held[request_id] = blocks = self.blocks(num_tokens)
        self._num_held += blocks
        self.is_idle = False

    def fail(self, request_id: str, num_tokens: int) -> None:
        """Its load failed and its blocks are free, but the engine reserves for it until it is scheduled."""
        self._drop_held(request_id)
        self._drop_failed(request_id)
        self._failed[request_id] = blocks = self.blocks(num_tokens)
        self._num_failed += blocks
        self.is_idle = False

    def give_back(self, request_id: str) -> None:
        """It was scheduled, or is gone."""
        if not self.is_idle:
            self._drop_held(request_id)
            self._drop_failed(request_id)
            self.is_idle = not self._held and not self._failed

    def _drop_held(self, request_id: str) -> None:
        self._num_held -= self._held.pop(request_id, 0)

    def _drop_failed(self, request_id: str) -> None:
        self._num_failed -= self._failed.pop(request_id, 0)

    def room(self, request_id: str, num_tokens: int, pool_blocks: int, free_blocks: int) -> Room:
        """What a load of this request must fit beside, in a pool of `pool_blocks`."""
        return Room(
            self._kept_counts(num_tokens),
            self._num_held - self._held.get(request_id, 0),
            self._num_failed,
            request_id in self._failed,
            pool_blocks,
            free_blocks,
        )
