"""State machine: RamIndex and the reference index answer any sequence of calls alike, and slots never overlap."""

from __future__ import annotations

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hybridkv.tiers import Slot, TierIndex, TierProtocolError
from hybridkv.tiers.ram import RamIndex
from kits.tiers.reference import ReferenceIndex

GRANULE_BYTES = 16
CAPACITY_BYTES = 10 * GRANULE_BYTES + 5

keys = st.sampled_from([bytes([number]) for number in range(8)])
sizes = st.integers(min_value=0, max_value=CAPACITY_BYTES + GRANULE_BYTES)


def outcome(index: TierIndex, operation: str, *arguments: object) -> object:
    """Comparable result of a call: of a slot only its size; an error is a result too."""
    try:
        answer = getattr(index, operation)(*arguments)
    except TierProtocolError:
        return TierProtocolError
    return ("slot", answer.num_bytes) if isinstance(answer, Slot) else answer


class RamIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ram = RamIndex(CAPACITY_BYTES, GRANULE_BYTES)
        self.reference = ReferenceIndex(CAPACITY_BYTES, GRANULE_BYTES)
        self.slots: dict[bytes, Slot] = {}
        self.answers = (self.ram.generation, self.lookups())

    def lookups(self) -> list[object]:
        return [self.ram.lookup(bytes([number])) for number in range(8)]

    def both(self, operation: str, *arguments: object) -> None:
        assert outcome(self.ram, operation, *arguments) == outcome(self.reference, operation, *arguments)

    @rule(key=keys, num_bytes=sizes)
    def reserve(self, key: bytes, num_bytes: int) -> None:
        expected = outcome(self.reference, "reserve", key, num_bytes)
        try:
            slot = self.ram.reserve(key, num_bytes)
        except TierProtocolError:
            assert expected is TierProtocolError
            return
        if isinstance(slot, Slot):
            assert expected == ("slot", num_bytes)
            self.slots[key] = slot
        else:
            assert slot == expected

    @rule(key=keys)
    def commit(self, key: bytes) -> None:
        self.both("commit", key)

    @rule(key=keys)
    def abort(self, key: bytes) -> None:
        self.both("abort", key)

    @rule(key=keys)
    def invalidate(self, key: bytes) -> None:
        self.both("invalidate", key)

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        slot = self.ram.pin(key)
        expected = self.reference.pin(key)
        assert (slot is None) == (expected is None)
        assert slot is None or slot == self.slots[key]

    @rule(key=keys)
    def unpin(self, key: bytes) -> None:
        self.both("unpin", key)

    @rule(chunks=st.lists(st.tuples(keys, sizes.filter(bool)), max_size=4))
    def reserve_many(self, chunks: list[tuple[bytes, int]]) -> None:
        answers, expected = self.ram.reserve_all(chunks), self.reference.reserve_all(chunks)
        for (key, _), answer, other in zip(chunks, answers, expected, strict=True):
            assert isinstance(answer, Slot) == isinstance(other, Slot)
            if isinstance(answer, Slot) and isinstance(other, Slot):
                assert answer.num_bytes == other.num_bytes
                self.slots[key] = answer
            else:
                assert answer == other

    @rule(many=st.lists(keys, max_size=4))
    def unpin_many(self, many: list[bytes]) -> None:
        self.both("unpin_all", many)

    @rule(many=st.lists(keys, max_size=4))
    def pin_many(self, many: list[bytes]) -> None:
        slots, expected = self.ram.pin_all(many), self.reference.pin_all(many)
        assert (slots is None) == (expected is None)
        assert slots is None or slots == [self.slots[key] for key in many]

    @rule(touched=st.lists(keys, max_size=4))
    def touch(self, touched: list[bytes]) -> None:
        self.both("touch", touched)

    @rule(asked=st.lists(keys, max_size=6))
    def ask_about_many(self, asked: list[bytes]) -> None:
        for question in ("leading", "last_held", "any_pending"):
            self.both(question, asked)

    @rule()
    def take_counts(self) -> None:
        assert self.ram.take_counts() == self.reference.take_counts()

    @rule(is_closing=st.integers(min_value=0, max_value=9))
    def clear(self, is_closing: int) -> None:
        self.both("close" if is_closing == 0 else "clear")

    @invariant()
    def both_indexes_answer_alike(self) -> None:
        for number in range(8):
            self.both("lookup", bytes([number]))
        for name in ("capacity_bytes", "used_bytes", "num_keys", "generation"):
            assert getattr(self.ram, name) == getattr(self.reference, name), name

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        assert 0 <= self.ram.used_bytes <= self.ram.capacity_bytes <= CAPACITY_BYTES

    @invariant()
    def answers_change_only_with_the_generation(self) -> None:
        generation, lookups = self.answers
        self.answers = (self.ram.generation, self.lookups())
        assert self.answers[1] == lookups or self.answers[0] != generation

    @invariant()
    def live_slots_do_not_overlap(self) -> None:
        # The reference keeps all keys that occupy space in one dict, also deleted ones with pins.
        granules: list[int] = []
        for key in self.reference._entries:
            for offset, num_bytes in self.slots[key].extents:
                assert offset % GRANULE_BYTES == 0
                assert num_bytes > 0
                assert offset + num_bytes <= self.ram.capacity_bytes
                granules.extend(range(offset // GRANULE_BYTES, -(-(offset + num_bytes) // GRANULE_BYTES)))
        assert len(set(granules)) == len(granules)
        assert len(granules) * GRANULE_BYTES == self.ram.used_bytes


RamIndexMachine.TestCase.settings = settings(max_examples=examples(150, 8), stateful_step_count=60, deadline=None)
TestRamIndexMachine = RamIndexMachine.TestCase
