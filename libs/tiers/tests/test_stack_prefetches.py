"""What is brought though nobody waits for it comes within its bounds, behind what somebody waits for, and holds nothing
up."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from disk_stack import PLACE_BYTES, Tiers
from hypothesis import example, given
from hypothesis import strategies as st
from test_stack import CHUNK, A, B, C, Stack

from hybridkv.planner import LookupResult
from hybridkv.tiers import Extends, Failure, FailureReason, Key, Refusal, Slot
from hybridkv.tiers.disk import DiskOptions, Fsync
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import BreakerOptions, BreakerState, Direction, PromotionLease
from hybridkv.tiers.stack.prefetches import MAX_PREFIXES, STEP_AGAIN_S

ALL = 1 << 20
OPTIONS = DiskOptions(capacity_bytes=64 << 20, fsync=Fsync.NONE)
HIT, MISS = LookupResult.HIT, LookupResult.MISS


def prefix(num_chunks: int, name: str = "p") -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(num_chunks)]


def bring(it: Stack) -> list[bytes]:
    """Let everything come that may; in which order it was sent."""
    sent: list[bytes] = []
    while moves := it.moves(Direction.PROMOTE):
        sent += [move.key for move in moves]
        it.end(moves)
    return sent


def results(it: Stack) -> dict[str, int]:
    return {str(result): number for result, number in it.stack.take_counts().prefetches.items()}


def in_primary(it: Stack, keys: list[bytes]) -> list[bytes]:
    return [key for key in keys if it.primary.lookup(key) is HIT]


def test_what_the_fast_tier_lacks_of_a_prefix_comes_from_its_beginning_on() -> None:
    it = Stack()
    keys = prefix(4)
    it.put_far(*keys)
    it.put_near(keys[1])
    it.stack.prefetch(keys, ALL)
    assert bring(it) == [keys[0], *keys[2:]]
    assert in_primary(it, keys) == keys
    counts = it.stack.take_counts()
    assert counts.prefetches == {"promoted": 1} and counts.prefetch_bytes == {"promoted": 3 * CHUNK}


def test_nothing_comes_that_nobody_asked_for() -> None:
    it = Stack()
    it.put_far(A, B)
    it.stack.prefetch([A], ALL)
    assert bring(it) == [A] and it.primary.lookup(B) is MISS


def test_where_all_is_near_there_is_nothing_to_bring() -> None:
    it = Stack()
    it.put_near(A)
    it.stack.prefetch([A], ALL)
    assert it.stack.take_moves() == [] and results(it) == {"nothing": 1}


def test_what_was_brought_is_not_pinned_and_leaves_no_trace_below() -> None:
    it = Stack(near_chunks=2)
    it.put_far(A, B)
    it.stack.prefetch([A, B], ALL)
    bring(it)
    it.put_near(C, b"d")
    assert in_primary(it, [A, B]) == []
    assert it.far.invalidate(A) and it.far.used_bytes == CHUNK, "nobody has it pinned"


def test_its_end_goes_before_its_beginning_in_every_tier() -> None:
    it = Stack(near_chunks=4, far_chunks=4)
    keys = prefix(4)
    it.put_far(*keys)
    it.stack.prefetch(keys, ALL)
    bring(it)
    it.put_near(A)
    it.put_far(A)
    assert in_primary(it, keys) == keys[:3]
    assert [key for key in keys if it.far.lookup(key) is HIT] == keys[:3]


def test_what_is_near_already_makes_no_room_for_the_rest() -> None:
    it = Stack(near_chunks=4)
    keys = prefix(4)
    it.put_far(*keys)
    it.put_near(keys[0], A, B, C)
    it.stack.prefetch(keys, ALL)
    bring(it)
    assert in_primary(it, keys) == keys


def test_no_more_comes_than_may_be_there_unused() -> None:
    it = Stack()
    keys = prefix(4)
    it.put_far(*keys)
    it.stack.prefetch(keys, 2 * CHUNK)
    assert bring(it) == keys[:2], "its beginning"
    assert results(it) == {"no_room": 1}


def test_a_bound_of_zero_brings_nothing() -> None:
    it = Stack()
    it.put_far(A)
    it.stack.prefetch([A], 0)
    assert it.stack.take_moves() == [] and results(it) == {"no_room": 1}


def test_the_newest_prefix_takes_the_place_of_the_oldest_and_no_other() -> None:
    it = Stack(near_chunks=6)
    old, new = prefix(2, "old"), prefix(2, "new")
    it.put_far(*old, *new)
    it.put_near(A, B)
    it.stack.prefetch(old, 2 * CHUNK)
    bring(it)
    it.put_near(C, b"d")
    it.stack.prefetch(new, 2 * CHUNK)
    bring(it)
    assert in_primary(it, new) == new and in_primary(it, old) == []
    assert in_primary(it, [A, B, C, b"d"]) == [A, B, C, b"d"], "what nobody brought ahead of time stays"
    assert it.stack.take_counts().prefetch_bytes["displaced"] == 2 * CHUNK


@pytest.mark.parametrize("use", ["hold", "pin_all"])
def test_what_was_used_makes_room_for_others_and_is_given_up_for_none(use: str) -> None:
    it = Stack(near_chunks=4)
    it.put_far(A, B)
    it.stack.prefetch([A], CHUNK)
    bring(it)
    if use == "hold":
        it.hold(A)
        it.stack.release("request")
    else:
        assert it.stack.pin_all([A])
        it.stack.unpin_all([A])
    it.stack.prefetch([B], CHUNK)
    bring(it)
    it.put_near(C, b"d")
    assert in_primary(it, [A, B]) == [A, B]
    assert it.stack.take_counts().prefetch_bytes == {"promoted": 2 * CHUNK, "used": CHUNK}


def test_what_left_unused_and_was_stored_anew_is_given_up_for_no_prefix() -> None:
    it = Stack(near_chunks=2)
    it.put_far(A, B)
    it.stack.prefetch([A], CHUNK)
    bring(it)
    it.primary.invalidate(A)
    it.store(A)
    it.end(it.stack.take_moves())
    it.stack.prefetch([B], CHUNK)
    bring(it)
    it.put_near(C)
    assert it.primary.lookup(A) is MISS or it.primary.lookup(B) is HIT
    assert "displaced" not in it.stack.take_counts().prefetch_bytes


def test_what_left_unused_comes_again_and_takes_up_nothing_meanwhile() -> None:
    it = Stack()
    keys, others = prefix(4), prefix(4, "other")
    it.put_far(*keys, *others)
    for wanted in (keys, keys, others):
        it.stack.prefetch(wanted, 4 * CHUNK)
        bring(it)
        assert in_primary(it, wanted) == wanted
        for key in wanted:
            it.primary.invalidate(key)
    counts = it.stack.take_counts()
    assert counts.prefetches == {"promoted": 3} and counts.prefetch_bytes == {"promoted": 12 * CHUNK}


def test_what_is_kept_is_given_up_for_no_prefix_and_was_not_used() -> None:
    it = Stack(near_chunks=2)
    it.put_far(A, B)
    it.stack.prefetch([A], CHUNK)
    bring(it)
    it.stack.touch_primary([A])
    it.stack.prefetch([B], CHUNK)
    bring(it)
    assert in_primary(it, [A, B]) == [A, B]
    it.stack.touch_primary([A])
    it.put_near(C)
    assert in_primary(it, [A, B]) == [A]
    assert it.stack.take_counts().prefetch_bytes == {"promoted": 2 * CHUNK}


def test_no_pinned_chunk_makes_room_and_one_waits_until_it_may() -> None:
    it = Stack(near_chunks=1)
    it.put_far(A)
    it.put_near(B)
    assert it.primary.pin(B) is not None
    it.stack.prefetch([A], ALL)
    assert it.stack.take_moves() == [] and it.primary.lookup(B) is HIT
    it.primary.unpin(B)
    assert bring(it) == [A]


def test_few_are_on_their_way_at_one_time() -> None:
    it = Stack(max_prefetching=2)
    keys = prefix(5)
    it.put_far(*keys)
    it.stack.prefetch(keys, ALL)
    moves = it.moves(Direction.PROMOTE)
    assert len(moves) == 2 and it.stack.take_moves() == []
    it.end(moves[:1])
    assert len(it.moves(Direction.PROMOTE)) == 1


def test_what_somebody_waits_for_goes_first() -> None:
    it = Stack()
    it.put_far(A, B)
    it.stack.prefetch([A], ALL)
    it.hold(B)
    moves = it.moves(Direction.PROMOTE)
    assert [move.key for move in moves] == [B], "and nothing beside it"
    it.end(moves)
    assert bring(it) == [A]


def test_no_hold_is_refused_for_what_nobody_waits_for() -> None:
    it = Stack(promoting_share=0.25)
    it.put_far(A, B, C, b"d")
    it.stack.prefetch([A, B], ALL)
    assert len(it.moves(Direction.PROMOTE)) == 2, "as much as may be"
    assert isinstance(it.stack.acquire("request", [C, b"d"]), PromotionLease)


def test_a_hold_of_what_is_on_its_way_costs_no_second_promotion() -> None:
    it = Stack()
    it.put_far(A)
    it.stack.prefetch([A], ALL)
    moves = it.moves(Direction.PROMOTE)
    hold = it.hold(A)
    assert it.stack.take_moves() == [] and not hold.is_ready
    it.end(moves)
    assert hold.is_ready
    it.stack.release("request")


def test_what_a_hold_brought_meanwhile_is_nothing_to_bring() -> None:
    it = Stack()
    it.put_far(A)
    it.stack.prefetch([A], ALL)
    it.hold(A)
    it.stack.release("request")
    it.end(it.moves(Direction.PROMOTE))
    assert it.stack.take_moves() == [] and results(it) == {"nothing": 1}


def test_a_tier_that_is_left_alone_or_tried_is_asked_for_nothing() -> None:
    it = Stack(breaker=BreakerOptions(failures=1, first_backoff_s=5.0))
    it.put_far(A, B, C)
    it.hold(A)
    it.end(it.moves(Direction.PROMOTE), Failure(FailureReason.IO))
    it.stack.prefetch([B], ALL)
    assert it.stack.take_moves() == [] and results(it) == {"lost": 1}
    it.clock.now_s += 5
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.PROBING
    it.stack.prefetch([C], ALL)
    assert it.stack.take_moves() == [] and results(it) == {"lost": 1}
    it.hold(C)
    assert len(it.moves(Direction.PROMOTE)) == 1, "the probe is for somebody who waits"


def test_one_that_takes_too_long_ends_and_what_comes_later_still_counts() -> None:
    it = Stack(max_prefetching=1, load_timeout_s=30.0)
    it.put_far(A, B)
    it.stack.prefetch([A, B], ALL)
    moves = it.moves(Direction.PROMOTE)
    it.clock.now_s += 30
    assert it.stack.take_moves() == [] and results(it) == {"late": 1}
    it.end(moves)
    assert it.primary.lookup(A) is HIT and it.stack.take_moves() == []
    assert it.stack.take_counts().prefetch_bytes == {"promoted": CHUNK}


def test_what_is_late_is_not_among_the_few_on_their_way() -> None:
    it = Stack(max_prefetching=1, load_timeout_s=30.0)
    it.put_far(A, B)
    it.stack.prefetch([A], ALL)
    moves = it.moves(Direction.PROMOTE)
    it.clock.now_s += 30
    it.stack.tick()
    it.stack.tick()
    it.stack.prefetch([B], ALL)
    assert bring(it) == [B]
    it.end(moves)


def test_a_chunk_that_fails_ends_its_prefix() -> None:
    it = Stack(max_prefetching=1)
    it.put_far(A, B)
    it.stack.prefetch([A, B], 2 * CHUNK)
    it.end(it.moves(Direction.PROMOTE), Failure(FailureReason.CHECKSUM))
    assert it.stack.take_moves() == [] and results(it) == {"lost": 1}
    assert it.stack.lookup(A) is MISS
    it.stack.prefetch([B], CHUNK)
    assert bring(it) == [B], "what failed takes up nothing"
    assert it.stack.take_counts().prefetch_bytes == {"promoted": CHUNK}


def test_no_more_prefixes_wait_than_may_and_the_rest_is_counted() -> None:
    it = Stack()
    it.put_far(A)
    for _ in range(MAX_PREFIXES + 3):
        it.stack.prefetch([A], ALL)
    assert bring(it) == [A]
    assert results(it) == {"crowded": 3, "promoted": 1, "nothing": MAX_PREFIXES - 1}


def test_what_waits_in_vain_keeps_nobody_awake_for_long() -> None:
    it = Stack(near_chunks=1)
    it.put_far(A)
    it.put_near(B)
    assert it.primary.pin(B) is not None
    it.stack.prefetch([A], ALL)
    assert it.stack.take_moves() == [] and it.stack.has_live_moves()
    it.clock.now_s += STEP_AGAIN_S
    assert not it.stack.has_live_moves()
    it.primary.unpin(B)
    assert bring(it) == [A], "it comes with whoever comes next"


def test_a_reset_ends_what_waits_and_what_moves_comes_to_nothing() -> None:
    it = Stack(max_prefetching=1)
    it.put_far(A, B, C)
    it.stack.prefetch([A, B], ALL)
    it.stack.prefetch([C], ALL)
    moves = it.moves(Direction.PROMOTE)
    it.stack.clear()
    it.end(moves)
    assert not it.stack.has_live_moves() and it.stack.take_moves() == []
    assert it.primary.used_bytes == it.far.used_bytes == 0 and results(it) == {"lost": 2}


def test_at_an_end_nothing_more_is_begun() -> None:
    it = Stack(max_prefetching=1)
    it.put_far(A, B)
    it.stack.prefetch([A, B], ALL)
    moves = it.moves(Direction.PROMOTE)
    it.stack.end_prefetches()
    it.end(moves)
    assert it.stack.take_moves() == [] and not it.stack.has_live_moves()


def test_without_a_slower_tier_there_is_nothing_to_bring() -> None:
    it = Stack(far_chunks=1)
    it.stack.prefetch([], ALL)
    assert it.stack.take_moves() == [] and results(it) == {"nothing": 1}


class Watched(RamIndex):
    """Tells what was pinned, and what was made recent."""

    def __init__(self, capacity_bytes: int, granularity_bytes: int) -> None:
        super().__init__(capacity_bytes, granularity_bytes)
        self.pinned: list[Key] = []
        self.touched: list[Key] = []

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        self.pinned += keys
        return super().pin_all(keys)

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        told = list(keys)
        self.touched += told
        super().touch(told, extends)


@pytest.mark.parametrize("waits_for", ["a hold", "a place", "bytes", "a tier"])
def test_what_cannot_come_now_is_no_use_of_it_below(waits_for: str) -> None:
    """A use is written to disk, and puts what goes first wrong."""
    options: dict[str, object] = {
        "a place": {"max_prefetching": 1},
        "bytes": {"promoting_share": 1 / 8},
        "a tier": {"breaker": BreakerOptions(failures=1)},
    }.get(waits_for, {})
    it = Stack(far_type=Watched, **options)
    keys = prefix(4)
    it.put_far(*keys, A)
    if waits_for in ("a hold", "a tier"):
        it.hold(A)
    else:
        it.stack.prefetch([A], ALL)
    moves = it.stack.take_moves()
    if waits_for == "a tier":
        it.end(moves, Failure(FailureReason.IO))
    for key in keys:
        it.stack.prefetch([key], ALL)
    it.stack.take_moves()
    assert isinstance(it.far, Watched)
    it.far.pinned.clear()
    for _ in range(3):
        assert it.stack.take_moves() == []
    assert it.far.pinned == []


def test_a_fast_tier_without_room_is_tried_once_a_step() -> None:
    it = Stack(near_chunks=1, far_type=Watched)
    keys = prefix(4)
    it.put_far(*keys)
    it.put_near(B)
    assert it.primary.pin(B) is not None and isinstance(it.far, Watched)
    for key in keys:
        it.stack.prefetch([key], ALL)
    assert it.stack.take_moves() == [] and it.far.pinned == keys[:1]
    it.primary.unpin(B)
    assert bring(it) == keys


def test_what_was_displaced_leaves_though_its_prefix_ends_later() -> None:
    it = Stack(near_chunks=12, far_chunks=40)
    old, new, own = prefix(4, "old"), prefix(4, "new"), prefix(4, "own")
    it.put_far(*old, *new)
    it.put_near(*own)
    it.stack.prefetch(old, 4 * CHUNK)
    moves = it.moves(Direction.PROMOTE)
    it.end(moves[:3])
    it.stack.prefetch(new, 4 * CHUNK)
    bring(it)
    it.end(moves[3:])
    bring(it)
    assert it.stack.take_counts().prefetch_bytes["displaced"] == 4 * CHUNK
    it.put_near(*prefix(4, "stored"))
    assert in_primary(it, old) == [] and in_primary(it, own) == own and in_primary(it, new) == new


def test_an_end_puts_only_that_in_order_which_came_and_nothing_where_nothing_was_sent() -> None:
    it = Stack(far_type=Watched, max_prefetching=1, load_timeout_s=30.0)
    keys, others = prefix(4), prefix(4, "other")
    it.put_far(*keys, *others)
    it.stack.prefetch(keys, ALL)
    it.stack.prefetch(others, ALL)
    moves = it.moves(Direction.PROMOTE)
    assert isinstance(it.far, Watched)
    it.clock.now_s += 30
    assert it.stack.take_moves() == [] and results(it) == {"late": 2}
    assert it.far.touched == keys[:1]
    it.end(moves)


def test_one_whose_chunk_took_longer_than_patience_keeps_awake_for_the_rest() -> None:
    it = Stack(max_prefetching=1)
    keys = prefix(3)
    it.put_far(*keys)
    it.stack.prefetch(keys, ALL)
    moves = it.moves(Direction.PROMOTE)
    it.clock.now_s += STEP_AGAIN_S * 1.2
    it.end(moves)
    assert it.stack.has_live_moves() and bring(it) == keys[1:]


def crowded_out() -> tuple[Stack, list[Key], list[Key]]:
    """A hold had no room while a chunk was brought that nobody waits for, which has come by now: what was to be held,
    and the prefix that is not whole yet."""
    it = Stack(near_chunks=4, max_prefetching=1)
    wanted, others = prefix(4), prefix(2, "other")
    it.put_far(*wanted, *others)
    it.stack.prefetch(others, ALL)
    moves = it.moves(Direction.PROMOTE)
    assert it.stack.acquire("request", wanted) is Refusal.BUSY
    it.end(moves)
    return it, wanted, others


def test_a_hold_that_lacks_the_room_of_what_moves_comes_back_and_nothing_is_begun_before() -> None:
    it, wanted, _ = crowded_out()
    assert it.stack.take_moves() == [], "the room is for whoever waits"
    assert isinstance(it.stack.acquire("request", wanted), PromotionLease)


def test_what_has_no_room_though_nothing_moves_has_none() -> None:
    it = Stack(near_chunks=4)
    wanted = prefix(4)
    it.put_far(*wanted)
    it.put_near(A)
    assert it.primary.pin(A) is not None
    assert it.stack.acquire("request", wanted) is Refusal.NO_ROOM


def test_nothing_gives_way_for_long_to_a_hold_that_does_not_come_back() -> None:
    it, _, others = crowded_out()
    it.clock.now_s += STEP_AGAIN_S
    assert bring(it) == others[1:]


def test_one_that_has_ended_remembers_no_keys() -> None:
    it = Stack()
    it.put_far(A, B)
    keys = [A, B]
    before = sys.getrefcount(keys)
    it.stack.prefetch(keys, ALL)
    bring(it)
    assert in_primary(it, keys) == keys and sys.getrefcount(keys) == before


@pytest.mark.parametrize("use", ["hold", "pin_all"])
def test_what_was_refused_was_not_used(use: str) -> None:
    it = Stack()
    it.put_far(A)
    it.stack.prefetch([A], ALL)
    bring(it)
    if use == "hold":
        assert it.stack.acquire("request", [A, B]) is Refusal.PRESENT
    else:
        assert it.stack.pin_all([A, B]) is None
    assert it.stack.take_counts().prefetch_bytes == {"promoted": CHUNK}


@pytest.mark.parametrize("has_come", [True, False])
def test_what_somebody_waits_for_is_used_when_it_has_come(has_come: bool) -> None:
    it = Stack()
    it.put_far(A)
    it.stack.prefetch([A], ALL)
    moves = it.moves(Direction.PROMOTE)
    it.hold(A)
    assert it.stack.take_counts().prefetch_bytes == {}
    it.end(moves, None if has_come else Failure(FailureReason.IO))
    assert it.stack.take_counts().prefetch_bytes == ({"promoted": CHUNK, "used": CHUNK} if has_come else {})


@pytest.mark.parametrize("is_stored", [True, False])
def test_what_others_were_bringing_counts_when_it_is_there(is_stored: bool) -> None:
    it = Stack()
    it.put_far(A, B)
    assert isinstance(it.stack.reserve(B, CHUNK), Slot)
    it.stack.prefetch([B, A], ALL)
    assert bring(it) == [A] and results(it) == {}
    assert it.stack.commit(B) if is_stored else it.stack.abort(B) is None
    it.end(it.stack.take_moves())
    assert results(it) == {"promoted" if is_stored else "lost": 1}


def test_one_that_is_asked_for_again_gives_way_from_its_end() -> None:
    it = Stack()
    keys = prefix(3)
    it.put_far(*keys, B)
    for _ in range(2):
        it.stack.prefetch(keys, 3 * CHUNK)
        bring(it)
    it.stack.prefetch([B], 3 * CHUNK)
    bring(it)
    assert in_primary(it, keys) == keys[:2]


def test_one_that_waits_takes_no_more_than_what_is_left_by_now() -> None:
    it = Stack(max_prefetching=1)
    keys = prefix(4)
    it.put_far(*keys)
    it.stack.prefetch(keys, 4 * CHUNK)
    it.end(it.moves(Direction.PROMOTE))
    it.stack.limit_prefetches(2 * CHUNK)
    assert bring(it) == keys[1:2] and results(it) == {"no_room": 1}


@example([[0, 4, 5, 6], [0, 4, 5, 6], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 7]])
@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True), min_size=1, max_size=5))
def test_whatever_is_asked_for_comes_as_far_as_a_list_that_is_walked_says(wanted: list[list[int]]) -> None:
    """The twin: each prefix in turn takes the place of those before it, and of nothing of its own."""
    most = 6
    it = Stack(near_chunks=32, far_chunks=32)
    it.put_far(*(bytes([number]) for number in range(12)))
    near: set[int] = set()
    unused: list[int] = []
    for numbers in wanted:
        it.stack.prefetch([bytes([number]) for number in numbers], most * CHUNK)
        bring(it)
        own = [each for each in numbers if each in unused]
        unused = [each for each in unused if each not in own]
        for number in [each for each in numbers if each not in near]:
            if len(unused) + len(own) == most:
                if not unused:
                    break
                near.remove(unused.pop(0))
            own.append(number)
            near.add(number)
        unused += [each for each in reversed(numbers) if each in own]
    assert {number for number in range(12) if it.primary.lookup(bytes([number])) is HIT} == near


def test_a_prefix_comes_from_a_disk_whole(tmp_path: Path) -> None:
    it = Tiers(tmp_path / "store", OPTIONS)
    keys = prefix(12)
    it.store(keys)
    it.forget_near()
    it.stack.prefetch(keys, len(keys) * PLACE_BYTES)
    while it.move():
        pass
    assert all(it.primary.lookup(key) is HIT for key in keys)
    it.close()
