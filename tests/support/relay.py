"""What stands between two processes that speak over TCP, and keeps back what a test tells it to.

It listens at an address of its own on the ports of one of them, and hands on what both say. A gate counts what passes
one way and holds the rest; so a test stops a conversation at a point that it names, and knows when it is there.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import patience

ADDRESS = "127.0.0.2"
"""Where it listens. Whoever it stands for listens at 127.0.0.1."""
WAIT_S = patience.seconds(30.0)
CHUNK_BYTES = 1 << 16
ON_THE_WAY_BYTES = 1 << 14
"""That the system takes for the relay before it looks: the rest stays with who sends it."""
_LENGTH_BYTES = 4


class Gate:
    """One way of all connections to a port. Everything passes until `hold`. It counts frames or bytes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: int | None = None
        self._is_holding = False
        self._is_over = False
        self._spoils = False

    def hold(self, after: int = 0) -> None:
        """No more than so much passes from now on."""
        with self._changed:
            self._left, self._is_holding = after, False

    def wait_until_holding(self) -> None:
        """Until something has come that may not pass."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_holding, WAIT_S):
                raise TimeoutError("nothing came that was to be held")

    def release(self, is_spoilt: bool = False) -> None:
        """Everything passes; what is next, where it `is_spoilt`, as other bytes."""
        with self._changed:
            self._left, self._spoils = None, is_spoilt
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing passes any more, and nothing waits."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def room(self, wanted: int) -> int:
        """How much of what has come may pass. Waits for some; 0 when it was closed."""
        with self._changed:
            while self._left == 0 and not self._is_over:
                self._is_holding = True
                self._changed.notify_all()
                self._changed.wait()
            if self._is_over:
                return 0
            return wanted if self._left is None else min(wanted, self._left)

    def passing(self, data: bytes, count: int) -> bytes:
        """What goes on of it, which counts for so much."""
        with self._changed:
            if self._left is not None:
                self._left = max(0, self._left - count)
            is_spoilt, self._spoils = self._spoils, False
        return bytes(byte ^ 0xFF for byte in data) if is_spoilt else data


@dataclass(frozen=True)
class Ways:
    """Both ways of a port, and which are frames: a length of four bytes, and so many bytes."""

    has_framed_requests: bool
    has_framed_answers: bool
    requests: Gate = field(default_factory=Gate)
    answers: Gate = field(default_factory=Gate)


class _Pipe(threading.Thread):
    """One way of one connection. When it ends, both do."""

    def __init__(self, source: socket.socket, sink: socket.socket, gate: Gate, is_framed: bool) -> None:
        super().__init__(name="relay", daemon=True)
        self._source, self._sink, self._gate, self._is_framed = source, sink, gate, is_framed
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while self._hand_on():
                pass
        for end in (self._source, self._sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _hand_on(self) -> bool:
        if self._is_framed:
            return self._hand_on_frame()
        # What may not pass is not taken, so that its sender has it still.
        if not self._source.recv(1, socket.MSG_PEEK):
            return False
        room = self._gate.room(CHUNK_BYTES)
        data = self._source.recv(room) if room else b""
        self._sink.sendall(self._gate.passing(data, len(data)))
        return bool(data)

    def _hand_on_frame(self) -> bool:
        head = self._exactly(_LENGTH_BYTES)
        body = self._exactly(int.from_bytes(head, "big"))
        if not body or not self._gate.room(1):
            return False
        self._sink.sendall(head + self._gate.passing(body, 1))
        return True

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._source.recv(size - len(data))
            if not more:
                return b""
            data += more
        return data


class Relay:
    """Stands for one process.

    Args:
        ports: of it, by a word for each.
        framed: the words of those whose answers are frames.
        streamed: of those whose requests are none either.
    """

    def __init__(
        self, ports: Mapping[str, int], framed: frozenset[str] = frozenset(), streamed: frozenset[str] = frozenset()
    ) -> None:
        self._ways = {word: Ways(word not in streamed, word in framed) for word in ports}
        self._sockets: list[socket.socket] = []
        self._pipes: list[_Pipe] = []
        self._listeners = {word: socket.create_server((ADDRESS, port)) for word, port in ports.items()}
        self._threads = [
            threading.Thread(target=self._accept, args=(word, port), name="relay", daemon=True)
            for word, port in ports.items()
        ]
        for thread in self._threads:
            thread.start()

    def __getitem__(self, word: str) -> Ways:
        return self._ways[word]

    def release(self) -> None:
        """Everything passes, both ways of every port."""
        for ways in self._ways.values():
            ways.requests.release()
            ways.answers.release()

    def cut(self) -> None:
        """Ends every connection. Others may follow."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends every connection, and listens no more."""
        for ways in self._ways.values():
            ways.requests.close()
            ways.answers.close()
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in (*self._threads, *self._pipes):
            thread.join(WAIT_S)
        for each in (*self._listeners.values(), *self._sockets):
            each.close()

    def _accept(self, word: str, port: int) -> None:
        ways = self._ways[word]
        while True:
            try:
                client, _ = self._listeners[word].accept()
            except OSError:
                return
            server = socket.socket()
            self._sockets += [client, server]
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ON_THE_WAY_BYTES)
            try:
                server.connect(("127.0.0.1", port))
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:  # whoever listened is no more, or whoever called has gone again
                client.close()
                server.close()
                continue
            self._pipes += [
                _Pipe(client, server, ways.requests, is_framed=ways.has_framed_requests),
                _Pipe(server, client, ways.answers, is_framed=ways.has_framed_answers),
            ]
