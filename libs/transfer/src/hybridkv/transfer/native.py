"""Chooses who copies runs of host memory: the C++ of `hybridkv.native`, or a plain reference in Python.

The C++ takes digests of records on the way, for a tenth of what reading the bytes once more would cost.

The copiers are private to the engines of this library. Both copy the same bytes; the reference pays for each run with a
call that gives up the interpreter lock and takes it back.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import TYPE_CHECKING, Protocol

from hybridkv.transfer.runs import CopyRuns, Integers

if TYPE_CHECKING:
    from hybridkv.native import Lowering

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16


class Copier(Protocol):
    """Copies each run. The digest of each record, 16 bytes, if `record_ends` asks for them and it takes any."""

    def __call__(self, runs: CopyRuns, record_ends: Integers | None = None) -> list[bytes] | None: ...


@cache
def runs_copier() -> Copier:
    """What copies runs in this process. Chosen once, and said once."""
    try:
        from hybridkv.native import MemoryCopier
    except ImportError as error:
        logger.warning(
            "hybridkv.native cannot be imported (%s): runs are copied one by one, which is slow for runs of a few KiB; "
            "hint: install a hybridkv-vllm wheel that was built for this Python",
            error,
        )
        return copy_one_by_one
    copier = MemoryCopier()

    def copy(runs: CopyRuns, record_ends: Integers | None = None) -> list[bytes] | None:
        if record_ends is None:
            copier.copy(runs.sources, runs.destinations, runs.num_bytes)
            return None
        digests = copier.copy_and_digest(runs.sources, runs.destinations, runs.num_bytes, record_ends)
        return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]

    return copy


@cache
def native_lowering() -> type[Lowering] | None:
    """What makes the runs of a whole job without the interpreter lock, None where it is not installed: then whoever
    asks does it by himself, and `runs_copier` has said what is missing."""
    try:
        from hybridkv.native import Lowering
    except ImportError:
        return None
    return Lowering


def copy_one_by_one(runs: CopyRuns, record_ends: Integers | None = None) -> None:
    """The reference: each run by the C library's memmove. It takes no digests."""
    for source, destination, num_bytes in runs.triples():
        ctypes.memmove(destination, source, num_bytes)
