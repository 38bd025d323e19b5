"""Operations on prefixes: lookup, store, retrieve. Each operation is a sequence of calls and ends once.

The server keeps the locks of a lookup until the hit is retrieved to its end or released. Chunks of a completed store
may not be readable yet; only a lookup shows this. A session is used for one prefix only, because a server caches the
hashes of a session and ignores later tokens.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from hybridkv.lmcache.calls import MAY_STILL_RUN, NOT_SENT, CallAnswer, CallFailure, CallFailureReason, CallResult
from hybridkv.lmcache.connection import Connection, Ready
from hybridkv.lmcache.errors import LMCacheProtocolError
from hybridkv.lmcache.pool import TakenPages
from hybridkv.lmcache.wire import Key, MoveAnswer, RpcCall

POLL_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
"""Pauses between polls of a lookup or a store, in seconds; the last pause repeats."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Prefix of whole chunks.

    Args:
        model: name of the cache.
        world_size: number of ranks; each rank stores its own part.
        words: words of the whole prefix, see `keys`.
    """

    model: str
    world_size: int
    words: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.words) // 4


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Result of a lookup. The server keeps its locks until the hit is retrieved to its end or released.

    Args:
        prefix: requested prefix.
        rank: rank of the part; None for all ranks.
        num_chunks: number of leading chunks; every group can resume after the last of them.
        session: session that holds the locks. No locks are held if `num_chunks` is 0.
    """

    prefix: Prefix
    rank: int | None
    num_chunks: int
    session: str


AGAIN_S = 5.0
"""Timeout of a further call that ends a session, in seconds."""
MAX_UNENDED = 1024
"""Maximum sessions to end when a lost server is usable again. Older sessions are left to the server."""


class LookupHandle:
    """Lookup, from its start until its locks are released. For any thread. A caller may drop it before the answer.

    Args:
        until_s: deadline, by the clock of the operations.
        give_back: releases the locks of a result.
    """

    def __init__(self, until_s: float, give_back: Callable[[PrefixHit], None]) -> None:
        self.until_s = until_s
        self.ended: CallResult[PrefixHit] | None = None
        """Result; None until the lookup has ended."""
        self.is_dropped = False
        self._give_back = give_back
        self._lock = threading.Lock()

    def end(self, ended: CallResult[PrefixHit]) -> None:
        """Records the result. Releases its locks if the caller has dropped the lookup."""
        with self._lock:
            self.ended = ended
            is_dropped = self.is_dropped
        if is_dropped:
            self._release(ended)

    def drop(self) -> None:
        """Releases the locks, now or after the answer. Repeatable."""
        with self._lock:
            if self.is_dropped:
                return
            self.is_dropped = True
            ended = self.ended
        if ended is not None:
            self._release(ended)

    def _release(self, ended: CallResult[PrefixHit]) -> None:
        if isinstance(ended, CallAnswer) and ended.value.num_chunks:
            self._give_back(ended.value)


class OperationCounts(msgspec.Struct, frozen=True):
    """Counts of ended operations since the start. Stores and retrieves that end before their call are not counted."""

    lookups: int = 0
    found: int = 0
    """Lookups that found at least one chunk."""
    stores: int = 0
    stored_chunks: int = 0
    """Chunks that a server accepted; these chunks may not be readable."""
    retrieves: int = 0
    retrieved_chunks: int = 0
    """Chunks that a server reported as written; the page headers show whether they are valid."""
    failures: dict[str, int] = {}
    """Failures by operation and reason, as "lookup timeout". Has only failures that occurred."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages that an operation reads or writes.

    Args:
        taken: pages taken from the pool.
        block_ids: one list per group in registration order, for whole chunks; see `geometry.cut_tables`.
    """

    taken: TakenPages
    block_ids: Sequence[Sequence[int]]


