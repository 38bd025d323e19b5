"""Node: the connections of one process to its peers. The node listens, keeps a connection to each listed peer, connects
to hinted peers when they are needed, and passes messages to callbacks. Listed peers are in the configuration; hinted
peers are named by a hint of a request.

On every connection, both sides first send a description. Other messages follow only if protocol version, rank and
fingerprint are equal. The node retries an unreachable or incompatible peer later, in a call of `ready` or `reach`; no
call waits for a connection. Callbacks run on the loop's thread.

The number of hinted peers is limited. A new hinted peer replaces a peer that is not ready, or else the least recently
used peer. A peer is never replaced while a request waits for it, or while the caller reports it as in use.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hybridkv.peers.control import ControlLoop, Handlers, LinkId
from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.wire import CloseReason, Describe, Message, Notice, Refused, Reply, RequestMessage, WireError
from hybridkv.tiers.peer import messages
from hybridkv.tiers.peer.messages import PeerDescription
from hybridkv.tiers.peer.options import PeerOptions
from hybridkv.tiers.peer.places import Address, PeerId

logger = logging.getLogger(__name__)

INCOMPATIBLE_RETRY_FACTOR = 60
"""Factor on `retry_s` for an incompatible peer, and for an address of this engine itself. The node retries, because a
peer may restart with other settings."""
SELF_MESSAGE = "is this engine itself: skipped"
"""Logged if a connection leads back to this process."""
MAX_LOGGED_DIFFERENCES = 64
"""Limit of logged differences of incoming connections."""
MAX_HINTED_LINES = 64
"""Limit of logged lines about hinted peers. Clients choose the addresses of these peers, so they could fill the log."""


class IncomingHandler(Protocol):
    """Callbacks for incoming connections. Called on the loop's thread; a `WireError` ends the connection."""

    def on_request(self, link: LinkId, body: bytes) -> bytes: ...

    def on_notice(self, link: LinkId, body: bytes) -> None: ...

    def on_closed(self, link: LinkId) -> None:
        """The connection ended."""
        ...


class OutgoingHandler(Protocol):
    """Callbacks for outgoing connections. Called on the loop's thread; a `WireError` ends the connection."""

    def on_ready(self, peer: PeerId, description: Describe) -> None:
        """The peer is compatible and ready."""
        ...

    def on_reply(self, peer: PeerId, request: int, body: bytes) -> None: ...

    def on_lost(self, peer: PeerId, was_ready: bool) -> None:
        """The connection to a ready peer ended, or a connection attempt failed and a request waited for it. Open
        requests get no reply."""
        ...


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Description of a process for its peers. With `capability`, peers can read its memory; empty: they cannot."""

    description: PeerDescription
    capability: bytes = b""


@dataclass(frozen=True, slots=True)
class NodeCallbacks:
    """Callbacks for incoming and outgoing connections."""

    incoming: IncomingHandler
    outgoing: OutgoingHandler


@dataclass(slots=True, eq=False)
class _Peer:
    name: PeerId
    address: Address
    """Address to connect to: the peer's scheduler, or one of its ranks."""
    link: LinkId | None = None
    is_ready: bool = False
    retry_s: float = 0.0
    """Time before which no new connection is attempted."""
    is_incompatible: bool = False
    last_logged: str = ""
    """Last logged reason."""
    begun_s: float = 0.0
    """Start of the last connection attempt."""
    has_failed: bool = False
    """True if the last attempt failed. Then no request waits for the next attempt."""
    queued: dict[int, bytes] = field(default_factory=dict)
    """Requests that wait for the connection."""


