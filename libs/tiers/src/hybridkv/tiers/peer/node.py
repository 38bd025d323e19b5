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
from hybridkv.tiers.peer import messages
from hybridkv.tiers.peer.messages import PeerDescription

logger = logging.getLogger(__name__)

Address: TypeAlias = tuple[str, int]

INCOMPATIBLE_RETRY_FACTOR = 60
"""Factor on `retry_s` for an incompatible peer, which may be restarted with other settings."""
SELF = "is this engine itself: skipped"
MAX_LOGGED_DIFFERENCES = 64
"""Limit of logged differences of incoming connections."""


class IncomingHandler(Protocol):
    """Callbacks for incoming connections. Called on the loop's thread; a `WireError` ends the connection."""

    def on_request(self, link: LinkId, body: bytes) -> bytes: ...

    def on_notice(self, link: LinkId, body: bytes) -> None: ...

    def on_closed(self, link: LinkId) -> None:
        """The connection ended."""
        ...


class OutgoingHandler(Protocol):
    """Callbacks for outgoing connections. Called on the loop's thread; a `WireError` ends the connection."""

    def on_ready(self, peer: int, description: Describe) -> None:
        """The peer is compatible and ready."""
        ...

    def on_reply(self, peer: int, request: int, body: bytes) -> None: ...

    def on_lost(self, peer: int) -> None:
        """The connection to a ready peer ended. Open requests get no reply."""
        ...


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Description of a process for its peers. `capability` lets them read its memory; empty if they may not."""

    description: PeerDescription
    capability: bytes = b""


@dataclass(frozen=True, slots=True)
class NodeCallbacks:
    """Callbacks for incoming and outgoing connections."""

    incoming: IncomingHandler
    outgoing: OutgoingHandler


@dataclass(slots=True)
class _Peer:
    link: LinkId | None = None
    is_ready: bool = False
    retry_s: float = 0.0
    is_incompatible: bool = False
    last_logged: str = ""
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
        self._description = identity.description
        self._describe = Describe(messages.encode_description(identity.description), identity.capability)
        self._incoming, self._outgoing = callbacks.incoming, callbacks.outgoing
        self._addresses = tuple(peers)
        self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._peers = [_Peer() for _ in peers]
        self._logged_differences: set[str] = set()
        self._described: dict[LinkId, bool] = {}
        """Incoming connections, and whether each has sent a valid description."""

    def listen(self, host: str, port: int) -> Address:
        """Accept connections. `OSError` if the address is not available."""
        handlers = Handlers(self._on_incoming_opened, self._on_incoming_message, self._on_incoming_closed)
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
            lambda link, _: self._on_opened(link),
            lambda link, message: self._on_message(number, link, message),
            lambda link, reason: self._on_closed(number, link, reason),
        )
        try:
            peer.link = self._loop.connect(*self._addresses[number], None, handlers)
        except PeersProtocolError:
            peer.retry_s = float("inf")

    def send_request(self, peer: int, request: int, body: bytes) -> bool:
        """Send a request. False if the peer is not ready; then no reply comes."""
        return self._send(peer, RequestMessage(request, body))

    def send_notice(self, peer: int, body: bytes) -> bool:
        """Send a message without a reply."""
        return self._send(peer, Notice(body))

    def _send(self, peer: int, message: Message) -> bool:
        with self._lock:
            link = self._peers[peer].link if self._peers[peer].is_ready else None
        return link is not None and self._loop.send(link, message)

    def disconnect(self, peer: int) -> None:
        """Close the connection to a peer."""
        with self._lock:
            link = self._peers[peer].link
        if link is not None:
            self._loop.end(link)

    def close(self, timeout_s: float) -> bool:
        """Close every connection. Idempotent. False if a callback is still running."""
        return self._loop.close(timeout_s)

    # Outgoing connections, on the loop's thread.

    def _on_opened(self, link: LinkId) -> None:
        self._loop.send(link, self._describe)

    def _on_message(self, number: int, link: LinkId, message: Message) -> None:
        peer = self._peers[number]
        if isinstance(message, Describe) and not peer.is_ready:
            differs = self._refuse(link, message)
            if differs is not None:
                peer.is_incompatible = True
                self._warn_once(number, differs)
            else:
                self._outgoing.on_ready(number, message)
                with self._lock:
                    peer.is_ready, peer.last_logged = True, ""
        elif isinstance(message, Reply) and peer.is_ready:
            self._outgoing.on_reply(number, message.request, message.body)
        elif isinstance(message, Refused):
            peer.is_incompatible = True
            self._warn_once(number, _difference_text(message.field, message.theirs, message.ours))
            self._loop.end(link, CloseReason.DONE)
        else:
            raise WireError(CloseReason.UNEXPECTED, type(message).__name__)

    def _refuse(self, link: LinkId, message: Describe) -> str | None:
        """Check a description. None if it is compatible; otherwise refuse the peer and return the difference."""
        theirs = messages.decode_description(message.description)
        differs = messages.difference(self._description, theirs)
        if differs is None:
            return None
        self._loop.send(link, Refused(*differs))
        self._loop.end(link, CloseReason.DONE)
        return _difference_text(*differs)

    def _on_closed(self, number: int, link: LinkId, reason: CloseReason) -> None:
        with self._lock:
            peer = self._peers[number]
            was_ready, was_incompatible = peer.is_ready, peer.is_incompatible
            is_self = reason is CloseReason.SELF
            pause_s = self._retry_s * (INCOMPATIBLE_RETRY_FACTOR if was_incompatible or is_self else 1)
            peer.link, peer.is_ready, peer.is_incompatible = None, False, False
            peer.retry_s = self._clock() + pause_s
        if is_self and peer.last_logged != SELF:
            peer.last_logged = SELF
            logger.info("peer %s:%d %s", *self._addresses[number], SELF)
        elif not was_incompatible and not is_self and reason is not CloseReason.DONE:
            hint = "; it has another secret or another version, or is ending" if reason is CloseReason.HUNG_UP else ""
            self._warn_once(number, f"the connection ended: {reason}{hint}")
        if was_ready:
            self._outgoing.on_lost(number)

    def _warn_once(self, number: int, why: str) -> None:
        """Log a reason, unless it was the last one logged for this peer."""
        peer = self._peers[number]
        if peer.last_logged != why:
            peer.last_logged = why
            logger.warning("peer %s:%d: %s", *self._addresses[number], why)

    # Incoming connections, on the loop's thread.

    def _on_incoming_opened(self, link: LinkId, _: str) -> None:
        self._described[link] = False
        self._loop.send(link, self._describe)

    def _on_incoming_message(self, link: LinkId, message: Message) -> None:
        is_known = self._described.get(link, False)
        if isinstance(message, Describe) and not is_known:
            differs = self._refuse(link, message)
            self._described[link] = differs is None
            if (
                differs is not None
                and differs not in self._logged_differences
                and len(self._logged_differences) < MAX_LOGGED_DIFFERENCES
            ):
                self._logged_differences.add(differs)
                logger.warning("a peer that connected here does not fit: %s", differs)
        elif isinstance(message, RequestMessage) and is_known:
            self._loop.send(link, Reply(message.request, self._incoming.on_request(link, message.body)))
        elif isinstance(message, Notice) and is_known:
            self._incoming.on_notice(link, message.body)
        elif not isinstance(message, Refused):
            raise WireError(CloseReason.UNEXPECTED, type(message).__name__)

    def _on_incoming_closed(self, link: LinkId, _: CloseReason) -> None:
        self._described.pop(link, None)
        self._incoming.on_closed(link)


def _difference_text(field: str, ours: str, theirs: str) -> str:
    return f"{field} is {ours} here and {theirs} there"
