"""Base class of a remote medium: checks operations at the start, and queues completions from other threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridkv.tiers.buffers import slot_views
from hybridkv.tiers.contract import Completion, Failure, FailureReason, Slot, Ticket

if TYPE_CHECKING:
    from typing_extensions import Buffer

CLOSED = Failure(FailureReason.CLOSED, "the medium was closed")


class RemoteMedium:
    """Base class of the medium of a remote tier.

    Args:
        max_waiting: limit of open operations. One more fails with BUSY.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._completions: list[Completion] = []
        self._num_open = 0
        """Operations without a completion."""
        self._is_closed = False

    def _begin(
        self, ticket: Ticket, slot: Slot, buffers: Sequence[Buffer], *, is_store: bool
    ) -> list[memoryview] | None:
        """Begin an operation. Returns its buffers as byte views; None if the operation failed at once."""
        with self._changed:
            self._num_open += 1
        views: list[memoryview] | Failure = CLOSED
        if not self._is_closed:
            views = Failure(FailureReason.BUSY, f"{self._max_waiting} operations wait")
            if self._num_open <= self._max_waiting:
                views = slot_views(slot, buffers, is_written=not is_store)
        if isinstance(views, Failure):
            self._end(Completion(ticket, views))
            return None
        return views

    def _end(self, *completions: Completion) -> None:
        """Queue completions. Thread-safe."""
        with self._changed:
            self._num_open -= len(completions)
            self._completions += completions
            self._changed.notify_all()

    def poll(self) -> list[Completion]:
        with self._changed:
            completions, self._completions = self._completions, []
        return completions

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open == 0, timeout_s)
