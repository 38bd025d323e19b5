"""Janitor of a disk tier without a thread, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable


class InlineJanitor:
    """Runs a task before `submit` returns, with the methods of `ThreadJanitor`. Accepts no delay."""

    def __init__(self) -> None:
        self._is_closed = False

    def submit(self, task: Callable[[], None]) -> bool:
        if self._is_closed:
            return False
        task()
        return True

    def submit_later(self, task: Callable[[], None], delay_s: float) -> bool:
        return delay_s <= 0 and self.submit(task)

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        return True

    def run_at_end(self, last: Callable[[], None]) -> bool:
        return False
