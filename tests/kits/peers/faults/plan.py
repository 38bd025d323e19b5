"""Plan of faults by read: a value that can be printed, stored and replayed. Deterministic."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport import TransferFailureReason


class Fail(msgspec.Struct, frozen=True, tag=True):
    """Nothing is read, and the read fails with this reason."""

    reason: TransferFailureReason = TransferFailureReason.BROKEN


class Late(msgspec.Struct, frozen=True, tag=True):
    """The read ends this many polls later."""

    num_polls: int = 1


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The bytes arrive without a completion: pending until it is cancelled."""


class HalfDone(msgspec.Struct, frozen=True, tag=True):
    """The first ranges arrive, then the read fails."""

    num_ranges: int = 1
    reason: TransferFailureReason = TransferFailureReason.GONE


class WrongBytes(msgspec.Struct, frozen=True, tag=True):
    """Done, with all bits of one received byte inverted."""

    byte_index: int = 0
    """Counted over the bytes of the read; reduced modulo their number."""


class Vanish(msgspec.Struct, frozen=True, tag=True):
    """The peer is gone from this read on: this and every later read of it fails."""


Action: TypeAlias = Fail | Late | Lost | HalfDone | WrongBytes | Vanish


class Rule(msgspec.Struct, frozen=True):
    """Do `action` at the `nth` read that is not empty (the first is 1; None: each)."""

    action: Action
    nth: int | None = None

    def __post_init__(self) -> None:
        if self.nth is not None and self.nth < 1:
            raise PeersConfigurationError("nth", "a number >= 1", self.nth)
        if isinstance(self.action, Late) and self.action.num_polls < 1:
            raise PeersConfigurationError("num_polls", "a number >= 1", self.action.num_polls)


class FaultPlan(msgspec.Struct, frozen=True):
    """Rules in order of precedence: the first that matches a read acts. Empty: no faults."""

    rules: tuple[Rule, ...] = ()

    def action(self, nth: int) -> Action | None:
        """The action for the nth read."""
        return next((rule.action for rule in self.rules if rule.nth in (None, nth)), None)
