"""Command queue of a thread that polls sockets, with a socket that wakes it."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Commands:
    """Command queue. Any thread may call `post`; the rest is for the thread that polls `woken`."""

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
        # If the socket is full, the thread is already woken. If it is closed, the thread has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def drain(self) -> None:
        """Empties `woken`. Call it when `woken` is readable."""
        with contextlib.suppress(OSError):
            self.woken.recv(4096)

    def obey(self) -> None:
        """Runs the commands queued before this call. Logs an exception and continues."""
        for _ in range(len(self._queue)):
            try:
                self._queue.popleft()()
            except Exception:  # the operation of the command has a deadline
                logger.exception("a command on the thread of control connections failed")

    def close(self) -> None:
        self.woken.close()
        self._waker.close()
