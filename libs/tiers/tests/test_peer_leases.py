"""Leases given to peers: leased chunks stay for the whole lease and no longer."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest

from hybridkv.planner import LookupResult
from hybridkv.tiers import Key, Refusal, Slot
from hybridkv.tiers.peer import PeerLeases, PeerOptions, leases
from hybridkv.tiers.ram import RamIndex

GRANULE = 1024
ONE, OTHER = 1, 2


class LeaseBench:
    """Full host memory with room for `num_chunks`."""

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
        """Evict every chunk that can be evicted."""
        for _ in self.keys:
            self.put(b"new %d" % next(self._numbers))

    def has(self, key: Key) -> bool:
        return self.ram.lookup(key) is LookupResult.HIT


def test_a_leased_chunk_stays_and_others_are_evicted() -> None:
    bench = LeaseBench()
    a, b = bench.keys[:2]
    slots = bench.leases.grant(ONE, [a, b"unknown", b])
    assert slots == [bench.ram.find(a), None, bench.ram.find(b)] and None not in (slots[0], slots[2])
    bench.churn()
    assert bench.has(a) and bench.has(b) and not bench.has(bench.keys[2])


def test_a_chunk_can_be_evicted_after_its_lease_is_ended() -> None:
    bench = LeaseBench()
    a, b = bench.keys[:2]
    bench.leases.grant(ONE, [a, b])
    bench.churn()
    bench.leases.end(ONE, [a, b"unknown"])
    bench.churn()
    assert not bench.has(a) and bench.has(b)


def test_a_lease_expires_and_a_lookup_renews_it() -> None:
    bench = LeaseBench()
    a, b = bench.keys[:2]
    bench.leases.grant(ONE, [a, b])
    bench.time_s = 40.0
    bench.churn()
    bench.leases.grant(ONE, [b])
    bench.time_s = 60.0
    bench.churn()
    assert not bench.has(a) and bench.has(b)
    bench.time_s = 100.0
    bench.churn()
    assert not bench.has(b) and len(bench.leases) == bench.leases.num_bytes == 0


def test_end_all_ends_only_the_leases_of_one_peer() -> None:
    bench = LeaseBench(leased_share=0.5)
    a, b = bench.keys[:2]
    bench.leases.grant(ONE, [a, b])
    bench.leases.grant(OTHER, [b])
    bench.churn()
    bench.leases.end_all(ONE)
    bench.churn()
    assert not bench.has(a) and bench.has(b)
    bench.leases.end_all(OTHER)
    bench.churn()
    assert not bench.has(b)


def test_leased_share_is_not_exceeded() -> None:
    bench = LeaseBench(leased_share=0.25)
    assert sum(slot is not None for slot in bench.leases.grant(ONE, bench.keys)) == 2
    assert bench.leases.num_bytes == 2 * GRANULE
    bench.churn()
    assert sum(map(bench.has, bench.keys)) == 2


def test_max_leases_is_not_exceeded() -> None:
    bench = LeaseBench(max_leases=1, leased_share=1.0)
    assert sum(slot is not None for slot in bench.leases.grant(ONE, bench.keys)) == 1


def test_only_slots_that_fit_into_the_reply_are_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_EXTENTS", 2)
    bench = LeaseBench(leased_share=1.0)
    assert sum(slot is not None for slot in bench.leases.grant(ONE, bench.keys)) == 2
    assert len(bench.leases) == 2


def test_ended_leases_do_not_count_while_the_engine_is_idle() -> None:
    bench = LeaseBench(leased_share=0.25)
    assert bench.leases.grant(ONE, bench.keys[:2]).count(None) == 0
    assert bench.leases.grant(OTHER, bench.keys[2:4]).count(None) == 2
    bench.leases.end_all(ONE)
    assert bench.leases.grant(OTHER, bench.keys[2:4]).count(None) == 0
    bench.time_s = 60.0
    assert bench.leases.grant(ONE, bench.keys[:2]).count(None) == 0


def test_a_chunk_evicted_before_its_lease_is_applied_is_not_pinned() -> None:
    bench = LeaseBench()
    a, b = bench.keys[:2]
    bench.leases.grant(ONE, [a, b])
    bench.ram.invalidate(a)
    bench.ram.invalidate(b)
    bench.ram.before_reserving = None
    for key in (b"other", b"another", b):  # b comes back to another place, or to its own
        bench.put(key)
    bench.leases.apply()
    moved = bench.ram.find(b) != bench.leases.grant(OTHER, [a])[0]
    assert moved
    bench.leases.end_all(ONE)
    bench.leases.apply()
    assert not bench.ram.num_pinned


def test_a_chunk_that_comes_back_to_its_slot_is_pinned_after_the_next_lookup() -> None:
    bench = LeaseBench()
    a = bench.keys[0]
    slots = bench.leases.grant(ONE, [a])
    bench.ram.invalidate(a)
    bench.leases.apply()
    bench.put(a)
    assert bench.leases.grant(ONE, [a]) == slots
    bench.churn()
    assert bench.has(a)
    bench.leases.end(ONE, [a])
    bench.leases.apply()
    assert not bench.ram.num_pinned


def test_ended_leases_of_an_idle_engine_take_no_memory() -> None:
    bench = LeaseBench()

    def count_leases() -> int:
        gc.collect()
        return sum(type(found).__name__ == "_KeyLease" for found in gc.get_objects())

    before = count_leases()
    for _ in range(3):
        bench.leases.grant(ONE, bench.keys[:2])
        bench.leases.end(ONE, bench.keys[:2])
    assert count_leases() == before


def test_a_lease_ended_before_it_is_applied_pins_nothing() -> None:
    bench = LeaseBench()
    bench.leases.grant(ONE, bench.keys[:2])
    bench.leases.end(ONE, bench.keys[:2])
    bench.leases.apply()
    assert not bench.ram.num_pinned


def test_a_closed_engine_gives_no_leases() -> None:
    bench = LeaseBench()
    bench.leases.grant(ONE, bench.keys[:2])
    bench.leases.apply()
    assert bench.ram.num_pinned == 2
    bench.leases.close()
    assert not bench.ram.num_pinned and bench.leases.grant(ONE, bench.keys[:2]) == [None, None]


def test_peers_look_keys_up_while_the_engine_stores() -> None:
    bench = LeaseBench(64, leased_share=0.5)
    failures: list[BaseException] = []

    def ask(reader: int) -> None:
        try:
            for turn in range(300):
                keys = [*bench.keys[:4], *(b"%d" % (turn * 3 + more) for more in range(8))]
                bench.leases.grant(reader, keys)
                bench.leases.end(reader, keys[:6])
        except BaseException as error:
            failures.append(error)
        bench.leases.end_all(reader)

    threads = [threading.Thread(target=ask, args=(reader,)) for reader in range(3)]
    for thread in threads:
        thread.start()
    for number in range(3000):
        bench.put(b"%d" % (number % 900))
    for thread in threads:
        thread.join()
    assert not failures
    bench.leases.apply()
    assert not bench.ram.num_pinned and len(bench.leases) == bench.leases.num_bytes == 0
