"""Listener for control connections, with a limit on strangers: connections that have not sent Hello.

If there are more than `max_handshakes` strangers, one of them is closed (`stranger_to_close`). ZeroMQ has no call that
closes one connection, so this module shuts down the TCP socket by the file descriptor that ZeroMQ reports.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from hybridkv.peers.control.handlers import Handlers
from hybridkv.peers.control.sockets import (
    FAILED,
    Address,
    ControlConnection,
    ControlSettings,
    close_reason_of,
    endpoint,
    events_of,
    start_monitor,
    stop_monitor,
)
from hybridkv.peers.wire import CloseReason

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILED
BACKLOG = 128
UNBIND_S = 1.0


class Listener:
    """One listener. Any thread may construct the listener; all methods are for the loop's thread.

    Args:
        settings: settings of the loop.
        address: numeric host and port. Raises `OSError` if it cannot be bound.
        handlers: callbacks of the accepted connections.
        count: called with the reason when a stranger disconnects or is closed.
        on_ended: called with each connection that the peer or the network ended. The receive queue may still have its
            last messages.
        idle_s: as for `ControlLoop.listen`.
    """

    def __init__(
        self,
        settings: ControlSettings,
        address: Address,
        handlers: Handlers,
        count: Callable[[CloseReason], None],
        on_ended: Callable[[ControlConnection], None],
        idle_s: float,
    ) -> None:
        self.handlers = handlers
        self.idle_s = idle_s
        self._max_strangers = settings.limits.max_handshakes
        self._clock = settings.clock
        self._count, self._on_ended = count, on_ended
        self._strangers: dict[int, Address] = {}
        """Peer address by file descriptor, oldest first."""
        self._by_fd: dict[int, ControlConnection] = {}
        self._failed: CloseReason | None = None
        self._is_unbound = False
        self.connections: dict[bytes, ControlConnection] = {}
        self.socket = settings.socket(zmq.ROUTER, ":" in address[0])
        settings.keys.as_server(self.socket)
        self.socket.router_mandatory = True
        self.socket.backlog = BACKLOG
        self.monitor = start_monitor(settings.context, self.socket, EVENTS)
        try:
            self.socket.bind(endpoint(address))
        except zmq.ZMQError as error:
            stop_monitor(self.socket, self.monitor)
            self.socket.close()
            raise OSError(error.errno, os.strerror(error.errno or 0)) from None
        bound = str(self.socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0").removeprefix("tcp://")
        host, _, port = bound.rpartition(":")
        self.address = host.strip("[]"), int(port)

    def close(self) -> None:
        """Stops accepting connections, and waits at most `UNBIND_S` for that. `socket` stays open to send queued
        messages."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.unbind(self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
            until_s = self._clock() + UNBIND_S
            # Read events meanwhile: while the monitor's queue is full, libzmq blocks and handles nothing else.
            while not self._is_unbound and self._clock() < until_s:
                self.monitor.poll(10)
                self.process_events()
        stop_monitor(self.socket, self.monitor)

    def process_events(self) -> None:
        """Processes connect and disconnect events, and closes strangers above the limit.

        Call it after a first message was received: then the connection of this message is known, or has ended.
        """
        for event, value in events_of(self.monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._strangers[value] = _peer_of(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._on_disconnected(value)
            elif event == zmq.EVENT_CLOSED:
                self._is_unbound = True
            else:
                self._failed = close_reason_of(event, value, CloseReason.ENDED)
        while len(self._strangers) > self._max_strangers:
            fd = list(self._strangers)[stranger_to_close([host for host, _ in self._strangers.values()])]
            self._count(CloseReason.TOO_MANY)
            self._hang_up(fd, self._strangers.pop(fd))

    def _on_disconnected(self, fd: int) -> None:
        failed, self._failed = self._failed, None
        if (connection := self._by_fd.pop(fd, None)) is not None:
            self._on_ended(connection)
        elif self._strangers.pop(fd, None) is not None:
            self._count(failed or CloseReason.MALFORMED)

    def add(self, connection: ControlConnection) -> None:
        """Registers a connection that has sent Hello."""
        assert connection.route is not None
        self.connections[connection.route] = connection
        address = self._strangers.pop(connection.fd, None)
        if address is None:
            self._on_ended(connection)  # the connection ended before its first message was read
        else:
            connection.address, self._by_fd[connection.fd] = address, connection

    def remove(self, connection: ControlConnection, bye_sent: bool) -> None:
        """Removes a connection and ends its TCP connection.

        If `bye_sent`, the peer closes the connection, which counts as a stranger until then.
        """
        assert connection.route is not None
        del self.connections[connection.route]
        if self._by_fd.pop(connection.fd, None) is None:
            return  # the connection has ended already
        if bye_sent:
            self._strangers[connection.fd] = connection.address
        else:
            self._hang_up(connection.fd, connection.address)

    def _hang_up(self, fd: int, peer: Address) -> None:
        """Shuts down the TCP connection with `peer`, if the descriptor still belongs to this connection."""
        sock = _connection(fd)
        if sock is not None:
            with sock, contextlib.suppress(OSError):
                if sock.getsockname()[1] == self.address[1] and sock.getpeername()[:2] == peer:
                    sock.shutdown(socket.SHUT_RDWR)


def _peer_of(fd: int) -> Address:
    """Address of the peer; ("", 0) if the connection has ended."""
    sock = _connection(fd)
    if sock is not None:
        with sock, contextlib.suppress(OSError):
            host, port = sock.getpeername()[:2]
            return str(host), int(port)
    return "", 0


def _connection(fd: int) -> socket.socket | None:
    """Duplicate of a TCP descriptor, because the original may be reused at any moment. None for another descriptor."""
    with contextlib.suppress(OSError):
        number = os.dup(fd)
        try:
            sock = socket.socket(fileno=number)
        except OSError:
            os.close(number)
            return None
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            return sock
        sock.close()
    return None


def stranger_to_close(hosts: Sequence[str]) -> int:
    """Index of the oldest stranger of the host with the most strangers.

    So a flood from one host closes no stranger of another host. A peer with the secret is a stranger for a few
    milliseconds only.

    Args:
        hosts: hosts of the strangers, oldest first; at least one.
    """
    [(crowd, _)] = Counter(hosts).most_common(1)
    return hosts.index(crowd)
