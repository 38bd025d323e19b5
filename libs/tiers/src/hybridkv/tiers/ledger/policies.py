"""Eviction policies: the protocol, and the LRU policy.

A policy contains only the keys that may be evicted now. Sizes, states and pins are in the ledger.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from hybridkv.tiers.contract import Key
from hybridkv.tiers.ledger.states import E

EntryT = TypeVar("EntryT")


class EvictionPolicy(Protocol[EntryT]):
    """Chooses the next key to evict among the tracked keys. The cost of a call does not depend on the number of tracked
    keys."""

    def track(self, key: Key, entry: EntryT, *, is_next: bool = False) -> None:
        """Add a key as the most recently used key, or with `is_next` as the next key to evict. The key must not be
        tracked yet."""
        ...

    def touch(self, keys: Iterable[Key]) -> int:
        """Mark keys as used, in order. Ignores untracked keys, and returns their number."""
        ...

    def pick(self) -> tuple[Key, EntryT]:
        """Remove and return the next key to evict. `LookupError` if there is none."""
        ...

    def forget(self, key: Key) -> None:
        """Remove a tracked key."""
        ...

    def clear(self) -> None:
        """Remove all keys."""
        ...

    def __len__(self) -> int:
        """Number of tracked keys."""
        ...

    def __iter__(self) -> Iterator[Key]:
        """Tracked keys, in any order."""
        ...


class LruPolicy(Generic[E]):
    """LRU `EvictionPolicy`. Iterates from the least to the most recently used key."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, E] = OrderedDict()

    def track(self, key: Key, entry: E, *, is_next: bool = False) -> None:
        self._entries[key] = entry
        if is_next:
            self._entries.move_to_end(key, last=False)

    def touch(self, keys: Iterable[Key]) -> int:
        entries, num_untracked = self._entries, 0
        for key in keys:
            if key in entries:
                entries.move_to_end(key)
            else:
                num_untracked += 1
        return num_untracked

    def pick(self) -> tuple[Key, E]:
        return self._entries.popitem(last=False)

    def forget(self, key: Key) -> None:
        del self._entries[key]

    def clear(self) -> None:
        self._entries = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)
