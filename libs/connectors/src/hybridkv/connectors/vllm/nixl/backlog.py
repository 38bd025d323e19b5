"""How much of what peers have said waits for a rank's thread. One that says more is not listened to any longer.

A peer has proven the secret and may be broken all the same: while the thread has something else to do, what it says
must not fill this process's memory.
"""

from __future__ import annotations

import threading

from hybridkv.peers.control import LinkId
from hybridkv.peers.wire import Message

MAX_LINK_BYTES = 32 << 20
"""Of one peer: a few of the longest messages that there are."""
MAX_BYTES = 256 << 20
"""Of all of them."""
WORD_BYTES = 512
"""What a message takes up beside what it carries."""


class Backlog:
    """Bytes by link. Any thread may call.

    Args:
        max_link_bytes: of one peer.
        max_bytes: of all.
    """

    def __init__(self, max_link_bytes: int = MAX_LINK_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self._max_link_bytes = max_link_bytes
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._by_link: dict[LinkId, int] = {}
        self._total = 0

    @property
    def num_bytes(self) -> int:
        """That wait."""
        return self._total

    def add(self, link: LinkId, num_bytes: int) -> bool:
        """Whether a message of so many bytes may wait. Then it does."""
        with self._lock:
            waiting = self._by_link.get(link, 0) + num_bytes
            if waiting > self._max_link_bytes or self._total + num_bytes > self._max_bytes:
                return False
            self._by_link[link] = waiting
            self._total += num_bytes
            return True

    def remove(self, link: LinkId, num_bytes: int) -> None:
        """It was heard."""
        with self._lock:
            self._total -= num_bytes
            left = self._by_link[link] - num_bytes
            if left:
                self._by_link[link] = left
            else:
                del self._by_link[link]


def message_bytes(message: Message) -> int:
    """About what it takes up while it waits."""
    fields = (getattr(message, name) for name in message.__struct_fields__)
    return WORD_BYTES + sum(len(field) for field in fields if isinstance(field, bytes | str))
