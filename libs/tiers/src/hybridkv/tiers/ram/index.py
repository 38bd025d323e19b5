"""Decides which chunks stay in host memory: least recently used goes first. Holds no bytes and starts no thread.

`RamIndex` is the native one where `hybridkv.native` is installed, else its twin in Python. Both pass the same tests,
and one that compares them call by call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.tiers.index_size import in_words
from hybridkv.tiers.ram.plain_index import PlainRamIndex

_why_not_native = ""

if TYPE_CHECKING:

    class RamIndex(PlainRamIndex):
        """What follows, whichever it is: both have these members."""

else:
    try:
        from hybridkv.tiers.ram.native_index import NativeRamIndex as _Base
    except ImportError as error:  # also where it is there, and older than this library
        _Base = PlainRamIndex
        _why_not_native = f", since hybridkv.native cannot be imported ({error})"

    class RamIndex(_Base):
        """A `TierIndex` over granules of host memory.

        `capacity_bytes` is rounded down to whole granules; `TierConfigurationError` when not even one fits. The media
        must be `RamArena`s of the same two numbers.

        No chunk has fewer than `smallest_bytes`: so many keys there may be at most, and the index has room for them
        from the start. One that has fewer is taken, too, and counts as one key.

        Beside what a `TierIndex` is, and `TellsChanges`: `find`, for any thread; `commit_all` and `invalidate_all`;
        `eviction_order`, `num_reserved` and `num_pinned`; `before_reserving`. What it takes at most is
        `most_index_bytes`, for `max_keys`.
        """


def describe(index: PlainRamIndex) -> str:
    """In which language it is, why not in the other, and what it may take, for an operator."""
    return in_words(index, _why_not_native)
