"""What came to a tier and what went, for whoever keeps a picture of it: a feed that is off until somebody watches.

It says of which keys a lookup may answer otherwise than before, and not what the answer is: whoever wants to know asks
the index, which always tells what is so now. So a key that came and went between two looks costs one question.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from hybridkv.tiers.contract import Key

MAX_CHANGED_KEYS = 1 << 17
"""Keys that a feed names one by one. When nobody takes them for so long it says that any may have changed."""


class Changes(NamedTuple):
    """Keys of which a lookup may answer otherwise than when changes were last taken."""

    keys: set[Key]
    is_any: bool
    """Any key may be among them, also those that are not named."""


@runtime_checkable
class TellsChanges(Protocol):
    """An index that says which answers changed. One may watch; nothing is kept before."""

    def watch(self) -> None:
        """Keep changes from now on. What was there before is not among them."""
        ...

    def take_changes(self) -> Changes:
        """What changed since the last call, or since `watch`."""
        ...


class ChangeFeed:
    """Collects them.

    Args:
        max_keys: that are named one by one.
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
        """What was collected since the last call."""
        taken = Changes(self._keys, self._is_any)
        self._keys, self._is_any = set(), False
        return taken
