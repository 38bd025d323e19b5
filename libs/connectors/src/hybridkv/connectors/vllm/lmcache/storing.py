"""Stores of one rank: room, copy, seal, and the server. The engine's blocks are free again as soon as they are copied.

A store of more chunks than should be under way at one time goes in several runs of chunks, one behind the other: what
comes later in a prefix is worth nothing without what came before. What a server does with pages is its affair by then;
that it did not take them is counted.
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
from hybridkv.connectors.vllm.lmcache.staging import HERE, SERVER, Hold, Station, engine_runs, seal_pages
from hybridkv.lmcache.calls import CallFailure, Ended
from hybridkv.tiers import FailureReason
from hybridkv.transfer import CopyRuns

logger = logging.getLogger("vllm.hybridkv.worker")


@dataclass(slots=True, eq=False)
class _Storing:
    store: PageStore
    until_s: float
    waiting: deque[Parts]
    """Runs of chunks that have no pages yet."""
    num_copying: int = 0
    failure: tuple[str, str] | None = None
    """Reason and words."""


class Storing:
    """For the engine's thread. Nothing here waits.

    Args:
        station: the server and the pages.
        pages: of the engine's blocks.
        zeros: what lies between pages of a stored block.
        copies: carried out here.
        clock: seconds.
        on_ended: told of each store by its id, the reason of its failure and its words, or None and None.
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
        """Copied, and not handed over, by store."""

    def begin(self, store: PageStore) -> None:
        """Carry out, when there is room."""
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
        """Hand over what a store that is held has copied, or drop it. The store has ended."""
        for store, parts, hold in self._held.pop(release.store_id, ()):
            if release.is_good:
                self._send(store, parts, hold)
            else:
                hold.drop(SERVER)

    def step(self, *, may_begin: bool) -> None:
        """Go on with whatever can. Where nothing may begin, because loads wait for room, what waited too long ends."""
        while self._waiting:
            storing = self._waiting[0]
            if storing.waiting and storing.failure is None and not self._start(storing, may_begin):
                return
            if not storing.waiting or storing.failure is not None:
                self._waiting.popleft()
                self._end_if_over(storing)

    def end(self, reason: str, detail: str) -> None:
        """Fail whatever is not over."""
        self._waiting.clear()
        for storing in list(self._open):
            self._fail(storing, reason, detail)
            storing.num_copying = 0
            self._end_if_over(storing)
        for store_id in list(self._held):
            self.release(Release(store_id, False))

    def _start(self, storing: _Storing, may_begin: bool) -> bool:
        """Begin the next run of chunks, or give up. False where it is too early for either."""
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
        except Exception as error:  # whatever it was, it is this store's failure and not the engine's
            logger.exception("a store could not begin")
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
                hold.until_s = math.inf  # the server is asked for nothing yet
                self._held[storing.store.store_id].append((storing.store, parts, hold))
                return
            # From here, and not when the engine looks next: it may be idle by then.
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
        """Have the server take sealed pages. Any thread."""
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
