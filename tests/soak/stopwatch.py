"""Measures durations, and ends processes that take too long."""

from __future__ import annotations

import contextlib
import faulthandler
import time
from collections.abc import Iterator

from soak.world_context import WorldContext


class Stopwatch:
    """For one process."""

    def __init__(self, context: WorldContext) -> None:
        self._context = context
        self._armed_s = -1.0

    def watch(self) -> None:
        """From now on, dump the stacks and end the process if it stalls for too long."""
        now_s = time.monotonic()
        if now_s - self._armed_s > min(1.0, self._context.watchdog_s / 4):
            faulthandler.dump_traceback_later(self._context.watchdog_s, exit=True, file=self._context.stacks)
            self._armed_s = now_s

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Restart the watchdog, and keep the longest duration of the block."""
        self.watch()
        started_s = time.monotonic()
        yield
        self._context.tally.most(f"longest {name}, ms", int(1000 * (time.monotonic() - started_s)))
