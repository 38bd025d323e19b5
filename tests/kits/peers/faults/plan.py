"""What shall happen to which read: a value that can be printed, stored and replayed. Deterministic."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport import TransferFailureReason


class Fail(msgspec.Struct, frozen=True, tag=True):
    """Nothing is read, and the read fails so."""

    reason: TransferFailureReason = TransferFailureReason.BROKEN


class Late(msgspec.Struct, frozen=True, tag=True):
    """It is over so many polls later."""

    num_polls: int = 1


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The bytes arrive and nobody hears of it: pending until it is cancelled."""


class HalfDone(msgspec.Struct, frozen=True, tag=True):
    """The first ranges arrive, and then it fails."""

    num_ranges: int = 1
    reason: TransferFailureReason = TransferFailureReason.GONE


class WrongBytes(msgspec.Struct, frozen=True, tag=True):
    """Done, with all bits of one byte that arrived turned round."""

    byte_index: int = 0
    """Counted over the bytes of the read; reduced modulo their number."""


class Vanish(msgspec.Struct, frozen=True, tag=True):
    """The peer is gone from this read on: it and every later one of this peer fails."""


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
    """Rules in order of precedence: the first that meets a read acts. Empty: idle."""

    rules: tuple[Rule, ...] = ()

    def action(self, nth: int) -> Action | None:
        """What happens to the nth read."""
        return next((rule.action for rule in self.rules if rule.nth in (None, nth)), None)
