"""Index of host memory and its model in Python: equal answers to every call, equal counts and evictions.

HYBRIDKV_TWINS_FACTOR multiplies the length of the comparisons, with calls drawn at random.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import patience
import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hybridkv.planner import LookupResult
from hybridkv.tiers import (
    Changes,
    Refusal,
    ReportsChanges,
    Slot,
    TierConfigurationError,
    TierIndex,
    TierProtocolError,
)
from hybridkv.tiers.ram import RamIndex
from kits.plain_ram_index import PlainRamIndex

FACTOR = int(os.environ.get("HYBRIDKV_TWINS_FACTOR", "1"))

# Also keys too long for an entry, and keys with a common prefix.
KEYS = [bytes([number]) * (48, 1, 200, 32, 49)[number % 5] for number in range(40)] + [b"", b"\0", b"\0\0"]
EXTENDED = st.lists(st.sampled_from(KEYS[:6]), max_size=2).map(tuple)
QUESTIONS = ("leading", "last_held", "any_pending")
BATCHES = ("touch", "unpin_all", "commit_all", "invalidate_all", "pin_all", *QUESTIONS)
SINGLES = ("commit", "abort", "invalidate", "pin", "unpin", "find", "lookup", "lacks")
NUMBERS = (
    "capacity_bytes",
    "used_bytes",
    "num_keys",
    "generation",
    "num_reserved",
    "num_pinned",
    "is_closed",
    "max_keys",
)


class Twins:
    """Both indexes, and the slots of each: only the places of slots may differ."""

    def __init__(self, num_granules: int, granule_bytes: int, smallest_bytes: int) -> None:
        self.pair: tuple[RamIndex, PlainRamIndex] = (
            RamIndex(num_granules * granule_bytes, granule_bytes, smallest_bytes),
            PlainRamIndex(num_granules * granule_bytes, granule_bytes, smallest_bytes),
        )
        self.granule_bytes = granule_bytes
        self.slots: tuple[dict[bytes, Slot], dict[bytes, Slot]] = ({}, {})

    def both(self, operation: str, *arguments: object) -> object:
        """Result of the call, checked to be equal on both."""
        results = [self._outcome(side, operation, arguments) for side in (0, 1)]
        assert results[0] == results[1], (operation, arguments)
        return results[0]

    def _outcome(self, side: int, operation: str, arguments: tuple[Any, ...]) -> object:
        index, slots = self.pair[side], self.slots[side]
        try:
            answer = getattr(index, operation)(*arguments)
        except TierProtocolError as error:
            return str(error)
        if operation == "reserve":
            return self._taken(slots, arguments[0], answer)
        if operation == "reserve_all":
            return [self._taken(slots, key, each) for (key, *_), each in zip(arguments[0], answer, strict=True)]
        if operation in ("pin", "find") and answer is not None:
            assert answer == slots[arguments[0]]
            return answer.num_bytes
        if operation == "pin_all" and answer is not None:
            assert answer == [slots[key] for key in arguments[0]]
            return len(answer)
        return answer

    @staticmethod
    def _taken(slots: dict[bytes, Slot], key: bytes, answer: Slot | Refusal) -> object:
        if not isinstance(answer, Slot):
            return answer
        slots[key] = answer
        return answer.num_bytes

    def check(self) -> None:
        native, plain = self.pair
        for name in NUMBERS:
            assert getattr(native, name) == getattr(plain, name), name
        assert native.eviction_order() == plain.eviction_order()
        assert isinstance(plain, PlainRamIndex)
        taken: list[int] = []
        for key in plain.by_key:
            for offset, num_bytes in self.slots[0][key].extents:
                assert offset % self.granule_bytes == 0 and 0 < num_bytes <= native.capacity_bytes - offset
                taken.extend(range(offset // self.granule_bytes, -(-(offset + num_bytes) // self.granule_bytes)))
        assert len(set(taken)) == len(taken) == native.used_bytes // self.granule_bytes


def random_calls(random: Random, twins: Twins) -> Iterator[tuple[Any, ...]]:
    """Endless calls, most of them valid: names of operations with their arguments."""
    _, plain = twins.pair
    most_bytes = plain.capacity_bytes // 4 + 16

    def fitting(operation: str) -> list[bytes]:
        """Keys for which the operation is valid."""
        if operation.startswith(("commit", "abort")):
            return list(plain.reserved_now)
        if operation.startswith("unpin"):
            return list(plain.pinned_now)
        if operation.startswith(("reserve", "invalidate")):
            return KEYS
        return [*plain.eviction_order(), *plain.pinned_now]

    def some(operation: str) -> list[bytes]:
        keys = fitting(operation)
        if random.random() < 0.15:
            return random.choices(KEYS, k=random.randrange(5))
        if operation != "pin_all" and random.random() < 0.05:
            return random.choices(keys or KEYS, k=random.randrange(300, 700))
        return random.sample(keys, random.randrange(min(len(keys), 6) + 1))

    def one(operation: str) -> bytes:
        keys = fitting(operation)
        return random.choice(keys if keys and random.random() < 0.85 else KEYS)

    def size() -> int:
        return random.randrange(1, most_bytes if random.random() < 0.95 else 4 * most_bytes)

    def extended() -> tuple[bytes, ...]:
        keys = [*plain.reserved_now, *plain.pinned_now, *plain.eviction_order(), random.choice(KEYS)]
        return tuple(random.choices(keys, k=random.randrange(3)))

    while True:
        turn = random.random()
        if turn < 0.15:
            yield "reserve", random.choice(KEYS), size(), extended()
        elif turn < 0.25:
            yield "reserve_all", [random.choice(((key, size()), (key, size(), extended()))) for key in some("reserve")]
        elif turn < 0.3:
            keys = some("touch")
            yield "touch", keys, [extended() for _ in keys]
        elif turn < 0.55:
            operation = random.choice((*SINGLES, "commit", "commit", "unpin", "unpin"))
            yield operation, one(operation)
        elif turn < 0.995:
            operation = random.choice((*BATCHES, "unpin_all", "commit_all"))
            yield operation, random.choice((list, tuple))(some(operation))
        else:
            yield (random.choice(("take_counts", "take_changes", "take_changes", "clear")),)


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_are_answered_alike(seed: int) -> None:
    random = Random(seed if FACTOR == 1 else None)
    for turn in range(examples(30, 8) * FACTOR):
        num_granules = random.choice((1, 5, 20, 300))
        twins = Twins(num_granules, 16, random.choice((1, 1, 33, 64)))
        if turn % 2:
            twins.both("watch")
        for number, call in zip(range(1000), random_calls(random, twins), strict=False):
            twins.both(*call)
            if number % 20 == 0:
                twins.check()
        twins.both("close")
        for key in KEYS:
            twins.both("reserve", key, 1)
        twins.check()


class TwinsMachine(RuleBasedStateMachine):
    """State machine version, so that Hypothesis can shrink a failure."""

    @initialize(num_granules=st.sampled_from((1, 4, 10)), smallest_bytes=st.sampled_from((1, 40)))
    def begin(self, num_granules: int, smallest_bytes: int) -> None:
        self.twins = Twins(num_granules, 16, smallest_bytes)
        self.twins.both("watch")

    @rule(key=st.sampled_from(KEYS[:6]), num_bytes=st.integers(-1, 180), extends=EXTENDED)
    def reserve(self, key: bytes, num_bytes: int, extends: tuple[bytes, ...]) -> None:
        self.twins.both("reserve", key, num_bytes, extends)

    @rule(pairs=st.lists(st.tuples(st.sampled_from(KEYS[:6]), EXTENDED), max_size=6))
    def touch(self, pairs: list[tuple[bytes, tuple[bytes, ...]]]) -> None:
        self.twins.both("touch", [key for key, _ in pairs], [extends for _, extends in pairs])

    @rule(chunks=st.lists(st.tuples(st.sampled_from(KEYS[:6]), st.integers(1, 60)), max_size=5))
    def reserve_all(self, chunks: list[tuple[bytes, int]]) -> None:
        self.twins.both("reserve_all", chunks)

    @rule(operation=st.sampled_from(SINGLES), key=st.sampled_from(KEYS[:6]))
    def single(self, operation: str, key: bytes) -> None:
        self.twins.both(operation, key)

    @rule(operation=st.sampled_from(BATCHES), keys=st.lists(st.sampled_from(KEYS[:6]), max_size=6))
    def batch(self, operation: str, keys: list[bytes]) -> None:
        self.twins.both(operation, keys)

    @rule(operation=st.sampled_from(("take_counts", "take_changes", "clear")))
    def whole(self, operation: str) -> None:
        self.twins.both(operation)

    @invariant()
    def both_indexes_are_alike(self) -> None:
        if hasattr(self, "twins"):
            self.twins.check()


TwinsMachine.TestCase.settings = settings(
    max_examples=examples(150, 8) * FACTOR,
    stateful_step_count=60,
    deadline=None,
    derandomize=FACTOR == 1,
    database=None,
)
TestTwinsMachine = TwinsMachine.TestCase


def test_a_ram_index_reports_changes() -> None:
    index = RamIndex(1 << 20, 4096, 3 * 4096)
    assert isinstance(index, TierIndex) and isinstance(index, ReportsChanges)
    assert index.max_keys == 85 and index.before_reserving is None


def test_a_feed_that_is_not_read_stays_small_and_reports_any() -> None:
    index = RamIndex(64 * 16, 16)
    index.watch_at_most(4)
    for number in range(9):
        index.reserve(b"%d" % number, 16)
    assert index.take_changes() == Changes(set(), True)
    index.reserve(b"more", 16)
    assert index.take_changes() == Changes({b"more"}, False)


def test_a_reservation_first_runs_the_callback_that_may_pin() -> None:
    for index in (RamIndex(64, 16), PlainRamIndex(64, 16)):
        assert isinstance(index.reserve(b"read", 16), Slot) and index.commit(b"read")
        index.before_reserving = lambda index=index: index.num_pinned or index.pin(b"read")
        assert [isinstance(each, Slot) for each in index.reserve_all([(b"%d" % n, 16) for n in range(4)])] == [
            True,
            True,
            True,
            False,
        ]
        assert index.lookup(b"read") is LookupResult.HIT
        index.unpin(b"read")
        assert index.reserve(b"more", 32) is Refusal.NO_ROOM and index.num_pinned == 1


def test_a_reservation_accepts_any_integer_as_size() -> None:
    twins = Twins(4, 16, 1)
    for num_bytes in (1 << 62, 1 << 63, 1 << 200):
        assert twins.both("reserve", b"key", num_bytes) is Refusal.TOO_LARGE
        assert twins.both("reserve_all", [(b"key", num_bytes)]) == [Refusal.TOO_LARGE]
    for num_bytes in (0, -1, -(1 << 200)):
        assert str(num_bytes) in str(twins.both("reserve", b"key", num_bytes))


def test_a_key_of_another_type_is_a_type_error() -> None:
    index = RamIndex(64, 16)
    index.reserve(b"key", 16)
    for call in (index.lookup, index.pin, index.commit, index.lacks):
        with pytest.raises(TypeError):
            call("key")
    for call in (index.leading, index.last_held, index.any_pending, index.touch, index.pin_all, index.commit_all):
        with pytest.raises(TypeError):
            call([b"key", 7])
        with pytest.raises(TypeError):
            call(7)
    for chunks in ([b"key"], [(b"key",)], [(b"key", "7")], 7):
        with pytest.raises(TypeError):
            index.reserve_all(chunks)


def test_too_many_granules_to_number_are_refused() -> None:
    for capacity_bytes, granule_bytes in ((1 << 40, 1), (1 << 40, 1 << 33)):
        with pytest.raises(TierConfigurationError):
            RamIndex(capacity_bytes, granule_bytes)


def test_a_call_stays_consistent_when_garbage_collection_reenters() -> None:
    """Allocation of an object may run the garbage collector, and with it any code."""
    index, keys = RamIndex(1 << 20, 16), [b"%d" % number for number in range(10_000)]
    index.reserve_all([(key, 16) for key in keys])
    index.commit_all(keys)

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            index.clear()
            index.reserve(b"other", 64)

    threshold = gc.get_threshold()
    gc.set_threshold(5)
    try:
        Cycle()
        slots = index.pin_all(keys)
        assert index.lookup(keys[0]) is LookupResult.MISS, "the collector called back"
    finally:
        gc.set_threshold(*threshold)
    assert slots is not None and [slot.num_bytes for slot in slots] == [16] * 10_000
    assert index.num_pinned == 10_000
    index.unpin_all(keys)
    assert index.used_bytes == 64


def test_other_threads_may_look_keys_up_during_calls() -> None:
    index, keys = RamIndex(64 * 16, 16), [b"%d" % number for number in range(128)]
    is_over = threading.Event()
    found: list[int] = []

    def look() -> None:
        while not is_over.is_set():
            slots = [index.find(key) for key in keys]
            found.append(sum(slot is not None and slot.num_bytes == 16 for slot in slots))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + patience.seconds(6.0)
    for turn in itertools.count():
        # On a busy machine the other threads may not run before the calls are made.
        if turn >= 3000 and (max(found, default=0) > 0 or time.monotonic() > deadline_s):
            break
        key = keys[turn % len(keys)]
        if isinstance(index.reserve(key, 16), Slot):
            index.commit(key)
        if turn % 500 == 0:
            index.clear()
    is_over.set()
    for thread in threads:
        thread.join()
    assert max(found) > 0


def test_memory_of_cleared_keys_is_freed_by_the_next_stores() -> None:
    count = 20_000
    index, keys = RamIndex(count * 16, 16), [number.to_bytes(32, "little") for number in range(count)]
    index.reserve_all([(key, 16) for key in keys])
    assert index.leftover_bytes == 0 and index.clear() == count
    left = index.leftover_bytes
    assert left > 0
    assert index.used_bytes == count * 16 and index.reserve(b"more", 16) is Refusal.NO_ROOM
    assert index.leftover_bytes == left, "a refusal changes nothing"
    for key in keys:
        index.abort(key)
    index.reserve_all([(key, 16) for key in keys])
    assert index.leftover_bytes == 0


BOUNDED = """
import resource
from hybridkv.tiers import TierConfigurationError
from hybridkv.tiers.ram import RamIndex
_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, most))
try:
    RamIndex(1 << 43, 4096)
