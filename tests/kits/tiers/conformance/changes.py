"""What an index promises that tells which answers changed: none is missed, and what it names is bounded.

Not a part of `TierConformance`: only tiers that nobody else changes behind their back can tell.
"""

from __future__ import annotations

import random

from hybridkv.planner import LookupResult
from hybridkv.tiers.changes import MAX_CHANGED_KEYS, ChangeFeed, Changes, ReportsChanges
from hybridkv.tiers.contract import Key, Slot, TierIndex
from kits.tiers.conformance.tier import CHUNK_BYTES, TierSuite, committed, reserved

A, B, C = b"key a", b"key b", b"key c"
_KEYS = [b"key %d" % number for number in range(6)]
_STEPS = 2000


class ChangesConformance(TierSuite):
    def make_watched(self, num_chunks: int) -> tuple[TierIndex, ReportsChanges]:
        """An index under both its faces, watched from now on."""
        index = self.make_index(num_chunks)
        assert isinstance(index, ReportsChanges)
        index.watch()
        return index, index

    def test_nothing_is_told_before_somebody_watches(self) -> None:
        index = self.make_index(2)
        assert isinstance(index, ReportsChanges)
        committed(index, A)
        assert index.take_changes() == Changes(set(), False)
        index.watch()
        assert index.take_changes() == Changes(set(), False)

    def test_what_came_and_what_went_is_told_once(self) -> None:
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

    def test_what_makes_room_is_told(self) -> None:
        index, told = self.make_watched(2)
        committed(index, A, B)
        told.take_changes()
        reserved(index, C)
        changes = told.take_changes()
        gone = {key for key in (A, B) if index.lookup(key) is LookupResult.MISS}
        assert gone and gone | {C} <= changes.keys

    def test_a_reset_says_that_any_answer_may_have_changed(self) -> None:
        index, told = self.make_watched(2)
        committed(index, A)
        index.clear()
        assert told.take_changes().is_any
        committed(index, B)
        assert told.take_changes() == Changes({B}, False)

    def test_uses_pins_and_questions_are_no_changes(self) -> None:
        index, told = self.make_watched(2)
        committed(index, A)
        told.take_changes()
        index.pin(A)
        index.touch([A])
        index.leading([A, B])
        index.unpin(A)
        assert told.take_changes() == Changes(set(), False)

    def test_no_answer_changes_untold(self) -> None:
        """Whatever is done: what a lookup says otherwise than at the last look was told."""
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

    def test_a_feed_that_nobody_takes_stays_small_and_says_so(self) -> None:
        feed = ChangeFeed(max_keys=4)
        for number in range(9):
            feed.add(b"%d" % number)
        assert feed.take() == Changes(set(), True)
        feed.add(A)
        assert feed.take() == Changes({A}, False)
        assert MAX_CHANGED_KEYS < 1 << 20


def _do_something(index: TierIndex, draw: random.Random, pinned: list[Key]) -> None:
    """One call that fits the state of the key it is for, or is a refusal."""
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
