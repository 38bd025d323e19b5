"""Stores of one rank: take pages, copy, seal, send to the server. The engine's blocks are free after the copy.

A large store is split into ranges of chunks that run in prefix order, because later chunks are useless without earlier
ones. A store ends with its copies; failures at the server are only counted.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybridkv.canonical import GroupPages
from hybridkv.connectors.vllm.common.copies.lowering import Zeros
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyJob, CopyJobs
from hybridkv.connectors.vllm.common.messages import LoadFailure
from hybridkv.connectors.vllm.lmcache.messages import PageStore, Release
from hybridkv.connectors.vllm.lmcache.pages import ChunkSpan, Parts, parts_of
from hybridkv.connectors.vllm.lmcache.session import HERE, SERVER, Hold, Station, engine_runs, seal_pages
from hybridkv.lmcache.calls import CallFailure, Ended
from hybridkv.tiers import FailureReason
from hybridkv.transfer import CopyRuns

logger = logging.getLogger("vllm.hybridkv.worker")


@dataclass(slots=True, eq=False)
class _Storing:
    store: PageStore
    until_s: float
    waiting: deque[Parts]
    """Ranges of chunks without pages yet."""
    num_copying: int = 0
    failure: tuple[str, str] | None = None
    """Reason and detail."""


class Storing:
    """Stores of one rank. For the engine's thread; no method waits.

    Args:
        station: session at the server.
        pages: engine's blocks by group.
        zeros: zero bytes for the gaps within a stored block.
        copies: queue of copy jobs.
        clock: seconds.
        on_ended: called once for each store, with its id, and reason and detail of a failure or None and None.
    """

    def __init__(
        self,
        station: Station,
        pages: Mapping[int, GroupPages],
        zeros: Zeros,
        copies: CopyJobs,
        clock: Callable[[], float],
        on_ended: Callable[[int, str | None, str | None], None],
    ) -> None:
        self._station = station
        self._pages = pages
        self._zeros = zeros
        self._copies = copies
        self._clock = clock
        self._on_ended = on_ended
        self._waiting: deque[_Storing] = deque()
        self._open: list[_Storing] = []
        self._held: dict[int, list[tuple[PageStore, Parts, Hold]]] = {}
        """Copied pages of held stores, by store."""

    def begin(self, store: PageStore) -> None:
        """Queues a store. It starts when enough pages are free."""
        if store.is_held:
            self._held[store.store_id] = []
        station = self._station
        at_once = station.chunks_at_once
        runs = [
            ChunkSpan(start, min(start + at_once, len(store.digests)))
            for start in range(store.start_chunk, len(store.digests), at_once)
        ]
        parts = (parts_of(station.site, station.geometry, store.copies, chunks) for chunks in runs)
        storing = _Storing(
            store, self._clock() + station.site.store_timeout_s, deque(part for part in parts if part.parts)
        )
        self._open.append(storing)
        self._waiting.append(storing)

    def release(self, release: Release) -> None:
        """Sends the copied pages of a held store to the server, or drops them. The store must have ended."""
        for store, parts, hold in self._held.pop(release.store_id, ()):
            if release.is_good:
                self._send(store, parts, hold)
            else:
                hold.drop(SERVER)

    def step(self, *, may_begin: bool) -> None:
        """Starts queued stores and fails late ones. With `may_begin` False no store starts: loads wait for pages."""
        while self._waiting:
            storing = self._waiting[0]
            if storing.waiting and storing.failure is None and not self._start(storing, may_begin):
                return
            if not storing.waiting or storing.failure is not None:
                self._waiting.popleft()
                self._end_if_over(storing)

    def end(self, reason: str, detail: str) -> None:
        """Fails all open stores and drops held ones."""
        self._waiting.clear()
        for storing in list(self._open):
            self._fail(storing, reason, detail)
            storing.num_copying = 0
            self._end_if_over(storing)
        for store_id in list(self._held):
            self.release(Release(store_id, False))

    def _start(self, storing: _Storing, may_begin: bool) -> bool:
        """Starts the next range of chunks, or fails the store. False if it must wait."""
        station = self._station
        if self._clock() >= storing.until_s:
            station.starved()
            self._fail(storing, FailureReason.BUSY, "no page was free in time")
            return True
        if station.ready is None:
            if station.is_coming:
                return False
            self._fail(storing, FailureReason.IO, f"no server: {station.connection.state}")
            return True
        if not may_begin:
            return False
        parts = storing.waiting[0]
        try:
            hold = station.take(parts, self._clock() + station.site.store_timeout_s, is_store=True)
        except Exception as error:  # any error fails this store, not the engine
            logger.exception("a store could not start")
            self._fail(storing, FailureReason.IO, f"{type(error).__name__}: {error}")
            return True
        if hold is None:
            return False
        storing.waiting.popleft()
        self._copy(storing, parts, hold)
        return True

    def _copy(self, storing: _Storing, parts: Parts, hold: Hold) -> None:
        station, digests = self._station, storing.store.digests

        def make_runs(job: CopyJob) -> CopyRuns:
            runs = engine_runs(parts, station.site, hold, self._pages, self._zeros)
            job.zero_bytes = self._zeros.num_bytes_in(runs)
            return runs

        def seal_and_send(_: CopyJob) -> None:
            seal_pages(parts, station.site, hold, digests, self._pages)
            if storing.store.is_held:
                hold.until_s = math.inf  # not sent to the server yet
                self._held[storing.store.store_id].append((storing.store, parts, hold))
                return
            # Sent from the copy thread: the engine may be idle, so that no step follows.
            self._send(storing.store, parts, hold)

        def copied(failures: tuple[LoadFailure, ...]) -> None:
            storing.num_copying -= 1
            hold.drop(HERE)
            if failures:
                hold.drop(SERVER)
                self._fail(storing, failures[0].reason, failures[0].detail)
            self._end_if_over(storing)

        storing.num_copying += 1
        self._copies.submit(CopyJob(False, make_runs, copied, after=seal_and_send))

    def _send(self, store: PageStore, parts: Parts, hold: Hold) -> None:
        """Sends sealed pages to the server. Any thread."""
        station = self._station
        timeout_s = station.site.store_timeout_s
        hold.until_s = self._clock() + timeout_s

        def ended(ended: Ended[None]) -> None:
            if isinstance(ended, CallFailure):
                logger.debug("store %d: LMCache's server: %s", store.store_id, ended)

        station.operations.store(
            station.prefix(store.digests[: parts.chunks.end]),
            station.rank,
            parts.chunks,
            station.pages(parts, hold),
            timeout_s,
            ended,
            lambda: hold.drop(SERVER),
        )

    def _fail(self, storing: _Storing, reason: str, detail: str) -> None:
        storing.failure = storing.failure or (str(reason), detail)
        storing.waiting.clear()

    def _end_if_over(self, storing: _Storing) -> None:
        if storing.waiting or storing.num_copying or storing not in self._open:
            return
        self._open.remove(storing)
        reason, detail = storing.failure or (None, None)
        self._on_ended(storing.store.store_id, reason, detail)
