"""How far a request is with its load, and what it is told: values, without a rule among them (`life.py` has those).

A stage says what is known of a request and still holds. What can change without it, such as the clock, what a tier
holds now or how much room there is, comes anew with each question, as `Facts`.
"""

import enum
from typing import Final, TypeAlias, final

import msgspec

from hybridkv.planner.admission import NOT_WAITED, Room, RoomBounds, RoomWait
from hybridkv.planner.hit import Hit, Miss, Pending

MAX_FAILED_LOADS: Final = 3
"""Loads of one request that may fail before it is no longer offered any."""
MAX_SHRINKS: Final = 8
"""Times that a boundary is brought down by a quarter because the fast tier cannot take what it needs."""


class Past(msgspec.Struct, frozen=True):
    """What happened to a request and still counts.

    Args:
        failed_loads: of this request, ever.
        boundary_limit: a load to this boundary failed and nobody knows why: only shorter ones are offered.
        room_limit: what a longer load needs does not fit into the fast tier: only shorter ones are offered.
        near_only: slower tiers took too long: this request goes without it.
        waited_in_vain: chunks that were being stored did not come in time.
        stores_since_s: when it was first told to ask again because of what is being stored; None when it was not.
        tier_since_s: when it was first told so, or would have been, because of what slower tiers have; None when it was
            not.
        asked_until_s: tiers that answer late were asked what they hold of it, and have answered by then or not at all;
            None when they were not. A request asks once until it is given blocks, so that no wait follows another; one
            that is searched anew after that asks anew.
        room: how long it has waited for room beside other loads.
    """

    failed_loads: int = 0
    boundary_limit: int | None = None
    room_limit: int | None = None
    near_only: bool = False
    waited_in_vain: bool = False
    stores_since_s: float | None = None
    tier_since_s: float | None = None
    asked_until_s: float | None = None
    room: RoomWait = NOT_WAITED


UNTROUBLED: Final = Past()


@final
class Unsearched(msgspec.Struct, frozen=True):
    """Nothing is known that would answer the next question: it was not asked yet, or what was known holds no more."""

    past: Past = UNTROUBLED


@final
class Searched(msgspec.Struct, frozen=True):
    """A search has ended, and its answer holds for as long as the same would be asked.

    Args:
        past: of the request.
        generation: of the tiers, when they were searched.
        limit_tokens: how much of the request was looked up.
        computed_tokens: what the engine held.
        answer: of the search.
        is_near: the fast tier was seen to hold all that the hit needs.
        settled: what was found where nothing counts of which a tier only was asked; None where that is `answer`.
    """

    past: Past
    generation: int
    limit_tokens: int
    computed_tokens: int
    answer: Hit | Pending | Miss
    is_near: bool = False
    settled: Hit | Pending | Miss | None = None


@final
class Holding(msgspec.Struct, frozen=True):
    """The tiers hold for the request what its hit needs, or bring it near.

    Args:
        found: what was searched. Its answer is a hit.
    """

    found: Searched

    @property
    def past(self) -> Past:
        return self.found.past


@final
class Loading(msgspec.Struct, frozen=True):
    """It has blocks, into which it loads.

    Args:
        past: of the request.
        boundary: where it will resume.
    """

    past: Past
    boundary: int


@final
class GivenUp(msgspec.Struct, frozen=True):
    """So many of its loads failed that it is computed from now on."""

    past: Past


Stage: TypeAlias = Unsearched | Searched | Holding | Loading | GivenUp
NEW: Final = Unsearched()
"""A request that nobody has asked about."""


class HoldState(enum.Enum):
    """Of what the tiers hold for a request."""

    WAITING = enum.auto()
    """Something is still on its way into the fast tier."""
    READY = enum.auto()
    """All of it is there, and stays."""
    LATE = enum.auto()
    """It came to nothing: slower tiers took too long."""
    LOST = enum.auto()
    """It came to nothing: something is gone, or could not be read."""


