"""State machine of the reference ledger with its space and observer, in any order of calls; and its bounds."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hybridkv.planner import LookupResult
from hybridkv.tiers import Refusal, Slot, TierProtocolError
from hybridkv.tiers.ledger import Entry, KeyState
from kits.plain_ledger import KeyLedger, LruPolicy

KEYS = [bytes([number]) for number in range(6)]
CAPACITY_BYTES, LARGEST_BYTES, MAX_KEYS = 12, 7, 4

keys = st.sampled_from(KEYS)


class NumberedEntry(Entry):
    number: int

    @property
    def slot(self) -> Slot:
        return Slot(((self.number, 1),))


class Recorder:
    """Space and observer: the writers and readers of each entry, according to the callbacks."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.taken: dict[int, int] = {}
        """Cost per number."""
        self.writing: set[int] = set()
        self.reading: set[int] = set()
        self.offered: set[int] = set()
        """Includes entries that are about to be committed."""
        self.committed: set[int] = set()
        self.uses: list[int] = []

    def take(self, key: bytes, num_bytes: int, cost: int) -> NumberedEntry:
        number = next(self._numbers)
        self.taken[number] = cost
        self.writing.add(number)
        self.offered.add(number)
        return NumberedEntry(cost, KeyState.RESERVED, 0, number)

    def free(self, entry: NumberedEntry) -> None:
        number = entry.number
        assert number not in self.writing | self.reading | self.offered, "it is still in use"
        assert self.taken.pop(number) == entry.cost

    def keep_only(self, entries: Iterable[NumberedEntry]) -> None:
        kept = {entry.number for entry in entries}
        assert kept == self.writing | self.reading
        self.taken = {number: cost for number, cost in self.taken.items() if number in kept}
        self.offered.clear()

    def on_written(self, entry: NumberedEntry) -> None:
        self.writing.remove(entry.number)
        if entry.state is KeyState.COMMITTED:
            assert entry.number in self.offered
            self.committed.add(entry.number)

    def on_pinned(self, entry: NumberedEntry) -> None:
        assert entry.number not in self.reading | self.writing and entry.number in self.offered
        self.reading.add(entry.number)

    def on_unpinned(self, entry: NumberedEntry) -> None:
        self.reading.remove(entry.number)
        assert (entry.state is KeyState.COMMITTED) == (entry.number in self.offered)

    def on_used(self, entries: Iterable[NumberedEntry]) -> None:
        self.uses = [entry.number for entry in entries]

    def on_deleted(self, entry: NumberedEntry) -> None:
        self.offered.remove(entry.number)


class KeyLedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.ledger: KeyLedger[NumberedEntry] = KeyLedger(
            self.recorder, LruPolicy(), CAPACITY_BYTES, self.recorder, LARGEST_BYTES, MAX_KEYS
        )

    @rule(key=keys, cost=st.integers(min_value=1, max_value=LARGEST_BYTES + 1))
    def reserve(self, key: bytes, cost: int) -> None:
        before = self.ledger.used_bytes, self.ledger.generation
        refusal = self.ledger.reserve_refusal(key, cost)
        assert (self.ledger.used_bytes, self.ledger.generation) == before
        assert refusal is not Refusal.TOO_LARGE or cost > LARGEST_BYTES
        if refusal is None:
            self.ledger.make_room(cost)
            self.ledger.take(key, cost, cost)

    @rule(key=keys)
    def commit(self, key: bytes) -> None:
        is_offered = self.ledger.lookup(key) is LookupResult.PENDING
        with contextlib.suppress(TierProtocolError):
            assert self.ledger.commit(key) == is_offered

    @rule(key=keys)
    def abort(self, key: bytes) -> None:
        with contextlib.suppress(TierProtocolError):
            self.ledger.abort(key)
            assert self.ledger.lookup(key) is LookupResult.MISS

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        is_hit = self.ledger.lookup(key) is LookupResult.HIT
        assert (self.ledger.pin(key) is not None) == is_hit

    @rule(key=keys)
    def unpin(self, key: bytes) -> None:
        with contextlib.suppress(TierProtocolError):
            self.ledger.unpin(key)

    @rule(key=keys)
    def withdraw(self, key: bytes) -> None:
        is_held = self.ledger.lookup(key) is not LookupResult.MISS
        assert (self.ledger.withdraw(key) is not None) == is_held

    @rule(key=keys)
    def evict_at_once(self, key: bytes) -> None:
        if key in list(self.ledger.evictable):
            self.ledger.evict(key)
            assert self.ledger.lookup(key) is LookupResult.MISS

    @rule(touched=st.lists(keys, max_size=4))
    def touch(self, touched: list[bytes]) -> None:
        evictable = set(self.ledger.evictable)
        self.ledger.touch(touched)
        assert self.recorder.uses == [self.ledger.by_key[key].number for key in touched if key in evictable]

    @rule()
    def forget_all(self) -> None:
        num_offered, table = self.ledger.num_keys, self.ledger.by_key
        before = dict(table)
        assert self.ledger.forget_all() == num_offered
        assert table == before, "a reader of the old table sees the old entries"
        assert not len(self.ledger.evictable)

    @invariant()
    def recorder_equals_the_ledger(self) -> None:
        ledger, recorder = self.ledger, self.recorder
        entries = ledger.by_key.values()
        assert recorder.taken == {entry.number: entry.cost for entry in entries}
        assert recorder.writing == {entry.number for entry in ledger.reserved_now.values()}
        assert recorder.reading == {entry.number for entry in ledger.pinned_now.values()}
        held = {entry.number for entry in entries if entry.state.result is not LookupResult.MISS}
        assert recorder.offered == held and len(held) == ledger.num_keys
        assert {entry.number for entry in entries if entry.state is KeyState.COMMITTED} <= recorder.committed

    @invariant()
    def sums_and_bounds_hold(self) -> None:
        ledger = self.ledger
        assert ledger.used_bytes == sum(self.recorder.taken.values()) <= CAPACITY_BYTES
        free = [entry for entry in ledger.by_key.values() if entry.state is KeyState.COMMITTED and not entry.num_pins]
        assert ledger.unpinned_bytes == sum(entry.cost for entry in free)
        assert {ledger.by_key[key].number for key in ledger.evictable} == {entry.number for entry in free}
        assert len(ledger.by_key) <= MAX_KEYS

    @invariant()
    def lookups_of_many_equal_lookups_of_each(self) -> None:
        ledger = self.ledger
        for key in KEYS:
            answer = ledger.lookup(key)
            assert ledger.leading([key]) == (answer is not LookupResult.MISS)
            assert ledger.any_pending([key]) == (answer is LookupResult.PENDING)


KeyLedgerMachine.TestCase.settings = settings(max_examples=examples(150, 8), stateful_step_count=60, deadline=None)
TestKeyLedgerMachine = KeyLedgerMachine.TestCase


def make_ledger(max_keys: int | None = None) -> KeyLedger[NumberedEntry]:
    recorder = Recorder()
    return KeyLedger(recorder, LruPolicy(), CAPACITY_BYTES, recorder, max_keys=max_keys)


def store(ledger: KeyLedger[NumberedEntry], key: bytes) -> Refusal | None:
    refusal = ledger.reserve_refusal(key, 1)
    if refusal is None:
        ledger.make_room(1)
        ledger.take(key, 1, 1)
        ledger.commit(key)
    return refusal


def test_max_keys_is_not_exceeded() -> None:
    ledger = make_ledger(max_keys=2)
    for key in KEYS[:3]:
        assert store(ledger, key) is None
    assert list(ledger.evictable) == KEYS[1:3]
    assert ledger.pin_all(KEYS[1:3]) is not None
    assert store(ledger, KEYS[0]) is Refusal.NO_ROOM
    ledger.unpin(KEYS[1])
    assert store(ledger, KEYS[0]) is None


def test_without_max_keys_only_bytes_limit_a_ledger() -> None:
    ledger = make_ledger()
    assert {store(ledger, key) for key in KEYS} == {None}
    assert ledger.num_keys == len(KEYS)


def test_leading_finds_the_first_miss_in_any_iterable() -> None:
    ledger = make_ledger()
    for key in KEYS[:4]:
        store(ledger, key)
    for end in range(len(KEYS)):
        asked = [*KEYS[:end], b"unknown", *KEYS[:2]]
        for question in (asked, tuple(asked), iter(asked)):
            assert ledger.leading(question) == min(end, 4)
