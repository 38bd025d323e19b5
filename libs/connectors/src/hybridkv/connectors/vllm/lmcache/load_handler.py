"""Loads of one rank: take pages, look up, retrieve, check, copy.

Each load ends once: when its bytes are copied, on a failure, or at its deadline if the copy has not begun. A server
that answers after the deadline writes to shared memory only, not to the engine's blocks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hybridkv.connectors.vllm.common.copies.rank_worker import CopyJob, CopyJobs
from hybridkv.connectors.vllm.common.messages import LoadFailure
from hybridkv.connectors.vllm.lmcache.messages import PageLoad
from hybridkv.connectors.vllm.lmcache.pages import ChunkSpan, PageTransfer, page_transfer
from hybridkv.connectors.vllm.lmcache.session import SERVER, WORKER, PageLease, RankSession, bad_pages, copy_table
from hybridkv.lmcache.calls import CallFailure, CallFailureReason, CallResult
from hybridkv.lmcache.operations import Prefix, PrefixHit
from hybridkv.lmcache.page import PageState
from hybridkv.tiers import FailureReason
from hybridkv.transfer import CopyRuns

logger = logging.getLogger("vllm.hybridkv.worker")

TIMEOUT = "timeout"
REASONS = {
    CallFailureReason.BUSY: str(FailureReason.BUSY),
    CallFailureReason.CLOSED: str(FailureReason.CLOSED),
    CallFailureReason.TIMEOUT: TIMEOUT,
    CallFailureReason.REFUSED: str(FailureReason.MISSING),
}
"""Failure reason of a load, by the reason of the failed call. All other reasons of calls are I/O errors."""
_STATES = {
    PageState.ABSENT: (str(FailureReason.MISSING), "the server wrote no page"),
    PageState.FOREIGN: (str(FailureReason.WRONG_KEY), "the server wrote another page"),
    PageState.CORRUPT: (str(FailureReason.CHECKSUM), "checksum mismatch"),
}


@dataclass(slots=True, eq=False)
class _LoadOperation:
    load: PageLoad
    transfer: PageTransfer
    until_s: float
    prefix: Prefix | None = None
    lease: PageLease | None = None
    is_copying: bool = False
    is_over: bool = False


class LoadHandler:
    """Loads of one rank. For the engine's thread; no method waits.

    Args:
        session: session at the server.
        copies: queue of copy jobs.
        timeout_s: timeout of a load.
        clock: seconds.
        on_ended: called once for each load, with the request id and the failures; empty after a success.
    """

    def __init__(
        self,
        session: RankSession,
        copies: CopyJobs,
        timeout_s: float,
        clock: Callable[[], float],
        on_ended: Callable[[str, tuple[LoadFailure, ...]], None],
    ) -> None:
        self._session = session
        self._copies = copies
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_ended = on_ended
        self._inbox: deque[Callable[[], None]] = deque()
        self._waiting: deque[_LoadOperation] = deque()
        self._open: list[_LoadOperation] = []

    @property
    def is_waiting(self) -> bool:
        """True if a load waits for free pages."""
        return bool(self._waiting)

    def begin(self, load: PageLoad) -> None:
        """Queues a load, which starts when enough pages are free. A load without pages ends at once; a load of blocks
        that no server keeps, or of more pages than the pool has, fails at once."""
        transfer = page_transfer(self._session.spec, self._session.geometry, load.copies, _chunks(load))
        operation = _LoadOperation(load, transfer, self._clock() + self._timeout_s)
        self._open.append(operation)
        if transfer.num_not_kept:
            detail = f"{transfer.num_not_kept} blocks that a server does not keep"
            self._fail(operation, FailureReason.MISSING, detail)
        elif not transfer.parts:
            self._end(operation, ())
        elif not self._session.fits_empty_pool(transfer):
            self._fail(
                operation,
                FailureReason.BUSY,
                f"the pool is too small for {sum(transfer.num_pages_by_group.values())} pages",
            )
        else:
            self._waiting.append(operation)

    def step(self) -> None:
        """Starts queued loads, handles results of the server, and fails late loads."""
        while self._inbox:
            self._inbox.popleft()()
        self._start()
        now_s = self._clock()
        for operation in [each for each in self._open if not each.is_copying and now_s >= each.until_s]:
            self._fail(operation, TIMEOUT, "the server took too long")

    def end(self, reason: str, detail: str) -> None:
        """Fails all open loads."""
        self._waiting.clear()
        for operation in list(self._open):
            self._fail(operation, reason, detail)

    def _start(self) -> None:
        while self._waiting:
            operation = self._waiting[0]
            if operation.is_over:
                self._waiting.popleft()
            elif self._clock() >= operation.until_s:
                self._session.report_starvation()
                self._fail(self._waiting.popleft(), TIMEOUT, "no page was free in time")
            elif self._session.ready is None:
                if self._session.is_connecting:
                    return
                state = self._session.connection.state
                self._fail(self._waiting.popleft(), FailureReason.IO, f"no server: {state}")
            elif not self._take(operation):
                return

    def _take(self, operation: _LoadOperation) -> bool:
        """Starts a load. False if too few pages are free."""
        try:
            operation.lease = self._session.take(operation.transfer, operation.until_s, is_store=False)
            if operation.lease is None:
                return False
            self._look_up(operation, operation.lease)
        except Exception as error:  # any error fails this load, not the engine
            logger.exception("a load could not start")
            if operation.lease is not None:
                operation.lease.drop(SERVER)
            self._fail(operation, FailureReason.IO, f"{type(error).__name__}: {error}")
        self._waiting.popleft()
        return True

    def _look_up(self, operation: _LoadOperation, lease: PageLease) -> None:
        session = self._session
        lease.memory.blank(lease.taken)
        operation.prefix = session.prefix(operation.load.digests)

        def found(ended: CallResult[PrefixHit]) -> None:
            try:
                self._found(operation, lease, ended)
            except Exception as error:  # a bug fails this load only
                lease.drop(SERVER)
                self._post_failure(operation, FailureReason.IO, f"{type(error).__name__}: {error}")

        session.operations.lookup(operation.prefix, session.rank, self._left_s(operation), found)

    # Any thread.

    def _found(self, operation: _LoadOperation, lease: PageLease, ended: CallResult[PrefixHit]) -> None:
        session, wanted = self._session, operation.transfer.chunks.end
        if isinstance(ended, CallFailure):
            lease.drop(SERVER)
            self._post_call_failure(operation, ended)
        elif ended.value.num_chunks < wanted or operation.is_over:
            session.operations.release(ended.value)
            lease.drop(SERVER)
            detail = f"the server has {ended.value.num_chunks} of {wanted} chunks"
            self._post_failure(operation, FailureReason.MISSING, detail)
        else:
            session.operations.retrieve(
                ended.value,
                operation.transfer.chunks.start,
                session.pages(operation.transfer, lease),
                self._left_s(operation),
                lambda read: self._inbox.append(lambda: self._read(operation, lease, read)),
                lambda: lease.drop(SERVER),
            )

    def _post_call_failure(self, operation: _LoadOperation, failure: CallFailure) -> None:
        self._post_failure(operation, REASONS.get(failure.reason, FailureReason.IO), f"LMCache's server: {failure}")

    def _post_failure(self, operation: _LoadOperation, reason: str, detail: str) -> None:
        self._inbox.append(lambda: self._fail(operation, reason, detail))

    def _left_s(self, operation: _LoadOperation) -> float:
        return max(0.0, operation.until_s - self._clock())

    # The engine's thread.

    def _read(self, operation: _LoadOperation, lease: PageLease, ended: CallResult[None]) -> None:
        if isinstance(ended, CallFailure):
            self._fail(operation, REASONS.get(ended.reason, FailureReason.IO), f"LMCache's server: {ended}")
        elif not operation.is_over:
            operation.is_copying = True
            runs = partial(self._runs, operation, lease)
            self._copies.submit(
                CopyJob(True, runs, partial(self._end, operation), partial(self._check, operation, lease))
            )

    # The copy thread.

    def _runs(self, operation: _LoadOperation, lease: PageLease, _: CopyJob) -> CopyRuns:
        return lease.memory.lowering.load(copy_table(operation.transfer, self._session.spec, lease))

    def _check(self, operation: _LoadOperation, lease: PageLease, job: CopyJob) -> str | None:
        """Checks pages and deadline before the copy. Returns the failure, if any."""
        if self._clock() >= operation.until_s:
            job.failures.append(LoadFailure(TIMEOUT, "the load waited too long for the copy thread"))
            return job.failures[0].detail
        digests = operation.load.digests
        for bad in bad_pages(operation.transfer, self._session.spec, lease, digests):
            reason, words = _STATES[bad.state]
            detail = f"{words} for block {bad.block} of group {bad.group} in chunk {bad.chunk}"
            job.failures.append(LoadFailure(reason, detail, digests[bad.chunk]))
            assert operation.prefix is not None
            self._session.withdraw(operation.prefix, bad.chunk)
        return job.failures[0].detail if job.failures else None

    # The engine's thread.

    def _fail(self, operation: _LoadOperation, reason: str, detail: str) -> None:
        self._end(operation, (LoadFailure(str(reason), detail),))

    def _end(self, operation: _LoadOperation, failures: tuple[LoadFailure, ...]) -> None:
        if operation.is_over:
            return
        operation.is_over = True
        self._open.remove(operation)
        if operation.lease is not None:
            operation.lease.drop(WORKER)
        self._on_ended(operation.load.request_id, failures)


def _chunks(load: PageLoad) -> ChunkSpan:
    return ChunkSpan(load.start_chunk, len(load.digests))
