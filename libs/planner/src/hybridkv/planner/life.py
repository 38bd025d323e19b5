"""The life of a request as far as its load goes: it asks, waits, is offered a load or none, loads, fails, tries again.

One function for each thing that happens to a request. Each takes its stage and gives the next one; those that answer
the engine give a step as well: a `Reply`, or an `Errand` whose outcome is to be told first. All are total, and none
asks, waits or counts: whoever drives them does.

    stage, step = resume(stage, facts, bounds)
    while not isinstance(step, Reply):
        stage, step = ...  # run the errand; then `searched`, `brought`, or `resume` after a `Release`

A boundary is settled first, at which every group can resume; then what only slower tiers have of it is brought near,
and nothing else. The engine is told to ask again meanwhile, and holds no block for it. Every such wait has a deadline.
Where a tier can only say later whether it has more, there are two boundaries: one that is settled, and one that is
possible. A request asks, and waits for answers, only where the difference is worth more than what the engine computes
meanwhile: a short prompt that nobody has seen pays for no round trip.
"""

from msgspec.structs import replace

from hybridkv.planner.admission import NOT_WAITED, RoomWait, Verdict, gate_load, gate_lookup
from hybridkv.planner.hit import Hit, Miss, Pending
from hybridkv.planner.stages import (
    ASK_AGAIN,
    COMPUTE,
    GO_WITHOUT,
    MAX_FAILED_LOADS,
    MAX_SHRINKS,
    RELEASE,
    UNTROUBLED,
    Ask,
    Bounds,
    Bring,
    Brought,
    Errand,
    Facts,
    GivenUp,
    Holding,
    HoldState,
    Loading,
    Offer,
    Past,
    Reply,
    Search,
    Searched,
    Stage,
    Unsearched,
)

# CPython 3.11 takes longer to look a member up than for most of a step.
_ADMIT, _WAIT = Verdict.ADMIT, Verdict.WAIT
_WAITING, _READY, _LATE = HoldState.WAITING, HoldState.READY, HoldState.LATE


# What the engine asks.


def resume(stage: Stage, facts: Facts, bounds: Bounds) -> tuple[Stage, Reply | Errand]:
    """The engine asks what a request can load. Where nothing has changed the same stage comes back."""
    room = facts.room
    if room is not None:
        past = stage.past
        verdict, wait = gate_lookup(room, past.room, facts.now_s, bounds.room, past.failed_loads)
        if verdict is not _ADMIT:
            return _with_room(stage, wait), ASK_AGAIN if verdict is _WAIT else COMPUTE
    if facts.hold is not None:
        return _with_hold(stage, facts, bounds)
    past = stage.past
    if type(stage) is Holding:
        stage = stage.found
    elif type(stage) is Loading:
        # Its blocks are taken, and a load always ends.
        return stage, ASK_AGAIN
    elif type(stage) is GivenUp:
        return stage, COMPUTE
    limit_tokens = facts.num_tokens if past is UNTROUBLED else _limit(past, facts.num_tokens)
    if (
        type(stage) is Searched
        and stage.generation == facts.generation
        and stage.limit_tokens == limit_tokens
        and stage.computed_tokens == facts.computed_tokens
    ):
        return _decide(stage, facts, bounds, 0)
    return stage, Search(limit_tokens, past.near_only)


def searched(
    stage: Stage,
    facts: Facts,
    bounds: Bounds,
    errand: Search,
    answer: Hit | Pending | Miss,
    settled: Hit | Pending | Miss | None = None,
) -> tuple[Stage, Reply | Errand]:
    """A search that `errand` asked for has ended. `facts` are those with which it was asked for.

    `settled` is what was found where nothing counts of which a tier only was asked; None where that is `answer` too.
    """
    if errand.is_last and isinstance(answer, Pending):
        # What is not readable was to count as missing; whoever says otherwise is not waited for.
        answer = Miss(None, "it was being stored for too long")
    if settled == answer:
        settled = None
    found = Searched(stage.past, facts.generation, errand.limit_tokens, facts.computed_tokens, answer, False, settled)
    return _decide(found, facts, bounds, errand.num_shrinks)


def asked(stage: Stage, facts: Facts, bounds: Bounds, errand: Ask) -> tuple[Stage, Reply | Errand]:
    """The tiers were asked what `errand` says: what they hold for sure is to be searched again."""
    if type(stage) is not Searched:
        return resume(stage, facts, bounds)
    return stage, Search(errand.limit_tokens, stage.past.near_only, num_shrinks=errand.num_shrinks)


