"""What other threads want done on a thread that waits for sockets: a queue, and a socket that wakes it."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Commands:
    """`post` is for any thread, everything else for the one that waits until `woken` is readable."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self.woken, self._waker = socket.socketpair()
        for end in (self.woken, self._waker):
            end.setblocking(False)

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, command: Callable[[], None]) -> None:
        """Have something done, in order."""
        self._queue.append(command)
        # A full socket pair has woken it already; a closed one has no thread to wake.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def drain(self) -> None:
        """`woken` was readable."""
        with contextlib.suppress(OSError):
            self.woken.recv(4096)

    def obey(self) -> None:
        """Do what was there when this began. A bug in one is logged, and the others are done."""
        for _ in range(len(self._queue)):
            try:
                self._queue.popleft()()
            except Exception:  # what it was about has a deadline
                logger.exception("what was to be done on a thread of peers' connections met a bug")

    def close(self) -> None:
        self.woken.close()
        self._waker.close()
