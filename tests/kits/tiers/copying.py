"""Medium over `SealedMemory` that copies in the calling thread instead of a copy engine.

For tests and examples; not meant to serve an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridkv.tiers.buffers import byte_views
from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, SealedMemory, Slot, Ticket
from hybridkv.tiers.errors import TierProtocolError
from kits.tiers.copies import copy_views, why_not_copy

if TYPE_CHECKING:
    from typing_extensions import Buffer


class CopyingMedium:
    """A `TierMedium` whose operations have completed when they return. `close` closes the memory too.

    May be used by several threads at once, on distinct slots.
    """

    def __init__(self, memory: SealedMemory) -> None:
        self._memory = memory
        self._is_closed = False
        self._lock = threading.Lock()
        self._completions: list[Completion] = []

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        self._complete(ticket, self._store(key, slot, source))

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        self._complete(ticket, self._load(key, slot, destination))

    def poll(self) -> list[Completion]:
        with self._lock:
            completions, self._completions = self._completions, []
        return completions

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self._is_closed = True
        self._memory.close()

    def views(self, slot: Slot) -> list[memoryview]:
        """Views of the memory itself."""
        return self._memory.views(slot)

    def _store(self, key: Key, slot: Slot, source: Sequence[Buffer]) -> Failure | None:
        views = self._views(slot)
        if isinstance(views, Failure):
            return views
        try:
            sources = byte_views(source)
        except (TypeError, ValueError, BufferError) as error:
            return Failure(FailureReason.IO, f"source: {error}")
        failure = why_not_copy(sources, views)
        if failure is not None:
            return failure
        self._memory.discard(slot)
        copy_views(sources, views)
        [failure] = self._memory.seal_all([(key, slot)])
        return failure

    def _load(self, key: Key, slot: Slot, destination: Sequence[Buffer]) -> Failure | None:
        views = self._views(slot)
        if isinstance(views, Failure):
            return views
        try:
            destinations = byte_views(destination)
        except (TypeError, ValueError, BufferError) as error:
            return Failure(FailureReason.IO, f"destination: {error}")
        failure = why_not_copy(views, destinations) or self._memory.check_all([(key, slot)])[0]
        if failure is None:
            copy_views(views, destinations)
        return failure

    def _views(self, slot: Slot) -> list[memoryview] | Failure:
        if self._is_closed:
            return Failure(FailureReason.CLOSED, "the memory was closed")
        try:
            return self._memory.views(slot)
        except TierProtocolError as error:
            return Failure(FailureReason.IO, str(error))

    def _complete(self, ticket: Ticket, failure: Failure | None) -> None:
        with self._lock:
            self._completions.append(Completion(ticket, failure))
