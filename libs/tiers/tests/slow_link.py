"""Connection between two processes that a test can slow down, stop or cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_AT_ONCE_BYTES = 1 << 16
_LOOK_AGAIN_S = 0.02


class SlowLink:
    """Listens on loopback and forwards data to a server.

    Args:
        server_port: on loopback.
    """

    def __init__(self, server_port: int) -> None:
        self.bytes_per_s = 0.0
        """In each direction of each connection; 0: unlimited."""
        self.is_stalled = False
        """No data passes."""
        self.is_refusing = False
        """New connections are closed at once."""
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._is_closed = False

    def __enter__(self) -> SlowLink:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed = True
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close all connections."""
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
                if self.is_refusing:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                continue
            self._sockets |= {near, far}
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_AT_ONCE_BYTES):
                while self.is_stalled and not self._is_closed:
                    time.sleep(_LOOK_AGAIN_S)
                if self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
