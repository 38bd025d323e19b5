"""Who is let in: listeners, and what strangers at them may take up until they have proven the secret.

Their number is bounded; one more ends another's handshake (`who_gives_way`).
"""

from __future__ import annotations

import errno
import itertools
import selectors
import socket
import time

from hybridkv.peers.control.connection import Connection
from hybridkv.peers.control.connections import Connections
from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.control.sessions import Sessions
from hybridkv.peers.wire import CloseReason, WireLimits, who_gives_way

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SHORTAGE_S = 0.01
"""How long nobody is let in when the system has no more files: a listener stays readable, and the loop would spin."""


class Accepting:
    """For the loop's thread.

    Args:
        sessions: makes them.
        connections: those of the loop.
        selector: the loop's.
        limits: on connections.
        links: numbers.
    """

    def __init__(
        self,
        sessions: Sessions,
        connections: Connections,
        selector: selectors.BaseSelector,
        limits: WireLimits,
        links: itertools.count[int],
    ) -> None:
        self._sessions = sessions
        self._connections = connections
        self._selector = selector
        self._limits = limits
        self._links = links
        self._listeners: dict[socket.socket, Handlers] = {}

    def __contains__(self, sock: object) -> bool:
        return sock in self._listeners

    def add(self, listener: socket.socket, handlers: Handlers) -> None:
        self._listeners[listener] = handlers
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Let nobody in any more."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()

    def accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._make_room(self._strangers())
                time.sleep(SHORTAGE_S)
            return
        strangers = self._strangers()
        accepted = sum(each.is_server for each in self._connections)
        if accepted - len(strangers) >= self._limits.max_connections:
            sock.close()
            self._connections.count(CloseReason.TOO_MANY)
            return
        if len(strangers) >= self._limits.max_handshakes:
            self._make_room(strangers)
        link, handlers = LinkId(next(self._links)), self._listeners[listener]
        connection = self._connections.add(link, sock, self._sessions.server(), handlers)
        connection.is_server, connection.host = True, str(address[0])

    def _strangers(self) -> list[Connection]:
        return [each for each in self._connections if each.is_server and not each.is_established]

    def _make_room(self, strangers: list[Connection]) -> None:
        if strangers:
            gone = strangers[who_gives_way([each.host for each in strangers])]
            self._connections.close(gone, CloseReason.TOO_MANY)
