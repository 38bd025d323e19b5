"""A listener, and what strangers at it may take up until they have proven the secret and said who they are.

Their number is bounded; one more ends another's handshake (`who_gives_way`). ZeroMQ has no call that ends one
connection, so its socket is shut down from here: it is a file of this process, and ZeroMQ says its number.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from hybridkv.peers.control.handlers import Handlers
from hybridkv.peers.control.lines import Line
from hybridkv.peers.control.sockets import (
    EVENTS_AT_A_TIME,
    FAILED,
    MAX_EVENTS,
    Setup,
    bound,
    endpoint,
    events_of,
    unwatched,
    watched,
    why_failed,
)
from hybridkv.peers.wire import CloseReason, who_gives_way

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILED
BYE_S = 1.0
"""For whoever was told to leave, to do so."""
BACKLOG = 128
MAX_SAID = 256
"""Messages of those who came lately."""


@dataclass(slots=True)
class Stranger:
    """Has proven nothing yet, or was told to leave."""

    host: str
    port: int
    until_s: float
    why: CloseReason | None = None
    """It ends, if this side ends it."""
    route: bytes = b""
    is_counted: bool = False


class Door:
    """Made by whoever listens; everything else is for the loop's thread.

    Args:
        setup: of the loop.
        address: in numbers. `OSError` where it cannot be bound.
        handlers: of who comes.
        count: told why each stranger left.
    """

    def __init__(
        self,
        setup: Setup,
        address: tuple[str, int],
        handlers: Handlers,
        count: Callable[[CloseReason], None],
    ) -> None:
        self.handlers = handlers
        self._limits = limits = setup.limits
        self._clock = setup.clock
        self._count = count
        self._strangers: dict[int, Stranger] = {}
        self._by_fd: dict[int, Line] = {}
        self._num_events = 0
        self._is_current = False
        self._is_unbound = False
        self._said: deque[tuple[int, bytes, list[zmq.Frame]]] = deque()
        self._leaving: set[bytes] = set()
        self._gone: deque[bytes] = deque()
        self._failed: CloseReason | None = None
        self.lines: dict[bytes, Line] = {}
        self.cut: list[Line] = []
        """Whose connection is no more; what they said last may still wait to be heard."""
        self.socket = setup.context.socket(zmq.ROUTER)
        bound(self.socket, limits)
        setup.keys.serve(self.socket)
        self.socket.router_mandatory = True
        self.socket.backlog = BACKLOG
        self.socket.ipv6 = ":" in address[0]
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

    @property
    def has_strangers(self) -> bool:
        return bool(self._strangers)

    def close(self) -> None:
        """Let nobody in any more. `socket` stays, to say what waits."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.unbind(self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
            until_s = self._clock() + BYE_S
            # Where the library waits for room, it could not be told that nobody listens any more.
            while not self._is_unbound and self._clock() < until_s:
                self.monitor.poll(10)
                self.look()
        unwatched(self.socket, self.monitor)

    def look(self) -> None:
        """Who came, and who left: some of it."""
        events = events_of(self.monitor, EVENTS_AT_A_TIME)
        self._num_events += len(events)
        self._is_current = len(events) < EVENTS_AT_A_TIME
        for event, value in events:
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._left(value)
            elif event == zmq.EVENT_CLOSED:
                self._is_unbound = True
            else:
                self._failed = why_failed(event, value, CloseReason.ENDED)

    def _accepted(self, fd: int) -> None:
        # The number of a connection that is no more may be used again before its end was heard of.
        if fd in self._strangers or fd in self._by_fd:
            self._left(fd)
        self._strangers[fd] = self._stranger(fd)
        # Of one that has gone there is only the end to be heard of.
        waiting = {
            each: stranger
            for each, stranger in self._strangers.items()
            if stranger.host and stranger.until_s < float("inf")
        }
        if len(waiting) > self._limits.max_handshakes:
            fds = list(waiting)
            self.turn_out(fds[who_gives_way([each.host for each in waiting.values()])], CloseReason.TOO_MANY)

    def _stranger(self, fd: int) -> Stranger:
        return Stranger(*_peer_of(fd, self.address[1]), self._clock() + self._limits.handshake_timeout_s)

    def _left(self, fd: int) -> None:
        failed, self._failed = self._failed, None
        if (line := self._by_fd.pop(fd, None)) is not None:
            self.cut.append(line)
        if (stranger := self._strangers.pop(fd, None)) is not None:
            if stranger.route:
                self._forget_later(stranger.route)
            if not stranger.is_counted:
                self._count(stranger.why or failed or CloseReason.MALFORMED)

    def _forget_later(self, route: bytes) -> None:
        """Its last words may still be on their way, and are not a newcomer's."""
        self._gone.append(route)
        if len(self._gone) > MAX_SAID:
            self._leaving.discard(self._gone.popleft())

    @property
    def has_kept(self) -> bool:
        """Something was said by those who came lately."""
        return bool(self._said)

    @property
    def is_behind(self) -> bool:
        """So much was said by those who came lately that no more is listened to before they are known."""
        return len(self._said) >= MAX_SAID

    def keep(self, route: bytes, frames: list[zmq.Frame]) -> None:
        """What somebody said who may not be known yet: who came is told on another way, which may be behind."""
        if route not in self._leaving:
            self._said.append((self._num_events + MAX_EVENTS, route, frames))

    def said(self) -> Iterator[tuple[bytes, list[zmq.Frame]]]:
        """The same, of those who are known by now, but for those who were told to leave."""
        while self._said and (self._is_current or self._said[0][0] <= self._num_events):
            _, route, frames = self._said.popleft()
            if route not in self._leaving:
                yield route, frames

    def let_in(self, line: Line) -> None:
        """A stranger has said who it is."""
        assert line.route is not None
        self._strangers.pop(line.fd, None)
        self._by_fd[line.fd] = line
        self.lines[line.route] = line

    def turn_out(self, fd: int, reason: CloseReason, route: bytes = b"", is_told: bool = False) -> None:
        """End a stranger's connection, once it has had time to hear why if it is told."""
        stranger = self._strangers.pop(fd, None)
        if stranger is None:
            self._count(reason)
            return  # it has gone already, and the number may be another's
        stranger.why = stranger.why or reason
        self._send_away(fd, stranger, route, is_told)

    def see_off(self, line: Line, is_told: bool) -> None:
        """The same for one that was let in."""
        assert line.route is not None
        del self.lines[line.route]
        if self._by_fd.pop(line.fd, None) is None:
            return  # it has gone already
        stranger = self._stranger(line.fd)
        stranger.is_counted = True
        self._send_away(line.fd, stranger, line.route, is_told)

    def _send_away(self, fd: int, stranger: Stranger, route: bytes, is_told: bool) -> None:
        """It stays known until its end is heard of."""
        self._strangers[fd] = stranger
        if route:
            stranger.route = route
            self._leaving.add(route)
        if is_told:
            stranger.until_s = self._clock() + BYE_S
        else:
            stranger.until_s = float("inf")
            _hang_up(fd, self.address[1], (stranger.host, stranger.port))

    def sweep(self, now_s: float) -> None:
        """End what is late."""
        for fd, stranger in list(self._strangers.items()):
            if now_s > stranger.until_s:
                self.turn_out(fd, CloseReason.TOO_SLOW, stranger.route)


def _connection(fd: int, port: int) -> tuple[socket.socket, tuple[str, int]] | None:
    """A second handle of the connection that this number stands for, and its other side.

    None where the number stands for something else by now: the connection has ended, and its number was used again.
    """
    try:
        number = os.dup(fd)
    except OSError:
        return None
    try:
        sock = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        return None
    with contextlib.suppress(OSError):
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port:
            return sock, sock.getpeername()[:2]
    sock.close()
    return None


def _peer_of(fd: int, port: int) -> tuple[str, int]:
    """("", 0) for one that is no more."""
    found = _connection(fd, port)
    if found is None:
        return "", 0
    sock, peer = found
    sock.close()
    return peer


def _hang_up(fd: int, port: int, peer: tuple[str, int]) -> None:
    """Shut the connection with `peer` down, if the number still stands for it."""
    found = _connection(fd, port)
    if found is None:
        return
    with found[0], contextlib.suppress(OSError):
        if found[1] == peer:
            found[0].shutdown(socket.SHUT_RDWR)
