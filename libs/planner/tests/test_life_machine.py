"""State machine of one request against a reference that keeps plain variables and searches again at every poll.

The reference is the connector's code from before the planner decided: written independently, with no stage and no step,
only the events so far.
"""

from __future__ import annotations

import copy
from typing import Any

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from life_world import World, ask

from hybridkv.planner import Hit, Miss, Pending, Room, RoomBounds, life
from hybridkv.planner.stages import (
    NEW_REQUEST,
    Bounds,
    Compute,
    GivenUp,
    HoldState,
    Loading,
    LookupWait,
    Offer,
    Promoted,
    RetryLater,
    Stage,
)

NUM_TOKENS = 101
BOUNDARIES = range(8, 100, 8)
LOOKUP_S, LOAD_S, GATE_S, GATE_POLLS = 10.0, 30.0, 60.0, 5
BOUNDARY_TOKENS = 8
WAITS = [
    None,
    LookupWait(timeout_s=1.0, answer_s=1.0, read_s=0.0, saved_s_per_token=0.125),
    LookupWait(timeout_s=4.0, answer_s=0.25, read_s=0.5, saved_s_per_token=0.125),
    LookupWait(timeout_s=4.0, answer_s=5.0, read_s=0.0, saved_s_per_token=1.0),
    LookupWait(timeout_s=4.0, answer_s=0.0, read_s=0.0, saved_s_per_token=0.0),
]
boundaries = st.sets(st.sampled_from(list(BOUNDARIES)), max_size=5)
blocks = st.integers(0, 20)


