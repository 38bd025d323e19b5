"""ZeroMQ sockets as control connections need them: bounded, and watched. For the loop's thread."""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from hybridkv.peers.control.curve import CurveKeys
from hybridkv.peers.control.lines import QUEUED_BYTES
from hybridkv.peers.wire import CloseReason, WireLimits

logger = logging.getLogger(__name__)

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

RECEIVED_AT_A_TIME = 16
"""Messages that wait to be heard on one connection; behind them the other side is held up."""
MAX_EVENTS = 1001
"""Of connections, that wait to be looked at: the library's own bound, and one."""
EVENTS_AT_A_TIME = 64
_monitors = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all connections of a loop are made with."""

    context: Context
    keys: CurveKeys
    limits: WireLimits
    clock: Callable[[], float]
    """Seconds."""


def bound(sock: Socket, limits: WireLimits) -> None:
    """Before it is bound or connected."""
    sock.linger = 0
    sock.maxmsgsize = limits.max_frame_bytes
    sock.rcvhwm = RECEIVED_AT_A_TIME
    sock.sndhwm = limits.max_buffered_bytes // QUEUED_BYTES
    sock.handshake_ivl = int(limits.handshake_timeout_s * 1000)


def endpoint(address: tuple[Any, ...]) -> str:
    """Of an address in numbers."""
    host, port = address[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def watched(context: Context, sock: Socket, events: int) -> Socket:
    """A socket that says what happens to the connections of another.

    When `MAX_EVENTS` wait there the library waits for room, and lets nobody in before there is some.
    """
    address = f"inproc://monitor-{next(_monitors)}"
    sock.monitor(address, events)
    monitor = context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.rcvhwm = 1
    monitor.connect(address)
    return monitor


def unwatched(sock: Socket, monitor: Socket) -> None:
    """Before either is closed: the library waits for whoever listens."""
    sock.disable_monitor()
    monitor.close()


def events_of(monitor: Socket, at_most: int) -> list[tuple[int, int]]:
    """(event, value), of what has happened by now."""
    events: list[tuple[int, int]] = []
    while len(events) < at_most:
        try:
            said = parse_monitor_message(monitor.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            break
        events.append((int(said["event"]), int(said["value"])))
    return events


FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def why_failed(event: int, value: int, hung_up: CloseReason) -> CloseReason:
    """What one of `FAILED` means. `hung_up`: that the other side ended the handshake, and did not say why."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return CloseReason.SECRET
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        is_key = value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
        return CloseReason.SECRET if is_key else CloseReason.MALFORMED
    return CloseReason.TOO_SLOW if value in (errno.EAGAIN, errno.ETIMEDOUT) else hung_up


class Inputs:
    """Sockets that are waited for, and what is done when there is something at one."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._calls: dict[object, Callable[[], None]] = {}

    def add(self, source: Any, call: Callable[[], None]) -> None:
        """`source` is a ZeroMQ socket, or the number of a file."""
        self._calls[source] = call
        self._poller.register(source, zmq.POLLIN)

    def remove(self, source: Any) -> None:
        if self._calls.pop(source, None) is not None:
            self._poller.unregister(source)

    def look(self, timeout_s: float | None) -> set[object]:
        """Wait, and do what is to be done; where there was anything. A bug met over one is logged."""
        found = self._poller.poll(None if timeout_s is None else int(timeout_s * 1000 + 0.999))
        for source, _ in found:
            call = self._calls.get(source)
            if call is None:
                continue
            try:
                call()
            except Exception:
                logger.exception("control connections met a bug")
        return {source for source, _ in found}
