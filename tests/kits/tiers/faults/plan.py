"""Plan of failures by call: a value that can be printed, stored and replayed. Deterministic; independent of any
tier."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from hybridkv.tiers.contract import FailureReason, Key, Refusal
from hybridkv.tiers.errors import TierConfigurationError


class Operation(enum.StrEnum):
    """A call that a rule can match."""

    STORE = "store"
    LOAD = "load"
    RESERVE = "reserve"
    COMMIT = "commit"
    PIN = "pin"


class Fail(msgspec.Struct, frozen=True, tag=True):
    """STORE, LOAD: complete with this reason; the inner medium is not called."""

    reason: FailureReason = FailureReason.IO


class Corrupt(msgspec.Struct, frozen=True, tag=True):
    """STORE: flip all bits of one stored byte after the store was sealed. The medium must expose its bytes."""

    byte_index: int = 0
    """Counted over the bytes of the slot; reduced modulo its size."""


class Delay(msgspec.Struct, frozen=True, tag=True):
    """STORE, LOAD: the completion misses this many polls."""

    num_polls: int = 1


class Drop(msgspec.Struct, frozen=True, tag=True):
    """STORE, LOAD: done, but the completion never comes."""


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """RESERVE: refused for this reason; the inner index is not called."""

    refusal: Refusal = Refusal.NO_ROOM


class Vanish(msgspec.Struct, frozen=True, tag=True):
    """COMMIT, PIN: the key is invalidated just before the call."""


Action: TypeAlias = Fail | Corrupt | Delay | Drop | Refuse | Vanish

_OPERATIONS: dict[type[Action], frozenset[Operation]] = {
    Fail: frozenset({Operation.STORE, Operation.LOAD}),
    Corrupt: frozenset({Operation.STORE}),
    Delay: frozenset({Operation.STORE, Operation.LOAD}),
    Drop: frozenset({Operation.STORE, Operation.LOAD}),
    Refuse: frozenset({Operation.RESERVE}),
    Vanish: frozenset({Operation.COMMIT, Operation.PIN}),
}


class Rule(msgspec.Struct, frozen=True):
    """Do `action` at the `nth` call of `operation` (first is 1; None: each), counting only calls for `key` if given."""

    operation: Operation
    action: Action
    key: Key | None = None
    nth: int | None = None

    def __post_init__(self) -> None:
        if self.operation not in _OPERATIONS[type(self.action)]:
            expected = "one of " + ", ".join(sorted(_OPERATIONS[type(self.action)]))
            raise TierConfigurationError("operation", f"{expected} for {self.action}", str(self.operation))
        if self.nth is not None and self.nth < 1:
            raise TierConfigurationError("nth", "a number >= 1", self.nth)
        if isinstance(self.action, Delay) and self.action.num_polls < 1:
            raise TierConfigurationError("num_polls", "a number >= 1", self.action.num_polls)


class FaultPlan(msgspec.Struct, frozen=True):
    """Rules in order of precedence: the first that matches a call acts, all that match count it. Empty: no failures."""

    rules: tuple[Rule, ...] = ()


class Trigger:
    """State of a plan: counts the calls that each rule matched."""

    def __init__(self, plan: FaultPlan) -> None:
        self._rules = plan.rules
        self._num_calls = [0] * len(plan.rules)

    def action(self, operation: Operation, key: Key) -> Action | None:
        """Counts this call and returns its action."""
        chosen: Action | None = None
        for position, rule in enumerate(self._rules):
            if rule.operation is not operation or rule.key not in (None, key):
                continue
            self._num_calls[position] += 1
            if chosen is None and rule.nth in (None, self._num_calls[position]):
                chosen = rule.action
        return chosen
