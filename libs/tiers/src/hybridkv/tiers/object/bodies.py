"""Size-limited reads of small objects.

The size arrives before the body, so an object that is too large is not read. `ReadMemoryLimit` limits the memory of all
reads together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

_PIECE_BYTES = 64 << 10


class ObjectBody(NamedTuple):
    """An object that was read.

    Args:
        data: its bytes; None if the object is larger than the limit, or than the size that the store reports.
        etag: ETag of this version; None if the store has no ETags.
    """

    data: bytes | None
    etag: str | None


class ReadMemoryLimit:
    """Limit of the bytes in memory at one time. Used on one event loop.

    Args:
        num_bytes: the limit.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until `num_bytes` are free; hold them while the context is open."""
        while self._left < num_bytes:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self._left -= num_bytes
        try:
            yield
        finally:
            self._left += num_bytes
            waiting, self._waiting = self._waiting, []
            for turn in waiting:
                if not turn.done():
                    turn.set_result(None)


@asynccontextmanager
async def read_body(
    store: Store,
    name: str,
    most_bytes: int,
    room: ReadMemoryLimit,
    *,
    unlike: str | None = None,
    is_ranged: bool = False,
) -> AsyncIterator[ObjectBody]:
    """Read an object. Its bytes count against `room` while the context is open.

    Args:
        store: the store.
        name: name of the object.
        most_bytes: a larger object is not read.
        room: memory limit, at least `most_bytes`.
        unlike: ETag of a version that must not be read again.
        is_ranged: request a byte range instead of the whole object.

    Raises:
        NotModifiedError: (obstore) the object is still the version `unlike`.
        FileNotFoundError: there is no such object.
        Exception: (obstore) the request failed.
    """
    options: Any = {}
    if unlike is not None:
        options["if_none_match"] = unlike
    if is_ranged:
        options["range"] = (0, most_bytes)
    answer = await store.get_async(name, options=options or None)
    size, etag = answer.meta["size"], answer.meta["e_tag"]
    if size > most_bytes:
        del answer
        yield ObjectBody(None, etag)
        return
    async with room.taken(size):
        data = bytearray()
        async for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
            data += memoryview(piece)
            if len(data) > size:
                break
        yield ObjectBody(bytes(data) if len(data) <= size else None, etag)
