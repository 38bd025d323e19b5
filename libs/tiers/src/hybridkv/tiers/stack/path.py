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


def holds_all(index: TierIndex, keys: Sequence[Key]) -> bool:
    """Whether a tier lacks none of these, whatever it was asked."""
    if index.leading(keys) < len(keys):
        return False
    return not (index.answers_late and any(map(index.lacks, keys)))
