"""Contract of a read-only index: it looks up what others store, and nothing is stored to its tier."""

from __future__ import annotations

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Refusal, TierIndex
from kits.tiers.conformance.index import assert_answers_agree
from kits.tiers.conformance.late import LateAnswersConformance
from kits.tiers.conformance.tier import CHUNK_BYTES, is_protocol_error

A, B, C = b"key a", b"key b", b"key c"


class ReadOnlyConformance(LateAnswersConformance):
    """In place of the suites that fill a tier by storing."""

    def index_with_hits(self) -> TierIndex:
        """An index with hits for A and B."""
        index = self.asked(A, B)
        self.answer_all()
        assert [index.lookup(key) for key in (A, B)] == [LookupResult.HIT] * 2
        return index

    def test_a_read_only_index_is_a_tier_index(self) -> None:
        assert isinstance(self.make_late(), TierIndex)

    def test_stores_are_refused_in_a_read_only_tier(self) -> None:
        index = self.index_with_hits()
        before = (index.generation, index.used_bytes, index.num_keys)
        assert index.reserve(C, CHUNK_BYTES) is Refusal.TOO_LARGE
        assert index.reserve_all([(A, CHUNK_BYTES), (C, CHUNK_BYTES)]) == [Refusal.PRESENT, Refusal.TOO_LARGE]
        assert (index.generation, index.used_bytes, index.num_keys) == before
        assert index.take_counts().refusals == {Refusal.TOO_LARGE: 2, Refusal.PRESENT: 1}
        assert index.take_counts().refusals == {}
        index.close()
        assert index.reserve(C, CHUNK_BYTES) is Refusal.CLOSED

    def test_invalid_calls_are_protocol_errors_in_a_read_only_tier(self) -> None:
        index = self.index_with_hits()
        assert is_protocol_error(lambda: index.reserve(C, 0))
        for key in (A, C):
            assert is_protocol_error(lambda key=key: index.commit(key))  # type: ignore[misc]
            assert is_protocol_error(lambda key=key: index.abort(key))  # type: ignore[misc]
            assert is_protocol_error(lambda key=key: index.unpin(key))  # type: ignore[misc]

    def test_a_found_key_is_pinned_at_its_place(self) -> None:
        index = self.index_with_hits()
        slot = index.pin(A)
        assert slot is not None and slot.num_bytes == CHUNK_BYTES
        slots = index.pin_all([A, B])
        assert slots is not None and slots[0] == slot != slots[1]
        assert index.pin_all([A, C]) is None and index.pin(C) is None
        index.unpin_all([A, A, B])
        assert is_protocol_error(lambda: index.unpin(A))

    def test_a_withdrawn_key_is_not_offered_and_keeps_its_readers(self) -> None:
        index = self.index_with_hits()
        used_bytes = index.used_bytes
        assert index.pin(A) is not None
        assert index.invalidate(A) and not index.invalidate(A) and not index.invalidate(C)
        assert (index.lookup(A), index.pin(A), index.used_bytes) == (LookupResult.MISS, None, used_bytes)
        index.unpin(A)
        assert index.used_bytes == used_bytes // 2
        assert index.take_counts().invalidations == 1
        index.start_lookup([A], self.now_s() + 2.0)
        self.answer_all()
        assert index.lookup(A) is LookupResult.HIT, "it may be looked up again"

    def test_a_reset_withdraws_found_keys_and_respects_readers(self) -> None:
        for end in ("clear", "close"):
            index = self.index_with_hits()
            assert index.pin(A) is not None
            before = index.generation
            if end == "clear":
                assert index.clear() == 2
            else:
                index.close()
            assert index.generation != before
            assert [index.lookup(key) for key in (A, B)] == [LookupResult.MISS] * 2
            index.unpin(A)
            assert (index.used_bytes, index.num_keys) == (0, 0)

    def test_a_lookup_of_many_found_keys_agrees_with_single_lookups(self) -> None:
        index = self.index_with_hits()
        index.start_lookup([C], self.now_s() + 2.0)
        assert_answers_agree(index, [A, B, C, b"unknown"])
        assert_answers_agree(index, [b"unknown", A])
        assert_answers_agree(index, [])
        assert index.lacks(C) and not index.lacks(A)

    def test_a_pinned_key_survives_a_touch_and_a_lookup(self) -> None:
        index = self.index_with_hits()
        slot = index.pin(A)
        index.touch([B, A, C])
        index.start_lookup([A, B], self.now_s() + 2.0)
        assert [index.lookup(key) for key in (A, B)] == [LookupResult.HIT] * 2
        assert index.pin(A) == slot
