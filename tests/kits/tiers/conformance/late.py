"""What a tier promises about `ask`, and more of it where answers come late."""

from __future__ import annotations

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, LookupAnswer, Slot, TierIndex
from kits.tiers.conformance.tier import CHUNK_BYTES, TierSuite, committed, reserved

A, B, C = b"key a", b"key b", b"key c"
DEADLINE_S = 1e9
"""No suite lives so long."""


class AskConformance(TierSuite):
    """Of every tier."""

    def test_asking_changes_nothing_about_what_is_known(self) -> None:
        index = self.make_index(4)
        committed(index, A)
        reserved(index, B)
        before = (index.generation, index.used_bytes, index.num_keys)
        index.start_lookup([A, B], DEADLINE_S)
        assert (index.generation, index.used_bytes, index.num_keys) == before
        assert (index.lookup(A), index.lookup(B)) == (LookupResult.HIT, LookupResult.PENDING)

    def test_a_key_that_was_asked_for_is_lacking_and_can_be_reserved(self) -> None:
        index = self.make_index(2)
        index.start_lookup([A], DEADLINE_S)
        assert index.lacks(A) and index.used_bytes == 0 and index.pin(A) is None
        assert isinstance(index.reserve(A, CHUNK_BYTES), Slot)
        assert not index.lacks(A) and index.commit(A) and not index.lacks(A)
        index.invalidate(A)
        assert index.lacks(A)

    def test_a_tier_that_knows_everything_answers_at_once(self) -> None:
        index = self.make_index(1)
        if not index.has_async_lookups:
            before = index.generation
            index.start_lookup([A], DEADLINE_S)
            assert (index.lookup(A), index.generation) == (LookupResult.MISS, before)
            assert index.lookup_counts == (0, 0)


