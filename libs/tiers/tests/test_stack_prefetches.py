"""Prefetches stay within their bounds, come after leases, and delay nothing."""

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


def bring(setup: Stack) -> list[bytes]:
    """Run all promotions; return the keys in the order sent."""
    sent: list[bytes] = []
    while moves := setup.moves(Direction.PROMOTE):
        sent += [move.key for move in moves]
        setup.end(moves)
    return sent


def results(setup: Stack) -> dict[str, int]:
    return {str(result): number for result, number in setup.stack.take_counts().prefetches.items()}


def in_primary(setup: Stack, keys: list[bytes]) -> list[bytes]:
    return [key for key in keys if setup.primary.lookup(key) is HIT]


def test_a_prefetch_promotes_the_missing_chunks_from_the_beginning() -> None:
    setup = Stack()
    keys = prefix(4)
    setup.put_secondary(*keys)
    setup.put_primary(keys[1])
    setup.stack.prefetch(keys, ALL)
    assert bring(setup) == [keys[0], *keys[2:]]
    assert in_primary(setup, keys) == keys
    counts = setup.stack.take_counts()
    assert counts.prefetches == {"promoted": 1} and counts.prefetch_bytes == {"promoted": 3 * CHUNK}


def test_a_prefetch_promotes_only_its_own_keys() -> None:
    setup = Stack()
    setup.put_secondary(A, B)
    setup.stack.prefetch([A], ALL)
    assert bring(setup) == [A] and setup.primary.lookup(B) is MISS


def test_a_prefetch_of_present_chunks_promotes_nothing() -> None:
    setup = Stack()
    setup.put_primary(A)
    setup.stack.prefetch([A], ALL)
    assert setup.stack.take_moves() == [] and results(setup) == {"nothing": 1}


def test_prefetched_chunks_are_not_pinned() -> None:
    setup = Stack(primary_chunks=2)
    setup.put_secondary(A, B)
    setup.stack.prefetch([A, B], ALL)
    bring(setup)
    setup.put_primary(C, b"d")
    assert in_primary(setup, [A, B]) == []
    assert setup.secondary.invalidate(A) and setup.secondary.used_bytes == CHUNK, "nothing has it pinned"


def test_a_prefetched_prefix_is_evicted_from_its_end_in_every_tier() -> None:
    setup = Stack(primary_chunks=4, secondary_chunks=4)
    keys = prefix(4)
    setup.put_secondary(*keys)
    setup.stack.prefetch(keys, ALL)
    bring(setup)
    setup.put_primary(A)
    setup.put_secondary(A)
    assert in_primary(setup, keys) == keys[:3]
    assert [key for key in keys if setup.secondary.lookup(key) is HIT] == keys[:3]


def test_chunks_already_present_make_no_room_for_the_rest() -> None:
    setup = Stack(primary_chunks=4)
    keys = prefix(4)
    setup.put_secondary(*keys)
    setup.put_primary(keys[0], A, B, C)
    setup.stack.prefetch(keys, ALL)
    bring(setup)
    assert in_primary(setup, keys) == keys


def test_unused_prefetches_stay_within_the_bound() -> None:
    setup = Stack()
    keys = prefix(4)
    setup.put_secondary(*keys)
    setup.stack.prefetch(keys, 2 * CHUNK)
    assert bring(setup) == keys[:2], "the beginning of the prefix"
    assert results(setup) == {"no_room": 1}


def test_a_bound_of_zero_promotes_nothing() -> None:
    setup = Stack()
    setup.put_secondary(A)
    setup.stack.prefetch([A], 0)
    assert setup.stack.take_moves() == [] and results(setup) == {"no_room": 1}


def test_the_newest_prefix_displaces_only_the_oldest_prefetch() -> None:
    setup = Stack(primary_chunks=6)
    old, new = prefix(2, "old"), prefix(2, "new")
    setup.put_secondary(*old, *new)
    setup.put_primary(A, B)
    setup.stack.prefetch(old, 2 * CHUNK)
    bring(setup)
    setup.put_primary(C, b"d")
    setup.stack.prefetch(new, 2 * CHUNK)
    bring(setup)
    assert in_primary(setup, new) == new and in_primary(setup, old) == []
    assert in_primary(setup, [A, B, C, b"d"]) == [A, B, C, b"d"], "chunks that were not prefetched stay"
    assert setup.stack.take_counts().prefetch_bytes["displaced"] == 2 * CHUNK