class Reference:
    """One request. `ask` returns tokens, or None to be polled again."""

    def __init__(self) -> None:
        self.failed = 0
        self.limit = NUM_TOKENS
        self.room_limit: int | None = None
        self.only_primary = False
        self.stores_since: float | None = None
        self.tier_since: float | None = None
        self.polls = 0
        self.gate_since: float | None = None
        self.held: tuple[int, int] | None = None
        self.hopeless: set[tuple[int, int, int]] = set()
        """Searches that timed out waiting for stores."""
        self.asked_at: float | None = None
        self.asked_until: float | None = None
        self.resigned: tuple[int, int, int] | None = None
        """The search for which further answers were not worth a wait."""

    def ask(self, world: World, computed: int, loads_end: bool) -> int | None:
        room = world.room
        if room is not None and room.held_by_others and (self.failed or room.has_failed):
            answer: int | None = self.gate(world, True, loads_end)
            is_too_long = loads_end and room.needed_blocks > room.free_blocks
            return self.end(world, None if is_too_long else answer)
        boundary = self.find(world, computed)
        if boundary is None:
            return None
        if self.failed < 3:
            self.stores_since = self.tier_since = None
        if boundary <= computed:
            return self.end(world, 0)
        answer = boundary - computed
        if room is not None:
            lets_pass = room.reserved_blocks > 0 and not room.has_failed
            is_full = room.held_by_others + room.needed_blocks > room.pool_blocks
            if lets_pass or (room.held_by_others and (room.has_failed or is_full)):
                answer = self.gate(world, lets_pass, loads_end)
            elif room.has_failed and room.needed_blocks + room.reserved_blocks > room.free_blocks:
                answer = 0
        if answer:
            self.gate_since = None
        return self.end(world, answer)

    def end(self, world: World, answer: int | None) -> int | None:
        """A request that computes holds no promotion."""
        if answer == 0:
            world.hold = None
        return answer

    def gate(self, world: World, is_certain: bool, loads_end: bool) -> int | None:
        if self.gate_since is None:
            self.gate_since = world.now_s
        self.polls += not (is_certain and loads_end)
        return None if self.polls <= GATE_POLLS and world.now_s - self.gate_since < GATE_S else 0

    def find(self, world: World, computed: int) -> int | None:
        is_of_use = self.held is not None and self.held[1] == computed
        if is_of_use and self.held is not None and world.hold is HoldState.READY:
            return self.held[0]
        if is_of_use and world.hold is HoldState.WAITING:
            return None
        if world.hold is HoldState.LATE:
            self.go_without(world)
        world.hold = None
        if self.failed >= 3:
            return computed
        for _ in range(8):
            boundary = self.longest(world, computed)
            if boundary is None or boundary == computed or self.only_primary or boundary in world.primary:
                return boundary
            if self.tier_since is None:
                self.tier_since = world.now_s
            if world.now_s - self.tier_since >= LOAD_S:
                break
            outcome = world.acquire(boundary, computed)
            if outcome in (Promoted.READY, Promoted.HELD):
                self.held = (boundary, computed)
                return boundary if outcome is Promoted.READY else None
            if outcome is Promoted.BUSY:
                break
            self.room_limit = computed + (boundary - computed) * 3 // 4
        if self.tier_since is not None and world.now_s - self.tier_since >= LOAD_S:
            self.go_without(world)
            world.hold = None
            return self.find(world, computed)
        return None

    def longest(self, world: World, computed: int) -> int | None:
        limit = self.limit
        if self.room_limit is not None and not self.only_primary:
            limit = min(limit, self.room_limit)
        asked = (world.generation, limit, computed)
        is_hopeless = asked in self.hopeless
        found = world.search(computed, limit, self.only_primary, is_hopeless, True)
        wait = world.lookup
        may_ask = wait is not None and self.asked_until is None and not self.only_primary
        if wait is not None and may_ask and limit - resumes_at(found, computed) > BOUNDARY_TOKENS:
            self.asked_at, self.asked_until = world.now_s, world.now_s + wait.timeout_s
            world.ask()
            return self.longest(world, computed)
        possible = world.search(computed, limit, self.only_primary, is_hopeless)
        if possible != found and self.resigned != asked:
            more = resumes_at(possible, computed) - resumes_at(found, computed)
            if wait is not None and self.asked_at is not None and self.asked_until is not None:
                waited_s = world.now_s - self.asked_at
                overdue_s = waited_s - wait.answer_s
                answered_s = self.asked_at + wait.answer_s
                if overdue_s >= 0:
                    answered_s = world.now_s + max(overdue_s, wait.answer_s / 4)
                gain_s = more * wait.saved_s_per_token - wait.read_s
                if world.now_s < self.asked_until >= answered_s and gain_s > answered_s - world.now_s:
                    if self.tier_since is None:
                        self.tier_since = world.now_s
                    return None
            self.resigned = asked
        if isinstance(found, Pending):
            if self.stores_since is None:
                self.stores_since = world.now_s
            if world.now_s - self.stores_since < LOOKUP_S:
                return None
            world.counts.append("timed out waiting for stores")
            self.hopeless.add(asked)
            return self.longest(world, computed)
        return computed if isinstance(found, Miss) else found.num_tokens

    def go_without(self, world: World) -> None:
        world.counts.append("timed out waiting for the secondary tier")
        self.only_primary = True
        self.hopeless.clear()
        self.resigned = None

    def start_over(self) -> None:
        self.polls, self.gate_since, self.held = 0, None, None
        self.room_limit = None
        self.hopeless.clear()
        self.resigned = None


def resumes_at(found: Hit | Pending | Miss, computed: int) -> int:
    return computed if isinstance(found, Miss) else found.num_tokens


