"""Life of a key in any `TierIndex`: reserve, commit, pin, invalidate. Eviction has its own suite."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Refusal, Slot, TierCounts, TierIndex
from kits.tiers.conformance.tier import CHUNK_BYTES, TierSuite, committed, is_protocol_error, reserved

A, B, C = b"key a", b"key b", b"key c"


def assert_answers_agree(index: TierIndex, keys: Sequence[Key]) -> None:
    """Requires that the answers for many keys at once agree with those for each."""
    answers = [index.lookup(key) for key in keys]
    held = [answer is not LookupResult.MISS for answer in answers]
    assert index.leading(keys) == len(list(itertools.takewhile(bool, held)))
    assert index.leading(list(keys)) == index.leading(iter(keys))
    assert index.last_held(keys) == max((place for place, is_held in enumerate(held) if is_held), default=None)
    assert index.any_pending(keys) == (LookupResult.PENDING in answers)


class IndexConformance(TierSuite):
    def test_an_index_is_a_tier_index(self) -> None:
        assert isinstance(self.make_index(1), TierIndex)

    def test_a_new_index_is_empty(self) -> None:
        index = self.make_index(3)
        assert (index.capacity_bytes, index.used_bytes, index.num_keys) == (3 * self.chunk_cost_bytes, 0, 0)

    def test_an_unknown_key_is_a_miss(self) -> None:
        assert self.make_index(1).lookup(A) is LookupResult.MISS

    def test_a_reserved_key_is_pending_until_it_is_committed(self) -> None:
        index = self.make_index(1)
        reserved(index, A)
        assert index.lookup(A) is LookupResult.PENDING
        assert index.commit(A)
        assert index.lookup(A) is LookupResult.HIT

    def test_a_slot_has_exactly_the_requested_bytes(self) -> None:
        index = self.make_index(6)
        sizes = [1, CHUNK_BYTES - 1, CHUNK_BYTES + 1]
        assert [reserved(index, str(size).encode(), size).num_bytes for size in sizes] == sizes

    def test_a_chunk_uses_the_bytes_that_the_index_says_it_costs(self) -> None:
        index = self.make_index(6)
        used_bytes = 0
        for size in (1, CHUNK_BYTES, CHUNK_BYTES + 1):
            used_bytes += index.cost(size)
            reserved(index, str(size).encode(), size)
            assert index.used_bytes == used_bytes and index.cost(size) >= size

    def test_a_pin_returns_the_reserved_slot(self) -> None:
        index = self.make_index(3)
        slot = reserved(index, A, CHUNK_BYTES + 5)
        index.commit(A)
        assert index.pin(A) == slot

    def test_only_a_hit_can_be_pinned(self) -> None:
        index = self.make_index(1)
        assert index.pin(A) is None
        reserved(index, A)
        assert index.pin(A) is None

    def test_a_known_key_is_refused_as_present(self) -> None:
        index = self.make_index(2)
        reserved(index, A)
        assert index.reserve(A, CHUNK_BYTES) is Refusal.PRESENT
        index.commit(A)
        assert index.reserve(A, CHUNK_BYTES) is Refusal.PRESENT

    def test_a_chunk_larger_than_the_tier_is_refused_as_too_large(self) -> None:
        assert self.make_index(2).reserve(A, self.bytes_of(2) + 1) is Refusal.TOO_LARGE

    def test_an_aborted_reservation_frees_its_space_and_its_key(self) -> None:
        index = self.make_index(1)
        reserved(index, A)
        index.abort(A)
        assert (index.lookup(A), index.used_bytes, index.num_keys) == (LookupResult.MISS, 0, 0)
        reserved(index, A)

    def test_an_invalidated_key_is_never_offered_again_and_frees_its_space(self) -> None:
        index = self.make_index(1)
        committed(index, A)
        assert index.invalidate(A)
        assert (index.lookup(A), index.pin(A), index.used_bytes) == (LookupResult.MISS, None, 0)

    def test_invalidating_a_missing_key_returns_false(self) -> None:
        index = self.make_index(2)
        assert not index.invalidate(A)
        reserved(index, A)
        assert index.invalidate(A)
        assert not index.invalidate(A)

    def test_an_invalidated_pinned_key_keeps_its_space_until_the_last_unpin(self) -> None:
        index = self.make_index(1)
        committed(index, A)
        index.pin(A)
        index.pin(A)
        assert index.invalidate(A)
        assert (index.lookup(A), index.pin(A), index.num_keys) == (LookupResult.MISS, None, 0)
        index.unpin(A)
        assert index.reserve(B, CHUNK_BYTES) is Refusal.NO_ROOM
        index.unpin(A)
        assert index.used_bytes == 0

    def test_an_invalidated_reservation_cannot_be_committed(self) -> None:
        index = self.make_index(1)
        reserved(index, A)
        assert index.invalidate(A)
        assert index.lookup(A) is LookupResult.MISS
        assert index.reserve(B, CHUNK_BYTES) is Refusal.NO_ROOM, "a writer still uses it"
        assert not index.commit(A)
        assert (index.lookup(A), index.used_bytes) == (LookupResult.MISS, 0)

    def test_an_invalidated_reservation_can_be_aborted(self) -> None:
        index = self.make_index(1)
        reserved(index, A)
        index.invalidate(A)
        index.abort(A)
        assert index.used_bytes == 0

    def test_a_deleted_key_in_use_is_refused_as_present_until_its_space_is_free(self) -> None:
        index = self.make_index(2)
        committed(index, A)
        index.pin(A)
        index.invalidate(A)
        assert index.reserve(A, CHUNK_BYTES) is Refusal.PRESENT
        index.unpin(A)
        reserved(index, A)

    def test_calls_that_do_not_fit_the_state_of_the_key_are_protocol_errors(self) -> None:
        index = self.make_index(3)
        committed(index, B)
        reserved(index, C)
        assert is_protocol_error(lambda: index.reserve(A, 0))
        assert is_protocol_error(lambda: index.commit(A))
        assert is_protocol_error(lambda: index.commit(B))
        assert is_protocol_error(lambda: index.abort(A))
        assert is_protocol_error(lambda: index.abort(B))
        assert is_protocol_error(lambda: index.unpin(A))
        assert is_protocol_error(lambda: index.unpin(B))
        assert is_protocol_error(lambda: index.unpin(C))

    def test_many_keys_are_reserved_in_order_each_with_its_own_answer(self) -> None:
        index = self.make_index(3)
        reserved(index, B)
        sizes = [(A, CHUNK_BYTES), (B, CHUNK_BYTES), (C, self.bytes_of(3) + 1), (C, self.bytes_of(2)), (C, CHUNK_BYTES)]
        answers = index.reserve_all(sizes)
        slot_a, slot_c = answers[0], answers[4]
        assert isinstance(slot_a, Slot) and isinstance(slot_c, Slot)
        assert answers[1:4] == [Refusal.PRESENT, Refusal.TOO_LARGE, Refusal.NO_ROOM]
        assert (slot_a.num_bytes, slot_c.num_bytes) == (CHUNK_BYTES, CHUNK_BYTES)
        assert {index.lookup(key) for key in (A, B, C)} == {LookupResult.PENDING}
        assert index.take_counts().refusals == {Refusal.PRESENT: 1, Refusal.TOO_LARGE: 1, Refusal.NO_ROOM: 1}
        assert index.reserve_all([]) == []

    def test_reservations_before_an_invalid_one_are_made(self) -> None:
        index = self.make_index(2)
        assert is_protocol_error(lambda: index.reserve_all([(A, CHUNK_BYTES), (B, 0)]))
        assert (index.lookup(A), index.lookup(B)) == (LookupResult.PENDING, LookupResult.MISS)

    def test_many_keys_are_committed_in_order_each_with_its_own_answer(self) -> None:
        index = self.make_index(3)
        index.reserve_all([(A, CHUNK_BYTES), (B, CHUNK_BYTES), (C, CHUNK_BYTES)])
        index.invalidate(B)
        assert index.commit_all([A, B]) == [True, False]
        assert [index.lookup(key) for key in (A, B, C)] == [LookupResult.HIT, LookupResult.MISS, LookupResult.PENDING]
        assert index.commit_all([]) == []
        assert is_protocol_error(lambda: index.commit_all([C, A]))
        assert index.lookup(C) is LookupResult.HIT, "commits before an invalid one are made"
        assert index.take_counts().commits == 2

    def test_many_keys_are_pinned_all_or_none(self) -> None:
        index = self.make_index(3)
        slots = index.reserve_all([(A, CHUNK_BYTES), (B, CHUNK_BYTES), (C, CHUNK_BYTES)])
        for key in (A, B):
            index.commit(key)
        assert index.pin_all([B, A]) == [slots[1], slots[0]]
        for lacking in (b"unknown", C):
            before = (index.generation, index.used_bytes)
            assert index.pin_all([A, B, lacking]) is None
            assert (index.generation, index.used_bytes) == before
        index.unpin_all([A, B])
        assert is_protocol_error(lambda: index.unpin(A)), "no other pin was made"
        assert is_protocol_error(lambda: index.unpin(B)), "no other pin was made"
        assert index.pin_all([]) == []

    def test_a_key_that_is_named_twice_is_pinned_twice(self) -> None:
        index = self.make_index(1)
        committed(index, A)
        assert index.pin_all([A, A]) is not None
        index.invalidate(A)
        index.unpin(A)
        assert index.used_bytes == self.chunk_cost_bytes
        index.unpin_all([A])
        assert index.used_bytes == 0

    def test_unpins_before_an_invalid_one_are_made(self) -> None:
        index = self.make_index(2)
        committed(index, A, B)
        index.pin_all([A, B])
        assert is_protocol_error(lambda: index.unpin_all([A, A, B]))
        assert is_protocol_error(lambda: index.unpin(A))
        index.unpin(B)

    def test_clear_withdraws_everything_and_respects_readers_and_writers(self) -> None:
        index = self.make_index(3)
        committed(index, A, B)
        reserved(index, C)
        index.pin(B)
        assert index.clear() == 3
        assert index.clear() == 0
        assert index.used_bytes == 2 * self.chunk_cost_bytes
        index.unpin(B)
        assert not index.commit(C)
        assert (index.used_bytes, index.num_keys) == (0, 0)

    def test_a_closed_index_offers_and_takes_nothing_but_lets_users_finish(self) -> None:
        index = self.make_index(3)
        committed(index, A)
        index.pin(A)
        reserved(index, B)
        index.close()
        assert (index.lookup(A), index.lookup(B)) == (LookupResult.MISS, LookupResult.MISS)
        assert index.reserve(C, CHUNK_BYTES) is Refusal.CLOSED
        index.unpin(A)
        assert not index.commit(B)
        assert index.used_bytes == 0

    def test_the_generation_changes_whenever_an_answer_may_change(self) -> None:
        index = self.make_index(1)
        seen = [index.generation]
        for change in (
            lambda: index.reserve(A, CHUNK_BYTES),
            lambda: index.commit(A),
            lambda: index.reserve(B, CHUNK_BYTES),
            lambda: index.abort(B),
            lambda: index.reserve(C, CHUNK_BYTES),
            lambda: index.invalidate(C),
        ):
            change()
            seen.append(index.generation)
        assert len(set(seen)) == len(seen)

    def test_a_refusal_and_a_lookup_keep_the_generation(self) -> None:
        index = self.make_index(1)
        reserved(index, A)
        before = index.generation
        index.lookup(A)
        assert index.reserve(B, CHUNK_BYTES) is Refusal.NO_ROOM
        assert index.generation == before

    def test_a_lookup_of_many_keys_agrees_with_single_lookups_in_every_state(self) -> None:
        index, keys = self.make_index_in_every_state()
        for asked in itertools.chain(itertools.product(keys, repeat=3), [(), tuple(keys)]):
            assert_answers_agree(index, asked)

    def test_a_lookup_of_many_keys_takes_any_iterable(self) -> None:
        index = self.make_index(2)
        committed(index, A)
        reserved(index, B)
        assert index.leading(iter([A, B, C, A])) == 2
        assert index.any_pending(iter([C, A, B]))
        assert (index.leading(iter(())), index.any_pending(iter(()))) == (0, False)

    def test_a_lookup_of_many_keys_changes_nothing(self) -> None:
        index = self.make_index(2)
        committed(index, A, B)
        index.take_counts()
        before = (index.generation, index.used_bytes, index.num_keys)
        assert (index.leading([A, C]), index.last_held([A, C]), index.any_pending([A, C])) == (1, 0, False)
        assert (index.generation, index.used_bytes, index.num_keys) == before
        assert index.take_counts() == TierCounts()
        committed(index, C)
        assert (index.lookup(A), index.lookup(B)) == (LookupResult.MISS, LookupResult.HIT), "a lookup is not a use"

    def make_index_in_every_state(self) -> tuple[TierIndex, list[Key]]:
        """Keys: unknown, reserved, committed, pinned, deleted while written, deleted while pinned, withdrawn,
        aborted."""
        index = self.make_index(8)
        names = ("unknown", "reserved", "committed", "pinned", "doomed_write", "doomed_read", "withdrawn", "aborted")
        keys = [name.encode() for name in names]
        _, reserved_key, committed_key, pinned, doomed_write, doomed_read, withdrawn, aborted = keys
        for key in (reserved_key, doomed_write, aborted):
            reserved(index, key)
        committed(index, committed_key, pinned, doomed_read, withdrawn)
        for key in (pinned, doomed_read):
            assert index.pin(key) is not None
        for key in (doomed_write, doomed_read, withdrawn):
            assert index.invalidate(key)
        index.abort(aborted)
        return index, keys

    def test_counts_cover_the_time_since_they_were_taken(self) -> None:
        index = self.make_index(1)
        committed(index, A)
        reserved(index, B)
        index.reserve(C, CHUNK_BYTES)
        index.reserve(C, self.bytes_of(2))
        index.abort(B)
        counts = index.take_counts()
        assert (counts.reservations, counts.commits, counts.aborts, counts.evictions) == (2, 1, 1, 1)
        assert counts.evicted_bytes == self.chunk_cost_bytes
        assert counts.refusals == {Refusal.NO_ROOM: 1, Refusal.TOO_LARGE: 1}
        assert index.take_counts().merge(counts) == counts