def is_worth_waiting(settled_tokens: int, possible_tokens: int, left_s: float, tokens_per_s: float) -> bool:
    """Whether to wait at most `left_s` for what may be there, rather than to compute from what is settled."""
    return possible_tokens - settled_tokens > left_s * tokens_per_s


def brought(
    stage: Stage, facts: Facts, bounds: Bounds, errand: Bring, outcome: Brought
) -> tuple[Stage, Reply | Errand]:
    """What `errand` asked for is near, is held, or cannot be. `facts` are those with which it was asked for."""
    if type(stage) is not Searched:
        return resume(stage, facts, bounds)
    if outcome is Brought.NEAR:
        found = replace(stage, is_near=True)
        return _settle(found, found.answer, facts, bounds)
    if stage.past.tier_since_s is None:
        stage = replace(stage, past=replace(stage.past, tier_since_s=errand.since_s))
    if outcome is Brought.READY:
        return _settle(Holding(stage), stage.answer, facts, bounds)
    if outcome is Brought.HELD:
        return Holding(stage), ASK_AGAIN
    if outcome is Brought.NO_ROOM:
        beyond = errand.boundary - facts.computed_tokens
        past = replace(stage.past, room_limit=facts.computed_tokens + beyond * 3 // 4)
        stage = Unsearched(past)
        if errand.num_shrinks + 1 < MAX_SHRINKS:
            limit_tokens = _limit(past, facts.num_tokens)
            return stage, Search(limit_tokens, past.near_only, num_shrinks=errand.num_shrinks + 1)
    if facts.now_s - errand.since_s >= bounds.load_s:
        return _without(stage), GO_WITHOUT
    return stage, ASK_AGAIN


# What the engine and the workers tell.


def allocated(stage: Stage, boundary: int | None) -> Stage:
    """The engine has given the request blocks: to load up to `boundary`, or to compute (None)."""
    past = stage.past
    if past.asked_until_s is not None:
        # It is searched anew only when it lost them, or when what was promised failed: what it heard is old by then.
        past = replace(past, asked_until_s=None)
    return _begin(past) if boundary is None else Loading(past, boundary)


def load_ended(stage: Stage, *, failed: bool = False, is_explained: bool = False) -> Stage:
    """The request's load has ended. After a failure its next one asks for less.

    Args:
        stage: of the request. One that does not load has another's id, and nothing of this is its own.
        failed: whether it must be asked again.
        is_explained: it is known which chunks are to blame. Where nobody is, the same would fail again.
    """
    if type(stage) is not Loading:
        return stage
    past = stage.past
    if failed:
        limit = past.boundary_limit if is_explained else stage.boundary
        past = replace(past, failed_loads=past.failed_loads + 1, boundary_limit=limit)
        past = _started_over(past)
    return _begin(past)


def start_over(stage: Stage) -> Stage:
    """The engine starts the request over: it gave up its blocks, or what it computed is not to be used."""
    past = _started_over(stage.past)
    return Loading(past, stage.boundary) if type(stage) is Loading else _begin(past)


def forget_search(stage: Stage) -> Stage:
    """What was searched for holds no more: the request has other tokens."""
    return Unsearched(stage.past) if type(stage) is Searched or type(stage) is Holding else stage


def answer_of(stage: Stage) -> Hit | Pending | Miss | None:
    """What was found for the request; None where nothing is known."""
    if type(stage) is Searched:
        return stage.answer
    if type(stage) is Holding:
        return stage.found.answer
    return Miss(None, f"{stage.past.failed_loads} loads of this request failed") if type(stage) is GivenUp else None


# One step.


def _with_hold(stage: Stage, facts: Facts, bounds: Bounds) -> tuple[Stage, Reply | Errand]:
    """The tiers hold something for the request: what it waits for, or what is of no use any more."""
    if type(stage) is Holding and stage.found.computed_tokens == facts.computed_tokens:
        if facts.hold is _READY:
            return _settle(stage, stage.found.answer, facts, bounds)
        if facts.hold is _WAITING:
            return stage, ASK_AGAIN
    if facts.hold is _LATE:
        return _without(stage), GO_WITHOUT
    return stage.found if type(stage) is Holding else stage, RELEASE


def _decide(found: Searched, facts: Facts, bounds: Bounds, num_shrinks: int) -> tuple[Stage, Reply | Errand]:
    """What follows from an answer that holds."""
    past, answer = found.past, found.answer
    settled = found.settled
    if facts.ask_s and past.asked_until_s is None and not past.near_only:
        known_tokens = _resumes_at(answer if settled is None else settled, found)
        if is_worth_waiting(known_tokens, found.limit_tokens, facts.ask_s, bounds.tokens_per_s):
            # The tiers have one deadline for all that they are waited for, and asking is the beginning of it.
            since_s = facts.now_s if past.tier_since_s is None else past.tier_since_s
            past = replace(past, asked_until_s=facts.now_s + facts.ask_s, tier_since_s=since_s)
            return replace(found, past=past), Ask(found.limit_tokens, num_shrinks)
    if settled is not None:
        left_s = 0.0 if past.asked_until_s is None else past.asked_until_s - facts.now_s
        possible_tokens = _resumes_at(answer, found)
        if left_s > 0 and is_worth_waiting(_resumes_at(settled, found), possible_tokens, left_s, bounds.tokens_per_s):
            return found, ASK_AGAIN
        # Others may still wait for what they asked, and ask again: that is not this request's wait.
        found, answer = replace(found, answer=settled, settled=None), settled
    if type(answer) is Hit and facts.has_slower and not found.is_near and not past.near_only:
        since_s = facts.now_s if past.tier_since_s is None else past.tier_since_s
        return found, Bring(answer.num_tokens, since_s, facts.now_s - since_s < bounds.load_s, num_shrinks)
    if type(answer) is Pending:
        since_s = facts.now_s if past.stores_since_s is None else past.stores_since_s
        if facts.now_s - since_s < bounds.lookup_s:
            if past.stores_since_s is None:
                found = replace(found, past=replace(past, stores_since_s=since_s))
            return found, ASK_AGAIN
        past = replace(past, waited_in_vain=True)
        return replace(found, past=past), Search(found.limit_tokens, past.near_only, True, num_shrinks)
    return _settle(found, answer, facts, bounds)


def _resumes_at(answer: Hit | Pending | Miss, found: Searched) -> int:
    """Where a request goes on with an answer."""
    return found.computed_tokens if isinstance(answer, Miss) else answer.num_tokens


def _settle(stage: Stage, answer: Hit | Pending | Miss, facts: Facts, bounds: Bounds) -> tuple[Stage, Reply | Errand]:
    """It is known what can be loaded, and all of it is near: is there room in the engine?"""
    past = stage.past
    if past.stores_since_s is not None or past.tier_since_s is not None:
        past = replace(past, stores_since_s=None, tier_since_s=None)
        stage = _with_past(stage, past)
    if type(answer) is not Hit or answer.num_tokens <= facts.computed_tokens:
        return stage, COMPUTE
    if facts.room is not None:
        verdict, wait = gate_load(facts.room, past.room, facts.now_s, bounds.room)
        if verdict is not _ADMIT:
            return _with_room(stage, wait), ASK_AGAIN if verdict is _WAIT else COMPUTE
    return stage, Offer(answer.num_tokens - facts.computed_tokens)


def _limit(past: Past, num_tokens: int) -> int:
    """How much of a request is looked up."""
    if past.boundary_limit is not None and past.boundary_limit < num_tokens:
        num_tokens = past.boundary_limit
    if past.room_limit is not None and past.room_limit < num_tokens and not past.near_only:
        num_tokens = past.room_limit
    return num_tokens


def limit_tokens(stage: Stage, num_tokens: int) -> int:
    """How much of a request of `num_tokens` is looked up, after what happened to it."""
    return _limit(stage.past, num_tokens)


def _without(stage: Stage) -> Stage:
    """Slower tiers took too long: this request looks only at the fast one from now on."""
    past = replace(stage.past, near_only=True)
    return Unsearched(past) if type(stage) is Searched or type(stage) is Holding else _with_past(stage, past)


def _started_over(past: Past) -> Past:
    if past.room is NOT_WAITED and not past.waited_in_vain:
        return past
    return replace(past, room=NOT_WAITED, waited_in_vain=False)


def _begin(past: Past) -> Stage:
    return GivenUp(past) if past.failed_loads >= MAX_FAILED_LOADS else Unsearched(past)


def _with_room(stage: Stage, wait: RoomWait) -> Stage:
    return stage if wait is stage.past.room else _with_past(stage, replace(stage.past, room=wait))


def _with_past(stage: Stage, past: Past) -> Stage:
    return Holding(replace(stage.found, past=past)) if type(stage) is Holding else replace(stage, past=past)
