"""Lookups before stores, with a clock and a store under the test's control; and the budgets of stores."""

from __future__ import annotations

import pytest
from played_objects import FakeObjectClient

from hybridkv.planner import LookupResult
from hybridkv.tiers import Key, Refusal, Slot
from hybridkv.tiers.object import ObjectIndex, ObjectOptions, ObjectSlot, PackPlace, store_checks
from hybridkv.tiers.object.store_checks import CHECKED_S, FRESH_ANSWER_S, KEPT_S
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import CascadePolicy, MoveOutcome, SecondaryTier, SecondaryTierOptions, TierStack

A, B, C = b"key a", b"key b", b"key c"
HIT, MISS = LookupResult.HIT, LookupResult.MISS


class Stores:
    """Index over a store that the test controls, and its clock."""

    def __init__(self, held: dict[Key, PackPlace], **options: object) -> None:
        self.time_s = 0.0
        self.depot = FakeObjectClient(lambda: self.time_s, held)
        self.index = ObjectIndex(self.depot, ObjectOptions(**options), lambda: self.time_s)  # type: ignore[arg-type]

    def announce(self, *keys: Key) -> None:
        """Touch a path, as before the store of a request."""
        self.index.touch(keys[::-1], [*((key,) for key in keys[-2::-1]), ()])


@pytest.mark.parametrize("is_prepared", [True, False])
def test_keys_not_looked_up_are_looked_up_before_their_store(is_prepared: bool) -> None:
    stores = Stores({A: PackPlace("p", 0, 100), B: PackPlace("p", 300, 100)})
    stores.announce(A, B, C)
    if is_prepared:
        stores.index.prepare_stores([A, B, C])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    assert [keys for _, keys in stores.depot.asked] == [(A, B, C)], "the whole path is one lookup"
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.depot.answer()
    assert [stores.index.reserve(key, 100) for key in (A, B)] == [Refusal.PRESENT] * 2
    assert isinstance(stores.index.reserve(C, 100), Slot)


@pytest.mark.parametrize(("age_s", "is_fresh"), [(FRESH_ANSWER_S - 0.1, True), (FRESH_ANSWER_S + 0.1, False)])
def test_an_answer_to_a_request_counts_for_half_a_second(age_s: float, is_fresh: bool) -> None:
    stores = Stores({})
    stores.index.start_lookup([A, B], 1.0)
    stores.depot.answer()
    assert stores.index.lookup(A) is MISS
    stores.announce(A, B)
    stores.time_s += age_s
    stores.index.prepare_stores([A, B])
    assert [keys for _, keys in stores.depot.asked] == ([] if is_fresh else [(A, B)])
    assert isinstance(stores.index.reserve(A, 100), Slot) == is_fresh, "another engine may have stored it meanwhile"
    stores.depot.answer()
    assert isinstance(stores.index.reserve(B, 100), Slot)


def test_a_lookup_of_a_request_that_ends_without_an_answer_is_continued_for_a_store() -> None:
    stores = Stores({A: PackPlace("p", 0, 100)}, check_timeout_s=1.0)
    stores.announce(A)
    stores.index.start_lookup([A], 0.25)
    stores.index.prepare_stores([A])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.time_s = 0.3
    stores.index.prepare_stores([A])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.depot.answer()
    assert stores.index.reserve(A, 100) is Refusal.PRESENT


def test_a_store_waits_once_and_briefly_for_a_silent_server() -> None:
    stores = Stores({}, check_timeout_s=1.0)
    stores.announce(A, B)
    stores.index.prepare_stores([A, B])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.time_s += 1.1
    stores.index.prepare_stores([A, B])
    assert isinstance(stores.index.reserve(A, 100), Slot)
    assert isinstance(stores.index.reserve(B, 100), Slot)


def test_a_store_goes_on_if_no_lookup_can_be_sent() -> None:
    stores = Stores({})
    stores.depot.is_reachable = False
    stores.announce(A)
    stores.index.prepare_stores([A])
    assert isinstance(stores.index.reserve(A, 100), Slot)


def test_a_lookup_of_a_new_path_does_not_delay_a_chunk_that_was_looked_up() -> None:
    """A shared prefix waits in the queue while each step brings another path with it."""
    stores = Stores({})
    stores.announce(A, B)
    stores.index.prepare_stores([A, B])
    stores.depot.answer()
    stores.time_s += 2.0
    stores.announce(A, C)
    stores.index.prepare_stores([A, B, C])
    assert [keys for _, keys in stores.depot.asked] == [(C,)]
    assert stores.index.reserve(C, 100) is Refusal.BUSY
    assert isinstance(stores.index.reserve(A, 100), Slot)


