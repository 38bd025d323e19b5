"""Hinted lookups: the hinted peer first, then the listed ones. Hinted peers need not be listed."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from peer_engines import SECRET, TIMEOUT_S, Engine, chunk_bytes, free_port, load, patient
from plain_peers import PlainPeers

from hybridkv.peers.wire import Secret
from hybridkv.planner import LookupResult
from hybridkv.tiers import Key, LookupAnswer, LookupCounts, Slot
from hybridkv.tiers.peer import PeerAnswer, PeerIndex, PeerOptions, places
from hybridkv.tiers.peer.places import PeerId, peer_of, to_peer_slot, to_tier_slot
from kits.peers.suite import until

A, B, C = b"key a", b"key b", b"key c"
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS
NEW = ("10.0.0.9", 7300)
"""An unlisted peer."""


def slots(*keys: Key) -> dict[Key, Slot]:
    return {key: Slot(((number * 4096, 4096),)) for number, key in enumerate(keys)}


class HintBench:
    """An index over two listed peers, and one that is not listed. Lookups have two seconds."""

    def __init__(self, *listed: dict[Key, Slot], **options: Any) -> None:
        self.time_s = 0.0
        self.peers = PlainPeers(lambda: self.time_s, listed, lease_s=60.0)
        self.peers.hinted[NEW] = slots(A, B)
        self.index = PeerIndex(self.peers, PeerOptions(**options), lambda: self.time_s)

    def look_up(self, *keys: Key, at: tuple[tuple[str, int], ...] = (NEW,)) -> None:
        self.index.start_lookup_at(at, keys, self.time_s + 2.0)

    def lookups(self, *keys: Key) -> list[LookupResult]:
        return [self.index.lookup(key) for key in keys]

    def receivers(self) -> list[PeerId]:
        return [peer for peer, _, _ in self.peers.waiting]


def source(bench: HintBench, key: Key) -> PeerId:
    slot = bench.index.pin(key)
    assert slot is not None
    bench.index.unpin(key)
    return peer_of(slot)


def test_a_right_hint_costs_one_message() -> None:
    bench = HintBench(slots(A, B), slots(A, B))
    bench.look_up(A, B)
    assert bench.receivers() == [NEW]
    bench.peers.answer()
    assert bench.lookups(A, B) == [HIT, HIT] and bench.peers.num_messages == 1
    assert source(bench, A) == NEW and bench.peers.given_up == [(NEW, A)]


def test_a_listed_peer_may_be_hinted() -> None:
    bench = HintBench({}, slots(A))
    bench.look_up(A, at=(("listed", 1),))
    assert bench.receivers() == [1]
    bench.peers.answer()
    assert bench.lookups(A) == [HIT] and source(bench, A) == 1


def test_the_other_peers_are_sent_only_the_keys_that_the_hinted_one_lacks() -> None:
    bench = HintBench({}, slots(C))
    bench.look_up(A, C)
    bench.peers.answer(NEW)
    assert bench.lookups(A, C) == [HIT, PENDING]
    assert [(peer, keys) for peer, _, keys in bench.peers.waiting] == [(0, (C,)), (1, (C,))]
    bench.peers.answer()
    assert bench.lookups(C) == [HIT] and (source(bench, A), source(bench, C)) == (NEW, 1)


def test_a_hinted_listed_peer_is_not_sent_the_lookup_again() -> None:
    bench = HintBench({}, {})
    bench.look_up(C, at=(("listed", 0),))
    bench.peers.answer()
    assert bench.lookups(C) == [PENDING] and bench.receivers() == [1]
    bench.peers.answer()
    assert bench.lookups(C) == [MISS]
    assert bench.index.take_counts().answers == {LookupAnswer.MISSING: 1}


def test_without_the_hint_an_unlisted_peer_is_not_looked_up() -> None:
    bench = HintBench({}, {})
    bench.look_up(A)
    bench.peers.answer()
    bench.time_s = 40.0
    bench.look_up(A, at=())
    assert bench.receivers() == [0, 1]
    bench.peers.answer()
    assert bench.lookups(A) == [MISS]


def test_a_silent_hinted_peer_is_passed_over_at_half_of_the_time_and_left_out_for_a_while() -> None:
    bench = HintBench(slots(A), {})
    bench.look_up(A)
    bench.time_s = 0.9
    assert bench.lookups(A) == [PENDING] and bench.receivers() == [NEW]
    bench.time_s = 1.0
    assert bench.lookups(A) == [PENDING] and bench.receivers() == [NEW, 0, 1]
    bench.peers.answer(0, 1)
    assert bench.lookups(A) == [HIT] and source(bench, A) == 0
    bench.look_up(B)
    assert bench.receivers()[1:] == [0, 1], "the hint does not count"
    bench.peers.answer(0, 1)
    bench.time_s = 12.0
    bench.look_up(C)
    assert bench.receivers()[-1] == NEW
    bench.peers.answer()
    assert bench.lookups(C) == [PENDING]
    bench.look_up(b"later")
    assert bench.receivers()[-1] == NEW


def test_a_late_answer_of_a_hinted_peer_counts_until_the_listed_ones_have_answered() -> None:
    bench = HintBench({}, {})
    bench.look_up(A)
    bench.time_s = 1.0
    assert bench.lookups(A) == [PENDING]
    bench.peers.answer(0)
    bench.peers.answer(NEW)
    assert bench.lookups(A) == [HIT] and source(bench, A) == NEW


@pytest.mark.parametrize("listed", [(), ({}, {})], ids=["no listed peer", "two listed peers"])
@pytest.mark.parametrize("ends", ["answer", "loss", "nothing"])
def test_a_connected_peer_without_an_answer_does_not_affect_the_breaker(
    listed: tuple[dict[Key, Slot], ...], ends: str
) -> None:
    bench = HintBench(*listed)
    bench.look_up(A, C)
    bench.time_s = 1.0
    assert bench.lookups(A, C) == [PENDING if listed else MISS] * 2
    bench.peers.answer(0, 1)
    assert bench.lookups(A, C) == [MISS] * 2
    if ends == "answer":
        bench.peers.answer(NEW)
    elif ends == "loss":
        bench.peers.lose(NEW)
    assert bench.lookups(A, C) == [MISS] * 2 and len(bench.index._lookups) == (ends == "nothing")
    assert bench.peers.given_up == ([(NEW, A)] if ends == "answer" else [])
    bench.time_s = 100.0
    assert bench.index.lookup_counts == LookupCounts(num_answered=len(listed))


@pytest.mark.parametrize("answers", [False, True])
def test_a_poll_after_the_deadline_counts_no_hinted_peer_as_silent(answers: bool) -> None:
    bench = HintBench({})
    bench.look_up(A)
    bench.time_s = 0.5
    if answers:
        bench.peers.answer()
    bench.time_s = 5.0
    assert bench.lookups(A) == [HIT if answers else MISS]
    assert bench.index.lookup_counts == LookupCounts(num_answered=int(answers))
    assert bench.peers.num_messages == 1


def test_the_time_of_an_answer_after_a_hint_counts_from_the_second_message() -> None:
    bench = HintBench(slots(A))
    before_s = bench.index.answer_s
    bench.look_up(A)
    bench.time_s = 1.0
    assert bench.lookups(A) == [PENDING]
    bench.peers.answer(0)
    assert bench.lookups(A) == [HIT] and bench.index.answer_s < before_s


def test_a_listed_peer_without_an_answer_counts_for_the_breaker_after_a_hint_too() -> None:
    bench = HintBench({})
    bench.look_up(A)
    bench.time_s = 1.0
    assert bench.lookups(A) == [PENDING]
    bench.time_s = 2.0
    assert bench.lookups(A) == [MISS]
    assert bench.index.lookup_counts == LookupCounts(num_timed_out=1)


@pytest.mark.parametrize("listed", [(), ({}, {})], ids=["no listed peer", "two listed peers"])
@pytest.mark.parametrize("fails", [True, False], ids=["refused", "no answer"])
def test_a_hinted_peer_without_a_connection_does_not_affect_the_breaker(
    listed: tuple[dict[Key, Slot], ...], fails: bool
) -> None:
    bench = HintBench(*listed)
    bench.peers.connecting.add(NEW)
    bench.look_up(A)
    assert bench.lookups(A) == [PENDING]
    if fails:
        bench.peers.lose(NEW)
    else:
        bench.time_s = 1.0
    assert bench.lookups(A) == [PENDING if listed else MISS]
    bench.peers.answer(0, 1)
    assert bench.lookups(A) == [MISS]
    assert bench.index.lookup_counts == LookupCounts(num_answered=len(listed) // 2)
    bench.time_s = 100.0
    assert bench.index.lookup_counts == LookupCounts(num_answered=len(listed) // 2)


def test_a_hinted_peer_that_cannot_be_reached_costs_nothing() -> None:
    bench = HintBench(slots(A))
    bench.peers.lose(NEW)
    bench.look_up(A)
    assert bench.receivers() == [0]


@pytest.mark.parametrize("listed", [(), ({},)], ids=["no listed peer", "a listed peer that is lost"])
def test_a_wrong_hint_does_not_suppress_a_right_one(listed: tuple[dict[Key, Slot], ...]) -> None:
    bench = HintBench(*listed)
    other = ("10.0.0.8", 7300)
    bench.peers.hinted[other] = {}
    bench.look_up(A, at=(other,))
    bench.peers.answer(other)
    if listed:
        assert bench.lookups(A) == [PENDING]
        bench.peers.lose(0)
    assert bench.lookups(A) == [MISS]
    assert bench.index.take_counts().answers == {LookupAnswer.MISSING: 1}
    bench.look_up(A)
    bench.peers.answer()
    assert bench.lookups(A) == [HIT] and source(bench, A) == NEW


def test_a_key_that_a_listed_peer_lacks_is_not_looked_up_again_at_once_with_a_hint_too() -> None:
    bench = HintBench({})
    bench.look_up(A, at=())
    bench.peers.answer()
    bench.look_up(A)
    assert bench.lookups(A) == [MISS] and not bench.receivers()
    bench.time_s = 1.1
    bench.look_up(A)
    assert bench.receivers() == [NEW]


def test_a_lost_hinted_peer_is_not_offered_any_more() -> None:
    bench = HintBench({})
    bench.look_up(A)
    bench.peers.answer()
    assert bench.lookups(A) == [HIT]
    bench.peers.lose(NEW)
    assert bench.lookups(A) == [MISS]


@pytest.mark.parametrize("was_ready", [False, True])
def test_a_failed_connection_costs_no_scan_of_chunks_and_a_loss_decodes_no_slot(
    was_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = HintBench({})
    bench.look_up(A, B)
    bench.peers.answer()
    assert bench.index.pin(A) is not None and bench.lookups(A, B) == [HIT, HIT]
    scanned = {"found": CountedDict(bench.index._found.by_key), "known": CountedDict(bench.index._ledger.by_key)}
    bench.index._found.by_key, bench.index._ledger.by_key = scanned["found"], scanned["known"]
    monkeypatch.setattr(places, "peer_of", lambda slot: pytest.fail("a slot was decoded"))
    other = ("10.0.0.8", 7300)
    bench.peers.hinted[other] = {}
    if not was_ready:
        bench.peers.connecting.add(other)
    bench.look_up(C, at=(other,))
    bench.peers.lose(other)
    bench.peers.held.clear()
    assert bench.lookups(A, B) == [HIT, HIT]
    assert [each.num_scans for each in scanned.values()] == [int(was_ready)] * 2


class CountedDict(dict[Any, Any]):
    num_scans = 0

    def items(self) -> Any:
        self.num_scans += 1
        return super().items()

    def values(self) -> Any:
        self.num_scans += 1
        return super().values()


@pytest.mark.parametrize("seed", range(40))
def test_every_hinted_lookup_ends_and_every_lease_is_returned(seed: int) -> None:
    chance = random.Random(seed)
    keys = [b"key %d" % number for number in range(12)]
    held = [slots(*chance.sample(keys, 6)) for _ in range(4)]
    bench = HintBench(*held[:2], forget_after_s=1000.0)
    others: list[PeerId] = [NEW, ("10.0.0.8", 7300)]
    bench.peers.hinted = dict(zip(others, held[2:], strict=True))
    places = [NEW, ("10.0.0.8", 7300), ("10.0.0.7", 7300), ("listed", 0), ("listed", 1)]
    leased: set[tuple[PeerId, Key]] = set()

    def follow() -> None:
        """Record leases that began and ended."""
        for event in bench.peers.events:
            assert isinstance(event, PeerAnswer)
            sent = bench.peers.sent[event.peer, event.request]
            leased.update((event.peer, key) for key, slot in zip(sent, event.slots, strict=True) if slot is not None)
        bench.lookups(*keys)
        leased.difference_update(bench.peers.given_up)
        bench.peers.given_up.clear()

    for _ in range(200):
        match chance.randrange(6):
            case 0 | 1:
                at = tuple(chance.sample(places, chance.randrange(3)))
                bench.look_up(*chance.sample(keys, 4), at=at)
            case 2:
                bench.peers.connecting = set(chance.sample(others, chance.randrange(3)))
            case 3:
                bench.time_s += chance.choice([0.1, 0.6, 1.1])
            case 4:
                bench.peers.answer(*chance.sample([0, 1, *others], 2))
            case 5:
                bench.index.invalidate(chance.choice(keys))
        follow()
    bench.time_s += 3.0
    assert PENDING not in bench.lookups(*keys)
    bench.peers.answer()
    follow()
    bench.index.clear()
    follow()
    assert not leased
    assert PENDING not in bench.lookups(*keys)
    bench.time_s += 2000.0
    bench.look_up(b"the next lookup forgets earlier ones", at=())
    assert len(bench.index._lookups) == 1


@pytest.mark.parametrize("peer", [0, 63, NEW, ("::1", 65535), ("a" * 253, 1)])
def test_a_slot_holds_its_peer(peer: PeerId) -> None:
    slot = Slot(((0, 5), ((1 << 48) - 1, 7)))
    tier_slot = to_tier_slot(peer, slot)
    assert (peer_of(tier_slot), to_peer_slot(tier_slot), tier_slot.num_bytes) == (peer, slot, 12)
    assert all(0 <= offset < 1 << 63 for offset, _ in tier_slot.extents)


# Two engines over loopback.

MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine() -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(*arguments: object, **options: object) -> Engine:
        made.append(Engine(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


def at(*engines: Engine) -> list[tuple[str, int]]:
    return [("127.0.0.1", each.port) for each in engines]


def look_up(reader: Engine, *keys: Key, hinted: list[tuple[str, int]], deadline_s: float = 1e12) -> list[LookupResult]:
    reader.index.start_lookup_at(hinted, keys, deadline_s)
    until(lambda: not reader.index.any_pending(keys))
    return [reader.index.lookup(key) for key in keys]


def test_an_engine_reads_from_a_hinted_peer_that_is_not_listed(engine: MakeEngine) -> None:
    holder, reader = engine(), engine()
    holder.put(A, chunk_bytes(1))
    reader.index.start_lookup([A], 1e12)
    assert reader.index.lookup(A) is MISS, "without the hint"
    assert look_up(reader, A, B, hinted=at(holder)) == [HIT, MISS]
    assert load(reader, A) == chunk_bytes(1)
    holder.put(B, chunk_bytes(2))
    until(lambda: look_up(reader, B, hinted=at(holder)) == [HIT])
    assert load(reader, B) == chunk_bytes(2)
    until(lambda: not len(holder.client.leases))


def test_a_hint_beside_a_listed_peer(engine: MakeEngine) -> None:
    holder, listed = engine(), engine()
    reader = engine([listed.port])
    holder.put(A, chunk_bytes(1))
    listed.put(B, chunk_bytes(2))
    until(reader.client.ready)
    assert look_up(reader, A, B, C, hinted=at(holder)) == [HIT, HIT, MISS]
    assert [load(reader, key) for key in (A, B)] == [chunk_bytes(1), chunk_bytes(2)]


def test_a_hinted_peer_with_another_secret_or_model_is_refused(
    engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    stranger, other = engine(secret=Secret(b"the secret of another fleet")), engine(model="another")
    reader = engine(secret=SECRET)
    for holder in (stranger, other):
        holder.put(A, chunk_bytes(1))
        assert look_up(reader, A, hinted=at(holder), deadline_s=time.monotonic() + TIMEOUT_S) == [MISS]
    until(lambda: "secret" in caplog.text and "model.name is" in caplog.text)
    assert reader.index.lookup_counts == LookupCounts()


def test_an_address_without_an_engine_costs_one_attempt(engine: MakeEngine) -> None:
    reader = engine(options=patient(retry_s=60.0))
    empty = [("127.0.0.1", free_port())]
    assert look_up(reader, A, hinted=empty) == [MISS]
    reader.index.start_lookup_at(empty, [B], 1e12)
    assert reader.index.lookup(B) is MISS, "at once"
    assert look_up(reader, C, hinted=at(reader)) == [MISS], "the engine itself"


def test_the_number_of_hinted_peers_is_limited(engine: MakeEngine) -> None:
    holders = [engine() for _ in range(3)]
    reader = engine(options=patient(max_hinted=2))
    for number, holder in enumerate(holders):
        holder.put(b"%d" % number, chunk_bytes(number))
    for number in (0, 1, 2, 0):
        key = b"%d" % number
        until(lambda key=key, number=number: look_up(reader, key, hinted=at(holders[number])) == [HIT])  # type: ignore[misc]
        assert load(reader, key) == chunk_bytes(number)
    reader_node = reader.medium._reader.node
    assert reader_node is not None and len(reader_node._hinted) == len(reader.client._node._hinted) == 2
    assert list(reader.client._node._hinted) == at(holders[2], holders[0])


def test_addresses_without_an_engine_displace_no_connected_peer(engine: MakeEngine) -> None:
    holder, reader = engine(), engine(options=patient(max_hinted=2))
    holder.put(A, chunk_bytes(1))
    assert look_up(reader, A, hinted=at(holder)) == [HIT]
    for _ in range(5):
        look_up(reader, C, hinted=[("127.0.0.1", free_port())])
        reader.index.clear()
    assert at(holder)[0] in reader.client._node._hinted
    assert look_up(reader, A, hinted=at(holder)) == [HIT] and load(reader, A) == chunk_bytes(1)


def test_a_hint_displaces_no_peer_that_it_names_itself(engine: MakeEngine) -> None:
    holders = [engine() for _ in range(3)]
    reader = engine(options=patient(max_hinted=2))
    for holder in holders[:2]:
        holder.put(A, chunk_bytes(1))
        assert look_up(reader, A, hinted=at(holder)) == [HIT]
        reader.index.clear()
    holders[0].put(B, chunk_bytes(2))
    # The least recently used peer is connected, and comes last in the hint.
    assert look_up(reader, B, hinted=at(holders[2], holders[1], holders[0])) == [HIT]
    assert list(reader.client._node._hinted) == at(holders[1], holders[0])


def test_a_new_peer_displaces_none_that_a_lookup_waits_for(engine: MakeEngine) -> None:
    holder, reader = engine(), engine(options=patient(max_hinted=2))
    holder.put(A, chunk_bytes(1))
    node = reader.client._node
    # These accept connections, and send nothing.
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        silent = [("127.0.0.1", each.getsockname()[1]) for each in (first, second)]
        reader.index.start_lookup_at(silent, [C], 1e12)
        assert reader.index.lookup(C) is PENDING
        assert look_up(reader, A, hinted=at(holder)) == [MISS] and list(node._hinted) == silent
        assert node.withdraw_request(silent[0], 1)
        assert look_up(reader, A, hinted=at(holder)) == [HIT] and list(node._hinted) == [silent[1], *at(holder)]
