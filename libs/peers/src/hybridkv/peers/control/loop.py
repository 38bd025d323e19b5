"""Thread of all control connections of a process, accepted and outgoing.

Sockets do not block, every wait for a peer has a timeout, and `WireLimits` bounds the memory that a peer can use here.
Calls from other threads go through a queue. No event of a connection ends the thread.

Each side proves that it has the secret before the other side reads its first message. The first message is `Hello`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import zmq

from hybridkv.peers.control.curve import CurveKeys, ZapHandler
from hybridkv.peers.control.dialing import MAX_ADDRESSES, Dialer, DialTarget
from hybridkv.peers.control.handlers import ControlCounts, Handlers, LinkId
from hybridkv.peers.control.listener import Listener
from hybridkv.peers.control.sockets import (
    FAILED,
    RECEIVED_AT_A_TIME,
    Commands,
    ControlConnection,
    ControlSettings,
    Socket,
    close_reason_of,
    events_of,
    stop_monitor,
)
from hybridkv.peers.errors import PeersConfigurationError, PeersProtocolError
from hybridkv.peers.wire import (
    MAX_NAME_BYTES,
    PROTOCOL_VERSION,
    Bye,
    CloseReason,
    Hello,
    Message,
    MessageCodec,
    Secret,
    WireError,
    WireLimits,
    WireMessage,
    require_secret,
)

logger = logging.getLogger(__name__)

BYE_S = 1.0
"""Timeout to send a Bye, in seconds."""
_SENT_REASONS = frozenset(
    {CloseReason.DONE, CloseReason.VERSION, CloseReason.SELF, CloseReason.WRONG_PEER, CloseReason.TOO_MANY}
)
"""Reasons that are sent to the peer before its connection ends."""
_RECEIVED_REASONS = {reason.value: reason for reason in _SENT_REASONS - {CloseReason.DONE}}


class ControlLoop:
    """Control connections of one process, on one thread.

    `name` identifies this process; use a new name for each process. `secret` may be `NO_SECRET`: then the loop listens
    and connects on loopback addresses only.
    """

    def __init__(
        self, name: str, secret: Secret, limits: WireLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise PeersConfigurationError("name", f"a name of 1 to {MAX_NAME_BYTES} bytes", name)
        self._name = name
        self._secret = secret
        self._limits = limits
        self._clock = clock
        self._codec = MessageCodec(limits)
        self._hello = self._codec.encode(Hello(PROTOCOL_VERSION, name))
        self._context = zmq.Context()
        # Each outgoing connection uses one socket, and two sockets for its events, at each address of its name. libzmq
        # frees closed sockets late, so those of earlier addresses count too.
        self._context.set(zmq.MAX_SOCKETS, 3 * MAX_ADDRESSES * limits.max_connections + 64)
        self._settings = ControlSettings(self._context, CurveKeys.of(secret), limits, clock)
        self._zap_handler = ZapHandler(self._context, self._settings.keys)
        self._commands = Commands()
        self._poller = zmq.Poller()
        self._calls: dict[object, Callable[[], None]] = {}
        self._call_when_readable(self._commands.woken.fileno(), self._commands.drain)
        self._call_when_readable(self._zap_handler.socket, self._zap_handler.answer)
        self._links = itertools.count(1)
        self._connections: dict[LinkId, ControlConnection] = {}
        self._open: set[LinkId] = set()
        self._num_opened = 0
        self._ended: Counter[CloseReason] = Counter()
        self._listeners: list[Listener] = []
        self._disconnected: list[ControlConnection] = []
        make_room = functools.partial(self._close, reason=CloseReason.TOO_MANY)
        self._dialer = Dialer(
            self._settings, self._outgoing, self._on_connecting, make_room, self._end, self._commands.post
        )
        self._closing_until_s: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hybridkv-peer-control", daemon=True)
        self._thread.start()

    # For any thread.

    def listen(self, host: str, port: int, handlers: Handlers, idle_s: float = math.inf) -> tuple[str, int]:
        """Accepts peers. Returns the bound address; port 0 takes any free port.

        If `max_connections` is reached, a new connection replaces the accepted one that has sent no message for the
        longest time, and for at least `idle_s` seconds. If there is none, the new connection is refused with TOO_MANY.

        Raises `OSError` if the address cannot be bound, `PeersConfigurationError` if there is no secret and
        `is_loopback(host)` is false, and `PeersProtocolError` after `close`.
        """
        require_secret("host", host, self._secret)
        self._require_running("listen")
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        listener = Listener(
            self._settings, (str(address[0]), int(address[1])), handlers, self._count, self._disconnected.append, idle_s
        )
        self._commands.post(lambda: self._add_listener(listener))
        return listener.address

    def connect(self, host: str, port: int, expected_peer: str | None, handlers: Handlers) -> LinkId:
        """Starts a connection. `opened` or `closed` follows within about 1.25 * `handshake_timeout_s`.

        `expected_peer` is the name that the peer must have; None accepts any peer that has the secret.
        """
        self._require_running("connect")
        link = LinkId(next(self._links))
        target = DialTarget(host, port, expected_peer, handlers)
        self._commands.post(lambda: self._begin(link, target))
        return link

    def send(self, link: LinkId, message: Message) -> bool:
        """Queues a message. Returns False and queues nothing if the link is not open. A message that is queued when the
        link ends may be lost.

        Raises `PeersProtocolError` for a message above `max_frame_bytes`.

        A link with more than `max_queued` unsent messages ends with BACKLOG. So a peer that reads nothing cannot block
        other peers.
        """
        body = self._codec.encode(message)
        if link not in self._open:
            return False
        self._commands.post(lambda: self._send_if_open(link, body))
        return True

    def end(self, link: LinkId, reason: CloseReason = CloseReason.DONE) -> None:
        """Closes a connection. Ignores a link that has ended."""
        self._commands.post(lambda: self._end_link(link, reason))

    def counts(self) -> ControlCounts:
        return ControlCounts(self._num_opened, dict(self._ended))

    def close(self, timeout_s: float) -> bool:
        """Sends queued messages for at most `timeout_s`, then closes everything. Repeatable.

        Returns False if the thread is still in a handler. Raises `PeersProtocolError` if a handler calls `close`.
        """
        if threading.current_thread() is self._thread:
            raise PeersProtocolError("close: called by a handler")
        until_s = self._clock() + timeout_s
        self._is_closed = True
        self._commands.post(lambda: self._begin_closing(until_s))
        self._thread.join(timeout_s + 1.0)
        return not self._thread.is_alive()

    def _require_running(self, call: str) -> None:
        if self._is_closed:
            raise PeersProtocolError(f"{call}: called after close")

    # On the loop's thread.

    def _run(self) -> None:
        while self._closing_until_s is None:
            for part in (self._poll_sockets, self._commands.run_queued, self._close_timed_out):
                self._safely(part)
        self._finish(self._closing_until_s)

    def _poll_sockets(self) -> None:
        disconnected = self._disconnected.copy()
        self._disconnected.clear()
        found = {source for source, _ in self._poller.poll(self._poll_timeout_ms(bool(disconnected)))}
        for source in found:
            if (call := self._calls.get(source)) is not None:
                self._safely(call)
        for connection in disconnected:
            # Receive the last messages of the connection before it is closed.
            if connection.socket in found:
                self._disconnected.append(connection)
            else:
                self._fail(connection, CloseReason.RESET)

    def _safely(self, action: Callable[[], None]) -> None:
        """Runs `action` and logs an exception, so that a bug in one connection does not stop the others."""
        try:
            action()
        except Exception:
            logger.exception("unexpected error on the thread of control connections")

    def _poll_timeout_ms(self, is_ending: bool) -> int | None:
        if self._commands or is_ending:
            return 0
        is_waiting = self._dialer or any(not each.is_open for each in self._connections.values())
        return int(self._limits.handshake_timeout_s * 250) if is_waiting else None

    def _call_when_readable(self, source: object, call: Callable[[], None]) -> None:
        """Runs `call` whenever the socket or file descriptor is readable."""
        self._calls[source] = call
        self._poller.register(source, zmq.POLLIN)

    def _begin_closing(self, until_s: float) -> None:
        self._closing_until_s = until_s

    def _finish(self, until_s: float) -> None:
        self._commands.run_queued()
        for connection in [*self._connections.values()]:
            self._safely(functools.partial(self._close, connection, CloseReason.DONE))
        self._dialer.close()
        for listener in self._listeners:
            listener.close()
        self._commands.close()
        # Queued messages are sent until `until_s`.
        self._context.destroy(linger=max(0, int((until_s - self._clock()) * 1000)))

    # New connections.

    def _add_listener(self, listener: Listener) -> None:
        if self._closing_until_s is not None:
            listener.close()
            listener.socket.close()
            return
        self._listeners.append(listener)
        self._call_when_readable(listener.monitor, listener.process_events)
        self._call_when_readable(listener.socket, functools.partial(self._receive_accepted, listener))

    def _begin(self, link: LinkId, target: DialTarget) -> None:
        if self._closing_until_s is not None:
            self._end(link, target.handlers, CloseReason.DONE)
        else:
            self._dialer.begin(link, target)

    def _outgoing(self) -> list[ControlConnection]:
        return [each for each in self._connections.values() if each.monitor is not None]

    def _on_connecting(self, connection: ControlConnection) -> None:
        self._connections[connection.link] = connection
        self._call_when_readable(connection.monitor, functools.partial(self._process_events_of, connection))
        self._call_when_readable(connection.socket, functools.partial(self._receive_outgoing, connection))
        # If the send fails, the connection has ended already, and its monitor reports the reason.
        connection.send(self._hello)

    def _process_events_of(self, connection: ControlConnection) -> None:
        assert connection.monitor is not None
        for event, value in events_of(connection.monitor):
            if not self._is_current(connection):
                return
            if event == zmq.EVENT_CLOSED:
                self._fail(connection, CloseReason.UNREACHABLE)
            elif event & FAILED:
                self._fail(connection, close_reason_of(event, value, CloseReason.HUNG_UP))
            else:
                self._disconnected.append(connection)

    # Received messages.

    def _receive_accepted(self, listener: Listener) -> None:
        for _ in range(RECEIVED_AT_A_TIME):
            try:
                route, *frames = listener.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            connection = listener.connections.get(route.bytes)
            if connection is not None:
                self._handle(connection, frames)
            else:
                self._handle_first_message(listener, route.bytes, frames)

    def _receive_outgoing(self, connection: ControlConnection) -> None:
        for _ in range(RECEIVED_AT_A_TIME):
            if not self._is_current(connection):
                return
            try:
                frames = connection.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._handle(connection, frames)

    def _handle_first_message(self, listener: Listener, route: bytes, frames: list[zmq.Frame]) -> None:
        """Handles the first message of an accepted connection. Only a valid Hello opens the connection."""
        try:
            hello = self._check_hello(self._decode(frames), None)
            if not self._has_room():
                raise WireError(CloseReason.TOO_MANY, "max_connections reached")
        except WireError as error:
            self._count(error.reason)
            if error.reason in _SENT_REASONS:
                self._send_bye(listener.socket, route, error.reason)
            return
        listener.process_events()
        fd, now_s = int(frames[-1].get(zmq.SRCFD)), self._clock()
        connection = ControlConnection(
            LinkId(next(self._links)),
            listener.handlers,
            listener.socket,
            now_s,
            route,
            fd,
            idle_s=listener.idle_s,
            last_message_s=now_s,
        )
        listener.add(connection)
        self._connections[connection.link] = connection
        if self._send(connection, self._hello):
            self._run_for(connection, lambda: self._opened(connection, hello.name))

    def _has_room(self) -> bool:
        """True if one more connection may be accepted. Ends the one that is idle longest if there are too many."""
        accepted = [each for each in self._connections.values() if each.monitor is None]
        if len(accepted) < self._limits.max_connections:
            return True
        now_s = self._clock()
        idle = [each for each in accepted if now_s - each.last_message_s >= each.idle_s]
        if idle:
            self._close(min(idle, key=lambda each: each.last_message_s), CloseReason.TOO_MANY, "idle")
        return bool(idle)

    def _handle(self, connection: ControlConnection, frames: list[zmq.Frame]) -> None:
        connection.last_message_s = self._clock()
        self._run_for(connection, lambda: self._dispatch(connection, self._decode(frames)))

    def _run_for(self, connection: ControlConnection, action: Callable[[], None]) -> None:
        """Runs `action`; a bad message or a failing handler ends the connection."""
        try:
            action()
        except WireError as error:
            if self._is_another_peer(connection, error.reason):
                self._fail(connection, error.reason, error.detail)
            else:
                self._close(connection, error.reason, error.detail)
        except Exception as error:
            logger.warning("closing a control connection: handling its message failed", exc_info=True)
            self._close(connection, CloseReason.HANDLER, type(error).__name__)

    def _is_another_peer(self, connection: ControlConnection, reason: CloseReason) -> bool:
        """True if this side expects one peer and has found another, or itself."""
        is_another = reason in (CloseReason.WRONG_PEER, CloseReason.SELF)
        return is_another and connection.expected_peer not in (None, self._name)

    def _decode(self, frames: list[zmq.Frame]) -> WireMessage:
        if len(frames) != 1:
            raise WireError(CloseReason.MALFORMED, f"a message in {len(frames)} parts")
        return self._codec.decode(frames[0].bytes)

    def _check_hello(self, message: WireMessage, expected_peer: str | None) -> Hello:
        if isinstance(message, Bye):
            raise WireError(_RECEIVED_REASONS.get(message.reason, CloseReason.ENDED), "sent by the peer")
        if not isinstance(message, Hello):
            raise WireError(CloseReason.UNEXPECTED, f"{type(message).__name__} in place of Hello")
        if message.version != PROTOCOL_VERSION:
            raise WireError(CloseReason.VERSION, f"expected version {PROTOCOL_VERSION}, got {message.version}")
        if not 0 < len(message.name.encode()) <= MAX_NAME_BYTES:
            raise WireError(CloseReason.OVERSIZED, f"a name of {len(message.name)} characters")
        if message.name == self._name:
            raise WireError(CloseReason.SELF, "connected to this process itself")
        if expected_peer not in (None, message.name):
            raise WireError(CloseReason.WRONG_PEER, f"expected {expected_peer!r}, got {message.name!r}")
        return message

    def _opened(self, connection: ControlConnection, peer_name: str) -> None:
        connection.is_open = True
        self._num_opened += 1
        self._open.add(connection.link)
        connection.handlers.opened(connection.link, peer_name)

    def _dispatch(self, connection: ControlConnection, message: WireMessage) -> None:
        if not connection.is_open:
            self._opened(connection, self._check_hello(message, connection.expected_peer).name)
        elif isinstance(message, Bye):
            raise WireError(CloseReason.ENDED, f"the peer closed it: {message.reason}")
        elif isinstance(message, Hello):
            raise WireError(CloseReason.UNEXPECTED, "a second Hello")
        else:
            connection.handlers.received(connection.link, message)

    # Sent messages.

    def _send_if_open(self, link: LinkId, body: bytes) -> None:
        connection = self._connections.get(link)
        if connection is not None and connection.is_open:
            self._send(connection, body)

    def _send(self, connection: ControlConnection, body: bytes) -> bool:
        """Sends one message. If the send fails, closes the connection and returns False."""
        reason = connection.send(body)
        if reason is not None:
            self._close(connection, reason)
        return reason is None

    def _send_bye(self, sock: Socket, route: bytes | None, reason: CloseReason) -> None:
        """Sends Bye if the socket can send without blocking."""
        bye = self._codec.encode(Bye(reason.value))
        with contextlib.suppress(zmq.ZMQError):
            sock.send_multipart([bye] if route is None else [route, bye], zmq.DONTWAIT)

    # Connections that end.

    def _close_timed_out(self) -> None:
        """Closes connections that are not open after `handshake_timeout_s`."""
        now_s = self._clock()
        self._dialer.cancel_timed_out(now_s)
        for connection in [*self._connections.values()]:
            if not connection.is_open and now_s - connection.began_s > self._limits.handshake_timeout_s:
                self._close(connection, CloseReason.TOO_SLOW)

    def _end_link(self, link: LinkId, reason: CloseReason) -> None:
        if connection := self._connections.get(link):
            self._close(connection, reason)
        else:
            self._dialer.cancel(link, reason)

    def _is_current(self, connection: ControlConnection) -> bool:
        """False if a connection is closed, or if a connection to another address of the same name has replaced it."""
        return self._connections.get(connection.link) is connection

    def _fail(self, connection: ControlConnection, reason: CloseReason, detail: str = "") -> None:
        """Handles a connection that the network or the peer ended without a message, or that reached another peer. If
        this side connects and the connection is not open, tries the next address of the peer's name."""
        if connection.monitor is None or connection.is_open or not self._is_current(connection):
            self._close(connection, reason, detail)
            return
        logger.debug("control connection closed: %s %s", reason, detail)
        self._close_sockets(connection, connection.monitor, 0.0)
        if reason is not CloseReason.UNREACHABLE:
            connection.failure = reason
        if not self._dialer.dial_next(connection):
            self._end(connection.link, connection.handlers, connection.failure)

    def _close_sockets(self, connection: ControlConnection, monitor: Socket, linger_s: float) -> None:
        """Closes the sockets of an outgoing connection. Queued messages are sent for at most `linger_s`."""
        for source in (connection.socket, monitor):
            del self._calls[source]
            self._poller.unregister(source)
        stop_monitor(connection.socket, monitor)
        connection.socket.close(int(linger_s * 1000))

    def _close(self, connection: ControlConnection, reason: CloseReason, detail: str = "") -> None:
        """Closes a connection. Does nothing for a closed connection."""
        if not self._is_current(connection):
            return
        logger.debug("control connection closed: %s %s", reason, detail)
        bye_sent = reason in _SENT_REASONS and connection.is_open
        if bye_sent:
            self._send_bye(connection.socket, connection.route, reason)
        if connection.monitor is None:
            next(listener for listener in self._listeners if listener.socket is connection.socket).remove(
                connection, bye_sent
            )
        else:
            self._close_sockets(connection, connection.monitor, BYE_S if bye_sent else 0.0)
        self._end(connection.link, connection.handlers, reason)

    def _end(self, link: LinkId, handlers: Handlers, reason: CloseReason) -> None:
        """Removes a connection, counts the reason and calls `closed`."""
        self._connections.pop(link, None)
        self._open.discard(link)
        self._count(reason)
        try:
            handlers.closed(link, reason)
        except Exception:
            logger.warning("the closed() handler of a control connection failed", exc_info=True)

    def _count(self, reason: CloseReason) -> None:
        self._ended[reason] += 1
