"""Values of a request's load: its stages, the facts for a decision, replies and actions. The rules are in `life.py`.

A stage holds facts about one request that stay true. Facts that change without the request (the clock, the content of
tiers, free blocks) are passed with each call, as `Facts`.
"""

import enum
from typing import Final, TypeAlias, final

import msgspec

from hybridkv.planner.admission import NOT_WAITED, Room, RoomBounds, RoomWait
from hybridkv.planner.hit import Hit, Miss, Pending

MAX_FAILED_LOADS: Final = 3
"""Number of failed loads after which no further load is offered to a request."""
MAX_SHRINKS: Final = 8
"""Maximum number of times that one lookup lowers a boundary by a quarter, if the primary tier has no room."""


class Past(msgspec.Struct, frozen=True):
    """History of a request, as far as it changes later decisions.

    Args:
        failed_loads: number of failed loads, ever.
        boundary_limit: a load to this boundary failed for an unknown reason: only shorter loads are offered.
        room_limit: the primary tier had no room for a longer load: only shorter loads are offered until the request
            starts over. Not used if `only_primary`.
        only_primary: secondary tiers timed out: the request uses only the primary tier.
        waited_in_vain: chunks in flight into a tier did not arrive in time.
        stores_since_s: start of the wait for chunks in flight into a tier; None if there is no such wait.
        tier_since_s: start of the wait for secondary tiers; None if there is no such wait.
        lookups_sent_s: time at which the async lookups for this request were sent; None if there were none. A request
            sends them once until it gets blocks, so that waits do not follow each other. A later search sends them
            again.
        lookup_deadline_s: deadline of these lookups; None if there were none.
        room: wait for room beside other loads.
    """

    failed_loads: int = 0
    boundary_limit: int | None = None
    room_limit: int | None = None
    only_primary: bool = False
    waited_in_vain: bool = False
    stores_since_s: float | None = None
    tier_since_s: float | None = None
    lookups_sent_s: float | None = None
    lookup_deadline_s: float | None = None
    room: RoomWait = NOT_WAITED


NO_PAST: Final = Past()


@final
class Unsearched(msgspec.Struct, frozen=True):
    """No search result is known, or the last one is out of date."""

    past: Past = NO_PAST


@final
class Searched(msgspec.Struct, frozen=True):
    """A search has ended. Its answer holds while its inputs are the same.

    Args:
        past: history of the request.
        generation: generation of the tiers at the search.
        limit_tokens: number of the request's tokens that were looked up.
        computed_tokens: prefix that the engine held.
        answer: result of the search.
        is_in_primary: the primary tier holds all chunks of the hit.
        settled: result if unanswered async lookups count as misses; None if that is `answer`.
    """

    past: Past
    generation: int
    limit_tokens: int
    computed_tokens: int
    answer: Hit | Pending | Miss
    is_in_primary: bool = False
    settled: Hit | Pending | Miss | None = None


@final
class Holding(msgspec.Struct, frozen=True):
    """The tiers hold the chunks of the hit for the request, or promote them.

    Args:
        found: the search. Its answer is a hit.
    """

    found: Searched

    @property
    def past(self) -> Past:
        return self.found.past


@final
class Loading(msgspec.Struct, frozen=True):
    """The request has blocks and loads into them.

    Args:
        past: history of the request.
        boundary: token at which the request will resume.
    """

    past: Past
    boundary: int


@final
class GivenUp(msgspec.Struct, frozen=True):
    """Too many loads of the request failed: it is computed."""

    past: Past


Stage: TypeAlias = Unsearched | Searched | Holding | Loading | GivenUp
NEW_REQUEST: Final = Unsearched()
"""Stage of a new request."""


class HoldState(enum.Enum):
    """State of the chunks that the tiers hold for a request."""

    WAITING = enum.auto()
    """A chunk is still in flight into the primary tier."""
    READY = enum.auto()
    """All chunks are in the primary tier, pinned."""
    LATE = enum.auto()
    """A secondary tier timed out."""
    LOST = enum.auto()
    """A chunk was evicted or could not be read."""


class LookupWait(msgspec.Struct, frozen=True, gc=False):
    """Cost of the wait for async lookups, and gain by a hit, as measured so far.

    Args:
        timeout_s: deadline, in seconds after a lookup is sent.
        answer_s: expected time from sending a lookup to its answer.
        read_s: expected time to load the part of a hit that does not grow with it: states and windows.
        saved_s_per_token: time to compute a token, less the time to load it. If this is 0 or less, a hit is no faster
            than computing.
    """

    timeout_s: float
    answer_s: float
    read_s: float
    saved_s_per_token: float


