"""Every connection of a loop, what may still be sent on it, and what its owner was told of its end.

Belongs to the loop's thread, but for what says otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from hybridkv.peers.control.counts import ControlCounts, Tally
from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.wire import CloseReason, WireError

logger = logging.getLogger(__name__)

QUEUED_BYTES = 256
"""What a message on its way takes up beside its body."""


@dataclass(slots=True, eq=False)
class Line:
    """One connection. At a listener all share a socket and have a `route`; one that was dialled has its own socket."""

    link: LinkId
    handlers: Handlers
    socket: zmq.Socket[bytes]
    host: str
    began_s: float
    route: bytes | None = None
    fd: int = -1
    """Of a connection that came here, as its listener counts them."""
    monitor: zmq.Socket[bytes] | None = None
    """Of one that was dialled."""
    expected_peer: str | None = None
    is_proven: bool = False
    """Both sides have proven the secret."""
    is_open: bool = False
    """And said who they are."""
    heard_s: float = 0.0
    spoke_s: float = 0.0
    heard_bytes: int = 0
    """That the other side was not told of."""

    @property
    def is_server(self) -> bool:
        return self.route is not None

    def say(self, body: bytes) -> None:
        """`WireError` when the connection is no more, or takes nothing."""
        parts = [body] if self.route is None else [self.route, body]
        try:
            self.socket.send_multipart(parts, zmq.DONTWAIT)
        except zmq.Again:
            # A socket of its own has nothing to send to when its connection is gone.
            reason = CloseReason.BACKLOG if self.is_server else CloseReason.RESET
            raise WireError(reason, "nothing more is taken") from None
        except zmq.ZMQError as error:
            raise WireError(CloseReason.RESET, str(error)) from None


@dataclass(slots=True)
class _Open:
    """What other threads may know of a link on which something may be said."""

    host: str
    unheard_bytes: int = 0
    """Said here, and not yet heard there as far as is known."""


class Lines:
    """Connections by link."""

    def __init__(self) -> None:
        self._by_link: dict[LinkId, Line] = {}
        self._lock = threading.Lock()
        self._open: dict[LinkId, _Open] = {}
        self._tally = Tally()

    # Any thread.

    def queue(self, link: LinkId, num_bytes: int, max_bytes: int) -> bool:
        """Whether so many bytes more may be on their way to the other side of this link. Then they are."""
        with self._lock:
            known = self._open.get(link)
            if known is None or known.unheard_bytes + num_bytes + QUEUED_BYTES > max_bytes:
                self._tally.refused_sends += 1
                return False
            known.unheard_bytes += num_bytes + QUEUED_BYTES
            return True

    def is_open(self, link: LinkId) -> bool:
        with self._lock:
            return link in self._open

    def counts(self) -> ControlCounts:
        with self._lock:
            return self._tally.value()

    # The loop's thread.

    def __contains__(self, link: object) -> bool:
        return link in self._by_link

    def __iter__(self) -> Iterator[Line]:
        """In the order in which they came. What is closed meanwhile is not looked at."""
        return iter([*self._by_link.values()])

    def __len__(self) -> int:
        return len(self._by_link)

    def get(self, link: LinkId) -> Line | None:
        return self._by_link.get(link)

    def add(self, line: Line) -> None:
        self._by_link[line.link] = line

    def open(self, line: Line) -> None:
        """Both sides have proven the secret, and said who they are."""
        line.is_open = True
        with self._lock:
            self._tally.opened += 1
            self._open[line.link] = _Open(line.host)

    def heard(self, link: LinkId, num_bytes: int) -> bool:
        """The other side has heard so much. False: so much was not said."""
        with self._lock:
            known = self._open.get(link)
            if known is None:
                return True
            known.unheard_bytes -= num_bytes
            return known.unheard_bytes >= 0

    def sent_frame(self) -> None:
        with self._lock:
            self._tally.sent_frames += 1

    def received_frame(self) -> None:
        with self._lock:
            self._tally.received_frames += 1

    def remove(self, line: Line) -> bool:
        """Whether it was there."""
        with self._lock:
            self._open.pop(line.link, None)
        return self._by_link.pop(line.link, None) is not None

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
