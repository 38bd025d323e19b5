"""What a request's life is played in: tiers that hold boundaries, a clock, and who drives the planner as it asks to be.

It has no groups and no keys: `longest_hit` has tests of its own. Here a tier holds boundaries.
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
"""Of one question; more would be a circle."""


@dataclass
class World:
    """Everything that is not the request's own. Whoever changes what tiers hold counts `generation` up."""

    now_s: float = 0.0
    generation: int = 0
    near: set[int] = field(default_factory=set)
    far: set[int] = field(default_factory=set)
    arriving: set[int] = field(default_factory=set)
    """Being stored: not readable yet."""
    elsewhere: set[int] = field(default_factory=set)
    """What a tier that answers late has not said yet, neither that it is there nor that it is not."""
    asked: set[int] = field(default_factory=set)
    """What it was asked about, by anybody."""
    lookup: LookupWait | None = None
    fitting_tokens: int = 1 << 20
    """What the fast tier can take at once."""
    is_busy: bool = False
    comes_at_once: bool = False
    """What is brought near is there when it is held."""
    hold: HoldState | None = None
    room: Room | None = None
    counts: list[str] = field(default_factory=list)

    def search(
        self, computed: int, limit: int, only_primary: bool, is_last: bool, unasked: bool = False
    ) -> Hit | Pending | Miss:
        """The longest boundary within the limit, whose last token is always computed. `unasked`: nothing counts of
        which a tier only was asked."""
        readable = self.near if only_primary else self.near | self.far
        coming = self.arriving if unasked else self.arriving | self.asked
        arriving = set() if only_primary or is_last else coming - readable
        best = max((each for each in readable | arriving if computed < each < limit), default=None)
        if best is None:
            return Miss(0, "nothing")
        return Pending(best) if best in arriving else Hit(best)

    def ask(self) -> None:
        """Of a tier that answers late, whatever it may have."""
        self.asked |= self.elsewhere
        self.generation += 1

    def acquire(self, boundary: int, computed: int) -> Promoted:
        """The tiers hold all up to a boundary, or say why not."""
        self.hold = None
        if self.is_busy:
            return Promoted.BUSY
        if boundary - computed > self.fitting_tokens:
            return Promoted.NO_ROOM
        self.hold = HoldState.READY if self.comes_at_once else HoldState.WAITING
        return Promoted.READY if self.comes_at_once else Promoted.HELD


def ask(stage: Stage, world: World, bounds: Bounds, num_tokens: int, computed: int = 0) -> tuple[Stage, Reply]:
    """One question of the engine, with every action run."""
    facts = facts_of(world, num_tokens, computed)
    stage, step = life.resume(stage, facts, bounds)
    for _ in range(MAX_ACTIONS):
        if isinstance(step, Offer | RetryLater | Compute):
            if isinstance(step, Compute):
                world.hold = None
            return stage, step
        stage, facts, step = run(stage, world, bounds, facts, step)
    raise AssertionError(f"actions go round in a circle: {stage}, {step}")


def facts_of(world: World, num_tokens: int, computed: int) -> Facts:
    """What is so now."""
    return Facts(num_tokens, computed, world.generation, world.now_s, True, world.hold, world.room, world.lookup)


def run(
    stage: Stage, world: World, bounds: Bounds, facts: Facts, action: Action
) -> tuple[Stage, Facts, Reply | Action]:
    """Runs one action."""
    if isinstance(action, Search):
        if action.is_last:
            world.counts.append("stores were waited for in vain")
        answer = world.search(facts.computed_tokens, action.limit_tokens, action.only_primary, action.is_last)
        settled = world.search(facts.computed_tokens, action.limit_tokens, action.only_primary, action.is_last, True)
        stage, step = life.searched(stage, facts, bounds, action, answer, settled)
    elif isinstance(action, StartLookups):
        world.ask()
        facts = facts_of(world, facts.num_tokens, facts.computed_tokens)
        stage, step = life.lookups_started(stage, facts, bounds, action)
    elif isinstance(action, Promote):
        if action.boundary in world.near:
            outcome = Promoted.IN_PRIMARY
        else:
            outcome = world.acquire(action.boundary, facts.computed_tokens) if action.has_time else Promoted.BUSY
        stage, step = life.promoted(stage, facts, bounds, action, outcome)
    else:
        world.hold = None
        if action.is_late:
            world.counts.append("the slow tier was waited for in vain")
        facts = facts_of(world, facts.num_tokens, facts.computed_tokens)
        stage, step = life.resume(stage, facts, bounds)
    return stage, facts, step
