"""One process among peers: it listens, keeps a connection to each peer that it was told of, and hands on what is said.

On every connection both sides describe themselves first, and nothing else is said before each has found that the other
is of the same fingerprint. A peer that is not there, or does not fit, is tried again after a while, when somebody asks
for it; nobody waits for that. What is heard is told on the loop's thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from hybridkv.peers.control import ControlLoop, Handlers, LinkId
from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.wire import CloseReason, Describe, Message, Notice, Question, Refused, Reply, WireError
from hybridkv.tiers.peer import words
from hybridkv.tiers.peer.words import About

logger = logging.getLogger(__name__)

Address: TypeAlias = tuple[str, int]

MISFIT_RETRIES = 60
"""A peer that does not fit is left alone for so many times as long as one that is not there: it may be made to fit."""
MAX_SAID = 64
"""Differences of those that connect here, of which the log has a line each."""


class Asked(Protocol):
    """What answers peers that connect here. Called on the loop's thread; a `WireError` ends that connection."""

    def question(self, link: LinkId, body: bytes) -> bytes: ...

    def notice(self, link: LinkId, body: bytes) -> None: ...

    def left(self, link: LinkId) -> None:
        """Its connection is no more."""
        ...


class Asking(Protocol):
    """Who asks peers. Called on the loop's thread; a `WireError` ends that connection."""

    def found(self, peer: int, description: Describe) -> None:
        """This peer fits, and may be asked."""
        ...

    def reply(self, peer: int, request: int, body: bytes) -> None: ...

    def lost(self, peer: int) -> None:
        """A peer that was ready may be asked no more, and will answer nothing of what it was asked."""
        ...


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Description of a process for its peers. `capability` is that of its memory, if they may read any."""

    about: About
    capability: bytes = b""


@dataclass(frozen=True, slots=True)
class NodeCallbacks:
    """Receivers of peers' messages."""

    asked: Asked
    asking: Asking


@dataclass(slots=True)
class _Peer:
    link: LinkId | None = None
    is_ready: bool = False
    retry_s: float = 0.0
    is_misfit: bool = False
    said: str = ""
    """Why it could not be had, as it was logged last."""


class Node:
    """`close` closes the loop.

    Args:
        loop: control connections.
        identity: of this process.
        callbacks: receive peers' messages.
        peers: where each listens; a peer's number is its place.
        retry_s: how long a peer that is not to be had is left alone.
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
        """Connections that came, and whether each has described itself."""

    def listen(self, host: str, port: int) -> Address:
        """Let peers in. `OSError` where that address cannot be had."""
        handlers = Handlers(self._guest_opened, self._guest_said, self._guest_left)
        return self._loop.listen(host, port, handlers)

    # Any thread.

    def ready(self) -> list[int]:
        """Peers that may be asked now. Others are looked for, and found later."""
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
        """Put a question. False where this peer cannot be asked now: there will be no reply."""
        return self._send(peer, Question(request, body))

    def tell(self, peer: int, body: bytes) -> bool:
        """Say what needs no reply."""
        return self._send(peer, Notice(body))

    def _send(self, peer: int, message: Message) -> bool:
        with self._lock:
            link = self._peers[peer].link if self._peers[peer].is_ready else None
        return link is not None and self._loop.send(link, message)

    def end(self, peer: int) -> None:
        """Have nothing more to do with this connection."""
        with self._lock:
            link = self._peers[peer].link
        if link is not None:
            self._loop.end(link)

    def close(self, timeout_s: float) -> bool:
        """End every connection. Repeatable. False: something is still being handled."""
        return self._loop.close(timeout_s)

    # On the loop's thread: peers that were looked for.

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
        """None if the other side is another engine's like process. If not it is told, and left: in what it differs."""
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
            pause_s = self._retry_s * (MISFIT_RETRIES if was_misfit else 1)
            peer.link, peer.is_ready, peer.is_misfit = None, False, False
            peer.retry_s = self._clock() + pause_s
        if not was_misfit and reason is not CloseReason.DONE:
            hint = "; it has another secret or another version, or is ending" if reason is CloseReason.HUNG_UP else ""
            self._complain(number, f"the connection ended: {reason}{hint}")
        if was_ready:
            self._asking.lost(number)

    def _complain(self, number: int, why: str) -> None:
        """Once each time that it is another reason."""
        peer = self._peers[number]
        if peer.said != why:
            peer.said = why
            logger.warning("peer %s:%d: %s", *self._addresses[number], why)

    # On the loop's thread: peers that came.

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
        elif isinstance(message, Question) and is_known:
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
