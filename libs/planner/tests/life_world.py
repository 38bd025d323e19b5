"""World of one request in tests of `life`: tiers as sets of boundaries, a clock, and a driver that runs the planner's
actions.

It has no groups and no keys: `longest_hit` has tests of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridkv.planner import Hit, Miss, Pending, Room, life
from hybridkv.planner.stages import (
    Action,
    Bounds,
    Compute,
    Facts,
    HoldState,
    LookupWait,
    Offer,
    Promote,
    Promoted,
    Reply,
    RetryLater,
    Search,
    Stage,
    StartLookups,
)

MAX_ACTIONS = 64
"""Per poll; more would be a loop."""


@dataclass
class World:
    """State outside of the request. Every change of the tiers' content increments `generation`."""

    now_s: float = 0.0
    generation: int = 0
    primary: set[int] = field(default_factory=set)
    secondary: set[int] = field(default_factory=set)
    arriving: set[int] = field(default_factory=set)
    """Being stored: not readable yet."""
    unanswered: set[int] = field(default_factory=set)
    """Boundaries that a tier with async lookups has not answered yet."""
    asked: set[int] = field(default_factory=set)
    """Boundaries with a lookup in flight, of any request."""
    lookup: LookupWait | None = None
    fitting_tokens: int = 1 << 20
    """Tokens that the primary tier can take at once."""
    is_busy: bool = False
    comes_at_once: bool = False
    """A promotion is complete as soon as it starts."""
    hold: HoldState | None = None
    room: Room | None = None
    counts: list[str] = field(default_factory=list)

    def search(
        self, computed: int, limit: int, only_primary: bool, is_last: bool, unasked: bool = False
    ) -> Hit | Pending | Miss:
        """Returns the longest boundary below the limit: the last token is always computed. With `unasked`, boundaries
        that only have a lookup in flight do not count."""
        readable = self.primary if only_primary else self.primary | self.secondary
        coming = self.arriving if unasked else self.arriving | self.asked
        arriving = set() if only_primary or is_last else coming - readable
        best = max((each for each in readable | arriving if computed < each < limit), default=None)
        if best is None:
            return Miss(0, "nothing")
        return Pending(best) if best in arriving else Hit(best)

    def ask(self) -> None:
        """Starts the lookups of a tier that answers later."""
        self.asked |= self.unanswered
        self.generation += 1

    def acquire(self, boundary: int, computed: int) -> Promoted:
        """Starts the promotion of everything up to a boundary, or returns why it cannot."""
        self.hold = None
        if self.is_busy:
            return Promoted.BUSY
        if boundary - computed > self.fitting_tokens:
            return Promoted.NO_ROOM
        self.hold = HoldState.READY if self.comes_at_once else HoldState.WAITING
        return Promoted.READY if self.comes_at_once else Promoted.HELD


def ask(stage: Stage, world: World, bounds: Bounds, num_tokens: int, computed: int = 0) -> tuple[Stage, Reply]:
    """One poll of the engine, with every action run."""
    facts = facts_of(world, num_tokens, computed)
    stage, step = life.resume(stage, facts, bounds)
    for _ in range(MAX_ACTIONS):
        if isinstance(step, Offer | RetryLater | Compute):
            if isinstance(step, Compute):
                world.hold = None
            return stage, step
        stage, facts, step = run(stage, world, bounds, facts, step)
    raise AssertionError(f"actions repeat without end: {stage}, {step}")


def facts_of(world: World, num_tokens: int, computed: int) -> Facts:
    return Facts(num_tokens, computed, world.generation, world.now_s, True, world.hold, world.room, world.lookup)


def run(
    stage: Stage, world: World, bounds: Bounds, facts: Facts, action: Action
) -> tuple[Stage, Facts, Reply | Action]:
    if isinstance(action, Search):
        if action.is_last:
            world.counts.append("timed out waiting for stores")
        answer = world.search(facts.computed_tokens, action.limit_tokens, action.only_primary, action.is_last)
        settled = world.search(facts.computed_tokens, action.limit_tokens, action.only_primary, action.is_last, True)
        stage, step = life.searched(stage, facts, bounds, action, answer, settled)
    elif isinstance(action, StartLookups):
        world.ask()
        facts = facts_of(world, facts.num_tokens, facts.computed_tokens)
        stage, step = life.lookups_started(stage, facts, bounds, action)
    elif isinstance(action, Promote):
        if action.boundary in world.primary:
            outcome = Promoted.IN_PRIMARY
        else:
            outcome = world.acquire(action.boundary, facts.computed_tokens) if action.has_time else Promoted.BUSY
        stage, step = life.promoted(stage, facts, bounds, action, outcome)
    else:
        world.hold = None
        if action.is_late:
            world.counts.append("timed out waiting for the secondary tier")
        facts = facts_of(world, facts.num_tokens, facts.computed_tokens)
        stage, step = life.resume(stage, facts, bounds)
    return stage, facts, step
