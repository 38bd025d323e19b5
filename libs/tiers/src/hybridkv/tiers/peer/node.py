"""Node: the connections of one process to its peers. It listens, keeps a connection to each configured peer, and passes
messages to callbacks.

On every connection both sides first send a description; other messages follow only if the fingerprints are equal. An
unreachable or incompatible peer is tried again later, at a call of `ready`; no call waits for it. Callbacks run on the
loop's thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from hybridkv.peers.control import ControlLoop, Handlers, LinkId
from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.wire import CloseReason, Describe, Message, Notice, Refused, Reply, RequestMessage, WireError
from hybridkv.tiers.peer import words
from hybridkv.tiers.peer.words import About

logger = logging.getLogger(__name__)

Address: TypeAlias = tuple[str, int]

MISFIT_RETRIES = 60
"""Factor on `retry_s` for an incompatible peer. It may be restarted with other settings."""
SELF = "is this engine itself: skipped"
MAX_SAID = 64
"""Limit of logged differences of incoming connections."""


class IncomingHandler(Protocol):
    """Callbacks for incoming connections. Called on the loop's thread; a `WireError` ends the connection."""

    def question(self, link: LinkId, body: bytes) -> bytes: ...

    def notice(self, link: LinkId, body: bytes) -> None: ...

    def left(self, link: LinkId) -> None:
        """The connection ended."""
        ...