def test_a_chunk_that_waits_long_after_its_lookup_is_looked_up_again() -> None:
    """For example for a budget. One attempt follows each answer, however long the steps are."""
    stores = Stores({})
    stores.announce(A)
    stores.index.prepare_stores([A])
    stores.depot.answer()
    for _ in range(2):
        stores.time_s += CHECKED_S + 1
        stores.index.prepare_stores([A])
        assert not stores.depot.asked, "its answer came after the last attempt"
        stores.time_s += CHECKED_S + 1
        stores.depot.held[A] = PackPlace("p", 0, 100)
        stores.index.prepare_stores([A])
        assert len(stores.depot.asked) == 1
        stores.depot.held = {}
        stores.depot.answer()
    assert isinstance(stores.index.reserve(A, 100), Slot)


def test_lookups_before_stores_leave_room_for_those_of_requests() -> None:
    stores = Stores({}, max_open_keys=8)
    keys = [b"key %d" % number for number in range(6)]
    stores.announce(*keys)
    stores.index.prepare_stores(keys)
    assert [asked for _, asked in stores.depot.asked] == [tuple(keys[:4])]
    stores.index.start_lookup([b"r %d" % number for number in range(8)], 1.0)
    assert len(stores.depot.asked[-1][1]) == 4
    assert [stores.index.reserve(key, 100) for key in keys] == [Refusal.BUSY] * 6
    stores.depot.answer()
    stores.index.prepare_stores(keys)
    assert [asked for _, asked in stores.depot.asked] == [tuple(keys[4:])]
    stores.depot.answer()
    assert all(isinstance(stores.index.reserve(key, 100), Slot) for key in keys)


def test_a_request_does_not_wait_for_a_lookup_before_a_store() -> None:
    """That one may wait in the client, and the health of the tier must show how the request is answered."""
    stores = Stores({A: PackPlace("p", 0, 100)})
    stores.announce(A, B, C)
    stores.index.prepare_stores([A, B])
    assert not stores.depot.requested
    stores.index.start_lookup([A, B], 0.25)
    assert stores.depot.requested == [A, B]
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.depot.answer()
    assert [stores.index.lookup(key) for key in (A, B)] == [HIT, MISS]
    assert stores.index.lookup_counts == (2, 0)
    stores.index.prepare_stores([B])
    assert isinstance(stores.index.reserve(B, 100), Slot)


def test_a_store_revives_no_lookup_of_a_request_that_timed_out() -> None:
    """Its late answer would count as one in time."""
    stores = Stores({A: PackPlace("p", 0, 100)}, check_timeout_s=1.0)
    stores.announce(A)
    stores.index.start_lookup([A], 0.25)
    stores.time_s = 0.3
    assert stores.index.lookup_counts == (0, 1)
    stores.index.prepare_stores([A])
    stores.time_s = 0.4
    stores.depot.answer()
    assert stores.index.lookup(A) is HIT
    assert stores.index.lookup_counts == (0, 1)
    stores.index.start_lookup([B], 0.65)
    stores.index.prepare_stores([B])
    stores.time_s = 0.7
    assert stores.index.lookup_counts == (0, 2), "a store does not change its deadline"


def test_an_old_answer_of_a_store_that_was_never_tried_is_not_used() -> None:
    stores = Stores({})
    stores.announce(A)
    stores.index.prepare_stores([A])
    stores.depot.answer()
    stores.time_s += KEPT_S + 1
    stores.index.prepare_stores([A])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    assert len(stores.depot.asked) == 1


def test_a_store_waits_briefly_while_requests_use_all_open_keys() -> None:
    stores = Stores({}, max_open_keys=8, check_timeout_s=1.0)
    stores.index.start_lookup([b"r %d" % number for number in range(8)], 100.0)
    stores.announce(A)
    for time_s in (0.0, 0.5):
        stores.time_s = time_s
        stores.index.prepare_stores([A])
        assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.time_s = 1.0
    assert isinstance(stores.index.reserve(A, 100), Slot)


def test_the_number_of_remembered_checks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_checks, "MAX_ANNOUNCED", 8)
    stores = Stores({})
    for number in range(20):
        key = b"key %d" % number
        stores.announce(key)
        stores.index.start_lookup([key], stores.time_s + 1.0)
        stores.depot.answer()
        stores.index.prepare_stores([key])
    assert len(stores.index._checks._checks) <= 8


@pytest.mark.parametrize("why", ["budget", "read-only", "unreachable"])
def test_no_lookup_before_a_store_is_sent_while_nothing_can_be_stored(why: str) -> None:
    stores = Stores({}, store_bytes_per_s=100.0)
    if why == "budget":
        assert isinstance(stores.index.reserve(b"first", 250), Slot)
    stores.depot.takes_objects = why != "read-only"
    stores.depot.namespace = None if why == "unreachable" else "n"
    stores.announce(A, B)
    stores.index.prepare_stores([A, B])
    assert stores.index.reserve(A, 10) is Refusal.BUSY
    assert not stores.depot.asked


