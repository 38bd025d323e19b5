"""Contract of `start_lookup`, with more for tiers with async lookups."""

from __future__ import annotations

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, LookupAnswer, Slot, TierIndex
from kits.tiers.conformance.tier import CHUNK_BYTES, TierSuite, committed, reserved

A, B, C = b"key a", b"key b", b"key c"
DEADLINE_S = 1e9
"""Longer than any suite runs."""


class AskConformance(TierSuite):
    """Contract of every tier."""

    def test_starting_a_lookup_changes_no_known_answer(self) -> None:
        index = self.make_index(4)
        committed(index, A)
        reserved(index, B)
        before = (index.generation, index.used_bytes, index.num_keys)
        index.start_lookup([A, B], DEADLINE_S)
        assert (index.generation, index.used_bytes, index.num_keys) == before
        assert (index.lookup(A), index.lookup(B)) == (LookupResult.HIT, LookupResult.PENDING)

    def test_a_key_in_lookup_is_lacking_and_can_be_reserved(self) -> None:
        index = self.make_index(2)
        index.start_lookup([A], DEADLINE_S)
        assert index.lacks(A) and index.used_bytes == 0 and index.pin(A) is None
        assert isinstance(index.reserve(A, CHUNK_BYTES), Slot)
        assert not index.lacks(A) and index.commit(A) and not index.lacks(A)
        index.invalidate(A)
        assert index.lacks(A)

    def test_a_tier_with_sync_lookups_answers_at_once(self) -> None:
        index = self.make_index(1)
        if not index.has_async_lookups:
            before = index.generation
            index.start_lookup([A], DEADLINE_S)
            assert (index.lookup(A), index.generation) == (LookupResult.MISS, before)
            assert index.lookup_counts == (0, 0)


