"""Relay between two processes that speak over TCP: it holds back the bytes that a test tells it to.

It listens at an address of its own on the port of one of them, and hands on what both say. A gate counts the bytes that
pass one way and holds the rest; so a test stops a conversation at a point that it names, and knows when it is there.
"""

from __future__ import annotations

import contextlib
import socket
import threading

import patience

ADDRESS = "127.0.0.2"
"""Where it listens. Whoever it stands for listens at 127.0.0.1."""
WAIT_S = patience.seconds(30.0)
CHUNK_BYTES = 1 << 16
ON_THE_WAY_BYTES = 1 << 14
"""That the system takes for the relay before it looks: the rest stays with who sends it."""


class Gate:
    """One way of all connections. Everything passes until `hold`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: int | None = None
        self._is_holding = False
        self._is_over = False
        self._spoils = False

    def hold(self, after: int = 0) -> None:
        """No more than so many bytes pass from now on."""
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

    def passing(self, data: bytes) -> bytes:
        """What goes on of it."""
        with self._changed:
            if self._left is not None:
                self._left = max(0, self._left - len(data))
            is_spoilt, self._spoils = self._spoils, False
        return bytes(byte ^ 0xFF for byte in data) if is_spoilt else data


class _Pipe(threading.Thread):
    """One way of one connection. When it ends, both do."""

    def __init__(self, source: socket.socket, sink: socket.socket, gate: Gate) -> None:
        super().__init__(name="relay", daemon=True)
        self._source, self._sink, self._gate = source, sink, gate
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while self._hand_on():
                pass
        for end in (self._source, self._sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _hand_on(self) -> bool:
        # What may not pass is not taken, so that its sender has it still.
        if not self._source.recv(1, socket.MSG_PEEK):
            return False
        room = self._gate.room(CHUNK_BYTES)
        data = self._source.recv(room) if room else b""
        self._sink.sendall(self._gate.passing(data))
        return bool(data)


class Relay:
    """Stands for the process that listens on `port`. `requests` is the way to it, `answers` the way back."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.requests, self.answers = Gate(), Gate()
        self._sockets: list[socket.socket] = []
        self._pipes: list[_Pipe] = []
        self._listener = socket.create_server((ADDRESS, port))
        self._thread = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Everything passes, both ways."""
        self.requests.release()
        self.answers.release()

    def cut(self) -> None:
        """Ends every connection. Others may follow."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends every connection, and listens no more."""
        self.requests.close()
        self.answers.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in (self._thread, *self._pipes):
            thread.join(WAIT_S)
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket()
            self._sockets += [client, server]
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ON_THE_WAY_BYTES)
            try:
                server.connect(("127.0.0.1", self._port))
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:  # whoever listened is no more, or whoever called has gone again
                client.close()
                server.close()
                continue
            self._pipes += [_Pipe(client, server, self.requests), _Pipe(server, client, self.answers)]
