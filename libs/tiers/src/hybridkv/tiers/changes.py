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
