"""What goes first is not copied down, and nothing that was on its way makes it recent again; a use does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from test_cascades import D, store_path
from test_stack import CHUNK, A, B, C, Stack

from hybridkv.planner import LookupResult
from hybridkv.tiers import Failure, FailureReason, Slot
from hybridkv.tiers.stack import CascadePolicy, Direction, Hold
from hybridkv.tiers.stack.demoted import Demoted

keys = st.sampled_from([bytes([number]) for number in range(6)])


def gone_near(it: Stack, *keys: bytes) -> list[bytes]:
    """Which of them is pushed out by each further chunk of a full fast tier."""
    gone = []
    for number in range(len(keys)):
        before = [key for key in keys if it.near.lookup(key) is LookupResult.HIT]
        it.put_near(b"more %d" % number)
        gone += [key for key in before if it.near.lookup(key) is LookupResult.MISS]
    return gone


def test_what_is_demoted_goes_first_in_every_tier() -> None:
    it = Stack(near_chunks=3, far_chunks=3)
    it.store(A, B, C)
    it.end(it.moves(Direction.CASCADE))
    it.stack.demote([C, A])
    assert gone_near(it, A, B, C) == [C, A, B]
    it.put_far(D)
    assert [it.far.lookup(key) for key in (A, B, C)] == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]


def test_what_is_demoted_before_its_turn_is_not_copied_down() -> None:
    it = Stack(max_cascading=1)
    it.store(A, B, C)
    moves = it.moves(Direction.CASCADE)
    it.stack.demote([B])
    it.end(moves)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [C]
    assert it.stack.take_counts().moves.cascades == {"done": 1, "dropped_superseded": 1}
    assert it.near.lookup(B) is LookupResult.HIT, "the fast tier keeps it while there is room"


def test_what_needs_a_chunk_that_is_not_copied_down_is_not_either() -> None:
    it = Stack(max_cascading=1)
    store_path(it, A, B, C)
    moves = it.moves(Direction.CASCADE)
    it.stack.demote([B])
    it.end(moves)
    assert it.stack.take_moves() == []
    assert it.stack.take_counts().moves.cascades == {"done": 1, "dropped_superseded": 1, "dropped_orphan": 1}


def test_what_is_demoted_while_it_is_stored_is_not_copied_down() -> None:
    it = Stack(near_chunks=2)
    assert isinstance(it.stack.reserve(A, CHUNK), Slot)
    it.stack.demote([A])
    it.put_near(B)
    assert it.stack.commit(A)
    assert it.stack.take_moves() == []
    assert gone_near(it, A, B) == [A, B]


def test_a_chunk_on_its_way_down_goes_first_when_it_is_there() -> None:
    it = Stack(near_chunks=3, far_chunks=2)
    it.store(A, B)
    moves = it.moves(Direction.CASCADE)
    it.stack.demote([B])
    it.stack.touch([A])
    it.end(moves)
    it.put_near(C)
    assert gone_near(it, A, B, C) == [B, A, C]
    it.put_far(D)
    assert (it.far.lookup(A), it.far.lookup(B)) == (LookupResult.HIT, LookupResult.MISS)


def test_a_touch_that_waits_for_what_is_on_its_way_does_not_take_a_later_demotion_back() -> None:
    it = Stack(near_chunks=3, far_chunks=3, max_cascading=1)
    it.store(A, B, C)
    moves = it.moves(Direction.CASCADE)
    it.stack.touch([C, B, A])
    it.stack.demote([A])
    while moves:
        it.end(moves)
        moves = it.moves(Direction.CASCADE)
    assert gone_near(it, A, B, C) == [A, C, B]
    it.put_far(D)
    assert [it.far.lookup(key) for key in (A, B, C)] == [LookupResult.MISS, LookupResult.HIT, LookupResult.HIT]


def test_a_later_touch_takes_a_demotion_back_and_the_chunk_is_copied_down() -> None:
    it = Stack(near_chunks=3, far_chunks=3, max_cascading=1)
    it.store(A, B, C)
    moves = it.moves(Direction.CASCADE)
    it.stack.demote([B])
    it.stack.touch([B])
    while moves:
        it.end(moves)
        moves = it.moves(Direction.CASCADE)
    assert it.far.leading([A, B, C]) == 3
    assert gone_near(it, A, B, C) == [A, C, B]


def test_what_is_stored_anew_is_copied_down() -> None:
    it = Stack(near_chunks=1, cascades=CascadePolicy.ALL)
    it.put_near(A)
    it.stack.demote([A])
    it.store(B)
    it.end(it.moves(Direction.CASCADE))
    it.store(A)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [A]


def test_what_is_refused_stays_demoted() -> None:
    it = Stack(max_cascading=1)
    it.store(A, B)
    moves = it.moves(Direction.CASCADE)
    it.stack.demote([B])
    assert not isinstance(it.stack.reserve(B, CHUNK), Slot)
    it.end(moves)
    assert it.moves(Direction.CASCADE) == []


def test_whoever_holds_a_demoted_chunk_makes_it_recent() -> None:
    it = Stack(near_chunks=3)
    it.put_near(A, B, C)
    it.stack.demote([C, B])
    assert isinstance(it.stack.acquire("request", [C]), Hold)
    it.stack.release("request")
    assert gone_near(it, A, B, C) == [B, A, C]


def test_a_demoted_chunk_that_somebody_holds_is_copied_down() -> None:
    it = Stack(max_cascading=1)
    it.store(A, B)
    moves = it.moves(Direction.CASCADE)
    it.stack.demote([B])
    it.hold(B)
    it.end(moves)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [B]


def test_a_touch_behind_what_was_dropped_does_not_take_a_later_demotion_back() -> None:
    it = Stack(near_chunks=3, max_cascading=1)
    it.put_near(C)
    it.store(A, B)
    moves = it.moves(Direction.CASCADE)
    it.stack.touch([A, C, B])
    it.stack.demote([B])
    it.end(moves)
    assert it.moves(Direction.CASCADE) == []
    assert gone_near(it, A, B, C) == [B, A, C]


def test_a_demoted_chunk_that_is_promoted_is_recent_in_both_tiers() -> None:
    it = Stack(near_chunks=2, far_chunks=2)
    it.put_far(A, B)
    it.stack.demote([A])
    it.hold(A)
    it.end(it.moves(Direction.PROMOTE))
    it.stack.release("request")
    it.put_far(C)
    assert (it.far.lookup(A), it.far.lookup(B)) == (LookupResult.HIT, LookupResult.MISS)
    it.put_near(B)
    assert gone_near(it, A, B) == [A, B]


def test_what_is_to_be_made_again_and_is_demoted_is_dropped() -> None:
    it = Stack()
    store_path(it, A, B)
    moves = it.moves(Direction.CASCADE)
    it.stack.demote([B])
    it.end(moves, Failure(FailureReason.BUSY))
    it.clock.now_s += 1.0
    assert [move.key for move in it.moves(Direction.CASCADE)] == [A]
    assert it.stack.take_counts().moves.cascades["dropped_superseded"] == 1


def test_a_reset_forgets_what_was_demoted() -> None:
    it = Stack()
    it.store(A)
    it.stack.demote([A])
    it.stack.clear()
    it.stack.take_moves()
    it.near.reserve(A, CHUNK)
    it.stack.commit(A)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [A]


def test_the_last_word_on_a_key_is_told() -> None:
    it = Stack(cascades=CascadePolicy.NOTHING)
    it.put_near(A, B, C)
    it.stack.demote([A, C])
    assert [it.stack.is_demoted(key) for key in (A, B, C)] == [True, False, True]
    assert it.stack.without_demoted([C, B, A]) == [B]
    it.stack.touch_near([C])
    assert it.stack.without_demoted([C, B, A]) == [C, B]


@given(st.lists(st.tuples(st.booleans(), st.lists(keys, max_size=3))), st.integers(1, 4))
def test_what_is_remembered_is_the_last_word_on_the_last_so_many(
    calls: list[tuple[bool, list[bytes]]], max_keys: int
) -> None:
    demoted, expected = Demoted(max_keys), list[bytes]()
    for is_demotion, told in calls:
        expected = [key for key in expected if key not in told]
        if is_demotion:
            demoted.add(iter(told))
            expected = (expected + [*dict.fromkeys(reversed(told))][::-1])[-max_keys:]
        else:
            demoted.discard(iter(told))
        everything = [bytes([number]) for number in range(6)]
        assert [key for key in everything if key in demoted] == sorted(expected)
        assert demoted.others(everything) == [key for key in everything if key not in expected]
