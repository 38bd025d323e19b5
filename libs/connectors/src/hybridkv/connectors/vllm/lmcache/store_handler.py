"""Stores of one rank: take pages, copy, seal, send to the server. The engine's blocks are free after the copy.

A large store is split into ranges of chunks that run in prefix order, because later chunks are useless without earlier
ones. A store ends with its copies; failures at the server are only counted.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.connectors.vllm.common.copies.rank_worker import CopyJob, CopyJobs
from hybridkv.connectors.vllm.common.messages import LoadFailure
from hybridkv.connectors.vllm.lmcache.messages import PageStore, StoreRelease
from hybridkv.connectors.vllm.lmcache.pages import ChunkSpan, PageTransfer, page_transfer
from hybridkv.connectors.vllm.lmcache.session import SERVER, WORKER, PageLease, RankSession, copy_table, seal_pages
from hybridkv.lmcache.calls import CallFailure, CallResult
from hybridkv.tiers import FailureReason
from hybridkv.transfer import CopyRuns

logger = logging.getLogger("vllm.hybridkv.worker")


@dataclass(slots=True, eq=False)
class _StoreOperation:
    store: PageStore
    until_s: float
    waiting: deque[PageTransfer]
    """Ranges of chunks without pages yet."""
    num_copying: int = 0
    failure: tuple[str, str] | None = None
    """Reason and detail."""


class StoreHandler:
    """Stores of one rank. For the engine's thread; no method waits.

    Args:
        session: session at the server.
        copies: queue of copy jobs.
        clock: seconds.
        on_ended: called once for each store, with its id, and reason and detail of the failure; None after a success.
    """

    def __init__(
        self,
        session: RankSession,
        copies: CopyJobs,
        clock: Callable[[], float],
        on_ended: Callable[[int, str | None, str | None], None],
    ) -> None:
        self._session = session
        self._copies = copies
        self._clock = clock
        self._on_ended = on_ended
        self._waiting: deque[_StoreOperation] = deque()
        self._open: list[_StoreOperation] = []
        self._held: dict[int, list[tuple[PageStore, PageTransfer, PageLease]]] = {}
        """Copied pages of held stores, by store."""

    def begin(self, store: PageStore) -> None:
        """Queues a store. It starts when enough pages are free."""
        if store.is_held:
            self._held[store.store_id] = []
        session = self._session
        at_once = session.chunks_at_once
        runs = [
            ChunkSpan(start, min(start + at_once, len(store.digests)))
            for start in range(store.start_chunk, len(store.digests), at_once)
        ]
        transfers = (page_transfer(session.spec, session.geometry, store.copies, chunks) for chunks in runs)
        operation = _StoreOperation(
            store, self._clock() + session.spec.store_timeout_s, deque(each for each in transfers if each.parts)
        )
        self._open.append(operation)
        self._waiting.append(operation)

    def release(self, release: StoreRelease) -> None:
        """Sends the copied pages of a held store to the server, or drops them. The store must have ended."""
        for store, transfer, lease in self._held.pop(release.store_id, ()):
            if release.is_good:
                self._send(store, transfer, lease)
            else:
                lease.drop(SERVER)

    def step(self, *, may_begin: bool) -> None:
        """Starts queued stores and fails late ones. `may_begin`: False while loads wait for pages: no store starts."""
        while self._waiting:
            operation = self._waiting[0]
            if operation.waiting and operation.failure is None and not self._start(operation, may_begin):
                return
            if not operation.waiting or operation.failure is not None:
                self._waiting.popleft()
                self._end_if_over(operation)

    def end(self, reason: str, detail: str) -> None:
        """Fails all open stores and drops held ones."""
        self._waiting.clear()
        for operation in list(self._open):
            self._fail(operation, reason, detail)
            operation.num_copying = 0
            self._end_if_over(operation)
        for store_id in list(self._held):
            self.release(StoreRelease(store_id, False))

    def _start(self, operation: _StoreOperation, may_begin: bool) -> bool:
        """Starts the next range of chunks, or fails the store. False if it must wait."""
        session = self._session
        if self._clock() >= operation.until_s:
            session.report_starvation()
            self._fail(operation, FailureReason.BUSY, "no page was free in time")
            return True
        if session.ready is None:
            if session.is_connecting:
                return False
            self._fail(operation, FailureReason.IO, f"no server: {session.connection.state}")
            return True
        if not may_begin:
            return False
        transfer = operation.waiting[0]
        try:
            lease = session.take(transfer, self._clock() + session.spec.store_timeout_s, is_store=True)
        except Exception as error:  # any error fails this store, not the engine
            logger.exception("a store could not start")
            self._fail(operation, FailureReason.IO, f"{type(error).__name__}: {error}")
            return True
        if lease is None:
            return False
        operation.waiting.popleft()
        self._copy(operation, transfer, lease)
        return True

    def _copy(self, operation: _StoreOperation, transfer: PageTransfer, lease: PageLease) -> None:
        session, digests = self._session, operation.store.digests

        def make_runs(job: CopyJob) -> CopyRuns:
            lowered = lease.memory.lowering.store(copy_table(transfer, session.spec, lease))
            job.zero_bytes = lowered.zero_bytes
            return lowered.runs

        def seal_and_send(_: CopyJob) -> None:
            seal_pages(transfer, session.spec, lease, digests)
            if operation.store.is_held:
                lease.until_s = math.inf  # not sent to the server yet
                self._held[operation.store.store_id].append((operation.store, transfer, lease))
                return
            # Sent from the copy thread: the engine may be idle, so that no step follows.
            self._send(operation.store, transfer, lease)

        def copied(failures: tuple[LoadFailure, ...]) -> None:
            operation.num_copying -= 1
            lease.drop(WORKER)
            if failures:
                lease.drop(SERVER)
                self._fail(operation, failures[0].reason, failures[0].detail)
            self._end_if_over(operation)

        operation.num_copying += 1
        self._copies.submit(CopyJob(False, make_runs, copied, after=seal_and_send))

    def _send(self, store: PageStore, transfer: PageTransfer, lease: PageLease) -> None:
        """Sends sealed pages to the server. Any thread."""
        session = self._session
        timeout_s = session.spec.store_timeout_s
        lease.until_s = self._clock() + timeout_s

        def ended(ended: CallResult[None]) -> None:
            if isinstance(ended, CallFailure):
                logger.debug("store %d: LMCache's server: %s", store.store_id, ended)

        session.operations.store(
            session.prefix(store.digests[: transfer.chunks.end]),
            session.rank,
            transfer.chunks,
            session.pages(transfer, lease),
            timeout_s,
            ended,
            lambda: lease.drop(SERVER),
        )

    def _fail(self, operation: _StoreOperation, reason: str, detail: str) -> None:
        operation.failure = operation.failure or (str(reason), detail)
        operation.waiting.clear()

    def _end_if_over(self, operation: _StoreOperation) -> None:
        if operation.waiting or operation.num_copying or operation not in self._open:
            return
        self._open.remove(operation)
        reason, detail = operation.failure or (None, None)
        self._on_ended(operation.store.store_id, reason, detail)
