"""Strangers at the port of an engine, and what they say there."""

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
    """Somebody who knows what a consumer must know, and says what he likes."""

    def __init__(self, port: int) -> None:
        self._changed = threading.Condition()
        self._heard: list[Message] = []
        self._state = ""
        self._loop = ControlLoop("stranger.0", NO_SECRET, WireLimits())
        handlers = Handlers(
            opened=lambda link, name: self._set("open"),
            received=lambda link, message: self._hear(message),
            closed=lambda link, reason: self._set("closed"),
        )
        self._link: LinkId = self._loop.connect("127.0.0.1", port, None, handlers)
        self._wait_for("open")

    def ask(self, message: Message) -> Message:
        """The answer. What was said before has been heard by then."""
        self.say(message)
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._heard), REST_S)
            return self._heard.pop()

    def say(self, message: Message) -> None:
        assert self._loop.send(self._link, message)

    def wait_until_thrown_out(self) -> None:
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

    def _hear(self, message: Message) -> None:
        with self._changed:
            self._heard.append(message)
            self._changed.notify_all()


def rubbish() -> Iterator[bytes]:
    """What is no frame, one that never ends, one that is none of ours, and some that nobody wrote."""
    generator = random.Random(0)
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"\xff" * 64
    yield b"\x00" * 64
    yield b"\x00\x00\x00\x05hello"
    for _ in range(16):
        yield (64).to_bytes(4, "big") + generator.randbytes(64)


def shout(port: int, data: bytes) -> None:
    """Says this to whoever listens there, who hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=REST_S) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        while connection.recv(1 << 16):
            pass
