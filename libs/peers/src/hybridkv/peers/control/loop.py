"""The thread that holds every control connection of a process: those that it accepts and those that it opens.

Sockets do not block, every wait has an end, and what a peer can make this side keep is bounded by `WireLimits`. Calls
from other threads go into a queue that the loop empties. Nothing that a connection does ends the thread.

Both sides have proven the secret before either hears the first word of the other, which is `Hello`.
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

from hybridkv.peers.commands import Commands
from hybridkv.peers.control.curve import CurveKeys, Doorkeeper
from hybridkv.peers.control.dialing import Call, Dialing
from hybridkv.peers.control.door import Door
from hybridkv.peers.control.handlers import ControlCounts, Handlers, LinkId
from hybridkv.peers.control.sockets import (
    FAILED,
    RECEIVED_AT_A_TIME,
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
"""A Bye has so long to be sent."""
_TOLD = frozenset(
    {CloseReason.DONE, CloseReason.VERSION, CloseReason.SELF, CloseReason.WRONG_PEER, CloseReason.TOO_MANY}
)
"""Reasons that the other side hears before its connection ends."""
_SAID = {reason.value: reason for reason in _TOLD - {CloseReason.DONE}}


class ControlLoop:
    """`name` is what this side calls itself: a fresh one for each process. `secret` may be `NO_SECRET`.

    Without a secret it listens and connects on loopback addresses alone.
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
        # Each connection that is opened here takes a socket, and two for its events.
        self._context.set(zmq.MAX_SOCKETS, 3 * limits.max_connections + 64)
        self._setup = Setup(self._context, CurveKeys.of(secret), limits, clock)
        self._doorkeeper = Doorkeeper(self._context, self._setup.keys)
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

    # Called by any thread.

    def listen(self, host: str, port: int, handlers: Handlers) -> tuple[str, int]:
        """Accept peers; the address that was bound, so port 0 takes any. `OSError` where it cannot be bound.

        Without a secret `PeersConfigurationError` for an address that others reach. `PeersProtocolError` after `close`.
        """
        demand_secret("host", host, self._secret)
        self._demand_open("listen")
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        door = Door(self._setup, (str(address[0]), int(address[1])), handlers, self._count, self._gone.append)
        self._commands.post(lambda: self._let_in(door))
        return door.address

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
        """Say something. False, and nothing said, when the link is not open.

        A link on which more than `max_queued` messages wait ends, for BACKLOG: a peer that does not read holds up
        nobody.
        """
        body = self._codec.encode(message)
        if link not in self._open:
            return False
        self._commands.post(lambda: self._say(link, body))
        return True

    def end(self, link: LinkId, reason: CloseReason = CloseReason.DONE) -> None:
        """Close a connection. A link that is no more is passed over."""
        self._commands.post(lambda: self._end_link(link, reason))

    def counts(self) -> ControlCounts:
        return ControlCounts(self._num_opened, dict(self._ended))

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
        """A bug met over one connection is logged, and the others go on."""
        try:
            action()
        except Exception:
            logger.exception("control connections met a bug")

    def _pause_ms(self, is_ending: bool) -> int | None:
        if self._commands or is_ending:
            return 0
        is_waiting = self._dialing or any(not each.is_open for each in self._lines.values())
        return int(self._limits.handshake_timeout_s * 250) if is_waiting else None

    def _wait_for(self, source: object, call: Callable[[], None]) -> None:
        """Have this done when there is something at a socket or a file's number."""
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

    # Connections that begin.

    def _let_in(self, door: Door) -> None:
        if self._closing_until_s is not None:
            door.close()
            door.socket.close()
            return
        self._doors.append(door)
        self._wait_for(door.monitor, door.look)
        self._wait_for(door.socket, functools.partial(self._hear_at, door))

    def _begin(self, link: LinkId, call: Call) -> None:
        if self._closing_until_s is not None:
            self._end(link, call.handlers, CloseReason.DONE)
        else:
            self._dialing.begin(link, call)

    def _dialled(self) -> list[Line]:
        return [each for each in self._lines.values() if each.monitor is not None]

    def _begun(self, line: Line) -> None:
        self._lines[line.link] = line
        self._wait_for(line.monitor, functools.partial(self._look_at_line, line))
        self._wait_for(line.socket, functools.partial(self._hear_from, line))
        # If this fails, the connection has failed already, and an event of its monitor gives the reason.
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

    # What peers say.

    def _hear_at(self, door: Door) -> None:
        for _ in range(RECEIVED_AT_A_TIME):
            try:
                route, *frames = door.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            line = door.lines.get(route.bytes)
            if line is not None:
                self._hear(line, frames)
            else:
                self._meet(door, route.bytes, frames)

    def _hear_from(self, line: Line) -> None:
        for _ in range(RECEIVED_AT_A_TIME):
            if line.link not in self._lines:
                return
            try:
                frames = line.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._hear(line, frames)

    def _meet(self, door: Door, route: bytes, frames: list[zmq.Frame]) -> None:
        """A stranger that knows the secret says something: Hello, or it stays a stranger."""
        try:
            hello = self._check_hello(self._decode(frames), None)
            if len(self._lines) - len(self._dialled()) >= self._limits.max_connections:
                raise WireError(CloseReason.TOO_MANY, "as many peers as allowed")
        except WireError as error:
            self._count(error.reason)
            if error.reason in _TOLD:
                self._say_bye(door.socket, route, error.reason)
            return
        door.look()
        fd = int(frames[-1].get(zmq.SRCFD))
        line = Line(LinkId(next(self._links)), door.handlers, door.socket, self._clock(), route, fd)
        door.let_in(line)
        self._lines[line.link] = line
        if self._whisper(line, self._hello):
            self._try(line, lambda: self._opened(line, hello.name))

    def _hear(self, line: Line, frames: list[zmq.Frame]) -> None:
        self._try(line, lambda: self._take(line, self._decode(frames)))

    def _try(self, line: Line, action: Callable[[], None]) -> None:
        """A message that cannot be taken, or a handler that fails, ends its connection."""
        try:
            action()
        except WireError as error:
            self._close(line, error.reason, error.detail)
        except Exception as error:
            logger.warning("a message of a peer ends its connection: it met a bug", exc_info=True)
            self._close(line, CloseReason.HANDLER, type(error).__name__)

    def _decode(self, frames: list[zmq.Frame]) -> Word:
        if len(frames) != 1:
            raise WireError(CloseReason.MALFORMED, f"a message in {len(frames)} parts")
        return self._codec.decode(frames[0].bytes)

    def _check_hello(self, word: Word, expected_peer: str | None) -> Hello:
        if isinstance(word, Bye):
            raise WireError(_SAID.get(word.reason, CloseReason.ENDED), "said by the other side")
        if not isinstance(word, Hello):
            raise WireError(CloseReason.UNEXPECTED, f"{type(word).__name__} in place of Hello")
        if word.version != PROTOCOL_VERSION:
            raise WireError(CloseReason.VERSION, f"version {word.version}; this side speaks {PROTOCOL_VERSION}")
        if not 0 < len(word.name.encode()) <= MAX_NAME_BYTES:
            raise WireError(CloseReason.OVERSIZED, f"a name of {len(word.name)} characters")
        if word.name == self._name:
            raise WireError(CloseReason.SELF, "this side answers itself")
        if expected_peer not in (None, word.name):
            raise WireError(CloseReason.WRONG_PEER, f"{word.name!r} answers for {expected_peer!r}")
        return word

    def _opened(self, line: Line, peer_name: str) -> None:
        line.is_open = True
        self._num_opened += 1
        self._open.add(line.link)
        line.handlers.opened(line.link, peer_name)

    def _take(self, line: Line, word: Word) -> None:
        if not line.is_open:
            self._opened(line, self._check_hello(word, line.expected_peer).name)
        elif isinstance(word, Bye):
            raise WireError(CloseReason.ENDED, f"the other side ended it: {word.reason}")
        elif isinstance(word, Hello):
            raise WireError(CloseReason.UNEXPECTED, "Hello once more")
        else:
            line.handlers.received(line.link, word)

    # What is said.

    def _say(self, link: LinkId, body: bytes) -> None:
        line = self._lines.get(link)
        if line is not None and line.is_open:
            self._whisper(line, body)

    def _whisper(self, line: Line, body: bytes) -> bool:
        """Say something. False where the connection is no more: it is closed."""
        why_not = line.say(body)
        if why_not is not None:
            self._close(line, why_not)
        return why_not is None

    def _say_bye(self, sock: Socket, route: bytes | None, reason: CloseReason) -> None:
        """Where it can be said still."""
        said = self._codec.encode(Bye(reason.value))
        with contextlib.suppress(zmq.ZMQError):
            sock.send_multipart([said] if route is None else [route, said], zmq.DONTWAIT)

    # Connections that end.

    def _give_up_late(self) -> None:
        """End connections that are not open in time."""
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
        """Repeatable."""
        if line.link not in self._lines:
            return
        logger.debug("a control connection ended: %s %s", reason, detail)
        is_told = reason in _TOLD and line.is_open
        if is_told:
            self._say_bye(line.socket, line.route, reason)
        if line.monitor is None:
            next(door for door in self._doors if door.socket is line.socket).see_off(line, is_told)
        else:
            for source in (line.socket, line.monitor):
                del self._calls[source]
                self._poller.unregister(source)
            unwatched(line.socket, line.monitor)
            line.socket.close(int(BYE_S * 1000) if is_told else 0)
        self._end(line.link, line.handlers, reason)

    def _end(self, link: LinkId, handlers: Handlers, reason: CloseReason) -> None:
        """The last word on a link to its owner."""
        self._lines.pop(link, None)
        self._open.discard(link)
        self._count(reason)
        try:
            handlers.closed(link, reason)
        except Exception:
            logger.warning("the handler of a connection's end failed", exc_info=True)

    def _count(self, reason: CloseReason) -> None:
        self._ended[reason] += 1
