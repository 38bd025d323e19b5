"""Loads of one rank: take pages, look up, retrieve, check, copy.

Each load ends once: when its bytes are copied, on a failure, or at its deadline. A late server writes to shared memory
only: a failed load has not changed the engine's blocks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from hybridkv.canonical import GroupPages
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyJob, CopyJobs
from hybridkv.connectors.vllm.common.messages import LoadFailure
from hybridkv.connectors.vllm.lmcache.messages import PageLoad
from hybridkv.connectors.vllm.lmcache.pages import ChunkSpan, Parts, parts_of
from hybridkv.connectors.vllm.lmcache.session import HERE, SERVER, Hold, Station, bad_pages, engine_runs
from hybridkv.lmcache.calls import CallFailure, Ended, Trouble
from hybridkv.lmcache.operations import Found, Prefix
from hybridkv.lmcache.page import PageState
from hybridkv.tiers import FailureReason
from hybridkv.transfer import CopyRuns

logger = logging.getLogger("vllm.hybridkv.worker")

TIMEOUT = "timeout"
REASONS = {
    Trouble.BUSY: str(FailureReason.BUSY),
    Trouble.CLOSED: str(FailureReason.CLOSED),
    Trouble.TIMEOUT: TIMEOUT,
    Trouble.REFUSED: str(FailureReason.MISSING),
}
"""Failure reason by trouble. All others are I/O errors."""
_STATES = {
    PageState.ABSENT: (str(FailureReason.MISSING), "the server wrote no page"),
    PageState.FOREIGN: (str(FailureReason.WRONG_KEY), "the server wrote another page"),
    PageState.CORRUPT: (str(FailureReason.CHECKSUM), "checksum mismatch"),
}


@dataclass(slots=True, eq=False)
class _Loading:
    load: PageLoad
    parts: Parts
    until_s: float
    prefix: Prefix | None = None
    hold: Hold | None = None
    is_copying: bool = False
    is_over: bool = False


class Loading:
    """Loads of one rank. For the engine's thread; no method waits.

    Args:
        station: session at the server.
        pages: engine's blocks by group.
        copies: queue of copy jobs.
        timeout_s: timeout of a load.
        clock: seconds.
        on_ended: called once for each load, with its request and its failures; no failures mean success.
    """

    def __init__(
        self,
        station: Station,
        pages: Mapping[int, GroupPages],
        copies: CopyJobs,
        timeout_s: float,
        clock: Callable[[], float],
        on_ended: Callable[[str, tuple[LoadFailure, ...]], None],
    ) -> None:
        self._station = station
        self._pages = pages
        self._copies = copies
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_ended = on_ended
        self._inbox: deque[Callable[[], None]] = deque()
        self._waiting: deque[_Loading] = deque()
        self._open: list[_Loading] = []

    @property
    def is_waiting(self) -> bool:
        """True if a load waits for free pages."""
        return bool(self._waiting)

    def begin(self, load: PageLoad) -> None:
        """Queues a load. It starts when enough pages are free."""
        parts = parts_of(self._station.site, self._station.geometry, load.copies, _chunks(load))
        loading = _Loading(load, parts, self._clock() + self._timeout_s)
        self._open.append(loading)
        if parts.num_unkept:
            detail = f"{parts.num_unkept} blocks that a server does not keep"
            self._fail(loading, FailureReason.MISSING, detail)
        elif not parts.parts:
            self._end(loading, ())
        elif not self._station.has_room(parts):
            self._fail(loading, FailureReason.BUSY, f"the pool is too small for {sum(parts.numbers.values())} pages")
        else:
            self._waiting.append(loading)

    def step(self) -> None:
        """Starts queued loads, handles results of the server, and fails late loads."""
        while self._inbox:
            self._inbox.popleft()()
        self._start()
        now_s = self._clock()
        for loading in [each for each in self._open if not each.is_copying and now_s >= each.until_s]:
            self._fail(loading, TIMEOUT, "the server took too long")

    def end(self, reason: str, detail: str) -> None:
        """Fails all open loads."""
        self._waiting.clear()
        for loading in list(self._open):
            self._fail(loading, reason, detail)

    def _start(self) -> None:
        while self._waiting:
            loading = self._waiting[0]
            if loading.is_over:
                self._waiting.popleft()
            elif self._clock() >= loading.until_s:
                self._station.starved()
                self._fail(self._waiting.popleft(), TIMEOUT, "no page was free in time")
            elif self._station.ready is None:
                if self._station.is_coming:
                    return
                state = self._station.connection.state
                self._fail(self._waiting.popleft(), FailureReason.IO, f"no server: {state}")
            elif not self._take(loading):
                return

    def _take(self, loading: _Loading) -> bool:
        """Starts a load. False if too few pages are free."""
        try:
            loading.hold = self._station.take(loading.parts, loading.until_s, is_store=False)
            if loading.hold is None:
                return False
            self._ask(loading, loading.hold)
        except Exception as error:  # any error fails this load, not the engine
            logger.exception("a load could not start")
            if loading.hold is not None:
                loading.hold.drop(SERVER)
            self._fail(loading, FailureReason.IO, f"{type(error).__name__}: {error}")
        self._waiting.popleft()
        return True

    def _ask(self, loading: _Loading, hold: Hold) -> None:
        station = self._station
        hold.memory.blank(hold.taken)
        loading.prefix = station.prefix(loading.load.digests)

        def found(ended: Ended[Found]) -> None:
            try:
                self._found(loading, hold, ended)
            except Exception as error:  # a bug fails this load only
                hold.drop(SERVER)
                self._post_failure(loading, FailureReason.IO, f"{type(error).__name__}: {error}")

        station.operations.lookup(loading.prefix, station.rank, self._left_s(loading), found)

    # Any thread.

    def _found(self, loading: _Loading, hold: Hold, ended: Ended[Found]) -> None:
        station, wanted = self._station, loading.parts.chunks.end
        if isinstance(ended, CallFailure):
            hold.drop(SERVER)
            self._post_lack(loading, ended)
        elif ended.value.num_chunks < wanted or loading.is_over:
            station.operations.release(ended.value)
            hold.drop(SERVER)
            detail = f"the server has {ended.value.num_chunks} of {wanted} chunks"
            self._post_failure(loading, FailureReason.MISSING, detail)
        else:
            station.operations.retrieve(
                ended.value,
                loading.parts.chunks.start,
                station.pages(loading.parts, hold),
                self._left_s(loading),
                lambda read: self._inbox.append(lambda: self._read(loading, hold, read)),
                lambda: hold.drop(SERVER),
            )

    def _post_lack(self, loading: _Loading, lack: CallFailure) -> None:
        self._post_failure(loading, REASONS.get(lack.trouble, FailureReason.IO), f"LMCache's server: {lack}")

    def _post_failure(self, loading: _Loading, reason: str, detail: str) -> None:
        self._inbox.append(lambda: self._fail(loading, reason, detail))

    def _left_s(self, loading: _Loading) -> float:
        return max(0.0, loading.until_s - self._clock())

    # The engine's thread.

    def _read(self, loading: _Loading, hold: Hold, ended: Ended[None]) -> None:
        if isinstance(ended, CallFailure):
            self._fail(loading, REASONS.get(ended.trouble, FailureReason.IO), f"LMCache's server: {ended}")
        elif not loading.is_over:
            loading.is_copying = True
            runs = partial(self._runs, loading, hold)
            self._copies.submit(CopyJob(True, runs, partial(self._end, loading), partial(self._check, loading, hold)))

    # The copy thread.

    def _runs(self, loading: _Loading, hold: Hold, _: CopyJob) -> CopyRuns:
        return engine_runs(loading.parts, self._station.site, hold, self._pages, None)

    def _check(self, loading: _Loading, hold: Hold, job: CopyJob) -> str | None:
        """Checks pages and deadline before the copy. Returns the failure, if any."""
        if self._clock() >= loading.until_s:
            job.failures.append(LoadFailure(TIMEOUT, "the load waited too long for the copy thread"))
            return job.failures[0].detail
        digests = loading.load.digests
        for bad in bad_pages(loading.parts, self._station.site, hold, digests):
            reason, words = _STATES[bad.state]
            detail = f"{words} for block {bad.block} of group {bad.group} in chunk {bad.chunk}"
            job.failures.append(LoadFailure(reason, detail, digests[bad.chunk]))
            assert loading.prefix is not None
            self._station.withdraw(loading.prefix, bad.chunk)
        return job.failures[0].detail if job.failures else None

    # The engine's thread.

    def _fail(self, loading: _Loading, reason: str, detail: str) -> None:
        self._end(loading, (LoadFailure(str(reason), detail),))

    def _end(self, loading: _Loading, failures: tuple[LoadFailure, ...]) -> None:
        if loading.is_over:
            return
        loading.is_over = True
        self._open.remove(loading)
        if loading.hold is not None:
            loading.hold.drop(HERE)
        self._on_ended(loading.load.request_id, failures)


def _chunks(load: PageLoad) -> ChunkSpan:
    return ChunkSpan(load.start_chunk, len(load.digests))
