"""The thread that holds every control connection of a process: those that it accepts and those that it opens.

Sockets do not block, every wait has an end, and what a peer can make this side keep is bounded by `WireLimits`. Calls
from other threads go into a queue that the loop empties. Nothing that a connection does ends the thread.
"""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from hybridkv.peers.commands import Commands
from hybridkv.peers.control.accepting import Accepting
from hybridkv.peers.control.connection import Connection
from hybridkv.peers.control.connections import Connections
from hybridkv.peers.control.counts import ControlCounts
from hybridkv.peers.control.dialing import Call, Dialing
from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.control.sessions import Sessions
from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.wire import (
    CloseReason,
    Identity,
    Message,
    MessageCodec,
    Ping,
    Secret,
    WireError,
    WireLimits,
    demand_secret,
)

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 64


class ControlLoop:
    """`name` is this side's in every handshake: a fresh one for each process. `secret` may be `NO_SECRET`.

    Without a secret it listens and connects on loopback addresses alone.
    """

    def __init__(
        self,
        name: str,
        secret: Secret,
        limits: WireLimits,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._secret = secret
        self._limits = limits
        self._clock = clock
        self._codec = MessageCodec(limits)
        self._selector = selectors.DefaultSelector()
        self._commands = Commands(self._selector)
        self._links = itertools.count(1)
        sessions = Sessions(Identity(name, secret.derive(b"control")), limits, random_bytes)
        self._connections = Connections(self._selector, clock)
        self._accepting = Accepting(sessions, self._connections, self._selector, limits, self._links)
        self._dialing = Dialing(sessions, self._connections, limits, bool(secret), self._commands.post, clock)
        self._closing_until_s: float | None = None
        self._is_closed = False
        self._next_sweep_s = clock()
        self._thread = threading.Thread(target=self._run, name="hybridkv-peer-control", daemon=True)
        self._thread.start()

    # Called by anybody.

    def listen(self, host: str, port: int, handlers: Handlers) -> tuple[str, int]:
        """Accept peers; the address that was bound, so port 0 takes any. `OSError` where it cannot be bound.

        Without a secret `PeersConfigurationError` for an address that others reach. `PeersProtocolError` after `close`.
        """
        demand_secret("host", host, self._secret)
        self._demand_open("listen")
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(address[:2], family=family, backlog=LISTEN_BACKLOG)
        sock.setblocking(False)
        bound = sock.getsockname()
        self._commands.post(lambda: self._let_in(sock, handlers))
        return bound[0], bound[1]

    def connect(self, host: str, port: int, expected_peer: str | None, handlers: Handlers) -> LinkId:
        """Begin a connection; `opened` or `closed` follows, within the time of a handshake.

        `expected_peer` is the name that must answer there; None: anybody who knows the secret.
        """
        self._demand_open("connect")
        link = LinkId(next(self._links))
        call = Call(host, port, expected_peer, handlers)
        self._commands.post(lambda: self._begin(link, call))
        return link

    def send(self, link: LinkId, message: Message) -> bool:
        """Say something. False, and nothing said, when the link is not open or too much waits to be sent on it.

        In the second case the link ends, for BACKLOG: a peer that does not read holds up nobody.
        """
        body = self._codec.encode(message)
        is_taken = self._connections.queue(link, len(body), self._limits.max_buffered_bytes)
        if is_taken:
            self._commands.post(lambda: self._say(link, body))
        elif self._connections.is_open(link):
            self.end(link, CloseReason.BACKLOG)
        return is_taken

    def end(self, link: LinkId, reason: CloseReason = CloseReason.DONE) -> None:
        """Close a connection. A link that is no more is passed over."""
        self._commands.post(lambda: self._end_link(link, reason))

    def host_of(self, link: LinkId) -> str | None:
        """The address of an open link's other side; None where it is not open."""
        return self._connections.host_of(link)

    def counts(self) -> ControlCounts:
        return self._connections.counts()

    def close(self, timeout_s: float) -> bool:
        """Send what waits, for at most `timeout_s`, then close everything. False when the thread is still in a handler.

        Repeatable. Not for a handler: `PeersProtocolError`.
        """
        if threading.current_thread() is self._thread:
            raise PeersProtocolError("close: called by a handler")
        until_s = self._clock() + timeout_s
        self._is_closed = True
        self._commands.post(lambda: self._begin_closing(until_s))
        self._thread.join(timeout_s + 1.0)
        return not self._thread.is_alive()

    def _demand_open(self, call: str) -> None:
        if self._is_closed:
            raise PeersProtocolError(f"{call}: called after close")

    # Called on the loop's thread.

    def _run(self) -> None:
        while not self._is_over():
            self._safely(self._look)
            self._commands.obey()
            self._safely(self._sweep)
        self._finish()

    def _look(self) -> None:
        for key, mask in self._selector.select(self._pause_s()):
            self._safely(functools.partial(self._look_at, key, mask))

    def _look_at(self, key: selectors.SelectorKey, mask: int) -> None:
        if self._commands.take_wake(key):
            return
        if isinstance(key.fileobj, socket.socket) and key.fileobj in self._accepting:
            self._accepting.accept(key.fileobj)
        elif (connection := self._connections.get(key.data)) is not None:
            self._serve(connection, mask)

    def _safely(self, action: Callable[[], None]) -> None:
        """A bug met over one connection is logged, and the others go on."""
        try:
            action()
        except Exception:
            logger.exception("control connections met a bug")

    def _is_over(self) -> bool:
        if self._closing_until_s is None:
            return False
        has_output = any(each.session.output for each in self._connections if not each.is_connecting)
        return not has_output or self._clock() >= self._closing_until_s

    def _pause_s(self) -> float | None:
        if self._commands:
            return 0.0
        if self._closing_until_s is not None:
            return max(0.0, min(0.05, self._closing_until_s - self._clock()))
        if not self._connections and not self._dialing:
            return None
        return max(0.0, self._next_sweep_s - self._clock())

    def _begin_closing(self, until_s: float) -> None:
        self._closing_until_s = until_s
        self._accepting.close()

    def _finish(self) -> None:
        self._commands.obey()
        for connection in self._connections:
            self._connections.close(connection, CloseReason.DONE)
        self._dialing.close()
        self._selector.close()
        self._commands.close()

    def _let_in(self, listener: socket.socket, handlers: Handlers) -> None:
        if self._closing_until_s is not None:
            listener.close()
        else:
            self._accepting.add(listener, handlers)

    def _begin(self, link: LinkId, call: Call) -> None:
        if self._closing_until_s is not None:
            self._connections.tell(link, call.handlers, CloseReason.DONE)
        else:
            self._dialing.begin(link, call)

    def _serve(self, connection: Connection, mask: int) -> None:
        try:
            if connection.is_connecting:
                connection.connected()
            elif mask & selectors.EVENT_READ:
                self._receive(connection)
            self._flush(connection)
        except WireError as error:
            self._connections.close(connection, error.reason, error.detail)
        except Exception:
            self._connections.close(connection, CloseReason.HANDLER)
            raise

    def _receive(self, connection: Connection) -> None:
        data = connection.receive()
        session = connection.session
        session.feed(data)
        was_open = connection.is_established
        while True:
            body = session.next()
            if not was_open and connection.is_established:
                was_open = True
                self._opened(connection)
            if body is None:
                return
            connection.heard_s = self._clock()
            self._connections.received_frame()
            message = self._codec.decode(body)
            if not isinstance(message, Ping):
                self._call(connection, functools.partial(connection.handlers.received, connection.link, message))
            if connection.link not in self._connections:
                return

    def _opened(self, connection: Connection) -> None:
        assert connection.session.established is not None
        connection.heard_s = connection.spoke_s = self._clock()
        peer_name = connection.session.established.peer_name
        self._connections.open(connection)
        self._call(connection, lambda: connection.handlers.opened(connection.link, peer_name))

    def _call(self, connection: Connection, handler: Callable[[], None]) -> None:
        try:
            handler()
        except WireError:
            raise
        except Exception as error:
            logger.warning("a message of a peer ends its connection: the handler failed", exc_info=True)
            raise WireError(CloseReason.HANDLER, type(error).__name__) from None

    def _say(self, link: LinkId, body: bytes) -> None:
        self._connections.take(link, len(body))
        connection = self._connections.get(link)
        if connection is None or not connection.is_established:
            return
        if not connection.session.seal(body):
            self._connections.close(connection, CloseReason.BACKLOG)
            return
        self._connections.sent_frame()
        connection.spoke_s = self._clock()
        try:
            self._flush(connection)
        except WireError as error:
            self._connections.close(connection, error.reason, error.detail)

    def _flush(self, connection: Connection) -> None:
        connection.flush()
        self._connections.watch(connection)

    def _sweep(self) -> None:
        """End what is late, and say a word where nothing was said for long."""
        now_s = self._clock()
        if now_s < self._next_sweep_s:
            return
        limits = self._limits
        self._next_sweep_s = now_s + min(limits.heartbeat_s, limits.handshake_timeout_s) / 4
        self._dialing.give_up_late(now_s)
        ping = self._codec.encode(Ping())
        for connection in self._connections:
            if not connection.is_established:
                if now_s - connection.began_s > limits.handshake_timeout_s:
                    self._connections.close(connection, CloseReason.TOO_SLOW)
            elif now_s - connection.heard_s > limits.silence_timeout_s:
                self._connections.close(connection, CloseReason.SILENT)
            elif now_s - connection.spoke_s > limits.heartbeat_s:
                self._say(connection.link, ping)

    def _end_link(self, link: LinkId, reason: CloseReason) -> None:
        if connection := self._connections.get(link):
            self._connections.close(connection, reason)
        else:
            self._dialing.give_up(link, reason)
