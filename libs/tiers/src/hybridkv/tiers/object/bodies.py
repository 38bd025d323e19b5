"""Reads small objects whole, and never more of one than was asked for.

The size comes before the body: an object that is too large is left unread. `Room` bounds what all reads together hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

_PIECE_BYTES = 64 << 10


class Body(NamedTuple):
    """An object.

    Args:
        data: its bytes; None where they are more than were asked for.
        tag: of this version of it, as the store calls it; None where the store has no such names.
    """

    data: bytes | None
    tag: str | None


class Room:
    """Bytes that may be in memory at one time. Used on one event loop.

    Args:
        num_bytes: of them.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until so many are free, and hold them."""
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
    store: Store, name: str, most_bytes: int, room: Room, *, unlike: str | None = None, is_ranged: bool = False
) -> AsyncIterator[Body]:
    """An object, for as long as the context lasts; so long its bytes take room.

    Args:
        store: that holds it.
        name: of it.
        most_bytes: of a larger one nothing is read.
        room: at least `most_bytes` in all.
        unlike: the tag of a version that is not to be read again.
        is_ranged: ask for a range of bytes instead of for the object.

    Raises:
        NotModifiedError: of obstore: the object is the version `unlike`.
        FileNotFoundError: there is no such object.
        Exception: of obstore, where the store gave no answer.
    """
    options: Any = {}
    if unlike is not None:
        options["if_none_match"] = unlike
    if is_ranged:
        options["range"] = (0, most_bytes)
    answer = await store.get_async(name, options=options or None)
    size, tag = answer.meta["size"], answer.meta["e_tag"]
    if size > most_bytes:
        del answer
        yield Body(None, tag)
        return
    async with room.taken(size):
        data = bytearray()
        async for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
            data += memoryview(piece)
            if len(data) > size:
                break
        yield Body(bytes(data) if len(data) <= size else None, tag)
