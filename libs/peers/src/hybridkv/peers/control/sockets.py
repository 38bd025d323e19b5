"""ZeroMQ sockets of control connections, with their limits, the events of their connections, and the command queue."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from hybridkv.peers.control.curve import CurveKeys
from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.wire import CloseReason, WireLimits

logger = logging.getLogger(__name__)

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"
Address: TypeAlias = tuple[str, int]

RECEIVED_AT_A_TIME = 16
"""Size of the receive queue of one connection, in messages. When the queue is full, the sender waits. Also the maximum
number of messages that are read from one socket before other sockets are served."""
MAX_EVENTS = 1001
"""Size of the queue of connection events: libzmq's own limit plus one. When the queue is full, libzmq accepts no
connection."""
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_monitors = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Settings that all connections of a loop share."""

    context: Context
    keys: CurveKeys
    limits: WireLimits
    clock: Callable[[], float]
    """Returns seconds."""

    def socket(self, kind: int, is_ipv6: bool) -> Socket:
        limits = self.limits
        sock = self.context.socket(kind)
        sock.linger = 0
        sock.ipv6 = is_ipv6
        sock.maxmsgsize = limits.max_frame_bytes
        sock.rcvhwm, sock.sndhwm = RECEIVED_AT_A_TIME, limits.max_queued
        sock.handshake_ivl = int(limits.handshake_timeout_s * 1000)
        sock.heartbeat_ivl = int(limits.heartbeat_s * 1000)
        sock.heartbeat_timeout = int(limits.silence_timeout_s * 1000)
        return sock


@dataclass(slots=True, eq=False)
class ControlConnection:
    """One connection. Accepted connections share a socket and have a `route`; an outgoing one has its own socket."""

    link: LinkId
    handlers: Handlers
    socket: Socket
    began_s: float
    route: bytes | None = None
    fd: int = -1
    address: Address = ("", 0)
    """Address of the peer. Set, like `fd` and `idle_s`, only for an accepted connection."""
    idle_s: float = math.inf
    """Time without a message of the peer after which the connection may be ended to make room."""
    last_message_s: float = 0.0
    """Time of the last message of the peer. Used only for an accepted connection."""
    monitor: Socket | None = None
    """Set, like the next three, only for an outgoing connection."""
    expected_peer: str | None = None
    other_addresses: tuple[Address, ...] = ()
    """Addresses of the same name that are tried if this connection fails before it is open."""
    failure: CloseReason = CloseReason.UNREACHABLE
    """Last reason of a failure at an address, except UNREACHABLE. Reported if the connection fails at all addresses."""
    is_open: bool = False

    def send(self, body: bytes) -> CloseReason | None:
        """Sends one message without blocking. Returns None, or the reason why the message cannot be sent."""
        try:
            self.socket.send_multipart([body] if self.route is None else [self.route, body], zmq.DONTWAIT)
        except zmq.Again:
            return CloseReason.BACKLOG
        except zmq.ZMQError:
            return CloseReason.RESET
        return None


def endpoint(address: tuple[Any, ...]) -> str:
    """ZeroMQ endpoint of a numeric address."""
    host, port = address[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def start_monitor(context: Context, sock: Socket, events: int) -> Socket:
    """Starts to monitor `sock`. Returns the socket that receives its connection events."""
    address = f"inproc://monitor-{next(_monitors)}"
    sock.monitor(address, events)
    monitor = context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.rcvhwm = 1
    monitor.connect(address)
    return monitor


def stop_monitor(sock: Socket, monitor: Socket) -> None:
    """Closes the monitor. Call this function before `sock` is closed: libzmq waits for the reader of its events."""
    sock.disable_monitor()
    monitor.close()


def events_of(monitor: Socket) -> list[tuple[int, int]]:
    """Pending events, at most `MAX_EVENTS`, as (event, value)."""
    events: list[tuple[int, int]] = []
    while len(events) < MAX_EVENTS:
        try:
            parsed = parse_monitor_message(monitor.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            break
        events.append((int(parsed["event"]), int(parsed["value"])))
    return events


def close_reason_of(event: int, value: int, hung_up: CloseReason) -> CloseReason:
    """Close reason of a `FAILED` event. `hung_up` is returned if the peer ended the handshake without a reason."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return CloseReason.SECRET
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        is_key = value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
        return CloseReason.SECRET if is_key else CloseReason.MALFORMED
    return CloseReason.TOO_SLOW if value in (errno.EAGAIN, errno.ETIMEDOUT) else hung_up


class Commands:
    """Command queue of a thread that polls sockets, with a socket that wakes this thread.

    Any thread may call `post`. Only the thread that polls `woken` calls the other methods.
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self.woken, self._waker = socket.socketpair()
        for end in (self.woken, self._waker):
            end.setblocking(False)

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, command: Callable[[], None]) -> None:
        """Queues a command. Commands run in order."""
        self._queue.append(command)
        # If the socket is full, the thread is already woken. If the socket is closed, the thread has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def drain(self) -> None:
        """Empties `woken`. Called when `woken` is readable."""
        with contextlib.suppress(OSError):
            self.woken.recv(4096)

    def run_queued(self) -> None:
        """Runs the commands queued before this call. Logs an exception and continues."""
        for _ in range(len(self._queue)):
            try:
                self._queue.popleft()()
            except Exception:  # the operation that posted the command has its own deadline
                logger.exception("a command on the thread of control connections failed")

    def close(self) -> None:
        self.woken.close()
        self._waker.close()
