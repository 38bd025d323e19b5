"""Admission of loads: no deadlock, and the counters agree with a list of all events."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from strategies import groups

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    LoadAdmission,
    Room,
    RoomBounds,
    RoomWait,
    Verdict,
    admit,
    blocks_to_run,
    gate_load,
    gate_lookup,
)
from hybridkv.planner.admission import MAX_GATE_S, MAX_GATED_POLLS, NOT_WAITED

SPEC = CacheSpec((GroupSpec(GroupKind.FULL, 4), GroupSpec(GroupKind.RECURRENT, 8)), 8)
POOL_BLOCKS = 40
ALONE = Room(10, 0, 0, False, POOL_BLOCKS, POOL_BLOCKS)
NAMES = ("a", "b", "c", "d")


class Ledger(RuleBasedStateMachine):
    """Events of four requests in any order; the expected counters come from the list of events."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = LoadAdmission(SPEC, 64)
        self.happened: list[tuple[str, str, int]] = []

    def since_given_back(self, name: str) -> list[tuple[str, int]]:
        own = [(what, blocks) for what, who, blocks in self.happened if who == name]
        last = max((i for i, (what, _) in enumerate(own) if what == "back"), default=-1)
        return own[last + 1 :]

    def held(self, name: str) -> int:
        own = self.since_given_back(name)
        return own[-1][1] if own and own[-1][0] == "take" else 0

    def reserved(self, name: str) -> int:
        return next((blocks for what, blocks in reversed(self.since_given_back(name)) if what == "fail"), 0)

    @rule(name=st.sampled_from(NAMES), num_tokens=st.integers(1, 90), what=st.sampled_from(["take", "fail", "back"]))
    def record(self, name: str, num_tokens: int, what: str) -> None:
        self.happened.append((what, name, self.admission.blocks(num_tokens)))
        if what == "take":
            self.admission.take(name, num_tokens)
        elif what == "fail":
            self.admission.fail(name, num_tokens)
        else:
            self.admission.give_back(name)

    @invariant()
    def the_counts_agree_with_the_list(self) -> None:
        all_held = {name: self.held(name) for name in NAMES}
        all_reserved = {name: self.reserved(name) for name in NAMES}
        assert self.admission.is_idle is not any([*all_held.values(), *all_reserved.values()])
        for name in NAMES:
            room = self.admission.room(name, 33, POOL_BLOCKS, 7)
            others = sum(blocks for other, blocks in all_held.items() if other != name)
            assert room == Room(
                self.admission.blocks(33),
                others,
                sum(all_reserved.values()),
                all_reserved[name] > 0,
                POOL_BLOCKS,
                7,
            )


