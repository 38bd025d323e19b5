"""Which key goes first: one interface for every policy, and the first of them, least recently used.

An order knows only what may be evicted now. Sizes, states and pins are the ledger's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from hybridkv.tiers.contract import Key
from hybridkv.tiers.ledger.states import E

OrderedE = TypeVar("OrderedE")


class EvictionOrder(Protocol[OrderedE]):
    """Of the keys that it tracks, which one is given up next. No call takes a step for each key but what it is told."""

    def track(self, key: Key, entry: OrderedE) -> None:
        """This key may be evicted from now on. It was just used, and is not tracked."""
        ...

    def touch(self, keys: Iterable[Key]) -> int:
        """These were used, the last one last. Those that are not tracked are passed over; how many these were."""
        ...

    def pick(self) -> tuple[Key, OrderedE]:
        """What goes next, which is tracked no more. `LookupError` when nothing is tracked."""
        ...

    def forget(self, key: Key) -> None:
        """This key may not be evicted any more, or is gone by other ways. It is tracked."""
        ...

    def give_up(self) -> None:
        """Track nothing any more."""
        ...

    def __len__(self) -> int:
        """Keys that are tracked."""
        ...

    def __iter__(self) -> Iterator[Key]:
        """They, in any order."""
        ...


class LeastRecentlyUsed(Generic[E]):
    """An `EvictionOrder` of which that goes first whose last use is longest ago. Iterates in that order."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, E] = OrderedDict()

    def track(self, key: Key, entry: E) -> None:
        self._entries[key] = entry

    def touch(self, keys: Iterable[Key]) -> int:
        entries, num_others = self._entries, 0
        for key in keys:
            if key in entries:
                entries.move_to_end(key)
            else:
                num_others += 1
        return num_others

    def pick(self) -> tuple[Key, E]:
        return self._entries.popitem(last=False)

    def forget(self, key: Key) -> None:
        del self._entries[key]

    def give_up(self) -> None:
        self._entries = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)
