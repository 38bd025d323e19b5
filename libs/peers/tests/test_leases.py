"""Leases: a slot has its nonce exactly while blocks may be read, and each lease ends once."""

from __future__ import annotations

import itertools

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.leases import MAX_NONCE, NO_NONCE, Ended, Lease, LeaseBounds, LeaseEnd, Leases, LeaseSlots

BOUNDS = LeaseBounds(hold_s=30, renew_s=20, longest_s=100)


def counting() -> LeaseSlots:
    return LeaseSlots(2, itertools.count(1).__next__)


class Rank:
    """One rank with its memory."""

    def __init__(self, max_leases: int = 2) -> None:
        self.slots = [NO_NONCE] * max_leases
        self.leases = Leases(max_leases, BOUNDS, self.write)

    def write(self, slot: int, nonce: int) -> None:
        self.slots[slot] = nonce

    def held(self) -> Lease:
        lease = Lease(0, 7)
        self.leases.open("a", lease)
        assert self.leases.hold("a", 0.0)
        return lease


def test_a_request_without_a_free_slot_gets_no_lease() -> None:
    slots = counting()
    assert slots.issue("a") == Lease(0, 1)
    assert slots.issue("a") == Lease(0, 1)
    assert slots.issue("b") == Lease(1, 2)
    assert slots.issue("c") is None
    assert slots.retire("a")
    assert not slots.retire("a")
    assert slots.issue("c") == Lease(0, 3)


def test_a_slot_never_gets_the_same_nonce_twice_in_a_row() -> None:
    draws = iter([5, 5, 0, MAX_NONCE + 1, 6])
    slots = LeaseSlots(1, draws.__next__)
    assert slots.issue("a") == Lease(0, 5)
    slots.retire("a")
    assert slots.issue("b") == Lease(0, 6)


def test_a_source_that_repeats_one_number_is_a_protocol_error() -> None:
    slots = LeaseSlots(1, lambda: 5)
    slots.issue("a")
    slots.retire("a")
    with pytest.raises(PeersProtocolError, match="nonces"):
        slots.issue("b")


def test_the_nonce_is_set_before_the_request_has_finished() -> None:
    rank = Rank()
    rank.leases.open("a", Lease(0, 7))
    assert rank.slots == [7, NO_NONCE]
    assert rank.leases.holds(Lease(0, 7), 0.0) is None
    assert rank.leases.hold("a", 0.0)
    assert rank.leases.holds(Lease(0, 7), 0.0) == "a"


def test_the_slot_is_cleared_before_the_end_of_the_lease_is_returned() -> None:
    seen = []
    rank = Rank()
    lease = rank.held()
    seen.append(rank.leases.done(lease, 0, 1))
    assert seen == [Ended("a", LeaseEnd.DONE)]
    assert rank.slots == [NO_NONCE, NO_NONCE]


def test_a_lease_ends_when_every_reader_is_done_and_none_counts_twice() -> None:
    rank = Rank()
    lease = rank.held()
    assert rank.leases.done(lease, 0, 2) is None
    assert rank.leases.done(lease, 0, 2) is None
    assert rank.slots[0] == 7
    assert rank.leases.done(lease, 1, 2) == Ended("a", LeaseEnd.DONE)


def test_messages_after_the_end_change_nothing() -> None:
    rank = Rank()
    lease = rank.held()
    assert rank.leases.expire(30.0) == [Ended("a", LeaseEnd.EXPIRED)]
    assert rank.leases.done(lease, 0, 1) is None
    assert not rank.leases.renew(lease, 31.0)
    assert rank.leases.abort("a") is None
    assert rank.leases.expire(1000.0) == []


def test_a_nonce_of_another_slot_ends_nothing() -> None:
    rank = Rank()
    lease = rank.held()
    assert rank.leases.done(Lease(0, 8), 0, 1) is None
    assert rank.leases.done(Lease(1, 7), 0, 1) is None
    assert rank.leases.done(Lease(-1, 7), 0, 1) is None
    assert rank.leases.holds(lease, 0.0) == "a"


def test_renewals_extend_a_lease_up_to_a_limit() -> None:
    rank = Rank()
    lease = rank.held()
    for now_s in (25.0, 40.0, 55.0, 70.0, 85.0):
        assert rank.leases.renew(lease, now_s)
    assert rank.leases.next_expiry_s == 100.0
    assert rank.leases.expire(99.0) == []
    assert not rank.leases.renew(lease, 100.0)
    assert rank.leases.expire(100.0) == [Ended("a", LeaseEnd.EXPIRED)]


def test_a_lease_aborted_before_the_request_finished_keeps_no_blocks() -> None:
    rank = Rank()
    rank.leases.open("a", Lease(0, 7))
    assert rank.leases.abort("a") == Ended("a", LeaseEnd.ABORTED)
    assert not rank.leases.hold("a", 0.0)


def test_opening_a_slot_with_another_lease_is_a_protocol_error() -> None:
    rank = Rank()
    rank.leases.open("a", Lease(0, 7))
    rank.leases.open("a", Lease(0, 7))
    for request_id, lease in (("b", Lease(0, 8)), ("a", Lease(1, 7)), ("b", Lease(2, 7))):
        with pytest.raises(PeersProtocolError):
            rank.leases.open(request_id, lease)


