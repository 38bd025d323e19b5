"""Outgoing connections: from a host name to a socket that is connecting.

Name resolution does not block: numeric addresses need no thread; names use a few threads. Connections to one name share
a lookup. A name waits for a free thread, at most for the time limit of its connection. When there are too many outgoing
connections, a new one replaces the oldest connection that is not open, or ends with TOO_MANY if all are open. So an
address that does not answer does not block connections to other addresses.

A name may have several addresses, such as one of IPv6 and one of IPv4. They are tried in the order of the system, until
the expected peer answers at one of them; without an expected peer, until any peer answers. All together have the time
limit of one connection.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq

from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.control.sockets import (
    FAILED,
    Address,
    ControlConnection,
    ControlSettings,
    Socket,
    endpoint,
    start_monitor,
    stop_monitor,
)
from hybridkv.peers.wire import CloseReason, is_loopback

MAX_NAMES = 4
MAX_ADDRESSES = 4
"""Maximum addresses of one name that are tried. The limit leaves each address time to repeat a lost packet."""
EVENTS = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | FAILED


class Resolver:
    """Looks up at most `MAX_NAMES` names at a time, and each name once at a time. Only for the loop's thread.

    A lookup by the system has no timeout and cannot be cancelled.

    Args:
        post: runs a call on the loop's thread.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._running: set[str] = set()

    def parse_numeric(self, host: str) -> tuple[str, ...]:
        """The address if `host` is numeric, else an empty tuple, also for a text that cannot be a host name."""
        return _addresses(host, socket.AI_NUMERICHOST)

    def begin(self, host: str, then: Callable[[tuple[str, ...]], None]) -> bool:
        """Starts a lookup, unless one of this name is running. Returns False if `MAX_NAMES` others are running.

        At the end of the lookup, `then` runs on the loop's thread, without an address if the lookup has failed or no
        thread can be started. If a lookup of this name was running already, this `then` does not run, but the `then`
        of the running lookup does.
        """
        if host in self._running:
            return True
        if len(self._running) >= MAX_NAMES:
            return False
        self._running.add(host)

        def resolve() -> None:
            found: tuple[str, ...] = ()
            try:
                found = _addresses(host)
            finally:
                self._post(lambda: self._end(host, found, then))

        try:
            threading.Thread(target=resolve, name="hybridkv-peer-name", daemon=True).start()
        except (RuntimeError, MemoryError):  # no thread available now; a later call may succeed
            self._post(lambda: self._end(host, (), then))
        return True

    def _end(self, host: str, found: tuple[str, ...], then: Callable[[tuple[str, ...]], None]) -> None:
        self._running.discard(host)
        then(found)


