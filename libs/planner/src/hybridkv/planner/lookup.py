"""What a tier may be asked, and what it may answer, and nothing else."""

import enum
from collections.abc import Callable
from typing import Protocol, TypeAlias


class LookupResult(enum.Enum):
    """The answer to "is this chunk stored?"."""

    HIT = "hit"
    """Stored and readable now."""
    PENDING = "pending"
    """On its way into the tier: worth asking again, not readable yet."""
    MISS = "miss"
    """Not stored."""


Lookup: TypeAlias = Callable[[int, int], LookupResult]
"""`lookup(group_index, end_token)`: is this group's part of the chunk (or tail) that ends there stored?

An answer that is no `LookupResult` counts as MISS.
"""


def is_held(answer: LookupResult) -> bool:
    """Whether a chunk is in the tier, or on its way into it. What is no `LookupResult` at all says neither."""
    return answer is LookupResult.HIT or answer is LookupResult.PENDING


class RangeLookup(Protocol):
    """Answers about many chunks of one group at once, where a tier has something better than one key at a time.

    A chunk is held when its answer is not MISS. Both ends are included, and are ends of chunks.
    """

    def held(self, group_index: int, first_end: int, last_end: int) -> int:
        """How many chunks are held in a row, from the one that ends at `first_end` up to `last_end` at most."""
        ...

    def last_held(self, group_index: int, first_end: int, last_end: int) -> int:
        """The last end in the range that is held, 0 if none.

        Where the cache stores tails, ends of tails count too: every multiple of `CacheSpec.boundary_tokens`.
        """
        ...

    def any_pending(self, group_index: int, first_end: int, last_end: int) -> bool:
        """Whether one of these chunks, all of which are held, is not readable yet. No tails."""
        ...
