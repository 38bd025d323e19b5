"""Whole life of a request, decided by hybridkv.planner alone: no engine, no tensor, and two dictionaries as tiers.

The request is polled, waits for a store, for the secondary tier and for room, is offered a load, loads, fails, retries
with less, is given up and computed; what it computes is planned to be stored. `python whole_life.py` prints these
events and the engine modules that were imported; `test_whole_life.py` asserts them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ENGINES = ("torch", "vllm")
asked_for: list[str] = []
"""Engine modules with an attempted import."""


class ImportRecorder(MetaPathFinder):
    """Records every attempted import, even where the engine is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ENGINES:
            asked_for.append(fullname)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, ImportRecorder())

from hybridkv.planner import (  # noqa: E402
    CacheSpec,
    GroupKind,
    GroupSpec,
    Hit,
    LoadAdmission,
    LookupResult,
    Miss,
    Pending,
    State,
    Transfer,
    life,
    longest_hit,
    needed_parts,
    plan_load,
    plan_store,
)
from hybridkv.planner.stages import (  # noqa: E402
    NEW_REQUEST,
    Bounds,
    Compute,
    Facts,
    HoldState,
    Offer,
    Promote,
    Promoted,
    RetryLater,
    Search,
    Stage,
)

CHUNK, NUM_TOKENS, POOL_BLOCKS = 8, 33, 32
BOUNDS = Bounds(lookup_s=10.0, load_s=30.0)
SPEC = CacheSpec((GroupSpec(GroupKind.RECURRENT, CHUNK), GroupSpec(GroupKind.FULL, CHUNK // 2)), CHUNK)
Part = tuple[int, int]
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS


class Engine:
    """The part of an engine that a load needs."""

    def __init__(self) -> None:
        self.now_s, self.generation = 0.0, 0
        self.primary: dict[Part, LookupResult] = {}
        self.secondary: dict[Part, LookupResult] = {}
        self.held: list[Part] | None = None
        self.is_late = False
        self.admission = LoadAdmission(SPEC, max_in_flight_tokens=64)
        self.stage: Stage = NEW_REQUEST
        self.story: list[str] = []

    def hold(self) -> HoldState | None:
        if self.held is None:
            return None
        if self.is_late:
            return HoldState.LATE
        return HoldState.READY if all(part in self.primary for part in self.held) else HoldState.WAITING

    def facts(self) -> Facts:
        room = None
        if not self.admission.is_idle:
            room = self.admission.room("r", NUM_TOKENS, POOL_BLOCKS, POOL_BLOCKS)
        return Facts(NUM_TOKENS, 0, self.generation, self.now_s, True, self.hold(), room)

    def search(self, action: Search) -> Hit | Pending | Miss:
        def lookup(group_index: int, end_token: int) -> LookupResult:
            part = (group_index, end_token)
            found = self.primary.get(part) or (MISS if action.only_primary else self.secondary.get(part, MISS))
            return MISS if found is PENDING and (action.is_last or action.only_primary) else found

        return longest_hit(SPEC, action.limit_tokens, 0, lookup)

    def promote(self, action: Promote) -> Promoted:
        parts = needed_parts(SPEC, action.boundary, 0)
        if all(part in self.primary for part in parts):
            return Promoted.IN_PRIMARY
        if not action.has_time:
            return Promoted.BUSY
        self.held = parts
        return Promoted.HELD

    def ask(self) -> int | None:
        """Tokens that are offered, None to be polled again."""
        facts = self.facts()
        stage, step = life.resume(self.stage, facts, BOUNDS)
        while not isinstance(step, Offer | RetryLater | Compute):
            match step:
                case Search():
                    stage, step = life.searched(stage, facts, BOUNDS, step, self.search(step))
                case Promote():
                    stage, step = life.promoted(stage, facts, BOUNDS, step, self.promote(step))
                case _:
                    self.held, self.is_late = None, False
                    facts = self.facts()
                    stage, step = life.resume(stage, facts, BOUNDS)
        self.stage = stage
        answer = step.num_tokens if isinstance(step, Offer) else None if isinstance(step, RetryLater) else 0
        self.story.append({None: "ask again", 0: "compute"}.get(answer, f"offer {answer}"))
        return answer

    def load(self, boundary: int) -> tuple[Transfer, ...]:
        """Allocates blocks; returns which parts are written into which blocks."""
        table = [[*[0] * (boundary // CHUNK - 1), 7], list(range(20, 20 + boundary // 4))]
        self.stage = life.allocated(self.stage, boundary)
        self.admission.take("r", NUM_TOKENS)
        self.held = None
        transfers = plan_load(SPEC, boundary, 0, table)
        self.story.append(f"load {len(transfers)} chunks")
        return transfers

    def fail(self, blamed: Part | None) -> None:
        """Fails the load and removes the faulty chunk, if one is given."""
        if blamed is not None:
            del self.primary[blamed]
            self.secondary.pop(blamed, None)
            self.generation += 1
        self.admission.fail("r", NUM_TOKENS)
        self.stage = life.load_ended(self.stage, failed=True, is_explained=blamed is not None)
        self.story.append("fail")

    def change(self) -> None:
        """Something was stored or promoted."""
        self.generation += 1


def play() -> Engine:
    engine = Engine()
    parts = needed_parts(SPEC, 32, 0) + [(0, end) for end in (8, 16, 24)]
    engine.secondary = dict.fromkeys(parts, HIT)
    engine.primary[0, 32] = PENDING
    del engine.secondary[0, 32]
    engine.ask()  # its last state is being stored
    engine.primary[0, 32] = HIT
    engine.change()
    engine.ask()  # and its prefix lies in the secondary tier
    engine.primary |= engine.secondary
    engine.change()
    engine.admission.take("other", 4 * NUM_TOKENS)
    engine.ask()  # and another loads into the blocks that it needs
    engine.admission.give_back("other")
    for blamed in (None, (1, 24), (0, 16)):
        offered = engine.ask()
        assert offered
        engine.load(offered)
        engine.fail(blamed)
    engine.ask()
    engine.stage = life.allocated(engine.stage, None)
    engine.admission.give_back("r")
    plan = plan_store(SPEC, 0, 32, [[0, 0, 0, 7], list(range(20, 28))], [State(0, 7, 32)], lambda group, ends: ends)
    engine.story.append(f"store {len(plan.transfers(SPEC.chunk_tokens))} chunks")
    return engine


def play_without_secondary() -> Engine:
    """The secondary tier never answers: the request loads what the primary tier holds."""
    engine = Engine()
    engine.secondary = dict.fromkeys(needed_parts(SPEC, 32, 0), HIT)
    engine.primary = dict.fromkeys(needed_parts(SPEC, 8, 0), HIT)
    engine.ask()
    engine.now_s = 29.0
    engine.ask()
    engine.now_s, engine.is_late = 30.0, True
    offered = engine.ask()
    assert offered
    engine.load(offered)
    engine.stage = life.load_ended(engine.stage)
    engine.admission.give_back("r")
    return engine


if __name__ == "__main__":
    print(*play().story, sep=", ")
    print(*play_without_secondary().story, sep=", ")
    print(*asked_for, *(name for name in ENGINES if name in sys.modules))
