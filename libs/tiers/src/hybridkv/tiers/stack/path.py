"""Where a chunk stands among those that are used together, as whoever stores it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.tiers.contract import Key, TierIndex


class PathPosition(NamedTuple):
    """Where a chunk stands among those that are used together.

    Args:
        needs: what must be in the slower tier, or on its way there, so that the chunk is worth anything there.
        path_bytes: what its path takes up from its beginning on, the chunk included, in each slower tier as
            `TierStack.costs` says; empty if nobody knows. What is beyond the whole of a tier is not copied there: it
            would only push out its own beginning.
        prefix: more that it needs, which nothing says is there: looked up once, when its turn comes.
    """

    needs: tuple[Key, ...] = ()
    path_bytes: tuple[int, ...] = ()
    prefix: tuple[Key, ...] = ()


ALONE = PathPosition()


def leading_held(index: TierIndex, keys: Sequence[Key]) -> int:
    """How many in a row, from the first, a tier does not lack, whatever it was asked."""
    num_held = index.leading(keys)
    if index.answers_late:
        return next((place for place, key in enumerate(keys[:num_held]) if index.lacks(key)), num_held)
    return num_held


def holds_all(index: TierIndex, keys: Sequence[Key]) -> bool:
    """Whether a tier lacks none of these, whatever it was asked."""
    return leading_held(index, keys) == len(keys)
