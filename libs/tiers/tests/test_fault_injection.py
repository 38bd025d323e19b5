"""Each planned fault happens at the planned call, and no other fault does."""

from __future__ import annotations

import msgspec
import pytest

from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason, Refusal, Slot, Ticket, TierConfigurationError, TierMedium
from hybridkv.tiers.ram import RamArena
from kits.tiers.copying import CopyingMedium
from kits.tiers.faults import (
    Corrupt,
    Delay,
    Drop,
    Fail,
    FaultInjectingIndex,
    FaultInjectingMedium,
    FaultPlan,
    Operation,
    Refuse,
    Rule,
    Vanish,
)
from kits.tiers.reference import ReferenceIndex

NUM_BYTES = 5000
SLOT = Slot(((0, 4096), (8192, NUM_BYTES - 4096)))


def make_medium(*rules: Rule) -> FaultInjectingMedium:
    return FaultInjectingMedium(CopyingMedium(RamArena(16 * 4096, 4096)), FaultPlan(rules))


def make_index(*rules: Rule) -> FaultInjectingIndex:
    return FaultInjectingIndex(ReferenceIndex(4 * NUM_BYTES), FaultPlan(rules))


def store(medium: TierMedium, ticket: int = 1, key: bytes = b"key") -> None:
    medium.store(Ticket(ticket), key, SLOT, [bytes(NUM_BYTES)])


def load(medium: TierMedium, ticket: int = 2, key: bytes = b"key") -> None:
    medium.load(Ticket(ticket), key, SLOT, [bytearray(NUM_BYTES)])


def reasons(medium: TierMedium) -> list[FailureReason | None]:
    return [completion.failure and completion.failure.reason for completion in medium.poll()]


def test_the_nth_call_fails_with_the_planned_reason() -> None:
    medium = make_medium(Rule(Operation.STORE, Fail(FailureReason.IO), nth=2))
    for ticket in range(3):
        store(medium, ticket)
    failed = {completion.ticket for completion in medium.poll() if completion.failure is not None}
    assert failed == {1}


def test_a_rule_for_a_key_counts_only_that_key() -> None:
    medium = make_medium(Rule(Operation.STORE, Fail(), key=b"b", nth=1))
    for ticket, key in enumerate([b"a", b"b", b"b"]):
        store(medium, ticket, key)
    failed = {completion.ticket for completion in medium.poll() if completion.failure is not None}
    assert failed == {1}


def test_the_first_matching_rule_applies() -> None:
    medium = make_medium(
        Rule(Operation.STORE, Fail(FailureReason.IO), nth=1), Rule(Operation.STORE, Fail(FailureReason.CHECKSUM))
    )
    store(medium, 1)
    store(medium, 2)
    assert reasons(medium) == [FailureReason.IO, FailureReason.CHECKSUM]


@pytest.mark.parametrize("byte_index", [0, 4096, NUM_BYTES - 1, NUM_BYTES + 3])
def test_a_byte_corrupted_after_sealing_is_found_by_the_load(byte_index: int) -> None:
    medium = make_medium(Rule(Operation.STORE, Corrupt(byte_index)))
    store(medium)
    assert reasons(medium) == [None]
    load(medium)
    assert reasons(medium) == [FailureReason.CHECKSUM]


def test_without_the_corruption_the_same_load_succeeds() -> None:
    medium = make_medium()
    store(medium)
    assert reasons(medium) == [None]
    load(medium)
    assert reasons(medium) == [None]


@pytest.mark.parametrize("num_polls", [1, 3])
def test_a_delayed_completion_is_missing_for_the_planned_polls(num_polls: int) -> None:
    medium = make_medium(Rule(Operation.STORE, Delay(num_polls)))
    store(medium)
    assert not medium.drain(0.0)
    assert [medium.poll() for _ in range(num_polls)] == [[]] * num_polls
    assert reasons(medium) == [None]
    assert medium.drain(0.0)


def test_a_dropped_completion_never_comes() -> None:
    medium = make_medium(Rule(Operation.STORE, Drop(), nth=1))
    store(medium, 1)
    store(medium, 2)
    assert [completion.ticket for completion in medium.poll()] == [2]
    assert not medium.drain(0.0)


def test_a_reservation_is_refused_and_counted() -> None:
    index = make_index(Rule(Operation.RESERVE, Refuse(Refusal.NO_ROOM), nth=1))
    assert index.reserve(b"key", 1) is Refusal.NO_ROOM
    assert isinstance(index.reserve(b"key", 1), Slot)
    assert index.take_counts().refusals == {Refusal.NO_ROOM: 1}


def test_a_key_that_vanishes_before_its_commit_is_a_miss() -> None:
    index = make_index(Rule(Operation.COMMIT, Vanish()))
    index.reserve(b"key", 1)
    assert not index.commit(b"key")
    assert (index.lookup(b"key"), index.used_bytes) == (LookupResult.MISS, 0)


def test_a_hit_may_vanish_before_its_pin() -> None:
    index = make_index(Rule(Operation.PIN, Vanish()))
    index.reserve(b"key", 1)
    index.commit(b"key")
    assert index.lookup(b"key") is LookupResult.HIT
    assert index.pin(b"key") is None


@pytest.mark.parametrize(
    ("operation", "action"),
    [
        (Operation.LOAD, Corrupt()),
        (Operation.RESERVE, Fail()),
        (Operation.COMMIT, Drop()),
        (Operation.PIN, Delay()),
        (Operation.STORE, Refuse()),
        (Operation.RESERVE, Vanish()),
        (Operation.STORE, Delay(0)),
    ],
)
def test_a_rule_that_cannot_act_is_refused(operation: Operation, action: Corrupt | Fail | Drop | Delay) -> None:
    with pytest.raises(TierConfigurationError):
        Rule(operation, action)


def test_calls_are_counted_from_one() -> None:
    with pytest.raises(TierConfigurationError, match="nth"):
        Rule(Operation.STORE, Fail(), nth=0)


def test_a_medium_without_views_cannot_be_corrupted() -> None:
    class Hidden:
        pass

    plan = FaultPlan((Rule(Operation.STORE, Corrupt()),))
    with pytest.raises(TierConfigurationError, match="views"):
        FaultInjectingMedium(Hidden(), plan)  # type: ignore[arg-type]


def test_a_fault_plan_survives_json() -> None:
    plan = FaultPlan(
        (
            Rule(Operation.STORE, Corrupt(7), key=b"key", nth=3),
            Rule(Operation.LOAD, Delay(2)),
            Rule(Operation.PIN, Vanish()),
        )
    )
    assert msgspec.json.decode(msgspec.json.encode(plan), type=FaultPlan) == plan