class Facts(msgspec.Struct, frozen=True, gc=False):
    """What is so now.

    Args:
        num_tokens: of the request.
        computed_tokens: the prefix that the engine holds itself.
        generation: changes whenever the answer of a search may have changed. Nobody looks at it while there is a hold.
        now_s: the time, on any clock that only grows.
        has_slower: there is a tier from which chunks must come near before they can be loaded.
        hold: what the tiers hold for the request, None if nothing.
        room: what a load must fit beside, None where no other holds blocks and none has failed.
        ask_s: how long tiers that answer late may take to say what they hold; 0 where there is none to be asked.
    """

    num_tokens: int
    computed_tokens: int
    generation: int
    now_s: float
    has_slower: bool = False
    hold: HoldState | None = None
    room: Room | None = None
    ask_s: float = 0.0


class Bounds(msgspec.Struct, frozen=True):
    """How long a request waits, in seconds from its first wait.

    Args:
        lookup_s: for chunks that are being stored.
        load_s: for slower tiers.
        room: for room beside other loads.
        tokens_per_s: what an engine computes while it waits for answers that may never come: a wait must be worth more.
    """

    lookup_s: float
    load_s: float
    room: RoomBounds = RoomBounds()
    tokens_per_s: float = 10_000.0


# What the engine is told.


@final
class Offer(msgspec.Struct, frozen=True, gc=False):
    """So many tokens can be loaded beyond those that the engine holds."""

    num_tokens: int


@final
class AskAgain(msgspec.Struct, frozen=True):
    """Not known yet, or not possible yet."""


@final
class Compute(msgspec.Struct, frozen=True):
    """Load nothing. What the tiers hold for the request is to be released."""


ASK_AGAIN: Final = AskAgain()
COMPUTE: Final = Compute()


# What must be done first.


@final
class Search(msgspec.Struct, frozen=True):
    """Find the longest hit, and tell `searched`.

    Args:
        limit_tokens: of the request are to be looked up.
        near_only: in the fast tier alone, where what is not readable yet counts as not stored.
        is_last: it has waited too long for what is being stored: that counts as not stored.
        num_shrinks: how often the boundary was brought down for this question.
    """

    limit_tokens: int
    near_only: bool
    is_last: bool = False
    num_shrinks: int = 0


@final
class Ask(msgspec.Struct, frozen=True):
    """Ask tiers that answer late what they hold of the request, and tell `asked`.

    Args:
        limit_tokens: of the request are to be asked for.
        num_shrinks: how often the boundary was brought down for this question.
    """

    limit_tokens: int
    num_shrinks: int = 0


@final
class Bring(msgspec.Struct, frozen=True):
    """See whether the fast tier holds all that a boundary needs; if not, and there is time, have the tiers hold it and
    bring it near. Tell `brought`.

    Args:
        boundary: that was found.
        since_s: when the request began to wait for slower tiers.
        has_time: whether it may still wait.
        num_shrinks: how often the boundary was brought down for this question.
    """

    boundary: int
    since_s: float
    has_time: bool
    num_shrinks: int = 0


@final
class Release(msgspec.Struct, frozen=True):
    """Release what the tiers hold for the request, and ask `resume` once more.

    Args:
        is_late: slower tiers took too long, and the request goes without it.
    """

    is_late: bool = False


RELEASE: Final = Release()
GO_WITHOUT: Final = Release(is_late=True)


class Brought(enum.Enum):
    """How `Bring` ended."""

    NEAR = enum.auto()
    """The fast tier holds all of it. Nothing is held for the request."""
    READY = enum.auto()
    """It holds all of it for the request."""
    HELD = enum.auto()
    """It will hold all of it for the request, which is to wait."""
    NO_ROOM = enum.auto()
    """The fast tier cannot take it all at once."""
    BUSY = enum.auto()
    """Not now, or no time was left."""


Reply: TypeAlias = Offer | AskAgain | Compute
"""What the engine is told."""
Errand: TypeAlias = Search | Ask | Bring | Release
"""What must be done before there is a reply."""
