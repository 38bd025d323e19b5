"""Entries of a ledger: state, cost and pins of a key."""

from __future__ import annotations

import enum

import msgspec

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Slot


class KeyState(enum.Enum):
    """State of a key in a ledger. A deleted key keeps its space until its write or its last pin ends."""

    RESERVED = ("reserved", LookupResult.PENDING)
    COMMITTED = ("committed", LookupResult.HIT)
    DELETED_WHILE_WRITTEN = ("invalidated while it is being stored", LookupResult.MISS)
    DELETED_WHILE_PINNED = ("invalidated while it is pinned", LookupResult.MISS)

    def __init__(self, text: str, result: LookupResult) -> None:
        self.text = text
        self.result = result


class Entry(msgspec.Struct, gc=False, eq=False):
    """One key of a ledger. A subclass adds the place of the bytes.

    Not tracked by the garbage collector: entries are in no cycles, and a ledger may have millions.
    """

    cost: int
    """Bytes of the capacity that the key uses. Keys of one size share one integer object: few sizes, many keys."""
    state: KeyState
    num_pins: int

    @property
    def slot(self) -> Slot:
        raise NotImplementedError
