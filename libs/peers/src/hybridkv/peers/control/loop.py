"""Thread of all control connections of a process, accepted and outgoing.

Sockets do not block, every wait has a timeout, and `WireLimits` bounds the memory that a peer can use here. Calls from
other threads go through a queue. No event of a connection ends the thread.

Both sides prove the secret before either reads the first message of the other, which is `Hello`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import zmq

from hybridkv.peers.control.curve import CurveKeys, ZapHandler
from hybridkv.peers.control.dialing import Dialing, DialTarget
from hybridkv.peers.control.door import Door
from hybridkv.peers.control.handlers import ControlCounts, Handlers, LinkId
from hybridkv.peers.control.sockets import (
    FAILED,
    RECEIVED_AT_A_TIME,
    Commands,
    Line,
    Setup,
    Socket,
    events_of,
    unwatched,
    why_failed,
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
    Word,
    demand_secret,
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

    `name` identifies this process; use a new one for each process. `secret` may be `NO_SECRET`: then the loop listens
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
        # Each outgoing connection uses one socket, and two for its events.
        self._context.set(zmq.MAX_SOCKETS, 3 * limits.max_connections + 64)
        self._setup = Setup(self._context, CurveKeys.of(secret), limits, clock)
        self._doorkeeper = ZapHandler(self._context, self._setup.keys)
        self._commands = Commands()
        self._poller = zmq.Poller()
        self._calls: dict[object, Callable[[], None]] = {}
        self._wait_for(self._commands.woken.fileno(), self._commands.drain)
        self._wait_for(self._doorkeeper.socket, self._doorkeeper.answer)
        self._links = itertools.count(1)
        self._lines: dict[LinkId, Line] = {}
        self._open: set[LinkId] = set()
        self._num_opened = 0
        self._ended: Counter[CloseReason] = Counter()
        self._doors: list[Door] = []
        self._gone: list[Line] = []
        give_way = functools.partial(self._close, reason=CloseReason.TOO_MANY)
        self._dialing = Dialing(self._setup, self._dialled, self._begun, give_way, self._end, self._commands.post)
        self._closing_until_s: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hybridkv-peer-control", daemon=True)
        self._thread.start()

    # For any thread.

    def listen(self, host: str, port: int, handlers: Handlers) -> tuple[str, int]:
        """Accepts peers. Returns the bound address; port 0 takes any free port.

        Raises `OSError` if the address cannot be bound, `PeersConfigurationError` for an address that other hosts can
        reach if there is no secret, and `PeersProtocolError` after `close`.
        """
        demand_secret("host", host, self._secret)
        self._demand_open("listen")
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        door = Door(self._setup, (str(address[0]), int(address[1])), handlers, self._count, self._gone.append)
        self._commands.post(lambda: self._add_door(door))
        return door.address

    def connect(self, host: str, port: int, expected_peer: str | None, handlers: Handlers) -> LinkId:
        """Starts a connection. `opened` or `closed` follows within `handshake_timeout_s`.

        `expected_peer` is the name that the peer must have; None accepts any peer that has the secret.
        """
        self._demand_open("connect")
        link = LinkId(next(self._links))
        call = DialTarget(host, port, expected_peer, handlers)
        self._commands.post(lambda: self._begin(link, call))
        return link

    def send(self, link: LinkId, message: Message) -> bool:
        """Sends a message. Returns False and sends nothing if the link is not open.

        A link with more than `max_queued` unsent messages ends with BACKLOG, so a peer that does not read blocks no
        other peer.
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

        Returns False if the thread is still in a handler. Raises `PeersProtocolError` if a handler calls it.
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

    # On the loop's thread.

    def _run(self) -> None:
        while self._closing_until_s is None:
            for part in (self._look, self._commands.obey, self._give_up_late):
                self._safely(part)
        self._finish(self._closing_until_s)

    def _look(self) -> None:
        gone = self._gone.copy()
        self._gone.clear()
        found = {source for source, _ in self._poller.poll(self._pause_ms(bool(gone)))}
        for source in found:
            if (call := self._calls.get(source)) is not None:
                self._safely(call)
        for line in gone:
            # Its last messages are received first.
            if line.socket in found:
                self._gone.append(line)
            else:
                self._close(line, CloseReason.RESET)

    def _safely(self, action: Callable[[], None]) -> None:
        """Runs `action` and logs an exception, so that a bug in one connection does not stop the others."""
        try:
            action()
        except Exception:
            logger.exception("unexpected error on the thread of control connections")

    def _pause_ms(self, is_ending: bool) -> int | None:
        if self._commands or is_ending:
            return 0
        is_waiting = self._dialing or any(not each.is_open for each in self._lines.values())
        return int(self._limits.handshake_timeout_s * 250) if is_waiting else None

    def _wait_for(self, source: object, call: Callable[[], None]) -> None:
        """Runs `call` whenever the socket or file descriptor is readable."""
        self._calls[source] = call
        self._poller.register(source, zmq.POLLIN)

    def _begin_closing(self, until_s: float) -> None:
        self._closing_until_s = until_s

    def _finish(self, until_s: float) -> None:
        self._commands.obey()
        for line in [*self._lines.values()]:
            self._safely(functools.partial(self._close, line, CloseReason.DONE))
        self._dialing.close()
        for door in self._doors:
            door.close()
        self._commands.close()
        # What waits is sent meanwhile.
        self._context.destroy(linger=max(0, int((until_s - self._clock()) * 1000)))

    # New connections.

    def _add_door(self, door: Door) -> None:
        if self._closing_until_s is not None:
            door.close()
            door.socket.close()
            return
        self._doors.append(door)
        self._wait_for(door.monitor, door.look)
        self._wait_for(door.socket, functools.partial(self._receive_at_door, door))

    def _begin(self, link: LinkId, call: DialTarget) -> None:
        if self._closing_until_s is not None:
            self._end(link, call.handlers, CloseReason.DONE)
        else:
            self._dialing.begin(link, call)

    def _dialled(self) -> list[Line]:
        return [each for each in self._lines.values() if each.monitor is not None]

    def _begun(self, line: Line) -> None:
        self._lines[line.link] = line
        self._wait_for(line.monitor, functools.partial(self._look_at_line, line))
        self._wait_for(line.socket, functools.partial(self._receive_dialled, line))
        # If this fails, the connection has failed already and its monitor reports the reason.
        line.say(self._hello)

    def _look_at_line(self, line: Line) -> None:
        assert line.monitor is not None
        for event, value in events_of(line.monitor):
            if line.link not in self._lines:
                return
            if event == zmq.EVENT_CLOSED:
                self._close(line, CloseReason.UNREACHABLE)
            elif event & FAILED:
                self._close(line, why_failed(event, value, CloseReason.HUNG_UP))
            else:
                self._gone.append(line)

    # Received messages.

    def _receive_at_door(self, door: Door) -> None:
        for _ in range(RECEIVED_AT_A_TIME):
            try:
                route, *frames = door.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            line = door.lines.get(route.bytes)
            if line is not None:
                self._handle(line, frames)
            else:
                self._handle_stranger(door, route.bytes, frames)

    def _receive_dialled(self, line: Line) -> None:
        for _ in range(RECEIVED_AT_A_TIME):
            if line.link not in self._lines:
                return
            try:
                frames = line.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._handle(line, frames)

    def _handle_stranger(self, door: Door, route: bytes, frames: list[zmq.Frame]) -> None:
        """Handles a message of a stranger that has the secret. Without a valid Hello it stays a stranger."""
        try:
            hello = self._check_hello(self._decode(frames), None)
            if len(self._lines) - len(self._dialled()) >= self._limits.max_connections:
                raise WireError(CloseReason.TOO_MANY, "max_connections reached")
        except WireError as error:
            self._count(error.reason)
            if error.reason in _SENT_REASONS:
                self._send_bye(door.socket, route, error.reason)
            return
        door.look()
        fd = int(frames[-1].get(zmq.SRCFD))
        line = Line(LinkId(next(self._links)), door.handlers, door.socket, self._clock(), route, fd)
        door.let_in(line)
        self._lines[line.link] = line
        if self._send(line, self._hello):
            self._run_for(line, lambda: self._opened(line, hello.name))

    def _handle(self, line: Line, frames: list[zmq.Frame]) -> None:
        self._run_for(line, lambda: self._dispatch(line, self._decode(frames)))

    def _run_for(self, line: Line, action: Callable[[], None]) -> None:
        """Runs `action`; a bad message or a failing handler ends the connection."""
        try:
            action()
        except WireError as error:
            self._close(line, error.reason, error.detail)
        except Exception as error:
            logger.warning("closing a control connection: handling its message failed", exc_info=True)
            self._close(line, CloseReason.HANDLER, type(error).__name__)

    def _decode(self, frames: list[zmq.Frame]) -> Word:
        if len(frames) != 1:
            raise WireError(CloseReason.MALFORMED, f"a message in {len(frames)} parts")
        return self._codec.decode(frames[0].bytes)

    def _check_hello(self, word: Word, expected_peer: str | None) -> Hello:
        if isinstance(word, Bye):
            raise WireError(_RECEIVED_REASONS.get(word.reason, CloseReason.ENDED), "sent by the peer")
        if not isinstance(word, Hello):
            raise WireError(CloseReason.UNEXPECTED, f"{type(word).__name__} in place of Hello")
        if word.version != PROTOCOL_VERSION:
            raise WireError(CloseReason.VERSION, f"version {word.version}; this side speaks {PROTOCOL_VERSION}")
        if not 0 < len(word.name.encode()) <= MAX_NAME_BYTES:
            raise WireError(CloseReason.OVERSIZED, f"a name of {len(word.name)} characters")
        if word.name == self._name:
            raise WireError(CloseReason.SELF, "connected to this process itself")
        if expected_peer not in (None, word.name):
            raise WireError(CloseReason.WRONG_PEER, f"{word.name!r} answers for {expected_peer!r}")
        return word

    def _opened(self, line: Line, peer_name: str) -> None:
        line.is_open = True
        self._num_opened += 1
        self._open.add(line.link)
        line.handlers.opened(line.link, peer_name)

    def _dispatch(self, line: Line, word: Word) -> None:
        if not line.is_open:
            self._opened(line, self._check_hello(word, line.expected_peer).name)
        elif isinstance(word, Bye):
            raise WireError(CloseReason.ENDED, f"the peer closed it: {word.reason}")
        elif isinstance(word, Hello):
            raise WireError(CloseReason.UNEXPECTED, "a second Hello")
        else:
            line.handlers.received(line.link, word)

    # Sent messages.

    def _send_if_open(self, link: LinkId, body: bytes) -> None:
        line = self._lines.get(link)
        if line is not None and line.is_open:
            self._send(line, body)

    def _send(self, line: Line, body: bytes) -> bool:
        """Sends one message. If that fails, closes the connection and returns False."""
        why_not = line.say(body)
        if why_not is not None:
            self._close(line, why_not)
        return why_not is None

    def _send_bye(self, sock: Socket, route: bytes | None, reason: CloseReason) -> None:
        """Sends Bye if the socket accepts it."""
        bye = self._codec.encode(Bye(reason.value))
        with contextlib.suppress(zmq.ZMQError):
            sock.send_multipart([bye] if route is None else [route, bye], zmq.DONTWAIT)

    # Connections that end.

    def _give_up_late(self) -> None:
        """Closes connections that are not open after `handshake_timeout_s`."""
        now_s = self._clock()
        self._dialing.give_up_late(now_s)
        for line in [*self._lines.values()]:
            if not line.is_open and now_s - line.began_s > self._limits.handshake_timeout_s:
                self._close(line, CloseReason.TOO_SLOW)

    def _end_link(self, link: LinkId, reason: CloseReason) -> None:
        if line := self._lines.get(link):
            self._close(line, reason)
        else:
            self._dialing.give_up(link, reason)

    def _close(self, line: Line, reason: CloseReason, detail: str = "") -> None:
        """Closes a connection. Does nothing if it is closed."""
        if line.link not in self._lines:
            return
        logger.debug("control connection closed: %s %s", reason, detail)
        bye_sent = reason in _SENT_REASONS and line.is_open
        if bye_sent:
            self._send_bye(line.socket, line.route, reason)
        if line.monitor is None:
            next(door for door in self._doors if door.socket is line.socket).see_off(line, bye_sent)
        else:
            for source in (line.socket, line.monitor):
                del self._calls[source]
                self._poller.unregister(source)
            unwatched(line.socket, line.monitor)
            line.socket.close(int(BYE_S * 1000) if bye_sent else 0)
        self._end(line.link, line.handlers, reason)

    def _end(self, link: LinkId, handlers: Handlers, reason: CloseReason) -> None:
        """Forgets a link, counts its end and calls `closed`."""
        self._lines.pop(link, None)
        self._open.discard(link)
        self._count(reason)
        try:
            handlers.closed(link, reason)
        except Exception:
            logger.warning("the closed() handler of a control connection failed", exc_info=True)

    def _count(self, reason: CloseReason) -> None:
        self._ended[reason] += 1
