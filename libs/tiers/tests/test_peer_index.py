"""`PeerIndex`: lookups, found chunks, expiry and leases. The tests set the time and the peers."""

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


class World:
    """An index over two peers."""

    def __init__(self, *held: dict[Key, Slot], lease_s: float = 60.0, **options: float) -> None:
        self.time_s = 0.0
        self.peers = PlainPeers(lambda: self.time_s, held or (slots(A, B), slots(B, C)), lease_s)
        self.index = PeerIndex(self.peers, PeerOptions(**options), lambda: self.time_s)

    def ask(self, *keys: Key) -> None:
        self.index.start_lookup(keys, self.time_s + 1.0)

    def lookups(self, *keys: Key) -> list[LookupResult]:
        return [self.index.lookup(key) for key in keys]


def test_a_batch_is_one_message_to_each_peer() -> None:
    world = World()
    world.index.start_lookup([b"%d" % number for number in range(1000)], 1.0)
    assert world.peers.num_messages == 2


def test_each_chunk_is_read_from_a_peer_that_holds_it() -> None:
    world = World()
    world.ask(A, C)
    world.peers.answer()
    assert world.lookups(A, C) == [HIT, HIT]
    first, second = world.index.pin(A), world.index.pin(C)
    assert first is not None and second is not None
    assert (peer_of(first), to_peer_slot(first)) == (0, slots(A)[A])
    assert (peer_of(second), to_peer_slot(second)) == (1, slots(B, C)[C])


def test_one_peer_that_lacks_a_key_answers_for_nobody_else() -> None:
    world = World()
    world.ask(C)
    world.peers.answer(0)
    assert world.lookups(C) == [PENDING]
    world.peers.answer(1)
    assert world.lookups(C) == [HIT] and world.index.take_counts().answers == {LookupAnswer.FOUND: 1}


def test_the_first_that_holds_a_key_is_enough_and_the_others_get_theirs_back() -> None:
    world = World()
    world.ask(B)
    world.peers.answer(1)
    assert world.lookups(B) == [HIT]
    slot = world.index.pin(B)
    assert slot is not None and peer_of(slot) == 1
    world.peers.answer(0)
    assert world.lookups(B) == [HIT] and world.peers.given_up == [(0, B)]


def test_what_was_read_is_given_back() -> None:
    world = World()
    world.ask(A)
    world.peers.answer()
    assert world.index.pin(A) and world.index.pin(A)
    world.index.unpin(A)
    assert world.peers.given_up == []
    world.index.unpin(A)
    assert world.peers.given_up == [(0, A)] and world.lookups(A) == [HIT]
    assert world.index.pin(A)
    world.index.unpin(A)
    assert world.peers.given_up == [(0, A)], "once"


def test_what_is_not_wanted_is_given_back() -> None:
    world = World()
    world.ask(A, B, C)
    world.peers.answer()
    assert world.lookups(A, B, C) == [HIT] * 3 and world.peers.given_up == [(1, B)]
    world.peers.given_up.clear()
    world.index.invalidate(A)
    assert world.lookups(A) == [MISS] and world.peers.given_up == [(0, A)]
    world.index.close()
    assert sorted(world.peers.given_up) == [(0, A), (0, B), (1, C)] and world.peers.is_closed


def test_what_was_heard_of_is_believed_for_half_of_its_lease() -> None:
    world = World(lease_s=60.0)
    world.ask(A, B)
    world.peers.answer()
    world.index.pin(B)
    before = world.index.generation
    world.time_s = 29.9
    assert world.lookups(A, B) == [HIT, HIT] and world.index.generation == before
    world.time_s = 30.0
    assert world.lookups(A, B) == [MISS, HIT] and world.index.generation != before
    assert (0, A) in world.peers.given_up
    world.index.unpin(B)
    assert world.lookups(B) == [MISS]
    world.ask(A)
    world.peers.answer()
    assert world.lookups(A) == [HIT]


def test_what_all_peers_lack_is_not_asked_for_again_at_once() -> None:
    world = World(missing_s=5.0)
    world.ask(b"nowhere")
    world.peers.answer()
    assert world.lookups(b"nowhere") == [MISS] and world.index.take_counts().answers == {LookupAnswer.MISSING: 1}
    num_messages = world.peers.num_messages
    world.ask(b"nowhere")
    assert (world.lookups(b"nowhere"), world.peers.num_messages) == ([MISS], num_messages)
    world.time_s = 5.0
    world.ask(b"nowhere")
    assert (world.lookups(b"nowhere"), world.peers.num_messages) == ([PENDING], num_messages + 2)


