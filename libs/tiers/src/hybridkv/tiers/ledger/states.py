"""What a ledger knows of one key, whom it asks for space, and who hears of what happens.

Values and protocols; nothing here decides.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Slot


class KeyState(enum.Enum):
    """Of a key that a ledger knows. A value."""

    RESERVED = ("reserved", LookupResult.PENDING)
    COMMITTED = ("committed", LookupResult.HIT)
    DOOMED_WRITE = ("invalidated while it is being stored", LookupResult.MISS)
    DOOMED_READ = ("invalidated while it is pinned", LookupResult.MISS)

    def __init__(self, words: str, answer: LookupResult) -> None:
        self.words = words
        self.answer = answer


class Entry(msgspec.Struct, gc=False, eq=False):
    """One key of a ledger; where its bytes lie is a subclass's to say.

    It is in no cycle, so Python's collector of garbage is told not to look at it: there may be millions.
    """

    cost: int
    """What it takes up of the capacity, in bytes. One number for all of a size: there are few sizes and many keys."""
    state: KeyState
    num_pins: int

    @property
    def slot(self) -> Slot:
        raise NotImplementedError


E = TypeVar("E", bound=Entry)
E_contra = TypeVar("E_contra", bound=Entry, contravariant=True)


class Space(Protocol[E]):
    """Hands out a tier's space and takes it back. Asked only for what fits."""

    def take(self, key: Key, num_bytes: int, cost: int) -> E:
        """A reserved entry that somebody may write to from now on. The ledger counts `cost`."""
        ...

    def free(self, entry: E) -> None:
        """Nobody needs it any more."""
        ...

    def keep_only(self, entries: Iterable[E]) -> None:
        """Take back all but these, without a step for each."""
        ...


class Witness(Protocol[E_contra]):
    """Hears of the steps of a life, of which a space in memory need not know. The ledger has changed already, unless
    said otherwise."""

    def written(self, entry: E_contra) -> None:
        """Whoever wrote it is done: it is committed now, or else about to be freed."""
        ...

    def held(self, entry: E_contra) -> None:
        """It has a first reader."""
        ...

    def released(self, entry: E_contra) -> None:
        """It has no reader any more. Committed still, or else about to be freed."""
        ...

    def used(self, entries: Iterable[E_contra]) -> None:
        """Somebody made these, which may be evicted, the most recently used."""
        ...

    def gone(self, entry: E_contra) -> None:
        """It was offered, or was to be, and never will be again."""
        ...
