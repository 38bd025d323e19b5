"""Every connection of a loop, what may still be sent on it, and what its owner was told of its end.

Belongs to the loop's thread, but for what says otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hybridkv.peers.control.connection import Connection
from hybridkv.peers.control.counts import ControlCounts, Tally
from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.wire import CloseReason, Session

logger = logging.getLogger(__name__)

QUEUED_BYTES = 256
"""What a message on its way to the loop's thread takes up beside its body."""


@dataclass(slots=True)
class _Open:
    """What other threads may know of a link on which something may be said."""

    host: str
    queued_bytes: int = 0


class Connections:
    """Connections by link."""

    def __init__(self, selector: selectors.BaseSelector, clock: Callable[[], float]) -> None:
        self._selector = selector
        self._clock = clock
        self._by_link: dict[LinkId, Connection] = {}
        self._lock = threading.Lock()
        self._open: dict[LinkId, _Open] = {}
        self._tally = Tally()

    # Any thread.

    def queue(self, link: LinkId, num_bytes: int, max_bytes: int) -> bool:
        """Whether so many bytes more may be on their way to the loop's thread for this link. Then they are."""
        with self._lock:
            known = self._open.get(link)
            if known is None or known.queued_bytes + num_bytes + QUEUED_BYTES > max_bytes:
                self._tally.refused_sends += 1
                return False
            known.queued_bytes += num_bytes + QUEUED_BYTES
            return True

    def is_open(self, link: LinkId) -> bool:
        with self._lock:
            return link in self._open

    def host_of(self, link: LinkId) -> str | None:
        """The address of the other side of an open link."""
        with self._lock:
            known = self._open.get(link)
            return known.host if known is not None else None

    def counts(self) -> ControlCounts:
        with self._lock:
            return self._tally.value()

    # The loop's thread.

    def __contains__(self, link: object) -> bool:
        return link in self._by_link

    def __iter__(self) -> Iterator[Connection]:
        """In the order in which they came. What is closed meanwhile is not looked at."""
        return iter([*self._by_link.values()])

    def __len__(self) -> int:
        return len(self._by_link)

    def get(self, link: LinkId) -> Connection | None:
        return self._by_link.get(link)

    def add(self, link: LinkId, sock: socket.socket, session: Session, handlers: Handlers) -> Connection:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(link, sock, session, handlers, self._clock())
        self._by_link[link] = connection
        self._selector.register(sock, connection.events, link)
        return connection

    def watch(self, connection: Connection) -> None:
        """Wait for what it waits for now."""
        self._selector.modify(connection.sock, connection.events, connection.link)

    def open(self, connection: Connection) -> None:
        """Both sides have proven the secret."""
        with self._lock:
            self._tally.opened += 1
            self._open[connection.link] = _Open(connection.host)

    def take(self, link: LinkId, num_bytes: int) -> None:
        """Bytes that were queued have come to the loop's thread."""
        with self._lock:
            known = self._open.get(link)
            if known is not None:
                known.queued_bytes -= num_bytes + QUEUED_BYTES

    def sent_frame(self) -> None:
        with self._lock:
            self._tally.sent_frames += 1

    def received_frame(self) -> None:
        with self._lock:
            self._tally.received_frames += 1

    def close(self, connection: Connection, reason: CloseReason, detail: str = "") -> None:
        """Repeatable."""
        link = connection.link
        if self._by_link.pop(link, None) is None:
            return
        with self._lock:
            self._open.pop(link, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.close(reason)
        logger.debug("a control connection ended: %s %s", reason, detail)
        if connection.is_established or not connection.is_server:
            self.tell(link, connection.handlers, reason)
        else:
            self.count(reason)

    def tell(self, link: LinkId, handlers: Handlers, reason: CloseReason) -> None:
        """The last word on a link to its owner."""
        self.count(reason)
        try:
            handlers.closed(link, reason)
        except Exception:
            logger.warning("the handler of a connection's end failed", exc_info=True)

    def count(self, reason: CloseReason) -> None:
        with self._lock:
            self._tally.close(reason)
