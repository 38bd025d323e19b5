"""The thread that holds every control connection of a process: those that it accepts and those that it opens.

Sockets do not block, every wait has an end, and what a peer can make this side keep is bounded by `WireLimits`. Calls
from other threads go into a queue that the loop empties.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from hybridkv.peers.control.connection import Connection
from hybridkv.peers.control.counts import ControlCounts, Tally
from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.control.resolving import Address, Resolver
from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.wire import (
    Channel,
    ClientHandshake,
    CloseReason,
    Identity,
    Message,
    MessageCodec,
    Ping,
    Secret,
    ServerHandshake,
    Session,
    WireError,
    WireLimits,
    demand_secret,
    is_loopback,
)

logger = logging.getLogger(__name__)

NONCE_BYTES = 32
LISTEN_BACKLOG = 64
QUEUED_BYTES = 256
"""What a message in the queue takes up beside its body."""


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
        self._identity = Identity(name, secret.derive(b"control"))
        self._secret = secret
        self._limits = limits
        self._clock = clock
        self._random_bytes = random_bytes
        self._codec = MessageCodec(limits)
        self._resolver = Resolver()
        self._tally = Tally()
        self._links = itertools.count(1)
        self._connections: dict[LinkId, Connection] = {}
        self._waiting: dict[LinkId, tuple[Handlers, float]] = {}
        self._listeners: dict[socket.socket, Handlers] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._open: set[LinkId] = set()
        self._queued_bytes: dict[LinkId, int] = {}
        self._closing_until_s: float | None = None
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
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
        self._post(lambda: self._add_listener(sock, handlers))
        return bound[0], bound[1]

    def connect(self, host: str, port: int, expected_peer: str | None, handlers: Handlers) -> LinkId:
        """Begin a connection; `opened` or `closed` follows, within the time of a handshake.

        `expected_peer` is the name that must answer there; None: anybody who knows the secret.
        """
        self._demand_open("connect")
        link = LinkId(next(self._links))
        self._post(lambda: self._begin(link, host, port, expected_peer, handlers))
        return link

    def send(self, link: LinkId, message: Message) -> bool:
        """Say something. False, and nothing said, when the link is not open or too much waits to be sent on it.

        In the second case the link ends, for BACKLOG: a peer that does not read holds up nobody.
        """
        body = self._codec.encode(message)
        with self._lock:
            queued = self._queued_bytes.get(link, 0) + len(body) + QUEUED_BYTES
            if link not in self._open or queued > self._limits.max_buffered_bytes:
                self._tally.refused_sends += 1
                is_taken = False
            else:
                self._queued_bytes[link] = queued
                is_taken = True
        if is_taken:
            self._post(lambda: self._say(link, body))
        elif link in self._open:
            self.end(link, CloseReason.BACKLOG)
        return is_taken

    def end(self, link: LinkId, reason: CloseReason = CloseReason.DONE) -> None:
        """Close a connection. A link that is no more is passed over."""
        self._post(lambda: self._end_link(link, reason))

    def counts(self) -> ControlCounts:
        with self._lock:
            return self._tally.value()

    def close(self, timeout_s: float) -> bool:
        """Send what waits, for at most `timeout_s`, then close everything. False when the thread is still in a handler.

        Repeatable. Not for a handler: `PeersProtocolError`.
        """
        if threading.current_thread() is self._thread:
            raise PeersProtocolError("close: called by a handler")
        until_s = self._clock() + timeout_s
        self._is_closed = True
        self._post(lambda: self._begin_closing(until_s))
        self._thread.join(timeout_s + 1.0)
        return not self._thread.is_alive()

    def _demand_open(self, call: str) -> None:
        if self._is_closed:
            raise PeersProtocolError(f"{call}: called after close")

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        # A full socket pair has woken it already; a closed one has no thread to wake.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # Called on the loop's thread.

    def _run(self) -> None:
        while not self._is_over():
            for key, mask in self._selector.select(self._pause_s()):
                if key.fileobj is self._woken:
                    with contextlib.suppress(OSError):
                        self._woken.recv(4096)
                elif key.fileobj in self._listeners:
                    self._accept(key.fileobj)
                elif key.data in self._connections:
                    self._serve(self._connections[key.data], mask)
            for _ in range(len(self._commands)):
                self._commands.popleft()()
            self._sweep()
        self._finish()

    def _is_over(self) -> bool:
        if self._closing_until_s is None:
            return False
        has_output = any(each.session.output for each in self._connections.values() if not each.is_connecting)
        return not has_output or self._clock() >= self._closing_until_s

    def _pause_s(self) -> float | None:
        if self._commands:
            return 0.0
        if self._closing_until_s is not None:
            return max(0.0, min(0.05, self._closing_until_s - self._clock()))
        if not self._connections and not self._waiting:
            return None
        return max(0.0, self._next_sweep_s - self._clock())

    def _begin_closing(self, until_s: float) -> None:
        self._closing_until_s = until_s
        for sock in list(self._listeners):
            self._selector.unregister(sock)
            sock.close()
        self._listeners.clear()

    def _finish(self) -> None:
        while self._commands:
            self._commands.popleft()()
        for connection in list(self._connections.values()):
            self._close(connection, CloseReason.DONE)
        for link, (handlers, _) in list(self._waiting.items()):
            self._waiting.pop(link)
            self._tell(link, handlers, CloseReason.DONE)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _add_listener(self, sock: socket.socket, handlers: Handlers) -> None:
        if self._closing_until_s is not None:
            sock.close()
            return
        self._listeners[sock] = handlers
        self._selector.register(sock, selectors.EVENT_READ)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # It stays readable: without a pause the loop would spin until there is a file again.
                self._drop_oldest_handshake()
                time.sleep(0.01)
            return
        handlers = self._listeners[listener]
        accepted = [each for each in self._connections.values() if each.is_server]
        if sum(each.session.established is not None for each in accepted) >= self._limits.max_connections:
            sock.close()
            self._count(CloseReason.TOO_MANY)
            return
        if sum(each.session.established is None for each in accepted) >= self._limits.max_handshakes:
            self._drop_oldest_handshake()
        handshake = ServerHandshake(self._identity, Channel.CONTROL, self._random_bytes(NONCE_BYTES))
        self._add(LinkId(next(self._links)), sock, Session(handshake, self._limits), handlers).is_server = True

    def _drop_oldest_handshake(self) -> None:
        """Make room: an honest peer needs it for milliseconds, so whoever has it longest is the least likely one."""
        for connection in self._connections.values():
            if connection.is_server and connection.session.established is None:
                self._close(connection, CloseReason.TOO_MANY)
                return

    def _begin(self, link: LinkId, host: str, port: int, expected_peer: str | None, handlers: Handlers) -> None:
        opened = sum(not each.is_server for each in self._connections.values()) + len(self._waiting)
        reason = None
        if self._closing_until_s is not None:
            reason = CloseReason.DONE
        elif not self._secret and not is_loopback(host):
            reason = CloseReason.NO_SECRET
        elif opened >= self._limits.max_connections:
            reason = CloseReason.TOO_MANY
        if reason is not None:
            self._tell(link, handlers, reason)
            return
        self._waiting[link] = (handlers, self._clock())
        address = self._resolver.at_once(host, port)
        if address is not None:
            self._dial(link, expected_peer, address)
            return

        def resolved(found: Address | None) -> None:
            self._post(lambda: self._dial(link, expected_peer, found))

        if not self._resolver.begin(host, port, resolved):
            self._dial(link, expected_peer, None)

    def _dial(self, link: LinkId, expected_peer: str | None, address: Address | None) -> None:
        if link not in self._waiting:
            return
        handlers, began_s = self._waiting.pop(link)
        if address is None:
            self._tell(link, handlers, CloseReason.UNREACHABLE)
            return
        try:
            sock = socket.socket(address[0], socket.SOCK_STREAM)
        except OSError:
            self._tell(link, handlers, CloseReason.UNREACHABLE)
            return
        sock.setblocking(False)
        number = sock.connect_ex(address[1])
        nonce = self._random_bytes(NONCE_BYTES)
        session = Session(ClientHandshake(self._identity, Channel.CONTROL, nonce, expected_peer), self._limits)
        if number not in (0, errno.EINPROGRESS):
            sock.close()
            self._tell(link, handlers, CloseReason.UNREACHABLE)
            return
        connection = self._add(link, sock, session, handlers, is_connecting=True)
        connection.began_s = began_s

    def _add(
        self, link: LinkId, sock: socket.socket, session: Session, handlers: Handlers, is_connecting: bool = False
    ) -> Connection:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(link, sock, session, handlers, self._clock())
        connection.is_connecting = is_connecting
        if not self._connections:
            self._next_sweep_s = self._clock()
        self._connections[link] = connection
        self._selector.register(sock, connection.events, link)
        return connection

    def _serve(self, connection: Connection, mask: int) -> None:
        try:
            if connection.is_connecting:
                connection.connected()
            elif mask & selectors.EVENT_READ:
                self._receive(connection)
            self._flush(connection)
        except WireError as error:
            self._close(connection, error.reason, error.detail)

    def _receive(self, connection: Connection) -> None:
        data = connection.receive()
        session = connection.session
        session.feed(data)
        was_open = session.established is not None
        while True:
            body = session.next()
            if not was_open and session.established is not None:
                was_open = True
                self._opened(connection)
            if body is None:
                return
            connection.heard_s = self._clock()
            with self._lock:
                self._tally.received_frames += 1
            message = self._codec.decode(body)
            if not isinstance(message, Ping):
                self._call(connection, functools.partial(connection.handlers.received, connection.link, message))
            if connection.link not in self._connections:
                return

    def _opened(self, connection: Connection) -> None:
        assert connection.session.established is not None
        connection.heard_s = connection.spoke_s = self._clock()
        peer_name = connection.session.established.peer_name
        with self._lock:
            self._tally.opened += 1
            self._open.add(connection.link)
        self._call(connection, lambda: connection.handlers.opened(connection.link, peer_name))

    def _call(self, connection: Connection, handler: Callable[[], None]) -> None:
        try:
            handler()
        except Exception as error:
            logger.warning("a message of a peer ends its connection: the handler failed", exc_info=True)
            raise WireError(CloseReason.HANDLER, type(error).__name__) from None

    def _say(self, link: LinkId, body: bytes) -> None:
        connection = self._connections.get(link)
        with self._lock:
            self._queued_bytes[link] = self._queued_bytes.get(link, 0) - len(body) - QUEUED_BYTES
            if connection is None or self._queued_bytes[link] <= 0:
                self._queued_bytes.pop(link, None)
        if connection is None or connection.session.established is None:
            return
        if not connection.session.seal(body):
            self._close(connection, CloseReason.BACKLOG)
            return
        with self._lock:
            self._tally.sent_frames += 1
        connection.spoke_s = self._clock()
        try:
            self._flush(connection)
        except WireError as error:
            self._close(connection, error.reason, error.detail)

    def _flush(self, connection: Connection) -> None:
        connection.flush()
        self._selector.modify(connection.sock, connection.events, connection.link)

    def _sweep(self) -> None:
        """End what is late, and say a word where nothing was said for long."""
        now_s = self._clock()
        if now_s < self._next_sweep_s:
            return
        limits = self._limits
        self._next_sweep_s = now_s + min(limits.heartbeat_s, limits.handshake_timeout_s) / 4
        for link, (handlers, began_s) in list(self._waiting.items()):
            if now_s - began_s > limits.handshake_timeout_s:
                self._waiting.pop(link)
                self._tell(link, handlers, CloseReason.TOO_SLOW)
        ping = self._codec.encode(Ping())
        for connection in list(self._connections.values()):
            if connection.session.established is None:
                if now_s - connection.began_s > limits.handshake_timeout_s:
                    self._close(connection, CloseReason.TOO_SLOW)
            elif now_s - connection.heard_s > limits.silence_timeout_s:
                self._close(connection, CloseReason.SILENT)
            elif now_s - connection.spoke_s > limits.heartbeat_s:
                self._say(connection.link, ping)

    def _end_link(self, link: LinkId, reason: CloseReason) -> None:
        if connection := self._connections.get(link):
            self._close(connection, reason)
        elif waiting := self._waiting.pop(link, None):
            self._tell(link, waiting[0], reason)

    def _close(self, connection: Connection, reason: CloseReason, detail: str = "") -> None:
        link = connection.link
        if self._connections.pop(link, None) is None:
            return
        was_open = connection.session.established is not None
        with self._lock:
            self._open.discard(link)
            self._queued_bytes.pop(link, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.close(reason)
        logger.debug("a control connection ended: %s %s", reason, detail)
        if was_open or not connection.is_server:
            self._tell(link, connection.handlers, reason)
        else:
            self._count(reason)

    def _tell(self, link: LinkId, handlers: Handlers, reason: CloseReason) -> None:
        self._count(reason)
        try:
            handlers.closed(link, reason)
        except Exception:
            logger.warning("the handler of a connection's end failed", exc_info=True)

    def _count(self, reason: CloseReason) -> None:
        with self._lock:
            self._tally.close(reason)