def test_a_new_epoch_needs_new_lookups() -> None:
    stores = Stores({})
    stores.announce(A)
    stores.index.prepare_stores([A])
    stores.depot.answer()
    stores.depot.move()
    stores.index.prepare_stores([A])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    assert len(stores.depot.asked) == 1


def test_lookups_before_stores_do_not_affect_the_health_of_the_tier() -> None:
    stores = Stores({}, check_timeout_s=1.0)
    before = stores.index.answer_s
    stores.announce(A, B)
    stores.index.prepare_stores([A, B])
    stores.time_s += 1.1
    assert stores.index.lookup_counts == (0, 0) and stores.index.answer_s == before
    stores.depot.answer()
    assert stores.index.lookup_counts == (0, 0) and stores.index.answer_s == before


@pytest.mark.parametrize("hot", [(), (b"hot 1", b"hot 2")], ids=["apart", "with a shared prefix"])
@pytest.mark.parametrize("step_s", [0.05, 0.4, 0.6, 0.8, 7.0])
def test_all_chunks_are_stored_at_the_pace_of_the_steps(step_s: float, hot: tuple[Key, ...]) -> None:
    """Prompts wait and compute longer than an answer counts, so each path is looked up again before its store."""
    time_s = [0.0]
    depot = FakeObjectClient(lambda: time_s[0], {})
    index = ObjectIndex(depot, ObjectOptions(), lambda: time_s[0])
    tier = SecondaryTier("object", index, SecondaryTierOptions(cascades=CascadePolicy.ALL))
    stack = TierStack(RamIndex(1 << 20, 1 << 10), [tier], num_ranks=1, clock=lambda: time_s[0])
    num_steps, per_step, moved, sent = 12, 8, set[Key](), set[Key]()
    paths = [
        [*hot, *(b"path %d chunk %d" % (each, chunk) for chunk in range(3))] for each in range(num_steps * per_step)
    ]
    for path in paths:
        stack.start_lookup(path)
    for step in range(num_steps + 2):
        if step:
            sent.update(key for _, keys in depot.asked for key in keys)
        depot.answer()
        time_s[0] += step_s
        batch = paths[step * per_step : (step + 1) * per_step]
        for path in batch:
            stack.touch(path[::-1], [*((key,) for key in path[-2::-1]), ()])
        new = [key for path in batch for key in path if isinstance(stack.reserve(key, 1 << 10), Slot)]
        for move in stack.take_moves():
            moved.add(move.key)
            stack.on_move(move.move_id, MoveOutcome(1, None))
        before = {key: (path[place - 1],) if place else () for path in batch for place, key in enumerate(path)}
        stack.commit_all([(key, before[key]) for key in new])
        assert stack.num_waiting("object") == len(new), "only the chunks of this step wait for the next one"
    assert moved == {key for path in paths for key in path}
    is_each_old = step_s > FRESH_ANSWER_S
    assert not is_each_old or sent >= moved, "each path is looked up before its store"


def test_stores_stay_within_their_budgets() -> None:
    stores = Stores({}, store_bytes_per_s=100.0)
    keys = [b"key %d" % number for number in range(8)]
    assert isinstance(stores.index.reserve(keys[0], 250), Slot), "a chunk may exceed the remaining budget"
    assert stores.index.reserve(keys[1], 10) is Refusal.BUSY
    stores.time_s += 1.6
    assert isinstance(stores.index.reserve(keys[1], 10), Slot)
    packs = Stores({}, store_packs_per_s=2.0, pack_bytes=1)
    assert [isinstance(packs.index.reserve(key, 10), Slot) for key in keys[:4]] == [True, True, False, False]
    packs.time_s += 0.5
    assert [isinstance(packs.index.reserve(key, 10), Slot) for key in keys[2:5]] == [True, False, False]


def test_the_budget_of_packs_counts_only_new_packs() -> None:
    """A chunk added to the open pack costs no request."""
    stores = Stores({}, store_packs_per_s=1.0)
    slots = [stores.index.reserve(b"key %d" % number, 10) for number in range(100)]
    assert len({slot.pack for slot in slots if isinstance(slot, ObjectSlot)}) == 1
    assert all(isinstance(slot, ObjectSlot) for slot in slots)
    stores.index.end_batch()
    assert stores.index.reserve(b"next", 10) is Refusal.BUSY


def test_the_newest_path_of_a_key_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_checks, "MAX_ANNOUNCED", 4)
    stores = Stores({})
    stores.announce(A, B)
    stores.announce(A, C)
    stores.index.prepare_stores([A])
    assert [keys for _, keys in stores.depot.asked] == [(A, C)]
    stores.depot.answer()
    stores.announce(b"x", b"y")  # drops the first path, not the second
    stores.index.prepare_stores([B])
    assert not stores.depot.asked
    assert isinstance(stores.index.reserve(B, 10), Slot), "its path is dropped"
    assert stores.index._checks._path_of.keys() == {A, C, b"x", b"y"}