@pytest.mark.parametrize("use", ["lease", "pin_all"])
def test_a_used_chunk_is_displaced_by_no_prefetch(use: str) -> None:
    setup = Stack(primary_chunks=4)
    setup.put_secondary(A, B)
    setup.stack.prefetch([A], CHUNK)
    bring(setup)
    if use == "lease":
        setup.lease(A)
        setup.stack.release("request")
    else:
        assert setup.stack.pin_all([A])
        setup.stack.unpin_all([A])
    setup.stack.prefetch([B], CHUNK)
    bring(setup)
    setup.put_primary(C, b"d")
    assert in_primary(setup, [A, B]) == [A, B]
    assert setup.stack.take_counts().prefetch_bytes == {"promoted": 2 * CHUNK, "used": CHUNK}


def test_a_chunk_stored_again_is_displaced_by_no_prefetch() -> None:
    setup = Stack(primary_chunks=2)
    setup.put_secondary(A, B)
    setup.stack.prefetch([A], CHUNK)
    bring(setup)
    setup.primary.invalidate(A)
    setup.store(A)
    setup.end(setup.stack.take_moves())
    setup.stack.prefetch([B], CHUNK)
    bring(setup)
    setup.put_primary(C)
    assert setup.primary.lookup(A) is MISS or setup.primary.lookup(B) is HIT
    assert "displaced" not in setup.stack.take_counts().prefetch_bytes


def test_a_prefetch_evicted_unused_is_promoted_again_and_takes_no_room() -> None:
    setup = Stack()
    keys, others = prefix(4), prefix(4, "other")
    setup.put_secondary(*keys, *others)
    for wanted in (keys, keys, others):
        setup.stack.prefetch(wanted, 4 * CHUNK)
        bring(setup)
        assert in_primary(setup, wanted) == wanted
        for key in wanted:
            setup.primary.invalidate(key)
    counts = setup.stack.take_counts()
    assert counts.prefetches == {"promoted": 3} and counts.prefetch_bytes == {"promoted": 12 * CHUNK}


def test_a_touched_prefetch_is_not_displaced_and_not_counted_as_used() -> None:
    setup = Stack(primary_chunks=2)
    setup.put_secondary(A, B)
    setup.stack.prefetch([A], CHUNK)
    bring(setup)
    setup.stack.touch_primary([A])
    setup.stack.prefetch([B], CHUNK)
    bring(setup)
    assert in_primary(setup, [A, B]) == [A, B]
    setup.stack.touch_primary([A])
    setup.put_primary(C)
    assert in_primary(setup, [A, B]) == [A]
    assert setup.stack.take_counts().prefetch_bytes == {"promoted": 2 * CHUNK}


def test_a_prefetch_waits_while_all_chunks_are_pinned() -> None:
    setup = Stack(primary_chunks=1)
    setup.put_secondary(A)
    setup.put_primary(B)
    assert setup.primary.pin(B) is not None
    setup.stack.prefetch([A], ALL)
    assert setup.stack.take_moves() == [] and setup.primary.lookup(B) is HIT
    setup.primary.unpin(B)
    assert bring(setup) == [A]


def test_prefetches_in_flight_are_limited() -> None:
    setup = Stack(max_prefetching=2)
    keys = prefix(5)
    setup.put_secondary(*keys)
    setup.stack.prefetch(keys, ALL)
    moves = setup.moves(Direction.PROMOTE)
    assert len(moves) == 2 and setup.stack.take_moves() == []
    setup.end(moves[:1])
    assert len(setup.moves(Direction.PROMOTE)) == 1


def test_a_lease_goes_before_a_prefetch() -> None:
    setup = Stack()
    setup.put_secondary(A, B)
    setup.stack.prefetch([A], ALL)
    setup.lease(B)
    moves = setup.moves(Direction.PROMOTE)
    assert [move.key for move in moves] == [B], "and nothing beside it"
    setup.end(moves)
    assert bring(setup) == [A]


