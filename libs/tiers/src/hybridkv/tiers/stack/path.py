"""Position of a chunk among those that are used together, given by the caller that stores it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.tiers.contract import Key, TierIndex


class PathPosition(NamedTuple):
    """Position of a chunk among those that are used together.

    Args:
        needs: chunks that must be in a secondary tier, or in flight to it, before this one is of use there.
        path_bytes: bytes of its path up to and including this chunk, in each secondary tier, by `TierStack.costs`;
            empty if not known. A chunk beyond the capacity of a tier is not copied there, since it would only evict
            the beginning of its own path.
        prefix: further chunks that it needs, looked up once, when its turn comes.
    """

    needs: tuple[Key, ...] = ()
    path_bytes: tuple[int, ...] = ()
    prefix: tuple[Key, ...] = ()


ALONE = PathPosition()


def leading_held(index: TierIndex, keys: Sequence[Key]) -> int:
    """Number of leading keys that a tier does not lack, apart from async lookups."""
    num_held = index.leading(keys)
    if index.has_async_lookups:
        return next((place for place, key in enumerate(keys[:num_held]) if index.lacks(key)), num_held)
    return num_held


def holds_all(index: TierIndex, keys: Sequence[Key]) -> bool:
    """True if a tier lacks none of these keys, apart from async lookups."""
    return leading_held(index, keys) == len(keys)
