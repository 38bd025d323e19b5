"""Contract of an index that reports changed answers: none is missed, and the report is bounded.

Not a part of `TierConformance`: a tier that other processes change cannot report changes.
"""

from __future__ import annotations

import random

from hybridkv.planner import LookupResult
from hybridkv.tiers.changes import Changes, ReportsChanges
from hybridkv.tiers.contract import Key, Slot, TierIndex
from kits.tiers.conformance.tier import CHUNK_BYTES, TierSuite, committed, reserved

A, B, C = b"key a", b"key b", b"key c"
_KEYS = [b"key %d" % number for number in range(6)]
_STEPS = 2000


class ChangesConformance(TierSuite):
    def make_watched(self, num_chunks: int) -> tuple[TierIndex, ReportsChanges]:
        """The index and its reports, watched from now on."""
        index = self.make_index(num_chunks)
        assert isinstance(index, ReportsChanges)
        index.watch()
        return index, index

    def test_no_change_is_reported_before_the_first_watch(self) -> None:
        index = self.make_index(2)
        assert isinstance(index, ReportsChanges)
        committed(index, A)
        assert index.take_changes() == Changes(set(), False)
        index.watch()
        assert index.take_changes() == Changes(set(), False)

    def test_added_and_removed_keys_are_reported_once(self) -> None:
        index, told = self.make_watched(3)
        reserved(index, A)
        assert told.take_changes() == Changes({A}, False)
        index.commit(A)
        reserved(index, B)
        assert told.take_changes() == Changes({A, B}, False)
        index.abort(B)
        index.invalidate(A)
        assert told.take_changes() == Changes({A, B}, False)
        assert told.take_changes() == Changes(set(), False)

    def test_evicted_keys_are_reported(self) -> None:
        index, told = self.make_watched(2)
        committed(index, A, B)
        told.take_changes()
        reserved(index, C)
        changes = told.take_changes()
        gone = {key for key in (A, B) if index.lookup(key) is LookupResult.MISS}
        assert gone and gone | {C} <= changes.keys

    def test_a_reset_reports_that_any_answer_may_have_changed(self) -> None:
        index, told = self.make_watched(2)
        committed(index, A)
        index.clear()
        assert told.take_changes().is_any
        committed(index, B)
        assert told.take_changes() == Changes({B}, False)

    def test_touches_pins_and_lookups_are_not_reported(self) -> None:
        index, told = self.make_watched(2)
        committed(index, A)
        told.take_changes()
        index.pin(A)
        index.touch([A])
        index.leading([A, B])
        index.unpin(A)
        assert told.take_changes() == Changes(set(), False)

    def test_no_answer_changes_without_a_report(self) -> None:
        """After any calls: every answer that differs from the last one was reported."""
        index, told = self.make_watched(3)
        draw = random.Random(16)
        seen = dict.fromkeys(_KEYS, LookupResult.MISS)
        pinned: list[Key] = []
        num_changed = 0
        for _ in range(_STEPS):
            _do_something(index, draw, pinned)
            if draw.random() < 0.3:
                changes = told.take_changes()
                now = {key: index.lookup(key) for key in _KEYS}
                changed = {key for key in _KEYS if now[key] is not seen[key]}
                assert changes.is_any or changed <= changes.keys
                num_changed += len(changed)
                seen = now
        assert num_changed > _STEPS / 20


def _do_something(index: TierIndex, draw: random.Random, pinned: list[Key]) -> None:
    """Makes one call that the state of its key allows, or that is refused."""
    key = draw.choice(_KEYS)
    match draw.randrange(6):
        case 0 | 1:
            if isinstance(index.reserve(key, CHUNK_BYTES), Slot):
                index.commit(key) if draw.random() < 0.8 else index.abort(key)
        case 2:
            index.invalidate(key)
        case 3:
            if len(pinned) < 2 and index.pin(key) is not None:
                pinned.append(key)
        case 4:
            if pinned:
                index.unpin(pinned.pop())
        case 5:
            if draw.random() < 0.05:
                index.clear()
