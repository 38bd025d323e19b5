"""A TCP relay between two processes that can hold back bytes on request.

It listens at its own address on the port of one of them, and forwards in both directions. A gate counts the bytes of
one direction and holds the rest, so a test can stop a connection at a chosen point and detect that it was reached.
"""

from __future__ import annotations

import contextlib
import socket
import threading

import patience

ADDRESS = "127.0.0.2"
"""The relay's address. The process behind it listens at 127.0.0.1."""
WAIT_S = patience.seconds(30.0)
CHUNK_BYTES = 1 << 16
ON_THE_WAY_BYTES = 1 << 14
"""How much the system buffers for the relay; the rest stays with the sender."""


class Gate:
    """One direction of all connections. Everything passes until `hold`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: int | None = None
        self._is_holding = False
        self._is_over = False
        self._spoils = False

    def hold(self, after: int = 0) -> None:
        """Let at most `after` more bytes pass."""
        with self._changed:
            self._left, self._is_holding = after, False

    def wait_until_holding(self) -> None:
        """Wait until bytes arrived that may not pass."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_holding, WAIT_S):
                raise TimeoutError("no bytes arrived that had to be held")

    def release(self, is_spoilt: bool = False) -> None:
        """Let everything pass. If `is_spoilt`, the next piece is corrupted."""
        with self._changed:
            self._left, self._spoils = None, is_spoilt
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing passes from now on, and nobody waits."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def room(self, wanted: int) -> int:
        """How many of the `wanted` bytes may pass. Waits until at least one may; 0 if the gate was closed."""
        with self._changed:
            while self._left == 0 and not self._is_over:
                self._is_holding = True
                self._changed.notify_all()
                self._changed.wait()
            if self._is_over:
                return 0
            return wanted if self._left is None else min(wanted, self._left)

    def passing(self, data: bytes) -> bytes:
        """The bytes to forward for `data`."""
        with self._changed:
            if self._left is not None:
                self._left = max(0, self._left - len(data))
            is_spoilt, self._spoils = self._spoils, False
        return bytes(byte ^ 0xFF for byte in data) if is_spoilt else data


class _Pipe(threading.Thread):
    """One direction of one connection. When it ends, it closes both sockets."""

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
        # Bytes that may not pass are not received, so the sender still holds them.
        if not self._source.recv(1, socket.MSG_PEEK):
            return False
        room = self._gate.room(CHUNK_BYTES)
        data = self._source.recv(room) if room else b""
        self._sink.sendall(self._gate.passing(data))
        return bool(data)


class Relay:
    """Forwards to the process that listens on `port`. `requests` is the direction to it, `answers` the way back."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.requests, self.answers = Gate(), Gate()
        self._sockets: list[socket.socket] = []
        self._pipes: list[_Pipe] = []
        self._listener = socket.create_server((ADDRESS, port))
        self._thread = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let everything pass in both directions."""
        self.requests.release()
        self.answers.release()

    def cut(self) -> None:
        """Close every connection. New connections are possible."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every connection and stop listening."""
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
            except OSError:  # the server has gone, or the client has already closed
                client.close()
                server.close()
                continue
            self._pipes += [_Pipe(client, server, self.requests), _Pipe(server, client, self.answers)]
