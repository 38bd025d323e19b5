"""Of what it was said last that it goes first, for whoever copies it down or puts the order of use right behind that.

What goes first is of no use to a slower tier, and must not become recent again because it was on its way there, or is
part of a path that is. Each tier has its own order; this is what others have to know.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from hybridkv.tiers.contract import Key

MAX_DEMOTED = 65_536
"""Keys that are remembered. What was demoted before so many others is copied down as any other chunk."""


class Demoted:
    """Keys that were demoted and not used since, as far as that is remembered."""

    def __init__(self, max_keys: int = MAX_DEMOTED) -> None:
        self._max_keys = max_keys
        # Not a dict, which looks for its first key among all that were before it and are gone.
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[Key]) -> None:
        """These go first from now on."""
        mine = self._keys
        for key in keys:
            mine.pop(key, None)
            mine[key] = None
            if len(mine) > self._max_keys:
                mine.popitem(last=False)

    def discard(self, keys: Iterable[Key]) -> None:
        """Somebody uses these, or stores them anew."""
        if self._keys:
            for key in self._keys.keys() & keys:
                del self._keys[key]

    def others(self, keys: list[Key]) -> list[Key]:
        """Those that were not demoted, in their order."""
        mine = self._keys
        return [key for key in keys if key not in mine] if mine else keys

    def clear(self) -> None:
        """Nothing is stored any more."""
        self._keys.clear()
