"""Helpers for tests of control connections: recorded callbacks, a peer that breaks the rules, and a raw TCP client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import patience
import zmq
from zmq.utils.monitor import parse_monitor_message

from hybridkv.peers.control import ControlLoop, Handlers, LinkId
from hybridkv.peers.control.curve import CurveKeys
from hybridkv.peers.wire import (
    PROTOCOL_VERSION,
    CloseReason,
    Hello,
    Message,
    MessageCodec,
    Secret,
    WireLimits,
    WireMessage,
)
from kits.peers.suite import until

TIMEOUT_S = patience.seconds(12.0)


class Recorder:
    """Records the calls of its handlers; `reply` may answer messages."""

    def __init__(self, reply: Callable[[LinkId, Message], None] | None = None) -> None:
        self.opened: list[tuple[LinkId, str]] = []
        self.received: list[Message] = []
        self.closed: list[tuple[LinkId, CloseReason]] = []
        self._reply = reply
        self._changed = threading.Condition()
        self.handlers = Handlers(self._opened, self._received, self._closed)

    def until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, TIMEOUT_S), (self.opened, self.received, self.closed)

    def until_open(self) -> LinkId:
        self.until(lambda: bool(self.opened))
        return self.opened[-1][0]

    def until_closed(self) -> CloseReason:
        self.until(lambda: bool(self.closed))
        return self.closed[-1][1]

    def _opened(self, link: LinkId, name: str) -> None:
        with self._changed:
            self.opened.append((link, name))
            self._changed.notify_all()

    def _received(self, link: LinkId, message: Message) -> None:
        with self._changed:
            self.received.append(message)
            self._changed.notify_all()
        if self._reply is not None:
            self._reply(link, message)

    def _closed(self, link: LinkId, reason: CloseReason) -> None:
        with self._changed:
            self.closed.append((link, reason))
            self._changed.notify_all()


def wait_counted(loop: ControlLoop, reason: CloseReason, times: int = 1) -> None:
    """Waits until so many connections ended for the reason."""
    until(lambda: loop.counts().closed.get(reason, 0) >= times, TIMEOUT_S)


CODEC = MessageCodec(WireLimits())


class Rogue:
    """ZeroMQ peer that proves a secret and obeys no other rule."""

    def __init__(self, address: tuple[str, int], secret: Secret, keys: CurveKeys | None = None) -> None:
        self._context = zmq.Context()
        self.sock = self._context.socket(zmq.DEALER)
        self.sock.linger = 0
        self.sock.reconnect_ivl = -1
        (keys or CurveKeys.of(secret)).as_client(self.sock)
        self.monitor = self.sock.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self.sock.connect(f"tcp://{address[0]}:{address[1]}")

    def say(self, *words: WireMessage | bytes, more: bool = False) -> None:
        for word in words:
            body = word if isinstance(word, bytes) else CODEC.encode(word)
            self.sock.send(body, zmq.SNDMORE if more else 0)

    def greet(self, version: int = PROTOCOL_VERSION, name: str = "rogue") -> None:
        self.say(Hello(version, name))

    def hear(self) -> WireMessage:
        assert self.sock.poll(TIMEOUT_S * 1000), "no message arrived"
        return CODEC.decode(self.sock.recv())

    def is_thrown_out(self) -> bool:
        """True if the other side has closed the connection."""
        while self.monitor.poll(0):
            if parse_monitor_message(self.monitor.recv_multipart())["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
        return False

    def until_thrown_out(self) -> None:
        while self.monitor.poll(TIMEOUT_S * 1000):
            if parse_monitor_message(self.monitor.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED:
                return
        raise AssertionError("the connection was not closed")

    def close(self) -> None:
        if self.sock.closed:
            return
        self.sock.disable_monitor()
        self._context.destroy(linger=0)


class Stranger:
    """TCP connection that sends arbitrary bytes."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address, timeout=TIMEOUT_S)

    def say(self, data: bytes) -> None:
        self.sock.sendall(data)

    def hear(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes and (more := self.sock.recv(num_bytes - len(data))):
            data += more
        return data

    def hear_all(self) -> bytes:
        """All bytes until the other side closes."""
        data = b""
        try:
            while more := self.sock.recv(65536):
                data += more
        except ConnectionResetError:
            pass
        return data

    def close(self) -> None:
        self.sock.close()
