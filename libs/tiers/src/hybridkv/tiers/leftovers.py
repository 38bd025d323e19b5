"""Gives back the memory of tables that nobody uses any more, piece by piece.

Forgetting a table with a million entries takes a tenth of a second in one step of the interpreter, in which no other
thread moves, and it happens wherever its last user happens to be. So tables are emptied before they are forgotten.
Private to the tiers of this library.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

Table: TypeAlias = dict[Any, Any] | set[Any] | list[Any]

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


class Leftovers:
    """Tables to be emptied. Nobody else may use them, but for readers that are done before the first call of `free`."""

    def __init__(self, *tables: Table) -> None:
        self._tables = list(tables)

    def add(self, *tables: Table) -> None:
        self._tables.extend(tables)

    def __len__(self) -> int:
        """Entries that are left."""
        return sum(map(len, self._tables))

    def free(self) -> None:
        """All of it, in pieces."""
        while self.free_some(ENTRIES_AT_A_TIME):
            time.sleep(YIELD_S)

    def free_some(self, num_entries: int) -> bool:
        """At most so many. Whether something is left."""
        room = num_entries
        while self._tables and room:
            table = self._tables[-1]
            count = min(room, len(table))
            drop = table.popitem if isinstance(table, dict) else table.pop
            for _ in range(count):
                drop()
            room -= count
            if not table:
                table.clear()  # which still has the room for what it held
                self._tables.pop()
        return bool(self._tables)
