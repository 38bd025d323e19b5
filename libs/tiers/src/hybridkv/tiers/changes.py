"""Change feed of an index: keys with a changed lookup result, for a reader that keeps a copy of the state.

Off until a reader calls `watch`. Contains keys, not lookup results: the reader looks up each key. A key that was added
and removed between two reads costs one lookup.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from hybridkv.tiers.contract import Key

MAX_CHANGED_KEYS = 1 << 17
"""Most keys that a feed keeps. With more keys, the feed reports that any key may have changed."""


class Changes(NamedTuple):
    """Keys with a lookup result that may have changed since the last read."""

    keys: set[Key]
    is_any: bool
    """If True, any key may have changed, also keys outside of `keys`."""


@runtime_checkable
class ReportsChanges(Protocol):
    """Index with a change feed, for one reader."""

    def watch(self) -> None:
        """Start to keep changes. Does not include keys that were stored before."""
        ...

    def take_changes(self) -> Changes:
        """Changes since the last call, or since `watch`."""
        ...


class ChangeFeed:
    """Collects changed keys.

    Args:
        max_keys: most keys that the feed keeps. With more keys, `take` reports that any key may have changed.
    """

    __slots__ = ("_is_any", "_keys", "_max_keys")

    def __init__(self, max_keys: int = MAX_CHANGED_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: set[Key] = set()
        self._is_any = False

    def add(self, key: Key) -> None:
        """Record that the lookup result of this key changed."""
        if self._is_any:
            return
        self._keys.add(key)
        if len(self._keys) > self._max_keys:
            self.add_all()

    def add_all(self) -> None:
        """Record that the lookup result of any key may have changed."""
        self._keys = set()
        self._is_any = True

    def take(self) -> Changes:
        """Changes since the last call."""
        taken = Changes(self._keys, self._is_any)
        self._keys, self._is_any = set(), False
        return taken