def test_a_prefetch_refuses_no_lease() -> None:
    setup = Stack(promoting_share=0.25)
    setup.put_secondary(A, B, C, b"d")
    setup.stack.prefetch([A, B], ALL)
    assert len(setup.moves(Direction.PROMOTE)) == 2, "the whole share"
    assert isinstance(setup.stack.acquire("request", [C, b"d"]), PromotionLease)


def test_a_lease_on_a_chunk_in_flight_costs_no_second_promotion() -> None:
    setup = Stack()
    setup.put_secondary(A)
    setup.stack.prefetch([A], ALL)
    moves = setup.moves(Direction.PROMOTE)
    lease = setup.lease(A)
    assert setup.stack.take_moves() == [] and not lease.is_ready
    setup.end(moves)
    assert lease.is_ready
    setup.stack.release("request")


def test_a_prefetch_of_a_chunk_promoted_meanwhile_promotes_nothing() -> None:
    setup = Stack()
    setup.put_secondary(A)
    setup.stack.prefetch([A], ALL)
    setup.lease(A)
    setup.stack.release("request")
    setup.end(setup.moves(Direction.PROMOTE))
    assert setup.stack.take_moves() == [] and results(setup) == {"nothing": 1}


def test_a_tier_with_an_open_or_probing_breaker_gets_no_prefetch() -> None:
    setup = Stack(breaker=BreakerOptions(failures=1, first_backoff_s=5.0))
    setup.put_secondary(A, B, C)
    setup.lease(A)
    setup.end(setup.moves(Direction.PROMOTE), Failure(FailureReason.IO))
    setup.stack.prefetch([B], ALL)
    assert setup.stack.take_moves() == [] and results(setup) == {"lost": 1}
    setup.clock.now_s += 5
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.PROBING
    setup.stack.prefetch([C], ALL)
    assert setup.stack.take_moves() == [] and results(setup) == {"lost": 1}
    setup.lease(C)
    assert len(setup.moves(Direction.PROMOTE)) == 1, "the probe is left to a lease"


def test_a_late_prefetch_ends_and_its_chunk_still_arrives() -> None:
    setup = Stack(max_prefetching=1, load_timeout_s=30.0)
    setup.put_secondary(A, B)
    setup.stack.prefetch([A, B], ALL)
    moves = setup.moves(Direction.PROMOTE)
    setup.clock.now_s += 30
    assert setup.stack.take_moves() == [] and results(setup) == {"late": 1}
    setup.end(moves)
    assert setup.primary.lookup(A) is HIT and setup.stack.take_moves() == []
    assert setup.stack.take_counts().prefetch_bytes == {"promoted": CHUNK}


def test_a_late_prefetch_does_not_count_as_in_flight() -> None:
    setup = Stack(max_prefetching=1, load_timeout_s=30.0)
    setup.put_secondary(A, B)
    setup.stack.prefetch([A], ALL)
    moves = setup.moves(Direction.PROMOTE)
    setup.clock.now_s += 30
    setup.stack.tick()
    setup.stack.tick()
    setup.stack.prefetch([B], ALL)
    assert bring(setup) == [B]
    setup.end(moves)


def test_a_failed_chunk_ends_its_prefetch() -> None:
    setup = Stack(max_prefetching=1)
    setup.put_secondary(A, B)
    setup.stack.prefetch([A, B], 2 * CHUNK)
    setup.end(setup.moves(Direction.PROMOTE), Failure(FailureReason.CHECKSUM))
    assert setup.stack.take_moves() == [] and results(setup) == {"lost": 1}
    assert setup.stack.lookup(A) is MISS
    setup.stack.prefetch([B], CHUNK)
    assert bring(setup) == [B], "the failed chunk takes no room"
    assert setup.stack.take_counts().prefetch_bytes == {"promoted": CHUNK}


def test_queued_prefixes_are_limited_and_the_rest_is_counted() -> None:
    setup = Stack()
    setup.put_secondary(A)
    for _ in range(MAX_PREFIXES + 3):
        setup.stack.prefetch([A], ALL)
    assert bring(setup) == [A]
    assert results(setup) == {"crowded": 3, "promoted": 1, "nothing": MAX_PREFIXES - 1}