class Operations:
    """Operations at one server. For any thread. Callbacks must not block. They run on the channel's thread, or on the
    caller's thread before the operation returns, if the server is not usable or the pages are void.

    Args:
        connection: connection to the server; not closed by this class.
    """

    def __init__(self, connection: Connection, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._channel = connection.channel
        self._clock = clock
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._tally: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._unended: deque[str] = deque(maxlen=MAX_UNENDED)
        """Sessions that the server may still have, oldest first."""

    def counts(self) -> OperationCounts:
        with self._lock:
            return OperationCounts(**self._tally, failures=dict(self._failures))

    def lookup(
        self,
        prefix: Prefix,
        rank: int | None,
        timeout_s: float,
        on_end: Callable[[CallResult[PrefixHit]], None] = lambda ended: None,
    ) -> LookupHandle:
        """Finds the longest stored part of a prefix. The server locks this part."""
        lookup = LookupHandle(self._clock() + timeout_s, self.release)

        def end(ended: CallResult[PrefixHit]) -> None:
            self._count("lookup", ended, found=int(isinstance(ended, CallAnswer) and ended.value.num_chunks > 0))
            lookup.end(ended)
            on_end(ended)

        self._lookup(prefix, rank, self._session(), lookup.until_s, end)
        return lookup

    def release(self, found: PrefixHit, timeout_s: float = 5.0) -> None:
        """Releases all locks of a lookup and ends its session."""
        self._free(found, (0, found.num_chunks), timeout_s)

    def retrieve(
        self,
        found: PrefixHit,
        start_chunk: int,
        pages: Pages,
        timeout_s: float,
        on_end: Callable[[CallResult[None]], None],
        on_settled: Callable[[], None],
    ) -> None:
        """Reads chunks [start_chunk, end of `found`) into the pages, releases the locks and ends the session.

        `found` must be the hit of one rank.

        `on_settled` is called once. If the call was not sent: at its end. Otherwise when the server writes no more and
        the locks are released: at the end, or after a late answer. Without an answer `on_settled` is not called: the
        pages stay in use until the pool is recreated.
        """
        ready = self._mover(pages)
        if isinstance(ready, CallFailure):
            self.release(found)
            on_end(ready)
            on_settled()
            return
        if not 0 <= start_chunk < found.num_chunks:
            raise LMCacheProtocolError(f"retrieve: chunk {start_chunk} of {found.num_chunks}")
        key = self._key(ready, found.prefix, found.rank, (start_chunk, found.num_chunks), found.session)

        def finish(is_sent: bool) -> None:
            if is_sent:
                # The server releases the locks of the chunks that it is asked to read.
                self._free(found, (0, start_chunk), max(timeout_s, 1.0), on_settled)
            else:
                on_settled()  # the server never had the pages
                self.release(found)

        def count(ended: CallResult[None]) -> None:
            self._count("retrieve", ended, retrieved_chunks=found.num_chunks - start_chunk)
            on_end(ended)

        call = ready.codec.retrieve(key, pages.taken.instance, pages.block_ids)
        self._move(call, found.session, timeout_s, count, finish)

    def store(
        self,
        prefix: Prefix,
        rank: int,
        chunks: tuple[int, int],
        pages: Pages,
        timeout_s: float,
        on_end: Callable[[CallResult[None]], None],
        on_settled: Callable[[], None],
    ) -> None:
        """Stores the pages of chunks [start, end). After success the chunks may not be readable yet: see `confirm`.

        `on_settled`: see `retrieve`.
        """
        ready = self._mover(pages)
        if isinstance(ready, CallFailure):
            on_end(ready)
            on_settled()
            return
        session = self._session()
        key = self._key(ready, prefix, rank, chunks, session)

        def finish(is_sent: bool) -> None:
            self._forget(ready, session, timeout_s)
            on_settled()

        def count(ended: CallResult[None]) -> None:
            self._count("store", ended, stored_chunks=chunks[1] - chunks[0])
            on_end(ended)

        call = ready.codec.store(key, pages.taken.instance, pages.block_ids)
        self._move(call, session, timeout_s, count, finish)

    def confirm(
        self, prefix: Prefix, rank: int | None, timeout_s: float, on_end: Callable[[CallResult[None]], None]
    ) -> None:
        """Polls until the whole prefix is readable, a lookup fails, or the time is up."""
        until_s = self._clock() + timeout_s
        pauses = itertools.chain(POLL_S, itertools.repeat(POLL_S[-1]))

        def look() -> None:
            self._lookup(prefix, rank, self._session(), until_s, on_lookup_ended)

        def on_lookup_ended(ended: CallResult[PrefixHit]) -> None:
            if isinstance(ended, CallFailure):
                on_end(ended)
                return
            self.release(ended.value)
            ready = self._connection.ready
            if ready is not None and ended.value.num_chunks * ready.chunk_tokens == prefix.num_tokens:
                on_end(CallAnswer(None))
            elif self._clock() >= until_s:
                on_end(CallFailure(CallFailureReason.REFUSED, "the stored prefix is not readable"))
            else:
                self._channel.after(next(pauses), look)

        look()

    # Calls of each operation.

    def _lookup(
        self,
        prefix: Prefix,
        rank: int | None,
        session: str,
        until_s: float,
        on_end: Callable[[CallResult[PrefixHit]], None],
    ) -> None:
        ready = self._ready()
        if isinstance(ready, CallFailure):
            on_end(ready)
            return
        num_chunks = prefix.num_tokens // ready.chunk_tokens
        key = self._key(ready, prefix, rank, (0, num_chunks), session)
        nothing = PrefixHit(prefix, rank, 0, session)
        pauses = itertools.chain(POLL_S, itertools.repeat(POLL_S[-1]))

        def give_up(failure: CallFailure) -> None:
            # Release the current locks. The server itself expires locks that it takes later.
            everything = PrefixHit(prefix, rank, num_chunks, session)
            self.release(everything, self._left_s(until_s, 1.0))
            on_end(failure)

        def asked(ended: CallResult[None]) -> None:
            if not isinstance(ended, CallFailure):
                look()
            elif ended.reason in NOT_SENT:
                on_end(ended)
            else:
                give_up(ended)

        def look() -> None:
            if self._clock() >= until_s:
                give_up(CallFailure(CallFailureReason.TIMEOUT, "lookup"))
                return
            self._channel.call(ready.codec.found_chunks(session), self._left_s(until_s), seen)

        def seen(ended: CallResult[int | None]) -> None:
            if isinstance(ended, CallFailure):
                # The lookup was sent, so the server may hold locks, even if this poll was not sent before the deadline.
                give_up(
                    CallFailure(CallFailureReason.TIMEOUT, "lookup")
                    if ended.reason is CallFailureReason.UNSENT
                    else ended
                )
            elif ended.value is None:
                self._channel.after(next(pauses), look, continues_operation=True)
            elif ended.value > num_chunks:
                give_up(CallFailure(CallFailureReason.MALFORMED, f"{ended.value} of {num_chunks} chunks"))
            elif ended.value == 0:
                self._forget(ready, session, self._left_s(until_s, 1.0))
                on_end(CallAnswer(nothing))
            else:
                on_end(CallAnswer(PrefixHit(prefix, rank, ended.value, session)))

        self._channel.call(ready.codec.lookup(key), self._left_s(until_s), asked)

    def _move(
        self,
        call: RpcCall[MoveAnswer],
        session: str,
        timeout_s: float,
        on_end: Callable[[CallResult[None]], None],
        finish: Callable[[bool], None],
    ) -> None:
        """Sends a call. `finish` is called when the server no longer executes the call, with True if it was sent.

        If the connection is lost before, only the session is ended, when the server is usable again.
        """

        def end(ended: CallResult[MoveAnswer]) -> None:
            if isinstance(ended, CallAnswer):
                if not ended.value.is_registered:
                    self._connection.check_registration()
                on_end(CallAnswer(None) if ended.value.is_done else CallFailure(CallFailureReason.REFUSED, call.name))
                finish(True)
            else:
                on_end(ended)
                if ended.reason not in MAY_STILL_RUN:
                    finish(ended.reason not in NOT_SENT)
                elif ended.reason is CallFailureReason.LOST:
                    self._forget_later(session)

        def end_late(is_answered: bool) -> None:
            if is_answered:
                finish(True)
            else:
                self._forget_later(session)

        self._channel.call(call, timeout_s, end, end_late)

    def _free(
        self, found: PrefixHit, chunks: tuple[int, int], timeout_s: float, then: Callable[[], None] = lambda: None
    ) -> None:
        """Releases the locks of some chunks, ends the session and calls `then`.

        If the server is not usable, only the session is ended, later.
        """
        ready = self._connection.ready
        if ready is None or not found.num_chunks:
            if found.num_chunks:
                self._forget_later(found.session)
            then()
            return

        def freed(ended: CallResult[None]) -> None:
            self._forget(ready, found.session, timeout_s)
            then()

        if chunks[0] < chunks[1]:
            key = self._key(ready, found.prefix, found.rank, chunks, found.session)
            self._channel.call(ready.codec.free_locks(key), timeout_s, freed)
        else:
            freed(CallAnswer(None))

    def _forget(self, ready: Ready, session: str, timeout_s: float) -> None:
        """Ends a session. Without an answer, the session is ended again when the server answers again."""

        def ended(answer: CallResult[None]) -> None:
            if isinstance(answer, CallFailure):
                self._forget_later(session)
            elif self._unended:  # the connection may have dropped the task
                self._forget_again(ready)

        self._channel.call(ready.codec.end_session(session), timeout_s, ended)

    def _forget_later(self, session: str) -> None:
        with self._lock:
            is_first = not self._unended
            self._unended.append(session)
        if is_first:
            self._connection.post(self._forget_again)

    def _forget_again(self, ready: Ready) -> None:
        with self._lock:
            sessions = list(self._unended)
            self._unended.clear()
        for session in sessions:
            self._channel.call(ready.codec.end_session(session), AGAIN_S, partial(self._on_ended_again, session))

    def _on_ended_again(self, session: str, ended: CallResult[None]) -> None:
        if isinstance(ended, CallFailure) and ended.reason in (CallFailureReason.LOST, CallFailureReason.UNSENT):
            self._forget_later(session)

    def _count(self, operation: str, ended: CallResult[object], **done: int) -> None:
        with self._lock:
            self._tally[f"{operation}s"] += 1
            if isinstance(ended, CallFailure):
                self._failures[f"{operation} {ended.reason}"] += 1
            else:
                self._tally.update(done)

    def _ready(self) -> Ready | CallFailure:
        state = self._connection.state
        return state if isinstance(state, Ready) else CallFailure(CallFailureReason.UNSENT, state.reason)

    def _mover(self, pages: Pages) -> Ready | CallFailure:
        ready = self._ready()
        if isinstance(ready, CallFailure):
            return ready
        if ready.registration is None:
            raise LMCacheProtocolError("a process without registered memory cannot move pages")
        if pages.taken.instance != ready.registration.instance:
            return CallFailure(CallFailureReason.UNSENT, "the pages are void: the pool was recreated")
        return ready

    def _key(self, ready: Ready, prefix: Prefix, rank: int | None, chunks: tuple[int, int], session: str) -> Key:
        chunk_tokens = ready.chunk_tokens
        start, end = chunks
        if prefix.num_tokens % chunk_tokens or not 0 <= start <= end <= prefix.num_tokens // chunk_tokens:
            raise LMCacheProtocolError(f"chunks {chunks} of {prefix.num_tokens} tokens in chunks of {chunk_tokens}")
        words = prefix.words[: end * chunk_tokens * 4]
        return Key(prefix.model, prefix.world_size, rank, words, start * chunk_tokens, end * chunk_tokens, session)

    def _session(self) -> str:
        return f"hybridkv-{self._nonce}-{next(self._numbers)}"

    def _left_s(self, until_s: float, least_s: float = 0.0) -> float:
        return max(least_s, until_s - self._clock())
