"""Slices for long loops that yield the GIL; release of freed memory to the system. Private to this library."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

ENTRIES_AT_A_TIME = 2048
"""Entries per slice, about a millisecond of work."""
YIELD_S = 0.0001
"""Pause between slices, in seconds. A thread that waits for the GIL must wake up within this pause; otherwise the
thread waits for the switch interval of five milliseconds."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""None if the C library has no `malloc_trim`."""


def trim_heap() -> None:
    """Release freed heap memory to the system: 50 MB or more after a snapshot or recovery of a million records. Takes
    up to 0.1 s, without the GIL. Does nothing if the C library has no `malloc_trim`."""
    if _trim is not None:
        _trim(ctypes.c_size_t(0))


def pieces(length: int) -> Iterator[slice]:
    """Slices of a sequence of this length, in order. Yields the GIL between two slices."""
    for start in range(0, length, ENTRIES_AT_A_TIME):
        if start:
            time.sleep(YIELD_S)
        yield slice(start, min(start + ENTRIES_AT_A_TIME, length))