class PeerNode:
    """Connections of one process to its peers.

    Args:
        loop: control connections. Closed by `close`.
        identity: description of this process.
        callbacks: receive peers' messages.
        peers: addresses of the listed peers; the number of a peer is its index.
        options: limits.
        clock: seconds.
        port_offset: added to the port of a hinted scheduler, to connect to one of its ranks; 0: to the scheduler.
    """

    def __init__(
        self,
        loop: ControlLoop,
        identity: NodeIdentity,
        callbacks: NodeCallbacks,
        peers: Sequence[Address],
        options: PeerOptions,
        clock: Callable[[], float],
        port_offset: int = 0,
    ) -> None:
        self._loop = loop
        self._description = identity.description
        self._describe_message = Describe(messages.encode_description(identity.description), identity.capability)
        self._incoming, self._outgoing = callbacks.incoming, callbacks.outgoing
        self._options = options
        self._clock = clock
        self._port_offset = port_offset
        self._lock = threading.Lock()
        self._listed = [_Peer(number, address) for number, address in enumerate(peers)]
        self._hinted: OrderedDict[Address, _Peer] = OrderedDict()
        """Least recently used first."""
        self._num_hinted_lines = 0
        self._logged_differences: set[str] = set()
        self._described: dict[LinkId, bool] = {}
        """Incoming connections. True if a connection has sent a compatible description."""

    def listen(self, host: str, port: int) -> Address:
        """Accept connections. `OSError` if the address is not available."""
        handlers = Handlers(self._on_incoming_opened, self._on_incoming_message, self._on_incoming_closed)
        return self._loop.listen(host, port, handlers)

    # Any thread.

    def ready(self) -> list[int]:
        """Numbers of the listed peers that are ready. Starts the connections that are due."""
        with self._lock:
            for peer in self._listed:
                self._connect_if_due(peer)
            return [number for number, peer in enumerate(self._listed) if peer.is_ready]

    def reach(self, name: PeerId, in_use: Collection[PeerId] = ()) -> bool:
        """True if a peer is ready. Otherwise starts a connection if one is due.

        Adds an unknown hinted peer. If there are too many, removes another hinted peer that is not in `in_use`; False
        if there is none.
        """
        with self._lock:
            peer = self._find(name)
            if peer is None:
                if isinstance(name, int) or not self._make_room(in_use):
                    return False
                peer = self._hinted[name] = _Peer(name, (name[0], name[1] + self._port_offset))
            self._connect_if_due(peer)
            return peer.is_ready

    def _find(self, name: PeerId) -> _Peer | None:
        if isinstance(name, int):
            return self._listed[name] if name < len(self._listed) else None
        peer = self._hinted.get(name)
        if peer is not None:
            self._hinted.move_to_end(name)
        return peer

    def _make_room(self, in_use: Collection[PeerId]) -> bool:
        """Remove a hinted peer if there are too many. False if all are in use or have waiting requests."""
        if len(self._hinted) < self._options.max_hinted:
            return True
        removable = [(name, peer) for name, peer in self._hinted.items() if name not in in_use and not peer.queued]
        if not removable:
            return False
        name, peer = next((each for each in removable if not each[1].is_ready), removable[0])
        del self._hinted[name]
        if peer.link is not None:
            self._loop.end(peer.link)
        return True

    def _connect_if_due(self, peer: _Peer) -> None:
        now_s = self._clock()
        if peer.link is not None or now_s < peer.retry_s:
            return
        handlers = Handlers(
            lambda link, _: self._on_opened(link),
            lambda link, message: self._on_message(peer, link, message),
            lambda link, reason: self._on_closed(peer, reason),
        )
        peer.begun_s = now_s
        try:
            peer.link = self._loop.connect(*peer.address, None, handlers)
        except PeersProtocolError:
            peer.retry_s = float("inf")

    def send_request(self, name: PeerId, request: int, body: bytes, may_wait: bool = False) -> bool:
        """Send a request. False if the peer is not ready; then no reply comes.

        With `may_wait`, the request waits for the end of a connection attempt, if the attempt has begun recently.
        """
        with self._lock:
            peer = self._find(name)
            if may_wait and peer is not None and self._may_open_soon(peer):
                peer.queued[request] = body
                return True
        return self._send(name, RequestMessage(request, body))

    def _may_open_soon(self, peer: _Peer) -> bool:
        is_connecting = peer.link is not None and not peer.is_ready and not peer.has_failed
        return is_connecting and self._clock() - peer.begun_s <= self._options.connect_wait_s

    def withdraw_request(self, name: PeerId, request: int) -> bool:
        """Drop a request that waits for a connection. False if it was sent, or is unknown."""
        with self._lock:
            peer = self._find(name)
            return peer is not None and peer.queued.pop(request, None) is not None

    def send_notice(self, name: PeerId, body: bytes) -> bool:
        """Send a message without a reply. False if it cannot be sent."""
        return self._send(name, Notice(body))

    def _send(self, name: PeerId, message: Message) -> bool:
        with self._lock:
            peer = self._find(name)
            link = peer.link if peer is not None and peer.is_ready else None
        return link is not None and self._loop.send(link, message)

    def disconnect(self, name: PeerId) -> None:
        """Close the connection to a peer."""
        with self._lock:
            peer = self._find(name)
            link = None if peer is None else peer.link
        if link is not None:
            self._loop.end(link)

    def close(self, timeout_s: float) -> bool:
        """Close every connection. Idempotent. False if a callback is still running."""
        return self._loop.close(timeout_s)

    # Outgoing connections, on the loop's thread.

    def _on_opened(self, link: LinkId) -> None:
        self._loop.send(link, self._describe_message)

    def _on_message(self, peer: _Peer, link: LinkId, message: Message) -> None:
        if isinstance(message, Describe) and not peer.is_ready:
            differs = self._check_description(link, message)
            if differs is not None:
                peer.is_incompatible = True
                self._warn_once(peer, differs)
            else:
                self._outgoing.on_ready(peer.name, message)
                with self._lock:
                    peer.is_ready, peer.has_failed, peer.last_logged = True, False, ""
                    queued, peer.queued = peer.queued, {}
                    for request, body in queued.items():
                        self._loop.send(link, RequestMessage(request, body))
        elif isinstance(message, Reply) and peer.is_ready:
            self._outgoing.on_reply(peer.name, message.request, message.body)
        elif isinstance(message, Refused):
            peer.is_incompatible = True
            self._warn_once(peer, _difference_text(message.field, message.theirs, message.ours))
            self._loop.end(link, CloseReason.DONE)
        else:
            raise WireError(CloseReason.UNEXPECTED, type(message).__name__)

    def _check_description(self, link: LinkId, message: Describe) -> str | None:
        """Check a description. None if it is compatible; otherwise refuse the peer and return the difference."""
        theirs = messages.decode_description(message.description)
        differs = messages.difference(self._description, theirs)
        if differs is None:
            return None
        self._loop.send(link, Refused(*differs))
        self._loop.end(link, CloseReason.DONE)
        return _difference_text(*differs)

    def _on_closed(self, peer: _Peer, reason: CloseReason) -> None:
        with self._lock:
            was_ready, was_incompatible, queued = peer.is_ready, peer.is_incompatible, peer.queued
            is_self = reason is CloseReason.SELF
            pause_s = self._options.retry_s * (INCOMPATIBLE_RETRY_FACTOR if was_incompatible or is_self else 1)
            peer.link, peer.is_ready, peer.is_incompatible, peer.queued = None, False, False, {}
            peer.retry_s, peer.has_failed = self._clock() + pause_s, not was_ready
        if is_self and peer.last_logged != SELF_MESSAGE:
            peer.last_logged = SELF_MESSAGE
            if self._may_log(peer):
                logger.info("peer %s:%d %s", *peer.address, SELF_MESSAGE)
        elif not was_incompatible and not is_self and reason is not CloseReason.DONE:
            hint = "; it has another secret or another version, or is ending" if reason is CloseReason.HUNG_UP else ""
            self._warn_once(peer, f"the connection ended: {reason}{hint}")
        if was_ready or queued:
            self._outgoing.on_lost(peer.name, was_ready)

    def _warn_once(self, peer: _Peer, why: str) -> None:
        """Log a reason, unless it was the last one logged for this peer."""
        if peer.last_logged == why:
            return
        peer.last_logged = why
        if self._may_log(peer):
            logger.warning("peer %s:%d: %s", *peer.address, why)

    def _may_log(self, peer: _Peer) -> bool:
        """Count a line about a hinted peer. False after the last one that may be logged."""
        if isinstance(peer.name, int):
            return True
        self._num_hinted_lines += 1
        return self._num_hinted_lines <= MAX_HINTED_LINES

    # Incoming connections, on the loop's thread.

    def _on_incoming_opened(self, link: LinkId, _: str) -> None:
        self._described[link] = False
        self._loop.send(link, self._describe_message)

    def _on_incoming_message(self, link: LinkId, message: Message) -> None:
        is_known = self._described.get(link, False)
        if isinstance(message, Describe) and not is_known:
            differs = self._check_description(link, message)
            self._described[link] = differs is None
            if (
                differs is not None
                and differs not in self._logged_differences
                and len(self._logged_differences) < MAX_LOGGED_DIFFERENCES
            ):
                self._logged_differences.add(differs)
                logger.warning("a peer that connected here is incompatible: %s", differs)
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