def test_a_prefetch_that_waits_in_vain_keeps_no_live_moves() -> None:
    setup = Stack(primary_chunks=1)
    setup.put_secondary(A)
    setup.put_primary(B)
    assert setup.primary.pin(B) is not None
    setup.stack.prefetch([A], ALL)
    assert setup.stack.take_moves() == [] and setup.stack.has_live_moves()
    setup.clock.now_s += STEP_AGAIN_S
    assert not setup.stack.has_live_moves()
    setup.primary.unpin(B)
    assert bring(setup) == [A], "it goes on at the next step"


def test_a_reset_ends_queued_and_moving_prefetches() -> None:
    setup = Stack(max_prefetching=1)
    setup.put_secondary(A, B, C)
    setup.stack.prefetch([A, B], ALL)
    setup.stack.prefetch([C], ALL)
    moves = setup.moves(Direction.PROMOTE)
    setup.stack.clear()
    setup.end(moves)
    assert not setup.stack.has_live_moves() and setup.stack.take_moves() == []
    assert setup.primary.used_bytes == setup.secondary.used_bytes == 0 and results(setup) == {"lost": 2}


def test_end_prefetches_starts_no_more_promotions() -> None:
    setup = Stack(max_prefetching=1)
    setup.put_secondary(A, B)
    setup.stack.prefetch([A, B], ALL)
    moves = setup.moves(Direction.PROMOTE)
    setup.stack.end_prefetches()
    setup.end(moves)
    assert setup.stack.take_moves() == [] and not setup.stack.has_live_moves()


def test_a_prefetch_of_no_keys_promotes_nothing() -> None:
    setup = Stack(secondary_chunks=1)
    setup.stack.prefetch([], ALL)
    assert setup.stack.take_moves() == [] and results(setup) == {"nothing": 1}


class Watched(RamIndex):
    """Records pinned and touched keys."""

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


@pytest.mark.parametrize("waits_for", ["a lease", "a place", "bytes", "a tier"])
def test_a_prefetch_that_cannot_start_pins_nothing_in_the_secondary_tier(waits_for: str) -> None:
    """A pin counts as a use, which is written to disk and changes the order of eviction."""
    options: dict[str, object] = {
        "a place": {"max_prefetching": 1},
        "bytes": {"promoting_share": 1 / 8},
        "a tier": {"breaker": BreakerOptions(failures=1)},
    }.get(waits_for, {})
    setup = Stack(secondary_type=Watched, **options)
    keys = prefix(4)
    setup.put_secondary(*keys, A)
    if waits_for in ("a lease", "a tier"):
        setup.lease(A)
    else:
        setup.stack.prefetch([A], ALL)
    moves = setup.stack.take_moves()
    if waits_for == "a tier":
        setup.end(moves, Failure(FailureReason.IO))
    for key in keys:
        setup.stack.prefetch([key], ALL)
    setup.stack.take_moves()
    assert isinstance(setup.secondary, Watched)
    setup.secondary.pinned.clear()
    for _ in range(3):
        assert setup.stack.take_moves() == []
    assert setup.secondary.pinned == []


def test_a_full_primary_tier_is_tried_once_per_step() -> None:
    setup = Stack(primary_chunks=1, secondary_type=Watched)
    keys = prefix(4)
    setup.put_secondary(*keys)
    setup.put_primary(B)
    assert setup.primary.pin(B) is not None and isinstance(setup.secondary, Watched)
    for key in keys:
        setup.stack.prefetch([key], ALL)
    assert setup.stack.take_moves() == [] and setup.secondary.pinned == keys[:1]
    setup.primary.unpin(B)
    assert bring(setup) == keys


def test_a_displaced_prefix_that_is_requested_again_counts_again() -> None:
    setup = Stack(primary_chunks=40, secondary_chunks=40)
    first, second = prefix(2, "first"), prefix(2, "second")
    setup.put_secondary(*first, *second)
    moves = []
    for keys in (first, second, first):
        setup.stack.prefetch(keys, 2 * CHUNK)
        moves += setup.moves(Direction.PROMOTE)
    setup.end(moves)
    bring(setup)
    assert in_primary(setup, first) == first and in_primary(setup, second) == []


