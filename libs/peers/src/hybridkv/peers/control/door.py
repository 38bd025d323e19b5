"""Listener for control connections, with a limit on strangers: connections that have not sent Hello.

A stranger above `max_handshakes` closes another stranger's connection (`stranger_to_close`). ZeroMQ has no call that
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
    Line,
    Setup,
    endpoint,
    events_of,
    unwatched,
    watched,
    why_failed,
)
from hybridkv.peers.wire import CloseReason

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILED
BACKLOG = 128
UNBIND_S = 1.0


class Door:
    """One listener. Any thread may construct it; all methods are for the loop's thread.

    Args:
        setup: of the loop.
        address: numeric host and port. Raises `OSError` if it cannot be bound.
        handlers: of the accepted connections.
        count: called with the reason when a stranger leaves.
        gone: called with each connection that ended. Its last messages may still be in the receive queue.
    """

    def __init__(
        self,
        setup: Setup,
        address: Address,
        handlers: Handlers,
        count: Callable[[CloseReason], None],
        gone: Callable[[Line], None],
    ) -> None:
        self.handlers = handlers
        self._max_strangers = setup.limits.max_handshakes
        self._clock = setup.clock
        self._count, self._gone = count, gone
        self._strangers: dict[int, Address] = {}
        """Peer address by file descriptor, oldest first."""
        self._by_fd: dict[int, Line] = {}
        self._failed: CloseReason | None = None
        self._is_unbound = False
        self.lines: dict[bytes, Line] = {}
        self.socket = setup.socket(zmq.ROUTER, ":" in address[0])
        setup.keys.serve(self.socket)
        self.socket.router_mandatory = True
        self.socket.backlog = BACKLOG
        self.monitor = watched(setup.context, self.socket, EVENTS)
        try:
            self.socket.bind(endpoint(address))
        except zmq.ZMQError as error:
            unwatched(self.socket, self.monitor)
            self.socket.close()
            raise OSError(error.errno, os.strerror(error.errno or 0)) from None
        bound = str(self.socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0").removeprefix("tcp://")
        host, _, port = bound.rpartition(":")
        self.address = host.strip("[]"), int(port)

    def close(self) -> None:
        """Stops accepting connections. `socket` stays open to send queued messages."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.unbind(self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
            until_s = self._clock() + UNBIND_S
            # Read events meanwhile: while the monitor's queue is full, libzmq blocks and handles nothing else.
            while not self._is_unbound and self._clock() < until_s:
                self.monitor.poll(10)
                self.look()
        unwatched(self.socket, self.monitor)

    def look(self) -> None:
        """Processes connect and disconnect events. A message received after this call is from a known connection."""
        for event, value in events_of(self.monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._strangers[value] = _peer_of(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._left(value)
            elif event == zmq.EVENT_CLOSED:
                self._is_unbound = True
            else:
                self._failed = why_failed(event, value, CloseReason.ENDED)
        while len(self._strangers) > self._max_strangers:
            fd = list(self._strangers)[stranger_to_close([host for host, _ in self._strangers.values()])]
            self._count(CloseReason.TOO_MANY)
            self._hang_up(fd, self._strangers.pop(fd))

    def _left(self, fd: int) -> None:
        failed, self._failed = self._failed, None
        if (line := self._by_fd.pop(fd, None)) is not None:
            self._gone(line)
        elif self._strangers.pop(fd, None) is not None:
            self._count(failed or CloseReason.MALFORMED)

    def let_in(self, line: Line) -> None:
        """Registers a connection that has sent Hello."""
        assert line.route is not None
        self.lines[line.route] = line
        address = self._strangers.pop(line.fd, None)
        if address is None:
            self._gone(line)  # it ended before its first message was read
        else:
            line.address, self._by_fd[line.fd] = address, line

    def see_off(self, line: Line, bye_sent: bool) -> None:
        """Removes a connection and shuts it down.

        If `bye_sent`, the peer closes it itself, and it counts as a stranger until then.
        """
        assert line.route is not None
        del self.lines[line.route]
        if self._by_fd.pop(line.fd, None) is None:
            return  # it has ended already
        if bye_sent:
            self._strangers[line.fd] = line.address
        else:
            self._hang_up(line.fd, line.address)

    def _hang_up(self, fd: int, peer: Address) -> None:
        """Shuts down the TCP connection with `peer`, if the descriptor still belongs to it."""
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
    """Duplicate of a TCP descriptor, because the original may be reused at any moment. None if it is not TCP."""
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
    """Index of the oldest stranger of the host with the most strangers, so a flood from one host displaces itself.

    An honest peer is a stranger for milliseconds.

    Args:
        hosts: hosts of the strangers, oldest first; at least one.
    """
    [(crowd, _)] = Counter(hosts).most_common(1)
    return hosts.index(crowd)