class LateAnswersConformance(TierSuite):
    """Contract of a tier with async lookups, read-only ones included. Needs a clock that the suite can advance."""

    def make_late(self) -> TierIndex:
        """An index with room for four usual chunks, over a store that already holds A and B."""
        raise NotImplementedError

    def pass_time(self, seconds: float) -> None:
        """Advances the clock of the deadlines."""
        raise NotImplementedError

    def answer_all(self) -> None:
        """Answers all lookups in flight."""
        raise NotImplementedError

    def now_s(self) -> float:
        raise NotImplementedError

    def asked(self, *keys: Key) -> TierIndex:
        index = self.make_late()
        index.start_lookup(keys, self.now_s() + 2.0)
        return index

    def test_a_key_without_a_lookup_is_a_miss(self) -> None:
        index = self.make_late()
        assert index.has_async_lookups and index.lookup(A) is LookupResult.MISS

    def test_a_key_in_lookup_is_pending_until_it_is_answered(self) -> None:
        index = self.asked(A, C)
        assert (index.lookup(A), index.lookup(C), index.lookup(B)) == (
            LookupResult.PENDING,
            LookupResult.PENDING,
            LookupResult.MISS,
        )
        assert index.leading([A, C, B]) == 2 and index.last_held([A, B]) == 0 and index.any_pending([B, C])
        self.answer_all()
        assert (index.lookup(A), index.lookup(C)) == (LookupResult.HIT, LookupResult.MISS)
        assert index.pin(A) is not None

    def test_a_key_in_lookup_is_a_miss_after_its_deadline(self) -> None:
        index = self.asked(A)
        self.pass_time(1.9)
        assert index.lookup(A) is LookupResult.PENDING
        self.pass_time(0.2)
        assert index.lookup(A) is LookupResult.MISS and not index.any_pending([A])

    def test_an_answer_after_the_deadline_still_counts(self) -> None:
        index = self.asked(A)
        self.pass_time(2.1)
        self.answer_all()
        assert index.lookup(A) is LookupResult.HIT

    def test_the_generation_changes_when_a_lookup_starts_ends_or_times_out(self) -> None:
        index = self.make_late()
        seen = [index.generation]
        index.start_lookup([A, B], self.now_s() + 2.0)
        seen.append(index.generation)
        self.pass_time(2.1)
        seen.append(index.generation)
        self.answer_all()
        seen.append(index.generation)
        assert len(set(seen)) == len(seen)

    def test_each_key_of_a_lookup_is_counted_once_by_its_answer(self) -> None:
        index = self.make_late()
        index.start_lookup([A, C], self.now_s() + DEADLINE_S)
        assert index.take_counts().answers == {}
        self.answer_all()
        assert index.take_counts().answers == {LookupAnswer.FOUND: 1, LookupAnswer.MISSING: 1}
        assert index.take_counts().answers == {}

    def test_a_timed_out_lookup_is_counted_once_even_if_answered_later(self) -> None:
        index = self.asked(A, C)
        self.pass_time(2.1)
        assert index.take_counts().answers == {LookupAnswer.TIMED_OUT: 2}
        self.answer_all()
        assert index.lookup(A) is LookupResult.HIT and index.take_counts().answers == {}
        index = self.asked(A, C)
        self.pass_time(2.1)
        self.answer_all()
        assert index.take_counts().answers == {LookupAnswer.TIMED_OUT: 2}, "although the index was not used meanwhile"

    def test_a_second_lookup_delays_no_answer_and_keeps_the_later_deadline(self) -> None:
        index = self.asked(A)
        self.pass_time(1.0)
        index.start_lookup([A], self.now_s() + 0.1)
        self.pass_time(0.5)
        assert index.lookup(A) is LookupResult.PENDING
        index.start_lookup([A], self.now_s() + 2.0)
        self.pass_time(1.0)
        assert index.lookup(A) is LookupResult.PENDING
        self.answer_all()
        assert index.lookup(A) is LookupResult.HIT

    def test_a_lookup_beyond_the_limit_is_a_miss(self) -> None:
        index = self.make_late()
        index.start_lookup([b"%d" % number for number in range(100_000)], self.now_s() + 2.0)
        index.start_lookup([A], self.now_s() + 2.0)
        assert index.lookup(A) is LookupResult.MISS and index.used_bytes == index.num_keys == 0
        self.pass_time(2.1)
        self.answer_all()
        index.start_lookup([A], self.now_s() + 2.0)
        self.answer_all()
        assert index.lookup(A) is LookupResult.HIT

    def test_an_answer_to_a_lookup_before_a_clear_is_ignored(self) -> None:
        index = self.asked(A)
        index.clear()
        assert index.lookup(A) is LookupResult.MISS
        self.answer_all()
        assert index.lookup(A) is LookupResult.MISS

    def test_a_closed_index_ignores_answers(self) -> None:
        index = self.asked(A)
        index.close()
        self.answer_all()
        index.start_lookup([B], self.now_s() + 2.0)
        self.answer_all()
        assert (index.lookup(A), index.lookup(B)) == (LookupResult.MISS, LookupResult.MISS)
        assert index.used_bytes == 0

    def test_an_answer_to_a_lookup_of_an_invalidated_key_is_ignored(self) -> None:
        index = self.asked(A)
        index.invalidate(A)
        self.answer_all()
        assert index.lookup(A) is LookupResult.MISS

    def test_answered_and_timed_out_lookups_are_counted_apart(self) -> None:
        index = self.make_late()
        index.start_lookup([A, C], self.now_s() + DEADLINE_S)
        assert index.lookup_counts == (0, 0)
        self.answer_all()
        assert index.lookup_counts == (2, 0)
        index = self.asked(A, B, C)
        self.pass_time(2.1)
        assert index.lookup_counts == (0, 3)
        self.answer_all()
        assert index.lookup_counts == (0, 3), "a late answer counts once, as timed out"
        index.take_counts()
        assert index.lookup_counts == (0, 3), "taking the counts does not reset it"

    def test_the_expected_answer_time_follows_the_answers(self) -> None:
        index = self.make_late()
        for number in range(20):
            index.start_lookup([b"missing %d" % number], self.now_s() + 2.0)
            self.pass_time(2.1)
            assert index.lookup_counts.num_timed_out == number + 1
        assert 3.5 < index.answer_s <= 4.01, "an unanswered lookup counts with twice its time"
        longest_s = 0.0
        for number in range(20):
            lookups_sent_s = self.now_s()
            index.start_lookup([b"answered %d" % number], lookups_sent_s + 60.0)
            self.answer_all()
            longest_s = max(longest_s, self.now_s() - lookups_sent_s)
        assert index.answer_s <= longest_s + 0.1


class LateConformance(LateAnswersConformance):
    """Contract of a tier with async lookups that chunks are stored to."""

    def test_an_answer_about_a_key_reserved_meanwhile_changes_nothing(self) -> None:
        index = self.asked(A)
        assert isinstance(index.reserve(A, CHUNK_BYTES), Slot)
        self.answer_all()
        assert index.lookup(A) is LookupResult.PENDING and index.commit(A)

    def test_answers_use_no_more_room_than_there_is(self) -> None:
        index = self.make_late()
        for number in range(4):
            assert isinstance(index.reserve(b"%d" % number, CHUNK_BYTES), Slot)
        index.start_lookup([A], self.now_s() + 2.0)
        self.answer_all()
        assert index.lookup(A) is LookupResult.MISS and index.used_bytes <= index.capacity_bytes

    def test_lookups_that_were_dropped_or_not_sent_are_not_timed_out(self) -> None:
        index = self.asked(A, B)
        index.invalidate(A)
        assert isinstance(index.reserve(B, CHUNK_BYTES), Slot)
        self.pass_time(2.1)
        assert index.lookup_counts == (0, 0)
        index = self.make_late()
        index.start_lookup([b"%d" % number for number in range(100_000)], self.now_s() + 2.0)
        assert index.lookup_counts == (0, 0), "the limit of lookups is reached"
        self.pass_time(2.1)
        assert 0 < index.lookup_counts.num_timed_out < 100_000