class LeaseMachine(RuleBasedStateMachine):
    """Slots and two ranks, beside a plain record of which reader may read which blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = LeaseSlots(3, itertools.count(1).__next__)
        self.ranks = [Rank(3), Rank(3)]
        self.now_s = 0.0
        self.names = itertools.count()
        self.expiry: list[dict[str, list[float]]] = [{}, {}]
        """For each rank, held requests: [expiry, latest expiry]."""
        self.open: list[set[str]] = [set(), set()]
        self.leases: dict[str, Lease] = {}
        self.given_back: list[dict[str, int]] = [{}, {}]
        self.held_once: list[set[str]] = [set(), set()]
        self.readers: list[dict[str, set[int]]] = [{}, {}]

    def ended(self, rank: int, ends: list[Ended]) -> None:
        for end in ends:
            if end.request_id in self.expiry[rank]:
                self.given_back[rank][end.request_id] = self.given_back[rank].get(end.request_id, 0) + 1
            assert self.leases[end.request_id].nonce not in self.ranks[rank].slots
            self.expiry[rank].pop(end.request_id, None)
            self.open[rank].discard(end.request_id)
            if all(end.request_id not in self.expiry[r] and end.request_id not in self.open[r] for r in (0, 1)):
                assert self.slots.retire(end.request_id)

    @rule()
    def schedule(self) -> None:
        name = f"r{next(self.names)}"
        busy = len({slot for r in (0, 1) for slot in (*self.expiry[r], *self.open[r])})
        lease = self.slots.issue(name)
        assert (lease is None) == (busy == 3)
        if lease is not None:
            self.leases[name] = lease
            for rank in (0, 1):
                self.ranks[rank].leases.open(name, lease)
                self.open[rank].add(name)

    @precondition(lambda self: any(self.open))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([r for r in (0, 1) if self.open[r]]))
        name = data.draw(st.sampled_from(sorted(self.open[rank])))
        assert self.ranks[rank].leases.hold(name, self.now_s)
        assert not self.ranks[rank].leases.hold(name, self.now_s)
        self.open[rank].remove(name)
        self.expiry[rank][name] = [self.now_s + 30, self.now_s + 100]
        self.readers[rank][name] = set()
        self.held_once[rank].add(name)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), rank=st.integers(0, 1), reader=st.integers(0, 1), count=st.integers(1, 2))
    def done(self, data: st.DataObject, rank: int, reader: int, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.leases)))
        end = self.ranks[rank].leases.done(self.leases[name], reader, count)
        if name not in self.expiry[rank] or reader in self.readers[rank][name]:
            assert end is None
            return
        self.readers[rank][name].add(reader)
        assert (end is not None) == (len(self.readers[rank][name]) >= count)
        if end is not None:
            assert end == Ended(name, LeaseEnd.DONE)
            self.ended(rank, [end])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), rank=st.integers(0, 1))
    def renew(self, data: st.DataObject, rank: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.leases)))
        times = self.expiry[rank].get(name)
        alive = times is not None and self.now_s < times[0]
        assert self.ranks[rank].leases.renew(self.leases[name], self.now_s) == alive
        if alive and times is not None:
            times[0] = max(times[0], min(self.now_s + 20, times[1]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), rank=st.integers(0, 1))
    def abort(self, data: st.DataObject, rank: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.leases)))
        alive = name in self.expiry[rank] or name in self.open[rank]
        end = self.ranks[rank].leases.abort(name)
        assert (end is not None) == alive
        if end is not None:
            self.ended(rank, [end])

    @rule(seconds=st.sampled_from([0.0, 5.0, 15.0, 40.0]), rank=st.integers(0, 1))
    def expire(self, seconds: float, rank: int) -> None:
        self.now_s += seconds
        due = {name for name, times in self.expiry[rank].items() if times[0] <= self.now_s}
        ends = self.ranks[rank].leases.expire(self.now_s)
        assert {end.request_id for end in ends} == due
        self.ended(rank, ends)

    @rule(rank=st.integers(0, 1))
    def close(self, rank: int) -> None:
        ends = self.ranks[rank].leases.close()
        assert {end.request_id for end in ends} == {*self.expiry[rank], *self.open[rank]}
        self.ended(rank, ends)

    @invariant()
    def slots_hold_the_nonces_of_live_leases_only(self) -> None:
        for rank in (0, 1):
            living = {*self.expiry[rank], *self.open[rank]}
            expected = [NO_NONCE] * 3
            for name in living:
                expected[self.leases[name].slot] = self.leases[name].nonce
            assert self.ranks[rank].slots == expected
            assert len(self.ranks[rank].leases) == len(living) <= 3
            assert self.ranks[rank].leases.num_held == len(self.expiry[rank])
            assert self.ranks[rank].leases.next_expiry_s == min(
                (times[0] for times in self.expiry[rank].values()), default=None
            )

    @invariant()
    def each_held_request_is_released_once(self) -> None:
        for rank in (0, 1):
            assert all(count == 1 for count in self.given_back[rank].values())
            assert set(self.given_back[rank]) == self.held_once[rank] - set(self.expiry[rank])


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
