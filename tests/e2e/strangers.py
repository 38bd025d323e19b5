"""Strangers that connect to the port of an engine and send valid or invalid data."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

from peers import REST_S

from hybridkv.peers.control import ControlLoop, Handlers, LinkId
from hybridkv.peers.wire import NO_SECRET, Message, WireLimits


class Stranger:
    """A client that can speak the protocol of a consumer and send any message."""

    def __init__(self, port: int) -> None:
        self._changed = threading.Condition()
        self._received: list[Message] = []
        self._state = ""
        self._loop = ControlLoop("stranger.0", NO_SECRET, WireLimits())
        handlers = Handlers(
            opened=lambda link, name: self._set("open"),
            received=lambda link, message: self._on_message(message),
            closed=lambda link, reason: self._set("closed"),
        )
        self._link: LinkId = self._loop.connect("127.0.0.1", port, None, handlers)
        self._wait_for("open")

    def ask(self, message: Message) -> Message:
        """Send a message and return the answer. Earlier messages have been processed by then."""
        self.say(message)
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._received), REST_S)
            return self._received.pop()

    def say(self, message: Message) -> None:
        assert self._loop.send(self._link, message)

    def wait_until_disconnected(self) -> None:
        self._wait_for("closed")
        self.close()

    def close(self) -> None:
        self._loop.close(1.0)

    def _wait_for(self, state: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._state == state, REST_S), self._state or "not met"

    def _set(self, state: str) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _on_message(self, message: Message) -> None:
        with self._changed:
            self._received.append(message)
            self._changed.notify_all()


def garbage() -> Iterator[bytes]:
    """Data that is not a frame, a frame without an end, a frame of another protocol, and random frames."""
    generator = random.Random(0)
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"\xff" * 64
    yield b"\x00" * 64
    yield b"\x00\x00\x00\x05hello"
    for _ in range(16):
        yield (64).to_bytes(4, "big") + generator.randbytes(64)


def send_raw(port: int, data: bytes) -> None:
    """Send raw data to the port, and wait until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=REST_S) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        while connection.recv(1 << 16):
            pass
