"""The ledger of a remote index equals the reference ledger for calls at random, errors included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import NamedTuple

import pytest
from examples import examples

from hybridkv.planner import LookupResult
from hybridkv.tiers import Slot, TierProtocolError
from hybridkv.tiers.ledger import KeyState
from hybridkv.tiers.remote.ledger import RemoteEntry, RemoteLedger
from kits.plain_ledger import KeyLedger, LruPolicy

KEYS = [bytes([number]) for number in range(8)]
CAPACITY_BYTES, MAX_KEYS = 24, 5
OPERATIONS = ("reserve", "reserve", "commit", "commit", "abort", "pin_all", "unpin", "unpin", "unpin")
RARE = ("withdraw", "touch", "evict_next", "forget_all", "close_or_open")


class NumberedPlace(NamedTuple):
    num_bytes: int

    def slot(self, number: int) -> Slot:
        return Slot(((number, self.num_bytes),))


Entries = RemoteEntry[NumberedPlace]


class Numbers:
    """Space of the reference ledger: numbers as `RemoteLedger` gives them."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, key: bytes, num_bytes: int, cost: int) -> Entries:
        number, self.next = self.next, self.next + num_bytes
        return RemoteEntry(cost, KeyState.RESERVED, 0, key, number, NumberedPlace(num_bytes), False)

    def free(self, entry: Entries) -> None:
        """Does nothing."""

    def keep_only(self, entries: Iterable[Entries]) -> None:
        """Does nothing."""


class Both:
    """Both ledgers. Each method calls both, and checks that the results are equal."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.ledger: RemoteLedger[NumberedPlace] = RemoteLedger(CAPACITY_BYTES, MAX_KEYS)
        self.plain: KeyLedger[Entries] = KeyLedger(Numbers(), LruPolicy(), CAPACITY_BYTES, max_keys=MAX_KEYS)
        self.outcomes: Counter[str] = Counter()

    def do(self, operation: str) -> None:
        match operation:
            case "reserve":
                self.reserve(self.random.choice(KEYS), self.random.choice((1, 2, 3, 9, 24, 25)))
            case "commit" | "abort":
                self.both(operation, self.one(self.plain.reserved_now))
            case "unpin":
                self.both(operation, self.one(self.plain.pinned_now))
            case "pin_all" | "touch":
                hits = [key for key in KEYS if self.plain.lookup(key) is LookupResult.HIT]
                keys = self.random.choices(hits, k=self.random.randrange(4)) if hits else []
                self.both(operation, keys if operation == "pin_all" else [*keys, self.random.choice(KEYS)])
            case "withdraw":
                in_use = [*self.plain.reserved_now, *self.plain.pinned_now]
                self.both(operation, self.random.choice([*in_use, *KEYS]))
            case "evict_next" if self.plain.evictable:
                self.ledger.evict_next()
                self.plain.evict_next()
            case "forget_all" if self.random.random() < 0.2:
                self.both(operation)
            case "close_or_open":
                self.ledger.is_closed = self.plain.is_closed = self.random.random() < 0.2

    def one(self, fitting: Iterable[bytes]) -> bytes:
        """A key for which the call is valid, or sometimes any key."""
        keys = list(fitting)
        return self.random.choice(keys if keys and self.random.random() < 0.8 else KEYS)

    def both(self, operation: str, *arguments: object) -> None:
        result, expected = (outcome(side, operation, arguments) for side in (self.ledger, self.plain))
        assert result == expected, (operation, arguments)
        self.outcomes[f"{operation} {result if isinstance(result, bool) else type(result).__name__}"] += 1

    def reserve(self, key: bytes, num_bytes: int) -> None:
        ledger, plain = self.ledger, self.plain
        refusal = ledger.reserve_refusal(key, num_bytes)
        assert refusal == plain.reserve_refusal(key, num_bytes)
        if refusal is not None:
            self.outcomes[refusal] += 1
            assert ledger.tally.refuse(refusal) == plain.tally.refuse(refusal)
            return
        while ledger.used_bytes + num_bytes > CAPACITY_BYTES or len(ledger.by_key) == MAX_KEYS:
            ledger.evict_next()
        plain.make_room(num_bytes)
        assert values(ledger.take(key, NumberedPlace(num_bytes))) == values(plain.take(key, num_bytes, num_bytes))

    def check(self) -> None:
        ledger, plain = self.ledger, self.plain
        entries = {key: values(entry) for key, entry in ledger.by_key.items()}
        assert entries == {key: values(entry) for key, entry in plain.by_key.items()}
        assert [ledger.lookup(key) for key in KEYS] == [plain.lookup(key) for key in KEYS]
        assert list(ledger.evictable) == plain.eviction_order()
        assert ledger.num_in_use == plain.num_reserved + plain.num_pinned
        assert ledger.in_use_bytes == plain.used_bytes - plain.unpinned_bytes
        assert ledger.used_bytes == plain.used_bytes
        assert (ledger.num_keys, ledger.generation) == (plain.num_keys, plain.generation)


def outcome(ledger: object, operation: str, arguments: tuple[object, ...]) -> object:
    try:
        result = getattr(ledger, operation)(*arguments)
    except TierProtocolError as error:
        return str(error)
    return values(result) if isinstance(result, RemoteEntry) else result


def values(entry: Entries) -> tuple[object, ...]:
    return entry.cost, entry.state, entry.num_pins, entry.key, entry.slot


@pytest.mark.parametrize("seed", range(examples(20)))
def test_a_remote_ledger_equals_the_reference_ledger(seed: int) -> None:
    both = Both(Random(seed))
    for _ in range(2000):
        both.do(both.random.choice(OPERATIONS if both.random.random() < 0.8 else RARE))
        both.check()
    assert both.ledger.tally.take() == both.plain.take_counts()
    assert {"commit True", "commit False", "commit str", "abort NoneType", "abort str"} <= set(both.outcomes)
    assert {"unpin NoneType", "unpin str", "withdraw tuple", "withdraw NoneType"} <= set(both.outcomes)
    assert {"no_room", "too_large", "present", "closed"} <= set(both.outcomes)
