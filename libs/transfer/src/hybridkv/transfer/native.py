"""Chooses who copies runs of host memory: the C++ of `hybridkv.native`, or a plain reference in Python.

Private to the engines of this library. Both copy the same bytes; the reference pays for each run with a call that gives
up the interpreter lock and takes it back.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache

from hybridkv.transfer.runs import CopyRuns

logger = logging.getLogger(__name__)


@cache
def runs_copier() -> Callable[[CopyRuns], None]:
    """What copies runs in this process. Chosen once, and said once."""
    try:
        from hybridkv.native import Mover
    except ImportError as error:
        logger.warning(
            "hybridkv.native cannot be imported (%s): runs are copied one by one, which is slow for runs of a few KiB; "
            "hint: install a hybridkv-vllm wheel that was built for this Python",
            error,
        )
        return copy_one_by_one
    mover = Mover()
    return lambda runs: mover.copy(runs.sources, runs.destinations, runs.num_bytes)


def copy_one_by_one(runs: CopyRuns) -> None:
    """The reference: each run by the C library's memmove."""
    for source, destination, num_bytes in runs.triples():
        ctypes.memmove(destination, source, num_bytes)
