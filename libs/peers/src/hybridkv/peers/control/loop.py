"""The thread that holds every control connection of a process: those that it accepts and those that it opens.

Sockets do not block, every wait has an end, and what a peer can make this side keep is bounded by `WireLimits`. Calls
from other threads go into a queue that the loop empties. Nothing that a connection does ends the thread.

Both sides have proven the secret before either hears the first word of the other, which is `Hello`. What was said and
not heard is counted: who reads nothing makes the other side keep no more than `max_buffered_bytes`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable

import zmq

from hybridkv.peers.commands import Commands
from hybridkv.peers.control.counts import ControlCounts
from hybridkv.peers.control.curve import CurveKeys, Doorkeeper
from hybridkv.peers.control.dialing import Call, Dialing
from hybridkv.peers.control.door import BYE_S, Door
from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.control.lines import QUEUED_BYTES, Line, Lines
from hybridkv.peers.control.sockets import (
    EVENTS_AT_A_TIME,
    FAILED,
    RECEIVED_AT_A_TIME,
    Inputs,
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
    Heard,
    Hello,
    Message,
    MessageCodec,
    Ping,
    Secret,
    WireError,
    WireLimits,
    Word,
    demand_secret,
)

logger = logging.getLogger(__name__)

HEARD_AT_BYTES = 64 << 10
"""So much is heard before the other side is told."""
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
        self._told_at_bytes = min(HEARD_AT_BYTES, limits.max_buffered_bytes // 4)
        self._hello = self._codec.encode(Hello(PROTOCOL_VERSION, name))
        self._context = zmq.Context()
        # Each connection that is opened here takes a socket, and two for its events.
        self._context.set(zmq.MAX_SOCKETS, 3 * limits.max_connections + 64)
        self._setup = Setup(self._context, CurveKeys.of(secret), limits, clock)
        self._doorkeeper = Doorkeeper(self._context, self._setup.keys)
        self._inputs = Inputs()
        self._commands = Commands()
        self._inputs.add(self._commands.woken.fileno(), self._commands.drain)
        self._inputs.add(self._doorkeeper.socket, self._doorkeeper.answer)
        self._links = itertools.count(1)
        self._lines = Lines()
        self._doors: list[Door] = []
        self._cut: list[Line] = []
        self._dialing = Dialing(
            self._setup,
            self._lines,
            self._begun,
            functools.partial(self._close, reason=CloseReason.TOO_MANY),
            self._commands.post,
        )
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
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        door = Door(self._setup, (str(address[0]), int(address[1])), handlers, self._lines.count)
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
        """Say something. False, and nothing said, when the link is not open or too much was not heard on it.

        In the second case the link ends, for BACKLOG: a peer that does not read holds up nobody.
        """
        body = self._codec.encode(message)
        is_taken = self._lines.queue(link, len(body), self._limits.max_buffered_bytes)
        if is_taken:
            self._commands.post(lambda: self._say(link, body))
        elif self._lines.is_open(link):
            self.end(link, CloseReason.BACKLOG)
        return is_taken

    def end(self, link: LinkId, reason: CloseReason = CloseReason.DONE) -> None:
        """Close a connection. A link that is no more is passed over."""
        self._commands.post(lambda: self._end_link(link, reason))

    def counts(self) -> ControlCounts:
        return self._lines.counts()

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
            for part in (self._look, self._commands.obey, self._sweep):
                self._safely(part)
        self._finish(self._closing_until_s)

    def _look(self) -> None:
        cut, self._cut = self._cut, []
        found = self._inputs.look(self._pause_s(bool(cut)))
        for door in self._doors:
            if door.has_kept:
                self._look_at(door)
        for line in cut:
            # What it has said last is heard first.
            if line.socket in found:
                self._cut.append(line)
            else:
                self._close(line, CloseReason.RESET)

    def _safely(self, action: Callable[[], None]) -> None:
        """A bug met over one connection is logged, and the others go on."""
        try:
            action()
        except Exception:
            logger.exception("control connections met a bug")

    def _pause_s(self, is_ending: bool) -> float | None:
        if self._commands or is_ending or any(door.has_kept for door in self._doors):
            return 0.0
        if not self._lines and not self._dialing and not any(door.has_strangers for door in self._doors):
            return None
        return max(0.0, self._next_sweep_s - self._clock())

    def _begin_closing(self, until_s: float) -> None:
        self._closing_until_s = until_s

    def _finish(self, until_s: float) -> None:
        self._commands.obey()
        for line in self._lines:
            self._safely(functools.partial(self._close, line, CloseReason.DONE))
        self._dialing.close()
        for door in self._doors:
            door.close()
        self._commands.close()
        # What waits is sent meanwhile.
        self._context.destroy(linger=max(0, int((until_s - self._clock()) * 1000)))

    def _let_in(self, door: Door) -> None:
        if self._closing_until_s is not None:
            door.close()
            door.socket.close()
            return
        self._doors.append(door)
        self._inputs.add(door.monitor, functools.partial(self._look_at, door))
        self._inputs.add(door.socket, functools.partial(self._hear_at, door))

    def _begin(self, link: LinkId, call: Call) -> None:
        if self._closing_until_s is not None:
            self._lines.tell(link, call.handlers, CloseReason.DONE)
        else:
            self._dialing.begin(link, call)

    def _begun(self, line: Line) -> None:
        assert line.monitor is not None
        self._inputs.add(line.monitor, functools.partial(self._happened, line))
        self._inputs.add(line.socket, functools.partial(self._hear_from, line))

    # What the library tells of connections.

    def _look_at(self, door: Door) -> None:
        door.look()
        cut, door.cut = door.cut, []
        self._cut += cut
        self._meet_at(door)

    def _meet_at(self, door: Door) -> None:
        for route, frames in door.said():
            line = door.lines.get(route)
            if line is not None:
                self._hear(line, frames)
            else:
                self._meet(door, route, frames)

    def _happened(self, line: Line) -> None:
        assert line.monitor is not None
        for event, value in events_of(line.monitor, EVENTS_AT_A_TIME):
            if line.link not in self._lines:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                line.is_proven = True
                self._whisper(line, self._hello)
            elif event == zmq.EVENT_CLOSED:
                self._close(line, CloseReason.UNREACHABLE)
            elif event == zmq.EVENT_DISCONNECTED:
                if line.is_proven:
                    self._cut.append(line)
                else:
                    self._close(line, CloseReason.MALFORMED, "no peer of ours answers")
            elif event & FAILED:
                self._close(line, why_failed(event, value, CloseReason.HUNG_UP))

    # What peers say.

    def _hear_at(self, door: Door) -> None:
        for _ in range(0 if door.is_behind else RECEIVED_AT_A_TIME):
            try:
                frames = door.socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            line = door.lines.get(frames[0].bytes)
            if line is not None:
                self._hear(line, frames[1:])
            else:
                door.keep(frames[0].bytes, frames[1:])
        self._look_at(door)

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
        """Somebody who knows the secret says the first word."""
        fd = int(frames[-1].get(zmq.SRCFD))
        try:
            hello = self._check_hello(self._decode(frames), None)
            if sum(each.is_server for each in self._lines) >= self._limits.max_connections:
                raise WireError(CloseReason.TOO_MANY, "as many peers as allowed")
        except WireError as error:
            is_told = error.reason in _TOLD
            if is_told:
                self._say_bye(door.socket, route, error.reason)
            door.turn_out(fd, error.reason, route, is_told)
            return
        host = str(frames[-1].get("Peer-Address"))
        line = Line(LinkId(next(self._links)), door.handlers, door.socket, host, self._clock(), route, fd)
        line.is_proven = True
        door.let_in(line)
        self._lines.add(line)
        if self._whisper(line, self._hello):
            self._open_safely(line, hello.name)

    def _open_safely(self, line: Line, peer_name: str) -> None:
        try:
            self._open(line, peer_name)
        except WireError as error:
            self._close(line, error.reason, error.detail)

    def _say_bye(self, sock: Socket, route: bytes | None, reason: CloseReason) -> None:
        """Where it can be said still."""
        said = self._codec.encode(Bye(reason.value))
        with contextlib.suppress(zmq.ZMQError):
            sock.send_multipart([said] if route is None else [route, said], zmq.DONTWAIT)

    def _hear(self, line: Line, frames: list[zmq.Frame]) -> None:
        try:
            word = self._decode(frames)
            line.heard_s = self._clock()
            self._lines.received_frame()
            if not line.is_open:
                self._open(line, self._check_hello(word, line.expected_peer).name)
            else:
                self._take(line, word, sum(len(each) for each in frames))
        except WireError as error:
            self._close(line, error.reason, error.detail)
        except Exception:
            self._close(line, CloseReason.HANDLER)
            raise

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

    def _open(self, line: Line, peer_name: str) -> None:
        line.heard_s = line.spoke_s = self._clock()
        self._lines.open(line)
        self._call(line, lambda: line.handlers.opened(line.link, peer_name))

    def _take(self, line: Line, word: Word, num_bytes: int) -> None:
        if isinstance(word, Heard):
            if not self._lines.heard(line.link, word.num_bytes):
                raise WireError(CloseReason.MALFORMED, "more was heard than was said")
        elif isinstance(word, Bye):
            raise WireError(CloseReason.ENDED, f"the other side ended it: {word.reason}")
        elif isinstance(word, Hello):
            raise WireError(CloseReason.UNEXPECTED, "Hello once more")
        elif not isinstance(word, Ping):
            line.heard_bytes += num_bytes + QUEUED_BYTES
            self._call(line, functools.partial(line.handlers.received, line.link, word))
            if line.heard_bytes >= self._told_at_bytes and line.link in self._lines:
                said, line.heard_bytes = line.heard_bytes, 0
                self._whisper(line, self._codec.encode(Heard(said)))

    def _call(self, line: Line, handler: Callable[[], None]) -> None:
        try:
            handler()
        except WireError:
            raise
        except Exception as error:
            logger.warning("a message of a peer ends its connection: the handler failed", exc_info=True)
            raise WireError(CloseReason.HANDLER, type(error).__name__) from None

    # What is said.

    def _say(self, link: LinkId, body: bytes) -> None:
        line = self._lines.get(link)
        if line is not None and line.is_open:
            self._whisper(line, body)

    def _whisper(self, line: Line, body: bytes) -> bool:
        """Say something. False where the connection is no more: it is closed."""
        try:
            line.say(body)
        except WireError as error:
            self._close(line, error.reason, error.detail)
            return False
        line.spoke_s = self._clock()
        self._lines.sent_frame()
        return True

    def _sweep(self) -> None:
        """End what is late, and say a word where nothing was said for long."""
        now_s = self._clock()
        if now_s < self._next_sweep_s:
            return
        limits = self._limits
        self._next_sweep_s = now_s + min(limits.heartbeat_s, limits.handshake_timeout_s, 2 * BYE_S) / 4
        self._dialing.give_up_late(now_s)
        for door in self._doors:
            door.sweep(now_s)
        ping = self._codec.encode(Ping())
        for line in self._lines:
            if not line.is_open:
                if now_s - line.began_s > limits.handshake_timeout_s:
                    self._close(line, CloseReason.TOO_SLOW)
            elif now_s - line.heard_s > limits.silence_timeout_s:
                self._close(line, CloseReason.SILENT)
            elif now_s - line.spoke_s > limits.heartbeat_s:
                self._whisper(line, ping)

    def _end_link(self, link: LinkId, reason: CloseReason) -> None:
        if line := self._lines.get(link):
            self._close(line, reason)
        else:
            self._dialing.give_up(link, reason)

    def _close(self, line: Line, reason: CloseReason, detail: str = "") -> None:
        """Repeatable."""
        if not self._lines.remove(line):
            return
        logger.debug("a control connection ended: %s %s", reason, detail)
        is_told = reason in _TOLD and line.is_proven
        if is_told:
            self._say_bye(line.socket, line.route, reason)
        if line.monitor is None:
            next(door for door in self._doors if door.socket is line.socket).see_off(line, is_told)
        else:
            self._inputs.remove(line.socket)
            self._inputs.remove(line.monitor)
            unwatched(line.socket, line.monitor)
            line.socket.close(int(BYE_S * 1000) if is_told else 0)
        self._lines.tell(line.link, line.handlers, reason)
