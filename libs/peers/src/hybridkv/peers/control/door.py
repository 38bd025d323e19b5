"""Listener for control connections, and a bound on strangers: connections that have not said Hello.

One more than `max_handshakes` ends another's (`who_gives_way`). ZeroMQ has no call that ends one connection, so its
socket is shut down from here, by the number that ZeroMQ reports.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

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
from hybridkv.peers.wire import CloseReason, who_gives_way

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILED
BACKLOG = 128
UNBIND_S = 1.0


class Door:
    """Made by any thread; everything else is for the loop's thread.

    Args:
        setup: of the loop.
        address: in numbers. `OSError` where it cannot be bound.
        handlers: of those who come.
        count: told why each stranger left.
        gone: told of each line whose connection has ended. Its last messages may still wait to be received.
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
        """By the number of the socket, the oldest first."""
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
        said = str(self.socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0").removeprefix("tcp://")
        host, _, port = said.rpartition(":")
        self.address = host.strip("[]"), int(port)

    def close(self) -> None:
        """Let nobody in any more. `socket` stays, to send what waits."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.unbind(self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
            until_s = self._clock() + UNBIND_S
            # Events are read meanwhile: libzmq waits for room for them, and then hears of nothing.
            while not self._is_unbound and self._clock() < until_s:
                self.monitor.poll(10)
                self.look()
        unwatched(self.socket, self.monitor)

    def look(self) -> None:
        """Take in who came and who left. A message that is received after this is of a connection that is known."""
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
            fd = list(self._strangers)[who_gives_way([host for host, _ in self._strangers.values()])]
            self._count(CloseReason.TOO_MANY)
            self._hang_up(fd, self._strangers.pop(fd))

    def _left(self, fd: int) -> None:
        failed, self._failed = self._failed, None
        if (line := self._by_fd.pop(fd, None)) is not None:
            self._gone(line)
        elif self._strangers.pop(fd, None) is not None:
            self._count(failed or CloseReason.MALFORMED)

    def let_in(self, line: Line) -> None:
        """A stranger has said who it is."""
        assert line.route is not None
        self.lines[line.route] = line
        address = self._strangers.pop(line.fd, None)
        if address is None:
            self._gone(line)  # its end was heard of before its first word
        else:
            line.address, self._by_fd[line.fd] = address, line

    def see_off(self, line: Line, is_told: bool) -> None:
        """It is a stranger again, who leaves by itself if it was told to, and is hung up on if not."""
        assert line.route is not None
        del self.lines[line.route]
        if self._by_fd.pop(line.fd, None) is None:
            return  # it has gone already
        if is_told:
            self._strangers[line.fd] = line.address
        else:
            self._hang_up(line.fd, line.address)

    def _hang_up(self, fd: int, peer: Address) -> None:
        """Shut the connection with `peer` down, if the number still stands for it."""
        sock = _connection(fd)
        if sock is not None:
            with sock, contextlib.suppress(OSError):
                if sock.getsockname()[1] == self.address[1] and sock.getpeername()[:2] == peer:
                    sock.shutdown(socket.SHUT_RDWR)


def _peer_of(fd: int) -> Address:
    """("", 0) of a connection that has ended."""
    sock = _connection(fd)
    if sock is not None:
        with sock, contextlib.suppress(OSError):
            host, port = sock.getpeername()[:2]
            return str(host), int(port)
    return "", 0


def _connection(fd: int) -> socket.socket | None:
    """A second handle of a TCP connection: its number may be another file's at any moment."""
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
