"""The fault-injecting transport injects the planned faults, and none without a plan."""

from __future__ import annotations

import pytest

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport import PENDING, Ranges, RemoteId, TransferDone, TransferFailureReason
from kits.peers.faults import (
    Fail,
    FaultInjectingTransport,
    FaultPlan,
    HalfDone,
    Late,
    Lost,
    Rule,
    Vanish,
    WrongBytes,
)
from kits.peers.in_memory import InMemoryTransport, World
from kits.peers.memory import POISON, pattern
from kits.peers.suite import Reader, reason_of

RANGES = Ranges.of([(0, 64 * at, 0, 64 * at, 64) for at in range(4)])


class Faulty:
    def __init__(self) -> None:
        self.world = World()
        self.owner = Reader(InMemoryTransport("owner", self.world), [256])
        self.owner.regions[0][:] = pattern(0, 256)

    def reader(self, *rules: Rule) -> tuple[Reader, RemoteId]:
        inner = InMemoryTransport("reader", self.world)
        reader = Reader(FaultInjectingTransport(inner, FaultPlan(rules)), [256])
        return reader, reader.attach(self.owner.capability)


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()


def is_equal(faulty: Faulty, reader: Reader) -> bool:
    return bool((reader.regions[0] == faulty.owner.regions[0]).all())


def test_a_read_without_a_rule_is_right(faulty: Faulty) -> None:
    reader, remote = faulty.reader()
    assert isinstance(reader.finish(remote, RANGES), TransferDone)
    assert is_equal(faulty, reader)


def test_the_nth_read_fails_with_the_planned_reason(faulty: Faulty) -> None:
    reader, remote = faulty.reader(Rule(Fail(TransferFailureReason.TIMEOUT), nth=2))
    assert isinstance(reader.finish(remote, RANGES), TransferDone)
    reader.regions[0][:] = POISON
    assert reason_of(reader.finish(remote, RANGES)) is TransferFailureReason.TIMEOUT
    assert (reader.regions[0] == POISON).all()
    assert isinstance(reader.finish(remote, RANGES), TransferDone)


def test_a_late_read_is_pending_for_the_planned_polls(faulty: Faulty) -> None:
    reader, remote = faulty.reader(Rule(Late(num_polls=2)))
    transfer = reader.transport.read(remote, RANGES, 1.0)
    assert [reader.transport.poll(transfer) is PENDING for _ in range(3)] == [True, True, False]
    assert is_equal(faulty, reader)


def test_a_lost_read_never_ends_until_it_is_cancelled(faulty: Faulty) -> None:
    reader, remote = faulty.reader(Rule(Lost()))
    transfer = reader.transport.read(remote, RANGES, 1.0)
    assert {reader.transport.poll(transfer) for _ in range(100)} == {PENDING}
    reader.transport.cancel(transfer)
    assert reason_of(reader.transport.poll(transfer)) is TransferFailureReason.CANCELLED
    assert reader.transport.release(transfer)


def test_a_half_done_read_has_its_first_ranges_and_fails(faulty: Faulty) -> None:
    reader, remote = faulty.reader(Rule(HalfDone(num_ranges=3)))
    assert reason_of(reader.finish(remote, RANGES)) is TransferFailureReason.GONE
    assert (reader.regions[0][:192] == faulty.owner.regions[0][:192]).all()
    assert (reader.regions[0][192:] == POISON).all()


def test_a_read_with_wrong_bytes_succeeds_and_differs_in_one_byte(faulty: Faulty) -> None:
    reader, remote = faulty.reader(Rule(WrongBytes(byte_index=100)))
    assert isinstance(reader.finish(remote, RANGES), TransferDone)
    assert (reader.regions[0] != faulty.owner.regions[0]).nonzero()[0].tolist() == [100]


def test_a_vanished_peer_stays_gone(faulty: Faulty) -> None:
    reader, remote = faulty.reader(Rule(Vanish(), nth=2))
    assert isinstance(reader.finish(remote, RANGES), TransferDone)
    for _ in range(3):
        assert reason_of(reader.finish(remote, RANGES)) is TransferFailureReason.GONE


def test_an_empty_read_counts_for_no_rule(faulty: Faulty) -> None:
    reader, remote = faulty.reader(Rule(Fail(), nth=1))
    assert isinstance(reader.finish(remote, Ranges.of([])), TransferDone)
    assert reason_of(reader.finish(remote, RANGES)) is TransferFailureReason.BROKEN


def test_an_impossible_plan_is_refused() -> None:
    with pytest.raises(PeersConfigurationError):
        Rule(Fail(), nth=0)
    with pytest.raises(PeersConfigurationError):
        Rule(Late(num_polls=0))
