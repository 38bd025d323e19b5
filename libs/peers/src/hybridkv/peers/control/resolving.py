"""Resolves host names without blocking the loop. Numeric addresses need no thread; names use a few threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Address: TypeAlias = tuple[int, "tuple[str, int] | tuple[str, int, int, int]"]
"""(family, address for `socket.connect`)"""

MAX_NAMES = 4


class Resolver:
    """Resolves at most `MAX_NAMES` names at a time. A lookup by the system has no timeout and cannot be cancelled."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(MAX_NAMES)

    def at_once(self, host: str, port: int) -> Address | None:
        """The address if `host` is numeric, else None. Catches the `ValueError` for a text that is not a host name."""
        try:
            return _first(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except (OSError, ValueError):
            return None

    def begin(self, host: str, port: int, then: Callable[[Address | None], None]) -> bool:
        """Starts a lookup. Calls `then` on a new thread, with None if the host does not exist.

        Returns False and does nothing if `MAX_NAMES` lookups are running or no thread can be started.
        """
        if not self._places.acquire(blocking=False):
            return False

        def resolve() -> None:
            try:
                then(_first(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
            except (OSError, ValueError):
                then(None)
            finally:
                self._places.release()

        try:
            threading.Thread(target=resolve, name="hybridkv-peer-name", daemon=True).start()
        except (RuntimeError, MemoryError):  # no thread available now; a later call may succeed
            self._places.release()
            return False
        return True


def _first(found: Sequence[tuple[Any, ...]]) -> Address:
    return int(found[0][0]), found[0][4]
