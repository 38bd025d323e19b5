"""Turns a host's name into an address while the loop goes on. Addresses take no thread, names a bounded number."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Address: TypeAlias = tuple[int, "tuple[str, int] | tuple[str, int, int, int]"]
"""(family, what connect takes)"""

MAX_NAMES = 4


class Resolver:
    """At most four names at a time: the system decides how long each takes, and nobody can stop it."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(MAX_NAMES)

    def at_once(self, host: str, port: int) -> Address | None:
        """The address, where `host` is one already. `ValueError` is for a text that the system takes for no name."""
        try:
            return _first(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except (OSError, ValueError):
            return None

    def begin(self, host: str, port: int, then: Callable[[Address | None], None]) -> bool:
        """Ask the system; `then` is called on a thread of its own, with None where there is no such host.

        False, and nothing done, when as many names as allowed are being asked for, or there is no thread to be had.
        """
        if not self._places.acquire(blocking=False):
            return False

        def ask() -> None:
            try:
                then(_first(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
            except (OSError, ValueError):
                then(None)
            finally:
                self._places.release()

        try:
            threading.Thread(target=ask, name="hybridkv-peer-name", daemon=True).start()
        except (RuntimeError, MemoryError):  # the process may have no more threads; later it may again
            self._places.release()
            return False
        return True


def _first(found: Sequence[tuple[Any, ...]]) -> Address:
    return int(found[0][0]), found[0][4]