def test_a_displaced_prefix_stays_displaced_if_its_second_limit_is_smaller() -> None:
    setup = Stack(primary_chunks=40, secondary_chunks=40)
    first, second = prefix(2, "first"), prefix(2, "second")
    setup.put_secondary(*first, *second)
    moves = []
    for keys, most_bytes in ((first, 2 * CHUNK), (second, 2 * CHUNK), (first, CHUNK)):
        setup.stack.prefetch(keys, most_bytes)
        moves += setup.moves(Direction.PROMOTE)
    setup.end(moves)
    bring(setup)
    assert in_primary(setup, [*first, *second]) == first[:1]


def test_a_displaced_prefetch_leaves_even_if_it_ends_later() -> None:
    setup = Stack(primary_chunks=12, secondary_chunks=40)
    old, new, own = prefix(4, "old"), prefix(4, "new"), prefix(4, "own")
    setup.put_secondary(*old, *new)
    setup.put_primary(*own)
    setup.stack.prefetch(old, 4 * CHUNK)
    moves = setup.moves(Direction.PROMOTE)
    setup.end(moves[:3])
    setup.stack.prefetch(new, 4 * CHUNK)
    bring(setup)
    setup.end(moves[3:])
    bring(setup)
    assert setup.stack.take_counts().prefetch_bytes["displaced"] == 4 * CHUNK
    setup.put_primary(*prefix(4, "stored"))
    assert in_primary(setup, old) == [] and in_primary(setup, own) == own and in_primary(setup, new) == new


def test_the_end_of_a_prefetch_touches_only_promoted_keys() -> None:
    setup = Stack(secondary_type=Watched, max_prefetching=1, load_timeout_s=30.0)
    keys, others = prefix(4), prefix(4, "other")
    setup.put_secondary(*keys, *others)
    setup.stack.prefetch(keys, ALL)
    setup.stack.prefetch(others, ALL)
    moves = setup.moves(Direction.PROMOTE)
    assert isinstance(setup.secondary, Watched)
    setup.clock.now_s += 30
    assert setup.stack.take_moves() == [] and results(setup) == {"late": 2}
    assert setup.secondary.touched == keys[:1]
    setup.end(moves)


def test_a_prefetch_with_a_slow_chunk_keeps_live_moves_for_the_rest() -> None:
    setup = Stack(max_prefetching=1)
    keys = prefix(3)
    setup.put_secondary(*keys)
    setup.stack.prefetch(keys, ALL)
    moves = setup.moves(Direction.PROMOTE)
    setup.clock.now_s += STEP_AGAIN_S * 1.2
    setup.end(moves)
    assert setup.stack.has_live_moves() and bring(setup) == keys[1:]


def lease_refused_during_a_prefetch() -> tuple[Stack, list[Key], list[Key]]:
    """A lease that had no room while a chunk was prefetched, which has arrived by now: its keys, and the unfinished
    prefix.
    """
    setup = Stack(primary_chunks=4, max_prefetching=1)
    wanted, others = prefix(4), prefix(2, "other")
    setup.put_secondary(*wanted, *others)
    setup.stack.prefetch(others, ALL)
    moves = setup.moves(Direction.PROMOTE)
    assert setup.stack.acquire("request", wanted) is Refusal.BUSY
    setup.end(moves)
    return setup, wanted, others


def test_a_prefetch_waits_for_the_return_of_a_refused_lease() -> None:
    setup, wanted, _ = lease_refused_during_a_prefetch()
    assert setup.stack.take_moves() == [], "the room is left to the lease"
    assert isinstance(setup.stack.acquire("request", wanted), PromotionLease)


def test_a_lease_without_room_and_without_moves_is_refused() -> None:
    setup = Stack(primary_chunks=4)
    wanted = prefix(4)
    setup.put_secondary(*wanted)
    setup.put_primary(A)
    assert setup.primary.pin(A) is not None
    assert setup.stack.acquire("request", wanted) is Refusal.NO_ROOM


def test_a_prefetch_goes_on_if_a_refused_lease_does_not_return() -> None:
    setup, _, others = lease_refused_during_a_prefetch()
    setup.clock.now_s += STEP_AGAIN_S
    assert bring(setup) == others[1:]


def test_an_ended_prefetch_keeps_no_reference_to_its_keys() -> None:
    setup = Stack()
    setup.put_secondary(A, B)
    keys = [A, B]
    before = sys.getrefcount(keys)
    setup.stack.prefetch(keys, ALL)
    bring(setup)
    assert in_primary(setup, keys) == keys and sys.getrefcount(keys) == before


