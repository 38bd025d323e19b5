"""Long work in pieces, between which other threads run, and what it freed goes back to the system. Private to the tiers
of this library.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

ENTRIES_AT_A_TIME = 2048
"""That a thread looks at before it lets others have the interpreter: about a millisecond."""
YIELD_S = 0.0001
"""For which it lets go of it. Who waits for the interpreter has to wake up meanwhile, or it waits for five milliseconds
more, which is when Python takes it away from whoever has it."""


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Of the C library, where it has one."""


def give_back_freed() -> None:
    """Let the C library give the system what was freed. Of what a snapshot or an opening made of a million records the
    process would keep 50 MB and more. That takes up to 0.1 s, without the interpreter."""
    if _trim is not None:
        _trim(ctypes.c_size_t(0))


def pieces(length: int) -> Iterator[slice]:
    """Of a sequence of this length, in order. Between two of them other threads may have the interpreter."""
    for start in range(0, length, ENTRIES_AT_A_TIME):
        if start:
            time.sleep(YIELD_S)
        yield slice(start, min(start + ENTRIES_AT_A_TIME, length))