class Facts(msgspec.Struct, frozen=True, gc=False):
    """Inputs of a decision.

    Args:
        num_tokens: tokens of the request.
        computed_tokens: prefix that the engine holds itself.
        generation: changes whenever the answer of a search may have changed. Not read while there is a hold.
        now_s: the time, on any monotonic clock.
        has_secondary: there is a secondary tier. Its chunks are promoted before a load.
        hold: state of the chunks that the tiers hold for the request; None if they hold none.
        room: blocks as this request sees them; None if no other request holds blocks and no load failed.
        lookup: cost of a wait for async lookups; None if no tier accepts a lookup now.
        is_unanswered: the async lookup that the request waits for has no answer yet. Then a changed generation
            does not come from this lookup.
    """

    num_tokens: int
    computed_tokens: int
    generation: int
    now_s: float
    has_secondary: bool = False
    hold: HoldState | None = None
    room: Room | None = None
    lookup: LookupWait | None = None
    is_unanswered: bool = False


class Bounds(msgspec.Struct, frozen=True):
    """Limits of the waits of a request.

    Args:
        lookup_s: wait for chunks in flight into a tier, in seconds from its start.
        load_s: wait for secondary tiers, in seconds from its start.
        room: wait for room beside other loads.
        boundary_tokens: distance of boundaries. Lookups are sent if a boundary may be found beyond the known hit.
    """

    lookup_s: float
    load_s: float
    room: RoomBounds = RoomBounds()
    boundary_tokens: int = 1


# Replies to the engine.


@final
class Offer(msgspec.Struct, frozen=True, gc=False):
    """The request can load `num_tokens` after the engine's own prefix."""

    num_tokens: int


@final
class RetryLater(msgspec.Struct, frozen=True):
    """The answer is not known yet, or there is no room yet."""


@final
class Compute(msgspec.Struct, frozen=True):
    """The request loads nothing. The tiers release the chunks that they hold for it."""


RETRY_LATER: Final = RetryLater()
COMPUTE: Final = Compute()


# Actions: work before there is a reply.


@final
class Search(msgspec.Struct, frozen=True):
    """Find the longest hit, then call `searched`.

    Args:
        limit_tokens: number of the request's tokens to look up.
        only_primary: look up only the primary tier. Chunks in flight count as misses.
        is_last: the wait for chunks in flight is over: they count as misses.
        num_shrinks: number of times that the boundary was lowered since the last `resume`.
    """

    limit_tokens: int
    only_primary: bool
    is_last: bool = False
    num_shrinks: int = 0


@final
class StartLookups(msgspec.Struct, frozen=True):
    """Send async lookups for the request, then call `lookups_started`.

    Args:
        limit_tokens: number of the request's tokens to look up.
        num_shrinks: number of times that the boundary was lowered since the last `resume`.
    """

    limit_tokens: int
    num_shrinks: int = 0


@final
class Promote(msgspec.Struct, frozen=True):
    """Check whether the primary tier holds all chunks of a hit. If not, and there is time, promote the missing chunks
    and pin all of them. Then call `promoted`.

    Args:
        boundary: end of the hit.
        since_s: start of the wait for secondary tiers.
        has_time: the wait may go on.
        num_shrinks: number of times that the boundary was lowered since the last `resume`.
    """

    boundary: int
    since_s: float
    has_time: bool
    num_shrinks: int = 0


@final
class Release(msgspec.Struct, frozen=True):
    """Release the chunks that the tiers hold for the request, then call `resume` again.

    Args:
        is_late: secondary tiers timed out, and the request uses only the primary tier.
    """

    is_late: bool = False


RELEASE: Final = Release()
RELEASE_LATE: Final = Release(is_late=True)


class Promoted(enum.Enum):
    """Outcome of `Promote`."""

    IN_PRIMARY = enum.auto()
    """The primary tier has all chunks. None is pinned for the request."""
    READY = enum.auto()
    """The primary tier has all chunks, pinned for the request."""
    HELD = enum.auto()
    """The chunks are being promoted for the request, which waits."""
    NO_ROOM = enum.auto()
    """The primary tier has no room for all chunks at once."""
    BUSY = enum.auto()
    """A promotion cannot start now, or no time is left."""


Reply: TypeAlias = Offer | RetryLater | Compute
"""Answer to the engine."""
Action: TypeAlias = Search | StartLookups | Promote | Release
"""Work before there is a reply."""