@pytest.mark.parametrize("use", ["lease", "pin_all"])
def test_a_refused_use_does_not_count_as_used(use: str) -> None:
    setup = Stack()
    setup.put_secondary(A)
    setup.stack.prefetch([A], ALL)
    bring(setup)
    if use == "lease":
        assert setup.stack.acquire("request", [A, B]) is Refusal.PRESENT
    else:
        assert setup.stack.pin_all([A, B]) is None
    assert setup.stack.take_counts().prefetch_bytes == {"promoted": CHUNK}


@pytest.mark.parametrize("has_come", [True, False])
def test_a_prefetch_counts_as_used_when_it_arrives_for_a_lease(has_come: bool) -> None:
    setup = Stack()
    setup.put_secondary(A)
    setup.stack.prefetch([A], ALL)
    moves = setup.moves(Direction.PROMOTE)
    setup.lease(A)
    assert setup.stack.take_counts().prefetch_bytes == {}
    setup.end(moves, None if has_come else Failure(FailureReason.IO))
    assert setup.stack.take_counts().prefetch_bytes == ({"promoted": CHUNK, "used": CHUNK} if has_come else {})


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_prefetch_ends_when_a_store_of_its_chunk_ends(is_stored: bool) -> None:
    setup = Stack()
    setup.put_secondary(A, B)
    assert isinstance(setup.stack.reserve(B, CHUNK), Slot)
    setup.stack.prefetch([B, A], ALL)
    assert bring(setup) == [A] and results(setup) == {}
    assert setup.stack.commit(B) if is_stored else setup.stack.abort(B) is None
    setup.end(setup.stack.take_moves())
    assert results(setup) == {"promoted" if is_stored else "lost": 1}


def test_a_repeated_prefix_is_displaced_from_its_end() -> None:
    setup = Stack()
    keys = prefix(3)
    setup.put_secondary(*keys, B)
    for _ in range(2):
        setup.stack.prefetch(keys, 3 * CHUNK)
        bring(setup)
    setup.stack.prefetch([B], 3 * CHUNK)
    bring(setup)
    assert in_primary(setup, keys) == keys[:2]


def test_a_queued_prefetch_obeys_a_lower_limit() -> None:
    setup = Stack(max_prefetching=1)
    keys = prefix(4)
    setup.put_secondary(*keys)
    setup.stack.prefetch(keys, 4 * CHUNK)
    setup.end(setup.moves(Direction.PROMOTE))
    setup.stack.limit_prefetches(2 * CHUNK)
    assert bring(setup) == keys[1:2] and results(setup) == {"no_room": 1}


@example([[0, 4, 5, 6], [0, 4, 5, 6], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 7]])
@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True), min_size=1, max_size=5))
def test_random_prefetches_equal_a_list_model(wanted: list[list[int]]) -> None:
    """Model: each prefix in turn displaces earlier ones, and none of its own chunks."""
    most = 6
    setup = Stack(primary_chunks=32, secondary_chunks=32)
    setup.put_secondary(*(bytes([number]) for number in range(12)))
    primary: set[int] = set()
    unused: list[int] = []
    for numbers in wanted:
        setup.stack.prefetch([bytes([number]) for number in numbers], most * CHUNK)
        bring(setup)
        own = [each for each in numbers if each in unused]
        unused = [each for each in unused if each not in own]
        for number in [each for each in numbers if each not in primary]:
            if len(unused) + len(own) == most:
                if not unused:
                    break
                primary.remove(unused.pop(0))
            own.append(number)
            primary.add(number)
        unused += [each for each in reversed(numbers) if each in own]
    assert {number for number in range(12) if setup.primary.lookup(bytes([number])) is HIT} == primary


def test_a_prefix_is_prefetched_whole_from_a_disk(tmp_path: Path) -> None:
    setup = Tiers(tmp_path / "store", OPTIONS)
    keys = prefix(12)
    setup.store(keys)
    setup.clear_primary()
    setup.stack.prefetch(keys, len(keys) * PLACE_BYTES)
    while setup.move():
        pass
    assert all(setup.primary.lookup(key) is HIT for key in keys)
    setup.close()
