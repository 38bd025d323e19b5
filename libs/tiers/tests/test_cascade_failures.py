"""Cascades with failures: no chunk stays without its prefix, pinned, or queued for ever."""

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


def test_cascaded_chunks_leave_the_primary_tier_from_the_end_of_their_prefix() -> None:
    setup = Stack(primary_chunks=3)
    store_path(setup, A, B, C)
    setup.end(setup.moves(Direction.CASCADE))
    setup.put_primary(D)
    assert held(setup.primary, A, B, C) == [A, B]


def test_a_retried_chunk_does_not_outlive_its_prefix() -> None:
    setup = Stack(secondary_chunks=3)
    store_path(setup, A, B, C)
    first, second, third = setup.moves(Direction.CASCADE)
    setup.end([third], BUSY)
    setup.end([first, second])
    setup.clock.now_s += 1
    setup.stack.tick()
    setup.end(setup.moves(Direction.CASCADE))
    assert held(setup.secondary, A, B, C) == [A, B, C]
    setup.put_secondary(D)
    assert held(setup.secondary, A, B, C) == [A, B]


def test_a_chunk_cascaded_again_while_in_flight_stays_pinned_once() -> None:
    setup = Stack()
    setup.store(A)
    moves = setup.moves(Direction.CASCADE)
    setup.secondary.invalidate(A)
    setup.stack.cascade(A)
    setup.end(moves, IO)
    setup.end(setup.moves(Direction.CASCADE))
    assert held(setup.secondary, A) == [A]
    setup.primary.invalidate(A)
    assert setup.primary.used_bytes == 0, "nothing has it pinned"


def test_a_chunk_added_again_while_in_flight_is_queued_once() -> None:
    setup = Stack()
    store_path(setup, A, B)
    first, second = setup.moves(Direction.CASCADE)
    setup.end([first], IO)  # so B is withdrawn in the secondary tier
    setup.stack.cascade(A)
    setup.stack.cascade(B, (A,))
    again = setup.moves(Direction.CASCADE)
    setup.end([second], BUSY)
    queue = setup.stack._tiers[0].queue
    assert queue is not None
    assert len(queue._queue) + len(queue._retries) == queue.num_waiting == 1
    setup.clock.now_s += 1
    setup.stack.tick()
    setup.end(again)
    sent = [move for _ in range(3) for move in setup.moves(Direction.CASCADE)]
    assert [move.key for move in sent] == [B]
    setup.end(sent)
    assert held(setup.secondary, A, B) == [A, B]
    assert setup.stack.num_waiting("disk") == 0


def test_a_withdrawn_chunk_in_flight_is_not_retried_before_its_prefix() -> None:
    setup = Stack()
    store_path(setup, A, B)
    first, second = setup.moves(Direction.CASCADE)
    setup.end([first], IO)
    setup.end([second], BUSY)
    setup.stack.cascade(A)
    setup.stack.cascade(B, (A,))
    setup.clock.now_s += 1
    setup.stack.tick()
    while moves := setup.moves(Direction.CASCADE):
        setup.end(moves)
    assert held(setup.secondary, A, B) == [A, B]


@pytest.mark.parametrize("lands_first", [True, False])
def test_chunks_in_flight_after_a_failed_one_carry_no_later_chunks(lands_first: bool) -> None:
    setup = Stack(max_cascading=3)
    store_path(setup, A, B, C, D, b"e")
    store_path(setup, b"x")
    first, *behind = setup.moves(Direction.CASCADE)
    if lands_first:
        setup.end(behind)
        setup.end([first], IO)
    else:
        setup.end([first], IO)
        setup.end(behind)
    setup.end(setup.moves(Direction.CASCADE))
    setup.end(setup.moves(Direction.CASCADE))
    assert held(setup.secondary, A, B, C, D, b"e", b"x") == [b"x"]


def test_a_retry_is_no_failure_and_keeps_dependent_chunks() -> None:
    setup = Stack()
    store_path(setup, A, B, C)
    first, *behind = setup.moves(Direction.CASCADE)
    setup.end([first], BUSY)
    setup.end(behind)
    setup.clock.now_s += 1
    setup.stack.tick()
    setup.end(setup.moves(Direction.CASCADE))
    assert held(setup.secondary, A, B, C) == [A, B, C]
    assert setup.stack.take_counts().moves.cascades == {"done": 3}


def test_a_dropped_retry_drops_its_dependent_chunks() -> None:
    setup = Stack()
    store_path(setup, A, B, C)
    first, *behind = setup.moves(Direction.CASCADE)
    setup.end([first], BUSY)
    setup.end(behind)
    setup.primary.invalidate(A)
    setup.clock.now_s += 1
    setup.stack.tick()
    assert setup.stack.take_moves() == []
    assert held(setup.secondary, A, B, C) == []
    assert setup.stack.take_counts().moves.cascades == {"done": 2, "dropped_evicted": 1}


def test_a_reset_retries_nothing() -> None:
    setup = Stack()
    setup.store(A)
    moves = setup.moves(Direction.CASCADE)
    setup.stack.clear()
    setup.end(moves, BUSY)
    assert setup.stack.num_waiting("disk") == 0 and not setup.stack.has_live_moves()


def test_a_disk_that_hangs_keeps_no_live_moves() -> None:
    setup = Stack(max_cascading=2, load_timeout_s=30.0, breaker=BreakerOptions(failures=1))
    setup.store(A, B)
    hung = setup.moves(Direction.CASCADE)
    setup.clock.now_s += 31
    setup.stack.tick()
    setup.stack.tick()
    setup.clock.now_s += 60
    setup.stack.tick()
    assert setup.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.PROBING
    setup.store(C)
    assert not setup.stack.has_live_moves() and setup.stack.take_moves() == []
    assert setup.stack.take_counts().moves.cascades == {"dropped_busy": 1}
    setup.end(hung)
    setup.store(D)
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [D], (
        "the first move that ends makes room for a probe"
    )


def test_a_shortage_empties_no_queue() -> None:
    setup = Stack(max_cascading=1)
    setup.store(A, B, C)
    for _ in range(40):
        setup.end(setup.moves(Direction.CASCADE), BUSY)
        setup.clock.now_s += 0.25
        setup.stack.tick()
    setup.clock.now_s += 5
    setup.stack.tick()
    for _ in range(3):
        setup.end(setup.moves(Direction.CASCADE))
    assert setup.stack.take_counts().moves.cascades == {"done": 3}


def test_a_chunk_waits_for_the_store_of_its_predecessor() -> None:
    setup = Stack()
    assert isinstance(setup.stack.reserve(A, CHUNK), Slot)
    store_path(setup, B, C, before=A)
    setup.store(D)
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [D], "no other chunk waits"
    assert setup.stack.has_live_moves()
    setup.stack.commit(A)
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [A, B, C]


def test_a_chunk_is_dropped_when_the_store_of_its_predecessor_is_aborted() -> None:
    setup = Stack()
    assert isinstance(setup.stack.reserve(A, CHUNK), Slot)
    store_path(setup, B, C, before=A)
    setup.stack.take_moves()
    setup.stack.abort(A)
    assert setup.stack.take_moves() == [] and not setup.stack.has_live_moves()
    assert setup.stack.take_counts().moves.cascades == {"dropped_orphan": 2}
