"""Loads chunks from a server of LMCache and stores them there: a rank's half of the tier.

One thread copies and checks; the connections' own threads speak with the server; callers leave operations and take
completions.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hybridkv.lmcache import connection
from hybridkv.tiers.buffers import slot_views
from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, Slot, Ticket
from hybridkv.tiers.in_flight import InFlight
from hybridkv.tiers.lmcache.moving import Moving, RankMove
from hybridkv.tiers.lmcache.options import LMCacheOptions
from hybridkv.tiers.lmcache.shelf import Shelf

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

IDLE_S = 0.05
"""The longest that the thread waits without looking at the clock."""
CLOSE_S = 2 * connection.CLOSE_S
"""How long `close` waits for the connections, which end side by side; then for the thread."""


class LMCacheMedium:
    """A `TierMedium` over one server.

    Args:
        shelves: by bytes of a chunk. The medium closes them.
        rank: whose parts are moved.
        options: bounds.
        clock: seconds.
    """

    def __init__(
        self, shelves: Mapping[int, Shelf], rank: int, options: LMCacheOptions, clock: Callable[[], float]
    ) -> None:
        self._shelves = dict(shelves)
        self._options = options
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._moves = InFlight()
        self._moving = Moving(
            self._shelves, rank, options.reach_timeout_s, clock, self._inbox.put, self._moves.complete
        )
        self._is_closed = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="hybridkv-lmcache-mover", daemon=True)
        self._thread.start()

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        self._begin(ticket, key, slot, source, is_store=True)

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        self._begin(ticket, key, slot, destination, is_store=False)

    def _begin(self, ticket: Ticket, key: Key, slot: Slot, buffers: Sequence[Buffer], *, is_store: bool) -> None:
        self._moves.begin()
        views = self._checked(slot, buffers, is_store=is_store)
        if isinstance(views, Failure):
            self._moves.complete(Completion(ticket, views))
            return
        now_s = self._clock()
        move = RankMove(ticket, key, views, is_store, now_s, now_s + self._options.move_timeout_s)
        self._inbox.put(lambda: self._moving.begin(move, slot.num_bytes))

    def _checked(self, slot: Slot, buffers: Sequence[Buffer], *, is_store: bool) -> list[memoryview] | Failure:
        if self._is_closed:
            return Failure(FailureReason.CLOSED, "the medium was closed")
        if self._moves.num_open > self._options.max_waiting:
            return Failure(FailureReason.BUSY, f"{self._options.max_waiting} operations wait")
        views = slot_views(slot, buffers, is_written=not is_store)
        if not isinstance(views, Failure) and slot.num_bytes not in self._shelves:
            return Failure(FailureReason.IO, f"no chunk of this cache has {slot.num_bytes} bytes")
        return views

    def poll(self) -> list[Completion]:
        return self._moves.poll()

    def drain(self, timeout_s: float) -> bool:
        return self._moves.drain(timeout_s)

    def close(self) -> None:
        """Everything ends, what was not over for CLOSED, within a bounded time; nothing is shared any more."""
        if self._is_closed:
            return
        self._is_closed = True
        closers = [threading.Thread(target=shelf.close, daemon=True) for shelf in self._shelves.values()]
        for closer in closers:
            closer.start()
        ends_s = time.monotonic() + CLOSE_S
        for closer in closers:
            closer.join(max(0.0, ends_s - time.monotonic()))
        self._inbox.put(self._finish)
        self._thread.join(CLOSE_S)

    # On the thread.

    def _finish(self) -> None:
        self._moving.end(FailureReason.CLOSED, "the medium was closed")
        self._is_over = True

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._take()
                self._moving.step()
            except Exception:  # whatever it was, other moves go on
                logger.exception("the tier of LMCache's servers met a bug")

    def _take(self) -> None:
        """Do what was left in the inbox."""
        try:
            self._inbox.get(timeout=IDLE_S if self._moving.is_busy else None)()
            for _ in range(self._inbox.qsize()):
                self._inbox.get_nowait()()
        except queue.Empty:
            pass