except TierConfigurationError as error:
    print(error)
"""


def test_a_lack_of_address_space_for_tables_is_reported() -> None:
    results = subprocess.run(
        [sys.executable, "-c", BOUNDED], check=True, capture_output=True, text=True, timeout=patience.seconds(12.0)
    )
    assert "address space" in results.stdout and "ulimit -v" in results.stdout


MEASURED = """
import os, sys
from hybridkv.tiers.ram import RamIndex
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
count, chunk = int(sys.argv[1]), 20 * 4096
before = resident()
index = RamIndex(count * chunk, 4096, chunk)
begun = resident()
for first in range(0, count, 1000):
    keys = [number.to_bytes(48, "little") for number in range(first, first + 1000)]
    index.reserve_all([(key, chunk) for key in keys])
    index.commit_all(keys)
assert index.num_keys == count
print(begun - before, resident() - before, index.max_index_bytes)
"""


def test_an_index_costs_nothing_at_first_and_at_most_116_bytes_a_key() -> None:
    count = 200_000
    run = [sys.executable, "-c", MEASURED, str(count)]
    results = subprocess.run(run, check=True, capture_output=True, text=True, timeout=patience.seconds(12.0)).stdout
    begun, full, most = map(int, results.split())
    # Python's own part is about 1 MiB of the measurement.
    assert begun < 1 << 20 and full < 116 * count + (2 << 20) and most <= 116 * count
