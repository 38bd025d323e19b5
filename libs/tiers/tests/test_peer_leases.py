"""What peers are promised, and that it stays as long as was promised and no longer."""

from __future__ import annotations

import itertools
import threading

from hybridkv.planner import LookupResult
from hybridkv.tiers import Key, Refusal, Slot
from hybridkv.tiers.peer import PeerLeases, PeerOptions
from hybridkv.tiers.ram import RamIndex

GRANULE = 1024
ONE, OTHER = 1, 2


class World:
    """Host memory with room for `num_chunks`, all of it taken."""

    def __init__(self, num_chunks: int = 8, **options: float) -> None:
        self.time_s = 0.0
        self._numbers = itertools.count()
        self.ram = RamIndex(num_chunks * GRANULE, GRANULE)
        self.leases = PeerLeases(self.ram, PeerOptions(**{"lease_s": 60.0, **options}), lambda: self.time_s)
        self.ram.before_reserving = self.leases.apply
        self.keys = [b"%d" % number for number in range(num_chunks)]
        for key in self.keys:
            self.put(key)

    def put(self, key: Key) -> Slot | Refusal:
        slot = self.ram.reserve(key, GRANULE)
        if isinstance(slot, Slot):
            self.ram.commit(key)
        return slot

    def churn(self) -> None:
        """Everything that may go, goes."""
        for _ in self.keys:
            self.put(b"new %d" % next(self._numbers))

    def has(self, key: Key) -> bool:
        return self.ram.lookup(key) is LookupResult.HIT


def test_what_a_peer_was_told_of_stays_and_the_rest_goes() -> None:
    world = World()
    a, b = world.keys[:2]
    slots = world.leases.grant(ONE, [a, b"unknown", b])
    assert slots == [world.ram.find(a), None, world.ram.find(b)] and None not in (slots[0], slots[2])
    world.churn()
    assert world.has(a) and world.has(b) and not world.has(world.keys[2])


def test_what_is_given_up_may_go() -> None:
    world = World()
    a, b = world.keys[:2]
    world.leases.grant(ONE, [a, b])
    world.churn()
    world.leases.end(ONE, [a, b"unknown"])
    world.churn()
    assert not world.has(a) and world.has(b)


def test_a_lease_ends_by_itself_and_a_question_renews_it() -> None:
    world = World()
    a, b = world.keys[:2]
    world.leases.grant(ONE, [a, b])
    world.time_s = 40.0
    world.churn()
    world.leases.grant(ONE, [b])
    world.time_s = 60.0
    world.churn()
    assert not world.has(a) and world.has(b)
    world.time_s = 100.0
    world.churn()
    assert not world.has(b) and len(world.leases) == world.leases.num_bytes == 0


def test_a_peer_that_leaves_holds_nothing_up_and_another_keeps_its_own() -> None:
    world = World(leased_share=0.5)
    a, b = world.keys[:2]
    world.leases.grant(ONE, [a, b])
    world.leases.grant(OTHER, [b])
    world.churn()
    world.leases.end_all(ONE)
    world.churn()
    assert not world.has(a) and world.has(b)
    world.leases.end_all(OTHER)
    world.churn()
    assert not world.has(b)


def test_no_more_bytes_are_promised_than_may_be() -> None:
    world = World(leased_share=0.25)
    assert sum(slot is not None for slot in world.leases.grant(ONE, world.keys)) == 2
    assert world.leases.num_bytes == 2 * GRANULE
    world.churn()
    assert sum(map(world.has, world.keys)) == 2


def test_no_more_leases_are_given_than_may_be() -> None:
    world = World(max_leases=1, leased_share=1.0)
    assert sum(slot is not None for slot in world.leases.grant(ONE, world.keys)) == 1


def test_leases_that_ended_count_no_more_though_the_engine_sleeps() -> None:
    world = World(leased_share=0.25)
    assert world.leases.grant(ONE, world.keys[:2]).count(None) == 0
    assert world.leases.grant(OTHER, world.keys[2:4]).count(None) == 2
    world.leases.end_all(ONE)
    assert world.leases.grant(OTHER, world.keys[2:4]).count(None) == 0
    world.time_s = 60.0
    assert world.leases.grant(ONE, world.keys[:2]).count(None) == 0


def test_what_left_before_it_was_pinned_pins_nothing() -> None:
    world = World()
    a, b = world.keys[:2]
    world.leases.grant(ONE, [a, b])
    world.ram.invalidate(a)
    world.ram.invalidate(b)
    world.ram.before_reserving = None
    for key in (b"other", b"another", b):  # b comes back to another place, or to its own
        world.put(key)
    world.leases.apply()
    moved = world.ram.find(b) != world.leases.grant(OTHER, [a])[0]
    assert moved
    world.leases.end_all(ONE)
    world.leases.apply()
    assert not world.ram.num_pinned


def test_a_promise_that_is_over_before_the_engine_wakes_pins_nothing() -> None:
    world = World()
    world.leases.grant(ONE, world.keys[:2])
    world.leases.end(ONE, world.keys[:2])
    world.leases.apply()
    assert not world.ram.num_pinned


def test_after_the_end_nothing_is_promised() -> None:
    world = World()
    world.leases.grant(ONE, world.keys[:2])
    world.leases.apply()
    assert world.ram.num_pinned == 2
    world.leases.close()
    assert not world.ram.num_pinned and world.leases.grant(ONE, world.keys[:2]) == [None, None]


def test_peers_ask_while_the_engine_stores() -> None:
    world = World(64, leased_share=0.5)
    failures: list[BaseException] = []

    def ask(reader: int) -> None:
        try:
            for turn in range(300):
                keys = [*world.keys[:4], *(b"%d" % (turn * 3 + more) for more in range(8))]
                world.leases.grant(reader, keys)
                world.leases.end(reader, keys[:6])
        except BaseException as error:
            failures.append(error)
        world.leases.end_all(reader)

    threads = [threading.Thread(target=ask, args=(reader,)) for reader in range(3)]
    for thread in threads:
        thread.start()
    for number in range(3000):
        world.put(b"%d" % (number % 900))
    for thread in threads:
        thread.join()
    assert not failures
    world.leases.apply()
    assert not world.ram.num_pinned and len(world.leases) == world.leases.num_bytes == 0
