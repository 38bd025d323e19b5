"""Connections that this process opens: from a host's name to a socket that is being connected.

Nothing waits for a name. Those that have not proven the secret give way to newer ones when there are too many, so an
address that does not answer keeps nobody from another.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.peers.control.connections import Connections
from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.control.resolving import Address, Resolver
from hybridkv.peers.control.sessions import Sessions
from hybridkv.peers.wire import CloseReason, WireLimits, is_loopback


@dataclass(frozen=True, slots=True)
class Call:
    """Who is to be connected to. `expected_peer` None: anybody who knows the secret."""

    host: str
    port: int
    expected_peer: str | None
    handlers: Handlers


class Dialing:
    """For the loop's thread.

    Args:
        sessions: makes them.
        connections: those of the loop.
        limits: on connections, and on the time for a name.
        has_secret: without one only this host is connected to.
        post: has something done on the loop's thread.
        clock: seconds.
    """

    def __init__(
        self,
        sessions: Sessions,
        connections: Connections,
        limits: WireLimits,
        has_secret: bool,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._sessions = sessions
        self._connections = connections
        self._limits = limits
        self._has_secret = has_secret
        self._post = post
        self._clock = clock
        self._resolver = Resolver()
        self._waiting: dict[LinkId, tuple[Call, float]] = {}

    def __len__(self) -> int:
        """Of those whose address is not known yet."""
        return len(self._waiting)

    def begin(self, link: LinkId, call: Call) -> None:
        if not self._has_secret and not is_loopback(call.host):
            self._connections.tell(link, call.handlers, CloseReason.NO_SECRET)
        elif not self._has_room():
            self._connections.tell(link, call.handlers, CloseReason.TOO_MANY)
        else:
            self._waiting[link] = (call, self._clock())
            self._resolve(link, call)

    def _has_room(self) -> bool:
        dialled = [each for each in self._connections if not each.is_server]
        if len(dialled) + len(self._waiting) < self._limits.max_connections:
            return True
        oldest = next((each for each in dialled if not each.is_established), None)
        if oldest is not None:
            self._connections.close(oldest, CloseReason.TOO_MANY)
        return oldest is not None

    def _resolve(self, link: LinkId, call: Call) -> None:
        address = self._resolver.at_once(call.host, call.port)
        if address is not None:
            self._dial(link, address)
            return

        def resolved(found: Address | None) -> None:
            self._post(lambda: self._dial(link, found))

        if not self._resolver.begin(call.host, call.port, resolved):
            self._dial(link, None)

    def _dial(self, link: LinkId, address: Address | None) -> None:
        if link not in self._waiting:
            return
        call, began_s = self._waiting.pop(link)
        sock = _connecting(address) if address is not None else None
        if sock is None or address is None:
            self._connections.tell(link, call.handlers, CloseReason.UNREACHABLE)
            return
        session = self._sessions.client(call.expected_peer)
        connection = self._connections.add(link, sock, session, call.handlers)
        connection.is_connecting, connection.began_s, connection.host = True, began_s, address[1][0]
        self._connections.watch(connection)

    def give_up(self, link: LinkId, reason: CloseReason) -> None:
        """One whose address is not known yet; others are passed over."""
        waiting = self._waiting.pop(link, None)
        if waiting is not None:
            self._connections.tell(link, waiting[0].handlers, reason)

    def give_up_late(self, now_s: float) -> None:
        """Those whose address took too long."""
        for link, (_, began_s) in list(self._waiting.items()):
            if now_s - began_s > self._limits.handshake_timeout_s:
                self.give_up(link, CloseReason.TOO_SLOW)

    def close(self) -> None:
        for link in list(self._waiting):
            self.give_up(link, CloseReason.DONE)


def _connecting(address: Address) -> socket.socket | None:
    """A socket that is being connected; None where the system refuses at once."""
    try:
        sock = socket.socket(address[0], socket.SOCK_STREAM)
    except OSError:
        return None
    sock.setblocking(False)
    if sock.connect_ex(address[1]) in (0, errno.EINPROGRESS):
        return sock
    sock.close()
    return None
