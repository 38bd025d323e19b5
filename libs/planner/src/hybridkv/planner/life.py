"""State machine of a request's load: lookup, wait, offer, load, failure, retry.

Each event of a request has one function. The function takes a stage and returns the next one. A function that answers
the engine also returns a step: a `Reply`, or an `Action`. The caller runs the action and passes its outcome to another
function. Every function accepts every stage, and raises no error. No function does I/O, waits or updates metrics; the
caller does.

    stage, step = resume(stage, facts, bounds)
    while not isinstance(step, Reply):
        stage, step = ...  # run the action; then `searched`, `promoted`, or `resume` after a `Release`

First a search finds a boundary at which every group can resume. Then the chunks of this hit that only secondary tiers
hold are promoted, and no others. Meanwhile the reply is `RetryLater`, and the request holds no blocks. Every wait for
tiers has a deadline.

A request sends async lookups for all chunks that no nearer tier holds. Then a search finds two boundaries. The settled
boundary is the end of the hit if all unanswered lookups count as misses; the possible boundary, if all find their
chunks. The request waits only while the tokens between the two are expected to save more time than the rest of the
wait takes. So a short new prompt does not wait for a round trip, and no request waits for an answer that is expected
after the deadline. This comparison is only for lookups. A promotion from a disk, whose hit is known, has only a
deadline.
"""

from math import inf

from msgspec.structs import replace

from hybridkv.planner.admission import NOT_WAITED, RoomWait, Verdict, gate_load, gate_lookup
from hybridkv.planner.hit import Hit, Miss, Pending
from hybridkv.planner.stages import (
    COMPUTE,
    MAX_FAILED_LOADS,
    MAX_SHRINKS,
    NO_PAST,
    RELEASE,
    RELEASE_LATE,
    RETRY_LATER,
    Action,
    Bounds,
    Facts,
    GivenUp,
    Holding,
    HoldState,
    Loading,
    LookupWait,
    Offer,
    Past,
    Promote,
    Promoted,
    Reply,
    Search,
    Searched,
    Stage,
    StartLookups,
    Unsearched,
)

# In CPython 3.11, access to an enum member takes longer than most other operations of a step.
_ADMIT, _WAIT = Verdict.ADMIT, Verdict.WAIT
_WAITING, _READY, _LATE = HoldState.WAITING, HoldState.READY, HoldState.LATE


# Answers to lookups of the engine.


def resume(stage: Stage, facts: Facts, bounds: Bounds) -> tuple[Stage, Reply | Action]:
    """Answers a lookup of the engine for a request. Returns the same stage if nothing has changed."""
    room = facts.room
    if room is not None and type(stage) is not Loading:
        past = stage.past
        verdict, wait = gate_lookup(room, past.room, facts.now_s, bounds.room, past.failed_loads)
        if verdict is not _ADMIT:
            return _with_room(stage, wait), RETRY_LATER if verdict is _WAIT else COMPUTE
    if facts.hold is not None:
        return _step_of_hold(stage, facts, bounds)
    past = stage.past
    if type(stage) is Holding:
        stage = stage.found
    elif type(stage) is Loading:
        # The request already loads into its blocks. It waits without a deadline, because every load ends.
        return stage, RETRY_LATER
    elif type(stage) is GivenUp:
        return stage, COMPUTE
    limit_tokens = facts.num_tokens if past is NO_PAST else _limit(past, facts.num_tokens)
    if (
        type(stage) is Searched
        and stage.limit_tokens == limit_tokens
        and stage.computed_tokens == facts.computed_tokens
    ):
        if stage.generation == facts.generation:
            return _decide(stage, facts, bounds, 0)
        if facts.is_unanswered and past.tier_since_s is not None and _is_worth_waiting(stage, facts):
            return stage, RETRY_LATER
    return stage, Search(limit_tokens, past.only_primary)


def searched(
    stage: Stage,
    facts: Facts,
    bounds: Bounds,
    action: Search,
    answer: Hit | Pending | Miss,
    settled: Hit | Pending | Miss | None = None,
) -> tuple[Stage, Reply | Action]:
    """Takes the result of the search `action`. `facts` are the same as for `resume`.

    `answer` is the result if unanswered async lookups may still find their chunks; `settled`, if they count as misses.
    `settled` is None if both are the same.
    """
    if action.is_last and isinstance(answer, Pending):
        # The search should have counted chunks in flight as misses. So this answer causes no further wait.
        answer = Miss(None, "it was being stored for too long")
    if settled == answer:
        settled = None
    found = Searched(stage.past, facts.generation, action.limit_tokens, facts.computed_tokens, answer, False, settled)
    return _decide(found, facts, bounds, action.num_shrinks)