class OutgoingHandler(Protocol):
    """Callbacks for outgoing connections. Called on the loop's thread; a `WireError` ends the connection."""

    def found(self, peer: int, description: Describe) -> None:
        """The peer is compatible and ready."""
        ...

    def reply(self, peer: int, request: int, body: bytes) -> None: ...

    def lost(self, peer: int) -> None:
        """The connection to a ready peer ended. Open requests get no reply."""
        ...


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Description of a process for its peers. `capability` lets them read its memory; empty if they may not."""

    about: About
    capability: bytes = b""


@dataclass(frozen=True, slots=True)
class NodeCallbacks:
    """Callbacks for incoming and outgoing connections."""

    asked: IncomingHandler
    asking: OutgoingHandler


@dataclass(slots=True)
class _Peer:
    link: LinkId | None = None
    is_ready: bool = False
    retry_s: float = 0.0
    is_misfit: bool = False
    said: str = ""
    """Last logged reason."""


class PeerNode:
    """Connections of one process to its peers.

    Args:
        loop: control connections. Closed by `close`.
        identity: description of this process.
        callbacks: receive peers' messages.
        peers: addresses; the number of a peer is its index.
        retry_s: delay before an unreachable peer is tried again.
        clock: seconds.

    """

    def __init__(
        self,
        loop: ControlLoop,
        identity: NodeIdentity,
        callbacks: NodeCallbacks,
        peers: Sequence[Address],
        retry_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._about = identity.about
        self._describe = Describe(words.encode_about(identity.about), identity.capability)
        self._asked, self._asking = callbacks.asked, callbacks.asking
        self._addresses = tuple(peers)
        self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._peers = [_Peer() for _ in peers]
        self._misfits: set[str] = set()
        self._guests: dict[LinkId, bool] = {}
        """Incoming connections, and whether each has sent a valid description."""

    def listen(self, host: str, port: int) -> Address:
        """Accept connections. `OSError` if the address is not available."""
        handlers = Handlers(self._guest_opened, self._guest_said, self._guest_left)
        return self._loop.listen(host, port, handlers)

    # Any thread.

    def ready(self) -> list[int]:
        """Peers that are ready. Starts connections to others that are due for a retry."""
        now_s = self._clock()
        with self._lock:
            for number, peer in enumerate(self._peers):
                if peer.link is None and now_s >= peer.retry_s:
                    self._connect(number, peer)
            return [number for number, peer in enumerate(self._peers) if peer.is_ready]

    def _connect(self, number: int, peer: _Peer) -> None:
        handlers = Handlers(
            lambda link, _: self._opened(link),
            lambda link, message: self._said(number, link, message),
            lambda link, reason: self._closed(number, link, reason),
        )
        try:
            peer.link = self._loop.connect(*self._addresses[number], None, handlers)
        except PeersProtocolError:
            peer.retry_s = float("inf")

    def ask(self, peer: int, request: int, body: bytes) -> bool:
        """Send a request. False if the peer is not ready; then no reply comes."""
        return self._send(peer, RequestMessage(request, body))

    def tell(self, peer: int, body: bytes) -> bool:
        """Send a message without a reply."""
        return self._send(peer, Notice(body))

    def _send(self, peer: int, message: Message) -> bool:
        with self._lock:
            link = self._peers[peer].link if self._peers[peer].is_ready else None
        return link is not None and self._loop.send(link, message)

    def end(self, peer: int) -> None:
        """Close the connection to a peer."""
        with self._lock:
            link = self._peers[peer].link
        if link is not None:
            self._loop.end(link)

    def close(self, timeout_s: float) -> bool:
        """Close every connection. Idempotent. False if a callback is still running."""
        return self._loop.close(timeout_s)

    # Outgoing connections, on the loop's thread.

    def _opened(self, link: LinkId) -> None:
        self._loop.send(link, self._describe)

    def _said(self, number: int, link: LinkId, message: Message) -> None:
        peer = self._peers[number]
        if isinstance(message, Describe) and not peer.is_ready:
            differs = self._refuse(link, message)
            if differs is not None:
                peer.is_misfit = True
                self._complain(number, differs)
            else:
                self._asking.found(number, message)
                with self._lock:
                    peer.is_ready, peer.said = True, ""
        elif isinstance(message, Reply) and peer.is_ready:
            self._asking.reply(number, message.request, message.body)
        elif isinstance(message, Refused):
            peer.is_misfit = True
            self._complain(number, _words(message.field, message.theirs, message.ours))
            self._loop.end(link, CloseReason.DONE)
        else:
            raise WireError(CloseReason.UNEXPECTED, type(message).__name__)

    def _refuse(self, link: LinkId, message: Describe) -> str | None:
        """Check a description. None if it is compatible; otherwise refuse the peer and return the difference."""
        theirs = words.decode_about(message.description)
        differs = words.difference(self._about, theirs)
        if differs is None:
            return None
        self._loop.send(link, Refused(*differs))
        self._loop.end(link, CloseReason.DONE)
        return _words(*differs)

    def _closed(self, number: int, link: LinkId, reason: CloseReason) -> None:
        with self._lock:
            peer = self._peers[number]
            was_ready, was_misfit = peer.is_ready, peer.is_misfit
            is_self = reason is CloseReason.SELF
            pause_s = self._retry_s * (MISFIT_RETRIES if was_misfit or is_self else 1)
            peer.link, peer.is_ready, peer.is_misfit = None, False, False
            peer.retry_s = self._clock() + pause_s
        if is_self and peer.said != SELF:
            peer.said = SELF
            logger.info("peer %s:%d %s", *self._addresses[number], SELF)
        elif not was_misfit and not is_self and reason is not CloseReason.DONE:
            hint = "; it has another secret or another version, or is ending" if reason is CloseReason.HUNG_UP else ""
            self._complain(number, f"the connection ended: {reason}{hint}")
        if was_ready:
            self._asking.lost(number)

    def _complain(self, number: int, why: str) -> None:
        """Log a reason, unless it was the last one logged for this peer."""
        peer = self._peers[number]
        if peer.said != why:
            peer.said = why
            logger.warning("peer %s:%d: %s", *self._addresses[number], why)

    # Incoming connections, on the loop's thread.

    def _guest_opened(self, link: LinkId, _: str) -> None:
        self._guests[link] = False
        self._loop.send(link, self._describe)

    def _guest_said(self, link: LinkId, message: Message) -> None:
        is_known = self._guests.get(link, False)
        if isinstance(message, Describe) and not is_known:
            differs = self._refuse(link, message)
            self._guests[link] = differs is None
            if differs is not None and differs not in self._misfits and len(self._misfits) < MAX_SAID:
                self._misfits.add(differs)
                logger.warning("a peer that connected here does not fit: %s", differs)
        elif isinstance(message, RequestMessage) and is_known:
            self._loop.send(link, Reply(message.request, self._asked.question(link, message.body)))
        elif isinstance(message, Notice) and is_known:
            self._asked.notice(link, message.body)
        elif not isinstance(message, Refused):
            raise WireError(CloseReason.UNEXPECTED, type(message).__name__)

    def _guest_left(self, link: LinkId, _: CloseReason) -> None:
        self._guests.pop(link, None)
        self._asked.left(link)


def _words(field: str, ours: str, theirs: str) -> str:
    return f"{field} is {ours} here and {theirs} there"
