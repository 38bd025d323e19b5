"""Asks a server which chunks it holds, many at a time, and leaves the answers for the index.

A server does not say how large a chunk is, and each size is a cache of its own there: so each is asked. What a lookup
locks is given back at once, since whoever reads a chunk looks it up himself.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hybridkv.lmcache import operations
from hybridkv.lmcache.calls import Answer, Ended
from hybridkv.lmcache.connection import Connection, Ready, ServerState
from hybridkv.lmcache.operations import Operations
from hybridkv.tiers.contract import Key
from hybridkv.tiers.lmcache.options import LMCacheOptions
from hybridkv.tiers.lmcache.records import cache_of, prefix_of

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """What the server said about one key."""

    request: int
    key: Key
    num_bytes: int | None
    """Of the chunk; None where there is none."""
    heard_s: float
    """When, by the index's clock."""


class Unanswered(NamedTuple):
    """There will be no answer."""

    request: int
    key: Key
    heard_s: float


class Lost(NamedTuple):
    """The server is gone, or was: what it held need not be there, and what it was asked is not answered."""

    heard_s: float


class Courier(Protocol):
    """Takes questions to a server and brings answers. No call waits; answers come from another thread into `news`."""

    @property
    def news(self) -> deque[Found | Unanswered | Lost]:
        """What arrived, in order. The index takes it from the left."""
        ...

    @property
    def is_there(self) -> bool:
        """Whether the server can be asked now."""
        ...

    def look(self) -> None:
        """Notice whether the server is still the one that it was."""
        ...

    def ask(self, request: int, keys: Sequence[Key], until_s: float) -> bool:
        """Ask which of these it holds. False: it cannot be asked, and there will be no answer."""
        ...

    def close(self) -> None:
        """End the connection, within a bounded time. Repeatable."""
        ...


@dataclass(slots=True)
class _Look:
    request: int
    key: Key
    until_s: float
    num_open: int
    """Sizes of which nothing was heard."""
    num_bytes: int | None = None
    is_unsure: bool = False
    is_told: bool = False


class Questioner:
    """A `Courier` to one server.

    Args:
        connection: to it, without memory. Closed by this.
        namespace: whose content is asked for.
        world_size: ranks that each must have their part.
        sizes: that a part may have.
        options: bounds.
        clock: seconds.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: bytes,
        world_size: int,
        sizes: Sequence[int],
        options: LMCacheOptions,
        clock: Callable[[], float],
    ) -> None:
        self.news: deque[Found | Unanswered | Lost] = deque()
        self._connection = connection
        self._operations = Operations(connection, clock)
        self._namespace = namespace
        self._world_size = world_size
        self._sizes = tuple(sizes)
        self._options = options
        self._clock = clock
        self._state: ServerState = connection.state
        self._names: tuple[int, tuple[str, ...]] = (0, ())
        """The chunk, and the name of each size's cache under it."""
        self._lock = threading.Lock()
        self._waiting: deque[_Look] = deque()
        self._num_looking = 0
        self._is_beginning = False

    @property
    def is_there(self) -> bool:
        return self._connection.ready is not None

    def look(self) -> None:
        state = self._connection.state
        if state is not self._state:
            if isinstance(self._state, Ready):
                self.news.append(Lost(self._clock()))
            self._state = state

    def ask(self, request: int, keys: Sequence[Key], until_s: float) -> bool:
        if not self.is_there:
            return False
        with self._lock:
            self._waiting.extend(_Look(request, key, until_s, len(self._sizes)) for key in keys)
        self._begin()
        return True

    def close(self) -> None:
        with self._lock:
            self._waiting.clear()
        self._connection.close()

    def _begin(self) -> None:
        """As many as may be asked at one time. What ends at once ends in here, without one call inside another."""
        with self._lock:
            if self._is_beginning:
                return
            self._is_beginning = True
        while True:
            with self._lock:
                if not self._waiting or self._num_looking >= self._options.max_looking:
                    self._is_beginning = False
                    return
                look = self._waiting.popleft()
                self._num_looking += 1
            try:
                self._look(look)
            except Exception:  # whatever it was, others are asked about
                logger.exception("a question to LMCache's server met a bug")
                look.num_open, look.is_unsure = 0, True
                self._tell(look)

    def _look(self, look: _Look) -> None:
        ready, left_s = self._connection.ready, look.until_s - self._clock()
        if ready is None or left_s <= 0:
            look.num_open, look.is_unsure = 0, True
            self._tell(look)
            return
        for num_bytes, model in zip(self._sizes, self._names_under(ready.chunk_tokens), strict=True):
            prefix = prefix_of(model, self._world_size, look.key, ready.chunk_tokens)

            def hear(ended: Ended[operations.Found], num_bytes: int = num_bytes) -> None:
                self._hear(look, num_bytes, ended)

            # Only whether it is there matters.
            self._operations.lookup(prefix, None, left_s, hear).drop()

    def _names_under(self, chunk_tokens: int) -> tuple[str, ...]:
        chunk, names = self._names
        if chunk != chunk_tokens:
            names = tuple(cache_of(self._namespace, num_bytes, chunk_tokens) for num_bytes in self._sizes)
            self._names = (chunk_tokens, names)
        return names

    def _hear(self, look: _Look, num_bytes: int, ended: Ended[operations.Found]) -> None:
        """On the connection's thread, or on the caller's where there is no connection."""
        found = ended.value if isinstance(ended, Answer) else None
        with self._lock:
            look.num_open -= 1
            look.is_unsure |= found is None
            if found is not None and found.num_chunks:
                look.num_bytes = num_bytes
        self._tell(look)
        self._begin()

    def _tell(self, look: _Look) -> None:
        """What is certain, once."""
        with self._lock:
            is_over, is_told = not look.num_open, look.is_told
            look.is_told = is_over or look.num_bytes is not None
            self._num_looking -= is_over
        if look.is_told and not is_told:
            now_s = self._clock()
            if look.num_bytes is None and look.is_unsure:
                self.news.append(Unanswered(look.request, look.key, now_s))
            else:
                self.news.append(Found(look.request, look.key, look.num_bytes, now_s))