def lookups_started(
    stage: Stage, facts: Facts, bounds: Bounds, action: StartLookups, *, is_news: bool = True
) -> tuple[Stage, Reply | Action]:
    """Takes the outcome of `action`: the async lookups are in flight.

    Searches again if they were sent just now (`is_news`). If they were in flight before the last search, its result is
    still valid.
    """
    if type(stage) is not Searched:
        return resume(stage, facts, bounds)
    if not is_news:
        return _decide(stage, facts, bounds, action.num_shrinks)
    return stage, Search(action.limit_tokens, stage.past.only_primary, num_shrinks=action.num_shrinks)


def is_worth_waiting(num_tokens: int, rest_s: float, wait: LookupWait) -> bool:
    """True if `num_tokens` more tokens of a hit save more time than the rest of the wait takes, plus the load of states
    and windows (`wait.read_s`)."""
    return num_tokens * wait.saved_s_per_token > rest_s + wait.read_s


def break_even_tokens(wait: LookupWait) -> int | None:
    """Shortest hit, in tokens, for which a request waits after it sends its lookups; None if it never waits."""
    if wait.saved_s_per_token <= 0 or wait.answer_s > wait.timeout_s:
        return None
    return int((wait.answer_s + wait.read_s) / wait.saved_s_per_token) + 1


def expected_rest_s(past: Past, now_s: float, wait: LookupWait) -> float:
    """Expected time until the lookups of a request are answered.

    Infinity if no lookup was sent, or if the answers are expected after the deadline. An answer that is overdue by x
    seconds is expected in x seconds, but not in less than a quarter of its usual time.
    """
    if past.lookups_sent_s is None or past.lookup_deadline_s is None:
        return inf
    waited_s = now_s - past.lookups_sent_s
    overdue_s = waited_s - wait.answer_s
    rest_s = -overdue_s if overdue_s < 0 else max(overdue_s, wait.answer_s / 4)
    return rest_s if now_s < past.lookup_deadline_s and now_s + rest_s <= past.lookup_deadline_s else inf


