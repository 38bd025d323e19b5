"""Hands pieces of file work to a janitor, one at a time, and keeps what came of them until somebody asks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from hybridkv.tiers.disk.upkeep.chore import Ending, Files, run
from hybridkv.tiers.disk.upkeep.janitor import Janitor
from hybridkv.tiers.disk.upkeep.kind import AnyPiece


class Outcome(NamedTuple):
    """What came of a piece."""

    piece: AnyPiece
    ending: Ending[Any]
    is_beside: bool


class Dispatcher:
    """Of one index. Used in its thread, but for `_execute`."""

    def __init__(self, janitor: Janitor, files: Files) -> None:
        self._janitor: Janitor | None = janitor
        self._files = files
        self._has_ended = threading.Event()
        self.ended: deque[Outcome] = deque()
        """For `next_ended`."""
        self.num_running = 0
        """Of the pieces that go one by one."""
        self.num_making_room = 0
        """Of those."""

    @property
    def can_wait(self) -> bool:
        """Whether `start_beside` takes what is to run later."""
        return self._janitor is not None and self._janitor.can_wait

    def start(self, piece: AnyPiece, then: Callable[[], None] | None = None) -> bool:
        """False when the janitor takes nothing more. `then` is called when it has run, in any thread."""
        self.num_running += 1
        self.num_making_room += piece.kind.makes_room
        if self._janitor is not None and self._janitor.submit(partial(self._execute, piece, False, then)):
            return True
        self.num_running -= 1
        self.num_making_room -= piece.kind.makes_room
        return False

    def start_beside(self, piece: AnyPiece, delay_s: float) -> bool:
        """It waits while other work goes on, and is none of the pieces that go one by one."""
        return self._janitor is not None and self._janitor.submit_later(
            partial(self._execute, piece, True, None), delay_s
        )

    def next_ended(self) -> Outcome:
        """The first of `ended`, which counts as running no more."""
        outcome = self.ended.popleft()
        if not outcome.is_beside:
            self.num_running -= 1
            self.num_making_room -= outcome.piece.kind.makes_room
        return outcome

    def clear_ended(self) -> None:
        """What ends from now on wakes `wait_for_ended`."""
        self._has_ended.clear()

    def wait_for_ended(self, timeout_s: float) -> bool:
        """Until something ended. False when `timeout_s` passed first."""
        return self._has_ended.wait(timeout_s)

    def stop(self) -> None:
        """Start nothing more: the janitor was closed."""
        self._janitor = None

    def _execute(self, piece: AnyPiece, is_beside: bool, then: Callable[[], None] | None) -> None:
        """In the janitor's thread."""
        self.ended.append(Outcome(piece, run(piece.chore, self._files), is_beside))
        self._has_ended.set()
        if then is not None:
            then()