class LateAnswersConformance(TierSuite):
    """Of a tier whose index hears late what the tier holds, also of one that nothing is stored to. Needs a world whose
    time the suite may move."""

    def make_late(self) -> TierIndex:
        """An index with room for four usual chunks, over a store that somebody else has filled with A and B."""
        raise NotImplementedError

    def pass_time(self, seconds: float) -> None:
        """Of the clock by which deadlines are."""
        raise NotImplementedError

    def answer_all(self) -> None:
        """What was asked is answered from now on."""
        raise NotImplementedError

    def now_s(self) -> float:
        raise NotImplementedError

    def asked(self, *keys: Key) -> TierIndex:
        index = self.make_late()
        index.start_lookup(keys, self.now_s() + 2.0)
        return index

    def test_what_nobody_asked_for_is_a_miss(self) -> None:
        index = self.make_late()
        assert index.has_async_lookups and index.lookup(A) is LookupResult.MISS

    def test_an_asked_key_is_pending_until_it_is_answered(self) -> None:
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

    def test_an_asked_key_is_a_miss_after_its_deadline(self) -> None:
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

    def test_the_generation_changes_when_a_question_is_asked_answered_or_over(self) -> None:
        index = self.make_late()
        seen = [index.generation]
        index.start_lookup([A, B], self.now_s() + 2.0)
        seen.append(index.generation)
        self.pass_time(2.1)
        seen.append(index.generation)
        self.answer_all()
        seen.append(index.generation)
        assert len(set(seen)) == len(seen)

    def test_how_a_question_ended_is_counted_once_for_each_key(self) -> None:
        index = self.make_late()
        index.start_lookup([A, C], self.now_s() + DEADLINE_S)
        assert index.take_counts().answers == {}
        self.answer_all()
        assert index.take_counts().answers == {LookupAnswer.FOUND: 1, LookupAnswer.MISSING: 1}
        assert index.take_counts().answers == {}

    def test_a_question_that_is_over_counts_as_late_and_its_answer_no_more(self) -> None:
        index = self.asked(A, C)
        self.pass_time(2.1)
        assert index.take_counts().answers == {LookupAnswer.TIMED_OUT: 2}
        self.answer_all()
        assert index.lookup(A) is LookupResult.HIT and index.take_counts().answers == {}
        index = self.asked(A, C)
        self.pass_time(2.1)
        self.answer_all()
        assert index.take_counts().answers == {LookupAnswer.TIMED_OUT: 2}, "though nobody looked meanwhile"

    def test_asking_again_puts_no_answer_off_and_keeps_the_later_deadline(self) -> None:
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

    def test_what_is_asked_while_as_much_is_as_may_be_is_a_miss(self) -> None:
        index = self.make_late()
        index.start_lookup([b"%d" % number for number in range(100_000)], self.now_s() + 2.0)
        index.start_lookup([A], self.now_s() + 2.0)
        assert index.lookup(A) is LookupResult.MISS and index.used_bytes == index.num_keys == 0
        self.pass_time(2.1)
        self.answer_all()
        index.start_lookup([A], self.now_s() + 2.0)
        self.answer_all()
        assert index.lookup(A) is LookupResult.HIT

    def test_what_was_asked_before_everything_was_withdrawn_is_not_offered_by_the_answer(self) -> None:
        index = self.asked(A)
        index.clear()
        assert index.lookup(A) is LookupResult.MISS
        self.answer_all()
        assert index.lookup(A) is LookupResult.MISS

    def test_a_closed_index_hears_no_answer(self) -> None:
        index = self.asked(A)
        index.close()
        self.answer_all()
        index.start_lookup([B], self.now_s() + 2.0)
        self.answer_all()
        assert (index.lookup(A), index.lookup(B)) == (LookupResult.MISS, LookupResult.MISS)
        assert index.used_bytes == 0

    def test_what_was_withdrawn_while_it_was_asked_for_is_not_offered_by_the_answer(self) -> None:
        index = self.asked(A)
        index.invalidate(A)
        self.answer_all()
        assert index.lookup(A) is LookupResult.MISS

    def test_what_was_answered_in_time_is_told_from_what_was_not(self) -> None:
        index = self.make_late()
        index.start_lookup([A, C], self.now_s() + DEADLINE_S)
        assert index.lookup_counts == (0, 0)
        self.answer_all()
        assert index.lookup_counts == (2, 0)
        index = self.asked(A, B, C)
        self.pass_time(2.1)
        assert index.lookup_counts == (0, 3)
        self.answer_all()
        assert index.lookup_counts == (0, 3), "an answer after its time is none, and is told of once"
        index.take_counts()
        assert index.lookup_counts == (0, 3), "it is not taken"

    def test_the_expected_time_of_an_answer_follows_the_answers(self) -> None:
        index = self.make_late()
        for number in range(20):
            index.start_lookup([b"missing %d" % number], self.now_s() + 2.0)
            self.pass_time(2.1)
            assert index.lookup_counts.num_timed_out == number + 1
        assert 3.5 < index.answer_s <= 4.01, "a lookup that was not answered counts with twice its time"
        longest_s = 0.0
        for number in range(20):
            lookups_sent_s = self.now_s()
            index.start_lookup([b"answered %d" % number], lookups_sent_s + 60.0)
            self.answer_all()
            longest_s = max(longest_s, self.now_s() - lookups_sent_s)
        assert index.answer_s <= longest_s + 0.1


class LateConformance(LateAnswersConformance):
    """The same, and more, of one that chunks are stored to as well."""

    def test_an_answer_about_what_was_reserved_meanwhile_changes_nothing(self) -> None:
        index = self.asked(A)
        assert isinstance(index.reserve(A, CHUNK_BYTES), Slot)
        self.answer_all()
        assert index.lookup(A) is LookupResult.PENDING and index.commit(A)

    def test_answers_find_no_more_room_than_there_is(self) -> None:
        index = self.make_late()
        for number in range(4):
            assert isinstance(index.reserve(b"%d" % number, CHUNK_BYTES), Slot)
        index.start_lookup([A], self.now_s() + 2.0)
        self.answer_all()
        assert index.lookup(A) is LookupResult.MISS and index.used_bytes <= index.capacity_bytes

    def test_what_nobody_could_answer_is_not_told_as_unanswered(self) -> None:
        index = self.asked(A, B)
        index.invalidate(A)
        assert isinstance(index.reserve(B, CHUNK_BYTES), Slot)
        self.pass_time(2.1)
        assert index.lookup_counts == (0, 0)
        index = self.make_late()
        index.start_lookup([b"%d" % number for number in range(100_000)], self.now_s() + 2.0)
        assert index.lookup_counts == (0, 0), "as much is asked as may be"
        self.pass_time(2.1)
        assert 0 < index.lookup_counts.num_timed_out < 100_000