def promoted(
    stage: Stage, facts: Facts, bounds: Bounds, action: Promote, outcome: Promoted
) -> tuple[Stage, Reply | Action]:
    """Takes the outcome of `action`. `facts` are the same as for `resume`."""
    if type(stage) is not Searched:
        return resume(stage, facts, bounds)
    if outcome is Promoted.IN_PRIMARY:
        found = replace(stage, is_in_primary=True)
        return _offer_or_compute(found, found.answer, facts, bounds)
    if stage.past.tier_since_s is None:
        stage = replace(stage, past=replace(stage.past, tier_since_s=action.since_s))
    if outcome is Promoted.READY:
        return _offer_or_compute(Holding(stage), stage.answer, facts, bounds)
    if outcome is Promoted.HELD:
        return Holding(stage), RETRY_LATER
    if outcome is Promoted.NO_ROOM:
        beyond = action.boundary - facts.computed_tokens
        past = replace(stage.past, room_limit=facts.computed_tokens + beyond * 3 // 4)
        stage = Unsearched(past)
        if action.num_shrinks + 1 < MAX_SHRINKS:
            limit_tokens = _limit(past, facts.num_tokens)
            return stage, Search(limit_tokens, past.only_primary, num_shrinks=action.num_shrinks + 1)
    if facts.now_s - action.since_s >= bounds.load_s:
        return _only_primary(stage), RELEASE_LATE
    return stage, RETRY_LATER


# Events from the engine and the workers.


def allocated(stage: Stage, boundary: int | None) -> Stage:
    """The engine gave blocks to the request: to load up to `boundary`, or to compute (None)."""
    past = stage.past
    if past.lookup_deadline_s is not None or past.tier_since_s is not None or past.stores_since_s is not None:
        # The request searches again only if it loses its blocks or the load fails. Then it sends new lookups, because
        # the answers are old, and its waits begin anew. A wait may be open here: below HybridMultiConnector, another
        # child may answer while this one waits.
        past = replace(past, lookups_sent_s=None, lookup_deadline_s=None, tier_since_s=None, stores_since_s=None)
    return _next_attempt(past) if boundary is None else Loading(past, boundary)


def load_ended(stage: Stage, *, failed: bool = False, is_explained: bool = False) -> Stage:
    """The load of the request has ended. After a failure without a known cause the next load is shorter.

    Args:
        stage: stage of the request. A stage other than `Loading` belongs to another request with the same
            id and is returned unchanged.
        failed: the load failed.
        is_explained: the chunks that caused the failure are known and dropped. If not, the same load would fail again,
            so only loads to lower boundaries are offered.
    """
    if type(stage) is not Loading:
        return stage
    past = stage.past
    if failed:
        limit = past.boundary_limit if is_explained else stage.boundary
        past = replace(past, failed_loads=past.failed_loads + 1, boundary_limit=limit)
        past = _started_over(past)
    return _next_attempt(past)


def start_over(stage: Stage) -> Stage:
    """The engine starts the request over: it took the blocks away, or discards computed tokens."""
    past = _started_over(stage.past)
    return Loading(past, stage.boundary) if type(stage) is Loading else _next_attempt(past)


def paused(stage: Stage, pause_s: float) -> Stage:
    """The engine had no room and did not call for `pause_s`. Waits for tiers and for room do not include this time."""
    past = stage.past
    tier_s, stores_s, room = past.tier_since_s, past.stores_since_s, past.room
    if tier_s is None and stores_s is None and room.since_s is None:
        return stage
    past = replace(
        past,
        tier_since_s=None if tier_s is None else tier_s + pause_s,
        stores_since_s=None if stores_s is None else stores_s + pause_s,
        room=room if room.since_s is None else replace(room, since_s=room.since_s + pause_s),
    )
    return _with_past(stage, past)


def lookups_sent_again(stage: Stage, now_s: float, timeout_s: float) -> Stage:
    """The async lookups of a queued request were sent again, since their answers have expired."""
    if stage.past.lookup_deadline_s is None:
        return stage
    return _with_past(stage, replace(stage.past, lookups_sent_s=now_s, lookup_deadline_s=now_s + timeout_s))


def forget_search(stage: Stage) -> Stage:
    """Drops the search result: the request has other tokens."""
    return Unsearched(stage.past) if type(stage) is Searched or type(stage) is Holding else stage


def answer_of(stage: Stage) -> Hit | Pending | Miss | None:
    """Search result of the request; None if there is none. For `GivenUp`, a Miss that names the failed loads."""
    if type(stage) is Searched:
        return stage.answer
    if type(stage) is Holding:
        return stage.found.answer
    return Miss(None, f"{stage.past.failed_loads} loads of this request failed") if type(stage) is GivenUp else None


# Steps.


def _step_of_hold(stage: Stage, facts: Facts, bounds: Bounds) -> tuple[Stage, Reply | Action]:
    """Next step if the tiers hold chunks for the request: offers the hit, waits for the chunks, or releases them."""
    if type(stage) is Holding and stage.found.computed_tokens == facts.computed_tokens:
        if facts.hold is _READY:
            return _offer_or_compute(stage, stage.found.answer, facts, bounds)
        if facts.hold is _WAITING:
            return stage, RETRY_LATER
    if facts.hold is _LATE:
        return _only_primary(stage), RELEASE_LATE
    return stage.found if type(stage) is Holding else stage, RELEASE


def _decide(found: Searched, facts: Facts, bounds: Bounds, num_shrinks: int) -> tuple[Stage, Reply | Action]:
    """Next step after a valid search result."""
    past, answer = found.past, found.answer
    settled = found.settled
    wait = facts.lookup
    if wait is not None and past.lookup_deadline_s is None and not past.only_primary:
        known_tokens = _resumes_at(answer if settled is None else settled, found)
        if found.limit_tokens - known_tokens > bounds.boundary_tokens:
            past = replace(past, lookups_sent_s=facts.now_s, lookup_deadline_s=facts.now_s + wait.timeout_s)
            return replace(found, past=past), StartLookups(found.limit_tokens, num_shrinks)
    if settled is not None:
        if _is_worth_waiting(found, facts):
            if past.tier_since_s is None:
                # All waits for tiers share one deadline.
                found = replace(found, past=replace(past, tier_since_s=facts.now_s))
            return found, RETRY_LATER
        # The request no longer waits. Lookups that are still in flight, also those of other requests, count as misses.
        found, answer = replace(found, answer=settled, settled=None), settled
    if type(answer) is Hit and facts.has_secondary and not found.is_in_primary and not past.only_primary:
        since_s = facts.now_s if past.tier_since_s is None else past.tier_since_s
        return found, Promote(answer.num_tokens, since_s, facts.now_s - since_s < bounds.load_s, num_shrinks)
    if type(answer) is Pending:
        since_s = facts.now_s if past.stores_since_s is None else past.stores_since_s
        if facts.now_s - since_s < bounds.lookup_s:
            if past.stores_since_s is None:
                found = replace(found, past=replace(past, stores_since_s=since_s))
            return found, RETRY_LATER
        past = replace(past, waited_in_vain=True)
        return replace(found, past=past), Search(found.limit_tokens, past.only_primary, True, num_shrinks)
    return _offer_or_compute(found, answer, facts, bounds)


def _is_worth_waiting(found: Searched, facts: Facts) -> bool:
    """True if the request waits for async lookups after this search."""
    wait, settled = facts.lookup, found.settled
    if wait is None or settled is None:
        return False
    more_tokens = _resumes_at(found.answer, found) - _resumes_at(settled, found)
    return is_worth_waiting(more_tokens, expected_rest_s(found.past, facts.now_s, wait), wait)


def _resumes_at(answer: Hit | Pending | Miss, found: Searched) -> int:
    """Token at which the request resumes with an answer."""
    return found.computed_tokens if isinstance(answer, Miss) else answer.num_tokens


def _offer_or_compute(
    stage: Stage, answer: Hit | Pending | Miss, facts: Facts, bounds: Bounds
) -> tuple[Stage, Reply | Action]:
    """Last step: offers a hit that is in the primary tier, if the engine has room. Without a hit: computes."""
    past = stage.past
    if past.stores_since_s is not None or past.tier_since_s is not None:
        past = replace(past, stores_since_s=None, tier_since_s=None)
        stage = _with_past(stage, past)
    if type(answer) is not Hit or answer.num_tokens <= facts.computed_tokens:
        return stage, COMPUTE
    if facts.room is not None:
        verdict, wait = gate_load(facts.room, past.room, facts.now_s, bounds.room)
        if verdict is not _ADMIT:
            return _with_room(stage, wait), RETRY_LATER if verdict is _WAIT else COMPUTE
    # The engine may have no room for the load. Then the next wait begins anew.
    return _with_room(stage, past.room.ended()), Offer(answer.num_tokens - facts.computed_tokens)


def _limit(past: Past, num_tokens: int) -> int:
    """Number of tokens to look up."""
    if past.boundary_limit is not None and past.boundary_limit < num_tokens:
        num_tokens = past.boundary_limit
    if past.room_limit is not None and past.room_limit < num_tokens and not past.only_primary:
        num_tokens = past.room_limit
    return num_tokens


def limit_tokens(stage: Stage, num_tokens: int) -> int:
    """Number of tokens to look up for a request of `num_tokens` at this stage."""
    return _limit(stage.past, num_tokens)


def _only_primary(stage: Stage) -> Stage:
    """Secondary tiers timed out: the request uses the primary tier alone from now on."""
    past = replace(stage.past, only_primary=True)
    return Unsearched(past) if type(stage) is Searched or type(stage) is Holding else _with_past(stage, past)


def _started_over(past: Past) -> Past:
    if past.room is NOT_WAITED and not past.waited_in_vain and past.room_limit is None:
        return past
    return replace(past, room=NOT_WAITED, waited_in_vain=False, room_limit=None)


def _next_attempt(past: Past) -> Stage:
    return GivenUp(past) if past.failed_loads >= MAX_FAILED_LOADS else Unsearched(past)


def _with_room(stage: Stage, wait: RoomWait) -> Stage:
    return stage if wait is stage.past.room else _with_past(stage, replace(stage.past, room=wait))


def _with_past(stage: Stage, past: Past) -> Stage:
    return Holding(replace(stage.found, past=past)) if type(stage) is Holding else replace(stage, past=past)