class RequestMachine(RuleBasedStateMachine):
    """Two copies of one world: one for the planner, one for the reference."""

    loads_end = True

    def __init__(self) -> None:
        super().__init__()
        self.world, self.other_world = World(), World()
        self.stage: Stage = NEW_REQUEST
        self.reference = Reference()
        self.bounds = Bounds(LOOKUP_S, LOAD_S, RoomBounds(GATE_POLLS, GATE_S, self.loads_end), BOUNDARY_TOKENS)
        self.offered: tuple[int, int] | None = None
        """(boundary, tokens) for which the engine may allocate blocks now."""

    def change(self, **values: Any) -> None:
        self.offered = None
        for world in (self.world, self.other_world):
            for name, value in values.items():
                setattr(world, name, copy.copy(value))

    @rule(primary=boundaries, secondary=boundaries, arriving=boundaries)
    def store_and_evict(self, primary: set[int], secondary: set[int], arriving: set[int]) -> None:
        self.change(primary=primary, secondary=secondary, arriving=arriving, generation=self.world.generation + 1)

    @rule(unanswered=boundaries, asked=boundaries, lookup=st.sampled_from(WAITS))
    def change_lookups(self, unanswered: set[int], asked: set[int], lookup: LookupWait | None) -> None:
        """Other requests send lookups too, and tiers answer."""
        generation = self.world.generation + 1
        self.change(unanswered=unanswered, asked=asked, lookup=lookup, generation=generation)

    @rule(later_s=st.sampled_from([0.0, 0.5, 9.0, 25.0, 61.0]))
    def pass_time(self, later_s: float) -> None:
        self.change(now_s=self.world.now_s + later_s)

    @rule(fitting=st.sampled_from([0, 8, 24, 60, 1 << 20]), is_busy=st.booleans(), comes_at_once=st.booleans())
    def change_the_tiers(self, fitting: int, is_busy: bool, comes_at_once: bool) -> None:
        self.change(fitting_tokens=fitting, is_busy=is_busy, comes_at_once=comes_at_once)

    @rule(room=st.none() | st.builds(Room, st.integers(1, 20), blocks, blocks, st.booleans(), blocks, blocks))
    def make_room(self, room: Room | None) -> None:
        self.change(room=room)

    @precondition(lambda self: self.world.hold is not None)
    @rule(state=st.sampled_from(HoldState))
    def change_the_promotion(self, state: HoldState) -> None:
        generation = self.world.generation + (state is HoldState.LOST)
        self.change(hold=state, generation=generation)

    @precondition(lambda self: not isinstance(self.stage, Loading))
    @rule(computed=st.sampled_from([0, 0, 0, 8, 32]), times=st.integers(1, 3))
    def ask(self, computed: int, times: int) -> None:
        for _ in range(times):
            self.stage, reply = ask(self.stage, self.world, self.bounds, NUM_TOKENS, computed)
            expected = self.reference.ask(self.other_world, computed, self.loads_end)
            told = {Offer: getattr(reply, "num_tokens", 0), RetryLater: None, Compute: 0}[type(reply)]
            assert told == expected
            self.offered = (computed + told, told) if told else None
            assert not told or computed < computed + told < NUM_TOKENS

    @precondition(lambda self: self.offered is not None)
    @rule(is_taken=st.booleans())
    def allocate_blocks(self, is_taken: bool) -> None:
        assert self.offered is not None
        self.stage = life.allocated(self.stage, self.offered[0] if is_taken else None)
        self.world.hold = self.other_world.hold = None
        self.reference.hopeless.clear()
        self.reference.resigned = self.reference.asked_at = self.reference.asked_until = None
        self.offered = None

    @precondition(lambda self: isinstance(self.stage, Loading))
    @rule(failed=st.booleans(), is_explained=st.booleans())
    def end_load(self, failed: bool, is_explained: bool) -> None:
        assert isinstance(self.stage, Loading)
        boundary = self.stage.boundary
        self.stage = life.load_ended(self.stage, failed=failed, is_explained=is_explained)
        if failed:
            self.reference.failed += 1
            self.reference.limit = self.reference.limit if is_explained else boundary
            self.reference.start_over()

    @rule()
    def start_over(self) -> None:
        self.stage, self.offered = life.start_over(self.stage), None
        self.reference.start_over()

    @rule()
    def drop_tokens(self) -> None:
        self.stage, self.offered = life.forget_search(self.stage), None
        self.reference.held = None
        self.reference.hopeless.clear()
        self.reference.resigned = None

    @invariant()
    def both_worlds_saw_the_same_actions(self) -> None:
        assert self.world == self.other_world

    @invariant()
    def failures_and_mode_agree(self) -> None:
        past = self.stage.past
        assert (past.failed_loads, past.only_primary) == (self.reference.failed, self.reference.only_primary)
        assert isinstance(self.stage, GivenUp) is (self.reference.failed >= 3) or isinstance(self.stage, Loading)


class RequestMachineWithUnboundedLoads(RequestMachine):
    """Beside loads of other connectors, which may never end."""

    loads_end = False


TestRequest = RequestMachine.TestCase
TestRequest.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
TestRequestWithUnboundedLoads = RequestMachineWithUnboundedLoads.TestCase
TestRequestWithUnboundedLoads.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)
