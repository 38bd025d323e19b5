"""Change feed of an index: keys with a changed lookup answer, for a reader that keeps a copy of the state.

Off until a reader calls `watch`. Contains keys, not answers: the reader looks the key up, so a key that came and went
between two reads costs one lookup.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from hybridkv.tiers.contract import Key

MAX_CHANGED_KEYS = 1 << 17
"""Keys that a feed keeps. If more collect, it reports that any key may have changed."""


class Changes(NamedTuple):
    """Keys for which a lookup may answer differently than at the last read."""

    keys: set[Key]
    is_any: bool
    """Any key may have changed, not only those in `keys`."""


@runtime_checkable
class ReportsChanges(Protocol):
    """An index with a change feed, for one reader."""

    def watch(self) -> None:
        """Start to keep changes. Keys stored before are not included."""
        ...

    def take_changes(self) -> Changes:
        """Changes since the last call, or since `watch`."""
        ...


class ChangeFeed:
    """Collects changed keys.

    Args:
        max_keys: keys to keep; beyond that any key may have changed.
    """

    __slots__ = ("_is_any", "_keys", "_max_keys")

    def __init__(self, max_keys: int = MAX_CHANGED_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: set[Key] = set()
        self._is_any = False

    def add(self, key: Key) -> None:
        """The answer for this key changed."""
        if self._is_any:
            return
        self._keys.add(key)
        if len(self._keys) > self._max_keys:
            self.add_all()

    def add_all(self) -> None:
        """The answer for any key may have changed."""
        self._keys = set()
        self._is_any = True

    def take(self) -> Changes:
        """Changes since the last call."""
        taken = Changes(self._keys, self._is_any)
        self._keys, self._is_any = set(), False
        return taken