def test_where_no_peer_can_be_asked_nobody_waits_and_nobody_is_blamed() -> None:
    world = World()
    world.peers.lose(0)
    world.peers.lose(1)
    world.ask(A)
    assert world.lookups(A) == [MISS]
    assert world.index.take_counts().answers == {LookupAnswer.TIMED_OUT: 1} and world.index.lookup_counts == (0, 0)


def test_a_peer_that_is_lost_is_waited_for_no_more_and_believed_no_more() -> None:
    world = World()
    world.ask(A)
    world.peers.answer(0)
    world.ask(C, b"nowhere")
    world.peers.answer(0)
    assert world.lookups(A, C) == [HIT, PENDING]
    assert world.index.pin(A)
    world.peers.lose(1)
    assert world.lookups(C, b"nowhere") == [MISS, MISS]
    world.peers.lose(0)
    assert world.lookups(A) == [MISS]
    world.index.unpin(A)
    assert world.index.used_bytes == 0 and world.peers.given_up == []


def test_an_answer_to_an_older_question_brings_nothing_back() -> None:
    world = World()
    world.ask(A)
    [first, second] = world.peers.waiting
    world.peers.waiting = []
    world.index.invalidate(A)
    world.ask(A)
    world.peers.waiting, later = [first, second], world.peers.waiting
    world.peers.answer()
    assert world.lookups(A) == [PENDING] and world.peers.given_up == [(0, A)]
    world.peers.waiting = later
    world.peers.answer()
    assert world.lookups(A) == [HIT]


def test_a_peer_that_never_answers_takes_up_no_room_for_ever() -> None:
    world = World(max_open_keys=4, given_up_s=10.0)
    world.ask(b"1", b"2", b"3", b"4")
    world.time_s = 5.0
    world.ask(A)
    assert world.lookups(A, b"1") == [MISS, MISS]
    world.time_s = 11.0
    world.ask(A)
    assert world.lookups(A) == [PENDING]


def test_answers_that_fit_no_question_change_nothing() -> None:
    world = World()
    world.ask(A)
    there_is = slots(A)[A]
    for peer, request, answered in ((2, 1, (there_is,)), (0, 77, (there_is,)), (0, 1, ())):
        world.peers.events.append(PeerAnswer(peer, request, answered, 60.0, 0.0))
        assert world.lookups(A) == [PENDING]
    world.time_s = 1.0
    assert world.lookups(A) == [MISS]


def test_no_more_is_known_than_may_be_and_the_oldest_goes() -> None:
    names = [b"%d" % number for number in range(6)]
    world = World(slots(*names), max_known=4)
    for name in names:
        world.ask(name)
        world.peers.answer()
        assert world.lookups(name) == [HIT]
    assert world.lookups(*names) == [MISS] * 2 + [HIT] * 4
    assert world.peers.given_up == [(0, names[0]), (0, names[1])]
    assert world.index.take_counts().evictions == 2
    assert world.index.pin_all(names[2:])
    world.ask(names[0])
    world.peers.answer()
    assert world.lookups(names[0]) == [MISS], "no room beside what is being read"


def test_an_answer_that_can_never_fit_displaces_nothing() -> None:
    world = World({A: Slot(((0, 100),)), B: Slot(((100, 1001),))}, known_bytes=1000)
    for key in (A, B):
        world.ask(key)
        world.peers.answer()
    assert world.lookups(A, B) == [HIT, MISS] and world.peers.given_up == [(0, B)]


def test_what_was_heard_of_is_counted_as_no_store() -> None:
    world = World()
    world.ask(A)
    world.peers.answer()
    world.index.generation  # noqa: B018
    counts = world.index.take_counts()
    assert (counts.reservations, counts.commits, counts.answers) == (0, 0, {LookupAnswer.FOUND: 1})


@pytest.mark.parametrize("field", ["lease_s", "max_open_keys", "leased_share"])
def test_options_of_peers_that_cannot_work_name_the_field(field: str) -> None:
    from hybridkv.tiers import TierConfigurationError

    with pytest.raises(TierConfigurationError) as caught:
        PeerOptions(**{field: 0})
    assert caught.value.field == field


def test_no_load_may_outlast_the_lease_of_what_it_reads() -> None:
    """It may begin when half of the lease is over."""
    from hybridkv.tiers import TierConfigurationError

    assert PeerOptions(lease_s=60.0, load_timeout_s=30.0)
    with pytest.raises(TierConfigurationError) as caught:
        PeerOptions(lease_s=60.0, load_timeout_s=30.1)
    assert caught.value.field == "load_timeout_s"
