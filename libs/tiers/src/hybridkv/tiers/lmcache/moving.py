"""Carries out one rank's loads and stores, on one thread: copies between a caller's memory and pages, and checks.

A load is looked up, so that the server keeps it for the moment, retrieved, and believed if its page says what it is and
its bytes are those that were sealed; a server is told to delete what is not. A store is over when a lookup finds it:
what a server says that it took need not be readable. Whatever a server leaves undone ends at its deadline, and its page
is nobody's until the server is heard of.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from hybridkv.lmcache import page as pages
from hybridkv.lmcache.calls import Ended, Lack, Trouble
from hybridkv.lmcache.operations import Found, Prefix
from hybridkv.lmcache.page import PageState
from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, Ticket
from hybridkv.tiers.digests import view_digest
from hybridkv.tiers.lmcache.records import identity_of
from hybridkv.tiers.lmcache.shelf import Page, Shelf

logger = logging.getLogger(__name__)

T = TypeVar("T")
Post = Callable[[Callable[[], None]], None]
"""Has something done on the moving thread."""

_REASONS = {Trouble.BUSY: FailureReason.BUSY, Trouble.CLOSED: FailureReason.CLOSED}
_STATES = {
    PageState.ABSENT: (FailureReason.MISSING, "the server gave nothing for"),
    PageState.FOREIGN: (FailureReason.WRONG_KEY, "the server gave another chunk for"),
    PageState.CORRUPT: (FailureReason.CHECKSUM, "not those that were sealed are the bytes of"),
}


@dataclass(slots=True)
class RankMove:
    """One load or store."""

    ticket: Ticket
    key: Key
    views: list[memoryview]
    is_store: bool
    began_s: float
    until_s: float
    checksum: bytes | None = None
    is_over: bool = False


@dataclass(slots=True)
class _Row:
    """What waits for a page of one size."""

    shelf: Shelf
    settled_s: float
    """When a page was given back last."""
    loads: deque[RankMove] = field(default_factory=deque)
    stores: deque[RankMove] = field(default_factory=deque)


class Moving:
    """What a medium's thread does. `begin`, `step` and `end` are that thread's.

    Args:
        shelves: by bytes of a chunk.
        rank: whose parts are moved.
        reach_timeout_s: for so long what comes first waits for a connection.
        clock: seconds.
        post: leaves work for the thread; for any thread.
        on_ended: takes completions.
    """

    def __init__(
        self,
        shelves: Mapping[int, Shelf],
        rank: int,
        reach_timeout_s: float,
        clock: Callable[[], float],
        post: Post,
        on_ended: Callable[[Completion], None],
    ) -> None:
        self._rows = {num_bytes: _Row(shelf, clock()) for num_bytes, shelf in shelves.items()}
        self._rank = rank
        self._clock = clock
        self._reach_until_s = clock() + reach_timeout_s
        self._post = post
        self._on_ended = on_ended
        self._open: dict[int, RankMove] = {}
        """Begun and not over, by identity."""

    def begin(self, move: RankMove, num_bytes: int) -> None:
        """Carry out, when there is a page for it."""
        row = self._rows[num_bytes]
        self._open[id(move)] = move
        (row.stores if move.is_store else row.loads).append(move)
        self._start(row)

    def step(self) -> None:
        """Let time pass."""
        for row in self._rows.values():
            self._start(row)

    @property
    def is_busy(self) -> bool:
        """Whether something is not over, so that time matters."""
        return bool(self._open)

    def end(self, reason: FailureReason, detail: str) -> None:
        """Fail whatever is not over."""
        for row in self._rows.values():
            row.loads.clear()
            row.stores.clear()
        for move in list(self._open.values()):
            self._fail(move, reason, detail)

    def _start(self, row: _Row) -> None:
        for queue in (row.loads, row.stores):
            while queue:
                move = queue.popleft()
                if not self._begin_now(row, move):
                    queue.appendleft(move)
                    break

    def _begin_now(self, row: _Row, move: RankMove) -> bool:
        """Carry out what comes first, or give it up. False where it waits: for a server that may come, or a page."""
        shelf, now_s = row.shelf, self._clock()
        is_late, ready = now_s >= move.until_s, shelf.ready
        if ready is None:
            if not is_late and now_s < self._reach_until_s and shelf.is_new:
                return False
            # A store is made again, and blames nobody: the other half may see a moment later that the server is gone.
            reason = FailureReason.BUSY if move.is_store else FailureReason.IO
            self._fail(move, reason, f"no server: {shelf.connection.state}")
        elif is_late:
            self._give_up(row, move)
        else:
            page = shelf.take(is_store=move.is_store)
            if page is None:
                return False
            begin = self._store if move.is_store else self._load
            self._safely(move, lambda: begin(row, move, page, shelf.prefix(move.key, ready)))
        return True

    def _give_up(self, row: _Row, move: RankMove) -> None:
        """No page was free in time. Where none came back either, nothing is heard of them: a server that passes over a
        question says nothing, and lives. Another connection has other memory."""
        if row.settled_s <= move.began_s:
            row.shelf.connection.doubt()
        self._fail(move, FailureReason.BUSY, "timeout: no page was free in time")

    # Loads.

    def _load(self, row: _Row, move: RankMove, page: Page, prefix: Prefix) -> None:
        operations = row.shelf.operations

        def found(ended: Ended[Found]) -> None:
            if isinstance(ended, Lack) or not ended.value.num_chunks:
                self._give_back(row, page)
                if isinstance(ended, Lack):
                    self._lack(move, ended)
                else:
                    self._fail(move, FailureReason.MISSING, f"the server does not hold {move.key.hex()}")
                return
            if self._clock() >= move.until_s or move.is_over:
                operations.release(ended.value)
                self._give_back(row, page)
                self._fail(move, FailureReason.IO, "timeout: the server took too long")
                return
            pages.blank(page.view)
            operations.retrieve(
                ended.value,
                0,
                page.pages,
                self._left_s(move),
                self._then(move, lambda read: self._read(row, move, page, prefix, read)),
                self._settled(row, page),
            )

        operations.lookup(prefix, self._rank, self._left_s(move), self._then(move, found))

    def _read(self, row: _Row, move: RankMove, page: Page, prefix: Prefix, ended: Ended[None]) -> None:
        if isinstance(ended, Lack):
            if ended.trouble is Trouble.REFUSED:
                self._fail(move, FailureReason.MISSING, f"the server holds {move.key.hex()} no more")
            else:
                self._lack(move, ended)
            return
        if move.is_over:
            return
        num_bytes = sum(map(len, move.views))
        state = pages.check(page.view, identity_of(move.key), num_bytes)
        if state is not PageState.GOOD:
            row.shelf.withdraw(prefix, self._rank)
            reason, words = _STATES[state]
            self._fail(move, reason, f"{words} {move.key.hex()}")
            return
        payload = pages.payload_of(page.view, num_bytes)
        move.checksum = view_digest([payload])
        source, at = np.frombuffer(payload, dtype=np.uint8), 0
        for view in move.views:
            np.frombuffer(view, dtype=np.uint8)[:] = source[at : at + len(view)]
            at += len(view)
        self._succeed(move)

    # Stores.

    def _store(self, row: _Row, move: RankMove, page: Page, prefix: Prefix) -> None:
        num_bytes = sum(map(len, move.views))
        payload = pages.payload_of(page.view, num_bytes)
        target, at = np.frombuffer(payload, dtype=np.uint8), 0
        for view in move.views:
            target[at : at + len(view)] = np.frombuffer(view, dtype=np.uint8)
            at += len(view)
        move.checksum = view_digest([payload])
        pages.seal(page.view, identity_of(move.key), num_bytes)
        operations = row.shelf.operations

        def taken(ended: Ended[None]) -> None:
            if isinstance(ended, Lack):
                if ended.trouble is Trouble.REFUSED:
                    # It has no room, for as long as others read what it has.
                    self._fail(move, FailureReason.BUSY, "the server took it not")
                else:
                    self._lack(move, ended)
                return
            operations.confirm(prefix, self._rank, self._left_s(move), self._then(move, readable))

        def readable(ended: Ended[None]) -> None:
            if isinstance(ended, Lack):
                self._lack(move, ended)
            else:
                self._succeed(move)

        operations.store(
            prefix,
            self._rank,
            (0, 1),
            page.pages,
            self._left_s(move),
            self._then(move, taken),
            self._settled(row, page),
        )

    # Both.

    def _left_s(self, move: RankMove) -> float:
        return max(0.0, move.until_s - self._clock())

    def _then(self, move: RankMove, action: Callable[[Ended[T]], None]) -> Callable[[Ended[T]], None]:
        """The same on the moving thread, where a bug costs this move."""
        return lambda ended: self._post(lambda: self._safely(move, lambda: action(ended)))

    def _settled(self, row: _Row, page: Page) -> Callable[[], None]:
        """Gives a page back behind whatever was posted before: it was read by then."""

        def give_back() -> None:
            self._give_back(row, page)
            self._start(row)

        return lambda: self._post(give_back)

    def _give_back(self, row: _Row, page: Page) -> None:
        row.settled_s = self._clock()
        row.shelf.give_back(page)

    def _safely(self, move: RankMove, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever it was, other moves go on
            logger.exception("a move to or from LMCache's server met a bug")
            self._fail(move, FailureReason.IO, f"{type(error).__name__}: {error}")

    def _lack(self, move: RankMove, lack: Lack) -> None:
        self._fail(move, _REASONS.get(lack.trouble, FailureReason.IO), f"LMCache's server: {lack}")

    def _succeed(self, move: RankMove) -> None:
        self._finish(move, Completion(move.ticket, None, move.checksum))

    def _fail(self, move: RankMove, reason: FailureReason, detail: str) -> None:
        self._finish(move, Completion(move.ticket, Failure(reason, detail)))

    def _finish(self, move: RankMove, completion: Completion) -> None:
        if not move.is_over:
            move.is_over = True
            del self._open[id(move)]
            self._on_ended(completion)