class SimulatedEngine(RuleBasedStateMachine):
    """Engine that gives blocks to admitted requests and schedules a loaded request once all the blocks that it needs
    are free."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = LoadAdmission(SPEC, 64)
        self.waiting: dict[str, int] = {}
        self.failed: set[str] = set()
        self.loading: dict[str, int] = {}
        self.names = 0

    def room(self, name: str) -> Room:
        free = POOL_BLOCKS - sum(self.admission.blocks(num_tokens) for num_tokens in self.loading.values())
        return self.admission.room(name, self.waiting[name], POOL_BLOCKS, free)

    @rule(num_tokens=st.integers(1, 120))
    def arrive(self, num_tokens: int) -> None:
        self.names += 1
        self.waiting[str(self.names)] = num_tokens

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        room = self.room(name)
        verdict, _ = gate_lookup(room, NOT_WAITED, 0.0, RoomBounds())
        if verdict is Verdict.ADMIT:
            verdict, _ = gate_load(room, NOT_WAITED, 0.0, RoomBounds())
        if verdict is Verdict.ADMIT:
            self.loading[name] = self.waiting.pop(name)
            self.admission.take(name, self.loading[name])
        elif verdict is Verdict.REFUSE:
            del self.waiting[name]
            self.failed.discard(name)
            self.admission.give_back(name)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), has_failed=st.booleans())
    def end_load(self, data: st.DataObject, has_failed: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.loading)))
        num_tokens = self.loading.pop(name)
        if has_failed:
            self.waiting[name] = num_tokens
            self.failed.add(name)
            self.admission.fail(name, num_tokens)
        else:
            self.failed.discard(name)
            self.admission.give_back(name)

    @invariant()
    def loading_requests_fit_together_or_one_is_alone(self) -> None:
        needed = [self.admission.blocks(num_tokens) for num_tokens in self.loading.values()]
        assert len(needed) <= 1 or sum(needed) <= POOL_BLOCKS

    @invariant()
    def some_request_can_always_proceed(self) -> None:
        if self.loading or not self.waiting:
            return
        verdicts = [gate_load(self.room(name), NOT_WAITED, 0.0, RoomBounds())[0] for name in self.waiting]
        assert any(verdict is not Verdict.WAIT for verdict in verdicts), "the requests wait for each other"


TestLedger = Ledger.TestCase
TestEngine = SimulatedEngine.TestCase
TestLedger.settings = TestEngine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@given(groups(), st.integers(1, 500), st.integers(0, 200))
def test_a_group_needs_the_blocks_of_its_window_and_never_more_than_all(
    group: GroupSpec, num_tokens: int, in_flight: int
) -> None:
    needed, everything = blocks_to_run(group, num_tokens, in_flight), -(-num_tokens // group.block_tokens) + 1
    assert 1 <= needed <= everything
    if group.kind is GroupKind.FULL:
        assert needed == everything
    if group.kind is GroupKind.WINDOW:
        kept = min(num_tokens, (group.window_tokens or 0) + in_flight)
        assert needed * group.block_tokens >= kept


@pytest.mark.parametrize(
    ("room", "verdict"),
    [
        (ALONE, Verdict.ADMIT),
        (Room(99, 0, 0, False, POOL_BLOCKS, 0), Verdict.ADMIT),
        (Room(10, 30, 0, False, POOL_BLOCKS, 10), Verdict.ADMIT),
        (Room(11, 30, 0, False, POOL_BLOCKS, 10), Verdict.WAIT),
        (Room(10, 0, 5, False, POOL_BLOCKS, 40), Verdict.WAIT),
        (Room(10, 1, 5, True, POOL_BLOCKS, 40), Verdict.WAIT),
        (Room(10, 0, 10, True, POOL_BLOCKS, 20), Verdict.ADMIT),
        (Room(10, 0, 10, True, POOL_BLOCKS, 19), Verdict.REFUSE),
    ],
)
def test_a_load_is_admitted_beside_others_where_all_fit(room: Room, verdict: Verdict) -> None:
    assert admit(room) is verdict


def polls_until_refused(room: Room, bounds: RoomBounds, step_s: float) -> int:
    wait, now_s = NOT_WAITED, 0.0
    for polls in range(10_000):
        verdict, wait = gate_load(room, wait, now_s, bounds)
        if verdict is not Verdict.WAIT:
            assert verdict is Verdict.REFUSE
            return polls
        now_s += step_s
    return 10_000


FULL_POOL = Room(11, 30, 0, False, POOL_BLOCKS, 10)
PASSING = Room(10, 0, 5, False, POOL_BLOCKS, 40)


@pytest.mark.parametrize(
    ("room", "bounds", "step_s", "polls"),
    [
        (FULL_POOL, RoomBounds(), 1e-3, 256),
        (FULL_POOL, RoomBounds(), 10.0, 6),
        (FULL_POOL, RoomBounds(polls=None), 0.25, 240),
        (PASSING, RoomBounds(), 1e-3, 10_000),
        (PASSING, RoomBounds(), 10.0, 6),
        (PASSING, RoomBounds(polls=None, loads_end=False), 10.0, 6),
    ],
)
def test_a_wait_for_room_is_bounded(room: Room, bounds: RoomBounds, step_s: float, polls: int) -> None:
    assert polls_until_refused(room, bounds, step_s) == polls


@pytest.mark.parametrize(
    ("has_failed", "failed_loads", "waits"), [(True, 0, True), (False, 1, True), (False, 0, False)]
)
def test_a_request_with_a_failed_load_waits_for_those_that_hold_blocks(
    has_failed: bool, failed_loads: int, waits: bool
) -> None:
    room = Room(10, 1, 0, has_failed, POOL_BLOCKS, 40)
    verdict, wait = gate_lookup(room, NOT_WAITED, 0.0, RoomBounds(), failed_loads)
    assert (verdict is Verdict.WAIT) is waits and wait == RoomWait(0, 0.0 if waits else None)
    assert gate_lookup(ALONE, NOT_WAITED, 0.0, RoomBounds(), failed_loads)[0] is Verdict.ADMIT


@pytest.mark.parametrize(
    ("free_blocks", "bounds", "verdict"),
    [
        (10, RoomBounds(), Verdict.REFUSE),
        (9, RoomBounds(), Verdict.WAIT),
        (9, RoomBounds(loads_end=False), Verdict.REFUSE),
    ],
)
def test_a_request_with_a_failed_load_waits_without_limit_only_if_it_does_not_fit(
    free_blocks: int, bounds: RoomBounds, verdict: Verdict
) -> None:
    """In front of the requests that hold blocks, it would keep them from being scheduled."""
    room, wait = Room(10, 1, 10, True, POOL_BLOCKS, free_blocks), NOT_WAITED
    for now_s in (0.0, MAX_GATE_S - 1):
        answer, wait = gate_lookup(room, wait, now_s, bounds)
        assert answer is Verdict.WAIT
    assert gate_lookup(room, wait, MAX_GATE_S, bounds)[0] is verdict


def test_each_failed_load_defers_one_lookup_unless_the_request_was_scheduled_or_has_ended() -> None:
    admission = LoadAdmission(SPEC, 64)
    assert not admission.take_deferral("a")
    for _ in range(2):
        admission.take("a", 8)
        admission.fail("a", 8)
        assert [admission.take_deferral(name) for name in ("b", "a", "a")] == [False, True, False]
    admission.fail("a", 8)
    admission.give_back("a")
    assert not admission.take_deferral("a")


def test_an_unchanged_wait_is_the_same_value() -> None:
    wait = RoomWait(3, 1.0)
    assert gate_load(PASSING, wait, 5.0, RoomBounds())[1] is wait
    assert NOT_WAITED.ended() is NOT_WAITED


def test_the_polls_of_waits_that_have_ended_count() -> None:
    wait = NOT_WAITED
    for _ in range(MAX_GATED_POLLS):
        verdict, wait = gate_load(FULL_POOL, wait.ended(), 1.0, RoomBounds())
        assert verdict is Verdict.WAIT
    assert gate_load(FULL_POOL, wait.ended(), 1.0, RoomBounds())[0] is Verdict.REFUSE
