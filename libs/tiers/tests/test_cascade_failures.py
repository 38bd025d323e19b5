"""The way down where something goes wrong on it: nothing is left without its beginning, pinned, or waited for."""

from __future__ import annotations

import pytest
from test_cascades import D, store_path
from test_stack import CHUNK, A, B, C, Stack

from hybridkv.planner import LookupResult
from hybridkv.tiers import Failure, FailureReason, Slot
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import BreakerOptions, BreakerState, Direction

IO, BUSY = Failure(FailureReason.IO), Failure(FailureReason.BUSY)


def held(index: RamIndex, *keys: bytes) -> list[bytes]:
    return [key for key in keys if index.lookup(key) is LookupResult.HIT]


def test_what_has_cascaded_leaves_the_fast_tier_from_its_end() -> None:
    it = Stack(near_chunks=3)
    store_path(it, A, B, C)
    it.end(it.moves(Direction.CASCADE))
    it.put_near(D)
    assert held(it.primary, A, B, C) == [A, B]


def test_an_end_that_is_made_again_does_not_outlive_its_beginning() -> None:
    it = Stack(far_chunks=3)
    store_path(it, A, B, C)
    first, second, third = it.moves(Direction.CASCADE)
    it.end([third], BUSY)
    it.end([first, second])
    it.clock.now_s += 1
    it.stack.tick()
    it.end(it.moves(Direction.CASCADE))
    assert held(it.far, A, B, C) == [A, B, C]
    it.put_far(D)
    assert held(it.far, A, B, C) == [A, B]


def test_a_chunk_that_is_asked_for_again_on_its_way_stays_pinned_once() -> None:
    it = Stack()
    it.store(A)
    moves = it.moves(Direction.CASCADE)
    it.far.invalidate(A)
    it.stack.cascade(A)
    it.end(moves, IO)
    it.end(it.moves(Direction.CASCADE))
    assert held(it.far, A) == [A]
    it.primary.invalidate(A)
    assert it.primary.used_bytes == 0, "nobody has it pinned"


@pytest.mark.parametrize("lands_first", [True, False])
def test_what_is_on_its_way_behind_a_failure_carries_nothing(lands_first: bool) -> None:
    it = Stack(max_cascading=3)
    store_path(it, A, B, C, D, b"e")
    store_path(it, b"x")
    first, *behind = it.moves(Direction.CASCADE)
    if lands_first:
        it.end(behind)
        it.end([first], IO)
    else:
        it.end([first], IO)
        it.end(behind)
    it.end(it.moves(Direction.CASCADE))
    it.end(it.moves(Direction.CASCADE))
    assert held(it.far, A, B, C, D, b"e", b"x") == [b"x"]


def test_what_is_made_again_is_no_failure_and_keeps_what_needs_it() -> None:
    it = Stack()
    store_path(it, A, B, C)
    first, *behind = it.moves(Direction.CASCADE)
    it.end([first], BUSY)
    it.end(behind)
    it.clock.now_s += 1
    it.stack.tick()
    it.end(it.moves(Direction.CASCADE))
    assert held(it.far, A, B, C) == [A, B, C]
    assert it.stack.take_counts().moves.cascades == {"done": 3}


def test_what_was_to_be_made_again_and_is_dropped_takes_what_needs_it() -> None:
    it = Stack()
    store_path(it, A, B, C)
    first, *behind = it.moves(Direction.CASCADE)
    it.end([first], BUSY)
    it.end(behind)
    it.primary.invalidate(A)
    it.clock.now_s += 1
    it.stack.tick()
    assert it.stack.take_moves() == []
    assert held(it.far, A, B, C) == []
    assert it.stack.take_counts().moves.cascades == {"done": 2, "dropped_evicted": 1}


def test_a_reset_makes_nothing_again() -> None:
    it = Stack()
    it.store(A)
    moves = it.moves(Direction.CASCADE)
    it.stack.clear()
    it.end(moves, BUSY)
    assert it.stack.num_waiting("disk") == 0 and not it.stack.has_live_moves()


def test_a_disk_that_hangs_keeps_nobody_waiting_for_it() -> None:
    it = Stack(max_cascading=2, load_timeout_s=30.0, breaker=BreakerOptions(failures=1))
    it.store(A, B)
    hung = it.moves(Direction.CASCADE)
    it.clock.now_s += 31
    it.stack.tick()
    it.stack.tick()
    it.clock.now_s += 60
    it.stack.tick()
    assert it.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.PROBING
    it.store(C)
    assert not it.stack.has_live_moves() and it.stack.take_moves() == []
    assert it.stack.take_counts().moves.cascades == {"dropped_busy": 1}
    it.end(hung)
    it.store(D)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [D], "the first that ends makes room for a probe"


def test_a_shortage_empties_no_queue() -> None:
    it = Stack(max_cascading=1)
    it.store(A, B, C)
    for _ in range(40):
        it.end(it.moves(Direction.CASCADE), BUSY)
        it.clock.now_s += 0.25
        it.stack.tick()
    it.clock.now_s += 5
    it.stack.tick()
    for _ in range(3):
        it.end(it.moves(Direction.CASCADE))
    assert it.stack.take_counts().moves.cascades == {"done": 3}


def test_what_needs_a_chunk_that_another_store_brings_waits_for_it() -> None:
    it = Stack()
    assert isinstance(it.stack.reserve(A, CHUNK), Slot)
    store_path(it, B, C, before=A)
    it.store(D)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [D], "nobody else waits"
    assert it.stack.has_live_moves()
    it.stack.commit(A)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [A, B, C]


def test_what_waits_for_a_store_that_comes_to_nothing_is_dropped() -> None:
    it = Stack()
    assert isinstance(it.stack.reserve(A, CHUNK), Slot)
    store_path(it, B, C, before=A)
    it.stack.take_moves()
    it.stack.abort(A)
    assert it.stack.take_moves() == [] and not it.stack.has_live_moves()
    assert it.stack.take_counts().moves.cascades == {"dropped_orphan": 2}
