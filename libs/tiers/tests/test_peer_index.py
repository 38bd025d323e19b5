"""`PeerIndex`: lookups, found chunks, expiry and leases. The tests control the clock and the peers."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

from plain_peers import PlainPeers  # noqa: E402

from hybridkv.planner import LookupResult  # noqa: E402
from hybridkv.tiers import Key, LookupAnswer, Slot, TierIndex  # noqa: E402
from hybridkv.tiers.peer import PeerAnswer, PeerIndex, PeerOptions  # noqa: E402
from hybridkv.tiers.peer.places import peer_of, to_peer_slot  # noqa: E402
from kits.tiers.conformance import CHUNK_BYTES, ReadOnlyConformance  # noqa: E402
from kits.tiers.faults import FaultInjectingIndex, FaultPlan  # noqa: E402

A, B, C = b"key a", b"key b", b"key c"
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS


def slots(*keys: Key) -> dict[Key, Slot]:
    return {key: Slot(((number * CHUNK_BYTES, CHUNK_BYTES),)) for number, key in enumerate(keys)}


class TestPeerIndex(ReadOnlyConformance):
    time_s = 0.0
    peers: PlainPeers

    def make_late(self) -> TierIndex:
        self.peers = PlainPeers(self.now_s, [slots(A, B), {}])
        return PeerIndex(self.peers, PeerOptions(), self.now_s)

    def now_s(self) -> float:
        return self.time_s

    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds

    def answer_all(self) -> None:
        self.peers.answer()


class TestPeerIndexInAnIdleFaultInjector(TestPeerIndex):
    def make_late(self) -> TierIndex:
        return FaultInjectingIndex(super().make_late(), FaultPlan())


class PeerBench:
    """Index over two peers."""

    def __init__(self, *held: dict[Key, Slot], lease_s: float = 60.0, **options: float) -> None:
        self.time_s = 0.0
        self.peers = PlainPeers(lambda: self.time_s, held or (slots(A, B), slots(B, C)), lease_s)
        self.index = PeerIndex(self.peers, PeerOptions(**options), lambda: self.time_s)

    def ask(self, *keys: Key) -> None:
        self.index.start_lookup(keys, self.time_s + 1.0)

    def lookups(self, *keys: Key) -> list[LookupResult]:
        return [self.index.lookup(key) for key in keys]


def test_a_batch_is_one_message_to_each_peer() -> None:
    bench = PeerBench()
    bench.index.start_lookup([b"%d" % number for number in range(1000)], 1.0)
    assert bench.peers.num_messages == 2


def test_each_chunk_is_read_from_a_peer_that_holds_it() -> None:
    bench = PeerBench()
    bench.ask(A, C)
    bench.peers.answer()
    assert bench.lookups(A, C) == [HIT, HIT]
    first, second = bench.index.pin(A), bench.index.pin(C)
    assert first is not None and second is not None
    assert (peer_of(first), to_peer_slot(first)) == (0, slots(A)[A])
    assert (peer_of(second), to_peer_slot(second)) == (1, slots(B, C)[C])


def test_a_miss_at_one_peer_does_not_answer_for_another() -> None:
    bench = PeerBench()
    bench.ask(C)
    bench.peers.answer(0)
    assert bench.lookups(C) == [PENDING]
    bench.peers.answer(1)
    assert bench.lookups(C) == [HIT] and bench.index.take_counts().answers == {LookupAnswer.FOUND: 1}


def test_the_first_hit_answers_and_other_leases_are_ended() -> None:
    bench = PeerBench()
    bench.ask(B)
    bench.peers.answer(1)
    assert bench.lookups(B) == [HIT]
    slot = bench.index.pin(B)
    assert slot is not None and peer_of(slot) == 1
    bench.peers.answer(0)
    assert bench.lookups(B) == [HIT] and bench.peers.given_up == [(0, B)]


def test_the_lease_of_a_read_chunk_is_ended() -> None:
    bench = PeerBench()
    bench.ask(A)
    bench.peers.answer()
    assert bench.index.pin(A) and bench.index.pin(A)
    bench.index.unpin(A)
    assert bench.peers.given_up == []
    bench.index.unpin(A)
    assert bench.peers.given_up == [(0, A)] and bench.lookups(A) == [HIT]
    assert bench.index.pin(A)
    bench.index.unpin(A)
    assert bench.peers.given_up == [(0, A)], "only once"


def test_the_lease_of_an_unwanted_chunk_is_ended() -> None:
    bench = PeerBench()
    bench.ask(A, B, C)
    bench.peers.answer()
    assert bench.lookups(A, B, C) == [HIT] * 3 and bench.peers.given_up == [(1, B)]
    bench.peers.given_up.clear()
    bench.index.invalidate(A)
    assert bench.lookups(A) == [MISS] and bench.peers.given_up == [(0, A)]
    bench.index.close()
    assert sorted(bench.peers.given_up) == [(0, A), (0, B), (1, C)] and bench.peers.is_closed


def test_a_found_key_is_cached_for_half_of_its_lease() -> None:
    bench = PeerBench(lease_s=60.0)
    bench.ask(A, B)
    bench.peers.answer()
    bench.index.pin(B)
    before = bench.index.generation
    bench.time_s = 29.9
    assert bench.lookups(A, B) == [HIT, HIT] and bench.index.generation == before
    bench.time_s = 30.0
    assert bench.lookups(A, B) == [MISS, HIT] and bench.index.generation != before
    assert (0, A) in bench.peers.given_up
    bench.index.unpin(B)
    assert bench.lookups(B) == [MISS]
    bench.ask(A)
    bench.peers.answer()
    assert bench.lookups(A) == [HIT]


def test_a_key_missing_at_all_peers_is_not_looked_up_again_at_once() -> None:
    bench = PeerBench(missing_s=5.0)
    bench.ask(b"nowhere")
    bench.peers.answer()
    assert bench.lookups(b"nowhere") == [MISS] and bench.index.take_counts().answers == {LookupAnswer.MISSING: 1}
    num_messages = bench.peers.num_messages
    bench.ask(b"nowhere")
    assert (bench.lookups(b"nowhere"), bench.peers.num_messages) == ([MISS], num_messages)
    bench.time_s = 5.0
    bench.ask(b"nowhere")
    assert (bench.lookups(b"nowhere"), bench.peers.num_messages) == ([PENDING], num_messages + 2)


def test_unreachable_peers_make_a_miss_and_count_as_timed_out() -> None:
    bench = PeerBench()
    bench.peers.lose(0)
    bench.peers.lose(1)
    bench.ask(A)
    assert bench.lookups(A) == [MISS]
    assert bench.index.take_counts().answers == {LookupAnswer.TIMED_OUT: 1} and bench.index.lookup_counts == (0, 0)


def test_a_lost_peer_is_neither_waited_for_nor_cached() -> None:
    bench = PeerBench()
    bench.ask(A)
    bench.peers.answer(0)
    bench.ask(C, b"nowhere")
    bench.peers.answer(0)
    assert bench.lookups(A, C) == [HIT, PENDING]
    assert bench.index.pin(A)
    bench.peers.lose(1)
    assert bench.lookups(C, b"nowhere") == [MISS, MISS]
    bench.peers.lose(0)
    assert bench.lookups(A) == [MISS]
    bench.index.unpin(A)
    assert bench.index.used_bytes == 0 and bench.peers.given_up == []


def test_an_answer_to_an_older_lookup_is_ignored() -> None:
    bench = PeerBench()
    bench.ask(A)
    [first, second] = bench.peers.waiting
    bench.peers.waiting = []
    bench.index.invalidate(A)
    bench.ask(A)
    bench.peers.waiting, later = [first, second], bench.peers.waiting
    bench.peers.answer()
    assert bench.lookups(A) == [PENDING] and bench.peers.given_up == [(0, A)]
    bench.peers.waiting = later
    bench.peers.answer()
    assert bench.lookups(A) == [HIT]


def test_a_silent_peer_does_not_block_lookups_for_ever() -> None:
    bench = PeerBench(max_open_keys=4, forget_after_s=10.0)
    bench.ask(b"1", b"2", b"3", b"4")
    bench.time_s = 5.0
    bench.ask(A)
    assert bench.lookups(A, b"1") == [MISS, MISS]
    bench.time_s = 11.0
    bench.ask(A)
    assert bench.lookups(A) == [PENDING]


def test_unexpected_answers_change_nothing() -> None:
    bench = PeerBench()
    bench.ask(A)
    there_is = slots(A)[A]
    for peer, request, answered in ((2, 1, (there_is,)), (0, 77, (there_is,)), (0, 1, ())):
        bench.peers.events.append(PeerAnswer(peer, request, answered, 60.0, 0.0))
        assert bench.lookups(A) == [PENDING]
    bench.time_s = 1.0
    assert bench.lookups(A) == [MISS]


def test_max_known_evicts_the_oldest_found_key() -> None:
    names = [b"%d" % number for number in range(6)]
    bench = PeerBench(slots(*names), max_known=4)
    for name in names:
        bench.ask(name)
        bench.peers.answer()
        assert bench.lookups(name) == [HIT]
    assert bench.lookups(*names) == [MISS] * 2 + [HIT] * 4
    assert bench.peers.given_up == [(0, names[0]), (0, names[1])]
    assert bench.index.take_counts().evictions == 2
    assert bench.index.pin_all(names[2:])
    bench.ask(names[0])
    bench.peers.answer()
    assert bench.lookups(names[0]) == [MISS], "no room beside the pinned keys"


def test_an_answer_that_never_fits_evicts_nothing() -> None:
    bench = PeerBench({A: Slot(((0, 100),)), B: Slot(((100, 1001),))}, known_bytes=1000)
    for key in (A, B):
        bench.ask(key)
        bench.peers.answer()
    assert bench.lookups(A, B) == [HIT, MISS] and bench.peers.given_up == [(0, B)]


def test_a_found_key_does_not_count_as_a_store() -> None:
    bench = PeerBench()
    bench.ask(A)
    bench.peers.answer()
    bench.index.generation  # noqa: B018
    counts = bench.index.take_counts()
    assert (counts.reservations, counts.commits, counts.answers) == (0, 0, {LookupAnswer.FOUND: 1})


@pytest.mark.parametrize("field", ["lease_s", "max_open_keys", "leased_share"])
def test_invalid_peer_options_name_the_field(field: str) -> None:
    from hybridkv.tiers import TierConfigurationError

    with pytest.raises(TierConfigurationError) as caught:
        PeerOptions(**{field: 0})
    assert caught.value.field == field


def test_a_load_timeout_longer_than_half_a_lease_is_refused() -> None:
    """A load may begin when half of the lease has passed."""
    from hybridkv.tiers import TierConfigurationError

    assert PeerOptions(lease_s=60.0, load_timeout_s=30.0)
    with pytest.raises(TierConfigurationError) as caught:
        PeerOptions(lease_s=60.0, load_timeout_s=30.1)
    assert caught.value.field == "load_timeout_s"
