"""Completions of a medium whose operations end on threads of its own. Private to the tiers of this library."""

from __future__ import annotations

import threading

from hybridkv.tiers.contract import Completion


class InFlight:
    """Counts what has begun, and keeps what has ended until it is polled. Any thread may use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._completions: list[Completion] = []
        self.num_open = 0
        """Operations without a completion."""

    def begin(self) -> None:
        with self._changed:
            self.num_open += 1

    def complete(self, completion: Completion) -> None:
        with self._changed:
            self.num_open -= 1
            self._completions.append(completion)
            self._changed.notify_all()

    def poll(self) -> list[Completion]:
        with self._changed:
            completions, self._completions = self._completions, []
        return completions

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.num_open == 0, timeout_s)
