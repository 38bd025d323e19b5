"""What tests of control connections hear, and a stranger who speaks bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import patience

from hybridkv.peers.control import ControlLoop, Handlers, LinkId
from hybridkv.peers.testing.suite import until
from hybridkv.peers.wire import CloseReason, Message

TIMEOUT_S = patience.seconds(12.0)


class Recorder:
    """Keeps what its handlers are told; `reply` may answer."""

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


def counted(loop: ControlLoop, reason: CloseReason, times: int = 1) -> None:
    """Wait until so many connections ended so."""
    until(lambda: loop.counts().closed.get(reason, 0) >= times, TIMEOUT_S)


class Stranger:
    """A connection that says whatever a test wants."""

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
        """Everything until the other side closes."""
        data = b""
        try:
            while more := self.sock.recv(65536):
                data += more
        except ConnectionResetError:
            pass
        return data

    def close(self) -> None:
        self.sock.close()