def _addresses(host: str, flags: int = 0) -> tuple[str, ...]:
    """At most `MAX_ADDRESSES` addresses of a host, in the order of the system; none if the lookup fails."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, ValueError):
        return ()
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))[:MAX_ADDRESSES]


@dataclass(frozen=True, slots=True)
class DialTarget:
    """Target of an outgoing connection. `expected_peer` None accepts any peer that has the secret."""

    host: str
    port: int
    expected_peer: str | None
    handlers: Handlers


class Dialer:
    """Outgoing connections of one loop. Only for the loop's thread.

    Args:
        settings: settings of the loop. Without a secret, the dialer connects to loopback addresses only.
        outgoing: returns the outgoing connections of the loop, in any order.
        on_connecting: called with each new connection.
        make_room: closes a connection to make room for a newer connection.
        end: called with the reason when no connection is made.
        post: as for `Resolver`.
    """

    def __init__(
        self,
        settings: ControlSettings,
        outgoing: Callable[[], list[ControlConnection]],
        on_connecting: Callable[[ControlConnection], None],
        make_room: Callable[[ControlConnection], None],
        end: Callable[[LinkId, Handlers, CloseReason], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._settings = settings
        self._outgoing = outgoing
        self._limits = settings.limits
        self._on_connecting = on_connecting
        self._make_room = make_room
        self._end = end
        self._clock = settings.clock
        self._resolver = Resolver(post)
        self._waiting: dict[LinkId, tuple[DialTarget, float]] = {}

    def __len__(self) -> int:
        """Number of connections that wait for name resolution."""
        return len(self._waiting)

    def begin(self, link: LinkId, target: DialTarget) -> None:
        if not self._settings.keys.has_secret and not is_loopback(target.host):
            self._end(link, target.handlers, CloseReason.NO_SECRET)
        elif not self._has_room():
            self._end(link, target.handlers, CloseReason.TOO_MANY)
        else:
            self._waiting[link] = (target, self._clock())
            self._resolve(link, target)

    def _has_room(self) -> bool:
        outgoing = self._outgoing()
        if len(outgoing) + len(self._waiting) < self._limits.max_connections:
            return True
        unfinished = (each for each in outgoing if not each.is_open)
        oldest = min(unfinished, key=lambda each: each.began_s, default=None)
        waiting = next(iter(self._waiting), None)
        if oldest is not None and (waiting is None or oldest.began_s <= self._waiting[waiting][1]):
            self._make_room(oldest)
        elif waiting is not None:
            self.cancel(waiting, CloseReason.TOO_MANY)
        return oldest is not None or waiting is not None

    def _resolve(self, link: LinkId, target: DialTarget) -> None:
        addresses = self._resolver.parse_numeric(target.host)
        if addresses:
            self._dial(link, addresses)
        else:
            self._start_lookups()

    def _start_lookups(self) -> None:
        """Starts lookups of waiting names while there is room, longest waiting first."""
        for target, _ in list(self._waiting.values()):
            if not self._resolver.begin(target.host, functools.partial(self._on_resolved, target.host)):
                return

    def _on_resolved(self, host: str, found: tuple[str, ...]) -> None:
        """Dials all connections that wait for this name."""
        for link, (target, _) in list(self._waiting.items()):
            if target.host == host:
                self._dial(link, found)
        self._start_lookups()

    def _dial(self, link: LinkId, hosts: tuple[str, ...]) -> None:
        if link not in self._waiting:
            return
        target, began_s = self._waiting.pop(link)
        addresses = tuple((host, target.port) for host in hosts)
        is_dialing = self._dial_first(
            addresses,
            began_s,
            lambda sock, monitor, others: ControlConnection(
                link,
                target.handlers,
                sock,
                began_s,
                monitor=monitor,
                expected_peer=target.expected_peer,
                other_addresses=others,
            ),
        )
        if not is_dialing:
            self._end(link, target.handlers, CloseReason.UNREACHABLE)

    def dial_next(self, failed: ControlConnection) -> bool:
        """Replaces a connection that failed before it was open by one to the next address. Its sockets are closed.

        Returns False if no other address is left. Link and time limit stay the same.
        """
        return self._dial_first(
            failed.other_addresses,
            failed.began_s,
            lambda sock, monitor, others: replace(failed, socket=sock, monitor=monitor, other_addresses=others),
        )

    def _dial_first(
        self,
        addresses: tuple[Address, ...],
        began_s: float,
        connection: Callable[[Socket, Socket, tuple[Address, ...]], ControlConnection],
    ) -> bool:
        """Connects to the first of these addresses that the system does not refuse at once. False if there is none.

        `connection` makes the connection from its socket, its monitor and the addresses that are left.
        """
        for number in range(len(addresses)):
            sockets = self._connecting(addresses[number:], began_s)
            if sockets is not None:
                self._on_connecting(connection(*sockets, addresses[number + 1 :]))
                return True
        return False

    def _connecting(self, addresses: tuple[Address, ...], began_s: float) -> tuple[Socket, Socket] | None:
        """A socket that connects to the first address, and its monitor; None if the system refuses at once.

        The addresses share the time that is left since `began_s`.
        """
        made: list[Socket] = []
        left_s = began_s + self._limits.handshake_timeout_s - self._clock()
        try:
            sock = self._settings.socket(zmq.DEALER, ":" in addresses[0][0])
            made.append(sock)
            self._settings.keys.as_client(sock)
            sock.reconnect_ivl = -1
            sock.connect_timeout = sock.handshake_ivl = max(1, int(left_s * 1000 / len(addresses)))
            monitor = start_monitor(self._settings.context, sock, EVENTS)
            made.append(monitor)
            sock.connect(endpoint(addresses[0]))
        except zmq.ZMQError:
            if len(made) == 2:
                stop_monitor(*made)
            for each in made:
                each.close(0)
            return None
        return sock, monitor

    def cancel(self, link: LinkId, reason: CloseReason) -> None:
        """Gives up a connection that waits for name resolution. Ignores any other link."""
        waiting = self._waiting.pop(link, None)
        if waiting is not None:
            self._end(link, waiting[0].handlers, reason)

    def cancel_timed_out(self, now_s: float) -> None:
        """Gives up connections that waited for name resolution longer than `handshake_timeout_s`."""
        for link, (_, began_s) in list(self._waiting.items()):
            if now_s - began_s > self._limits.handshake_timeout_s:
                self.cancel(link, CloseReason.TOO_SLOW)

    def close(self) -> None:
        for link in list(self._waiting):
            self.cancel(link, CloseReason.DONE)
