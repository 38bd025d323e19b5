"""Entries of a ledger, and the protocols of a space and an observer."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Slot


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


E = TypeVar("E", bound=Entry)
E_contra = TypeVar("E_contra", bound=Entry, contravariant=True)


class Space(Protocol[E]):
    """Space of a tier: assigns and frees places. The ledger never requests more than the free space."""

    def take(self, key: Key, num_bytes: int, cost: int) -> E:
        """Assign space, and return a reserved entry. The ledger counts `cost`."""
        ...

    def free(self, entry: E) -> None:
        """Free the space of an entry."""
        ...

    def keep_only(self, entries: Iterable[E]) -> None:
        """Free the space of all other entries, without a loop over these."""
        ...


class LedgerObserver(Protocol[E_contra]):
    """Callbacks for state changes and uses of a key. Not called for reservations, and not by `forget_all`."""

    def on_written(self, entry: E_contra) -> None:
        """The write ended: the entry is committed, or is freed next."""
        ...

    def on_pinned(self, entry: E_contra) -> None:
        """The entry got its first pin."""
        ...

    def on_unpinned(self, entry: E_contra) -> None:
        """The entry lost its last pin: the entry is committed, or is freed next."""
        ...

    def on_used(self, entries: Iterable[E_contra]) -> None:
        """Committed, unpinned entries were touched."""
        ...

    def on_deleted(self, entry: E_contra) -> None:
        """The entry is not offered any more."""
        ...
