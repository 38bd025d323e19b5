"""Chunks of one size of one rank: the memory in which a server reads and writes them, and the connection for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.lmcache.connection import Connection, ConnectionOptions, Down, Ready, ServerAddress
from hybridkv.lmcache.member import CacheMember
from hybridkv.lmcache.operations import Operations, Pages, Prefix
from hybridkv.lmcache.page import HEADER_BYTES
from hybridkv.lmcache.pool import Taken
from hybridkv.lmcache.withdrawal import withdraw
from hybridkv.tiers.contract import Key
from hybridkv.tiers.lmcache.records import groups_of, prefix_of

_GROUP = 0
_LEAST_PAGES = 2


@dataclass(frozen=True, slots=True)
class Page:
    """Memory of one chunk on its way.

    Args:
        taken: by it.
        view: header and bytes. Of the memory that it was taken of, also when the pool has other memory by now.
    """

    taken: Taken
    view: memoryview

    @property
    def pages(self) -> Pages:
        """As an operation wants it."""
        return Pages(self.taken, [self.taken.blocks[_GROUP]])


def num_pages(num_bytes: int, pool_bytes: int, max_moving: int) -> int:
    """Chunks of this size that have room in so many bytes, which are not enough where they are fewer than two."""
    return max(_LEAST_PAGES, min(max_moving, pool_bytes // (num_bytes + HEADER_BYTES)))


class Shelf:
    """One size.

    Args:
        address: of the server.
        cache: namespace, ranks, and the bytes of a chunk.
        pages: that can be under way.
        options: of the connection.
        clock: seconds.
    """

    def __init__(
        self,
        address: ServerAddress,
        cache: tuple[bytes, int, int],
        pages: int,
        options: ConnectionOptions,
        clock: Callable[[], float],
    ) -> None:
        namespace, self._world_size, self.num_bytes = cache
        self._member = CacheMember(groups_of(self.num_bytes), namespace, self._world_size, pages)
        self._spare = pages // 4 or 1
        self.connection = Connection(address, self._member, options, clock)
        self.operations = Operations(self.connection, clock)

    @property
    def ready(self) -> Ready | None:
        """The server, where it can be asked."""
        return self.connection.ready

    @property
    def is_new(self) -> bool:
        """Whether the server was not reached yet, and may be soon."""
        state = self.connection.state
        return not self.connection.was_ready and isinstance(state, Down) and state.refusal is None

    def prefix(self, key: Key, ready: Ready) -> Prefix:
        """What the server is asked for."""
        return prefix_of(self._member.model, self._world_size, key, ready.chunk_tokens)

    def take(self, *, is_store: bool) -> Page | None:
        """A page, where one is free. Stores leave some for loads."""
        pool = self._member.pool
        if is_store and pool.num_free(_GROUP) <= self._spare:
            return None
        taken = pool.take({_GROUP: 1})
        if taken is None:
            return None
        [block] = taken.blocks[_GROUP]
        view = pool.page(_GROUP, block)
        # Made anew between the two, what is void is given back to nobody.
        return Page(taken, view) if pool.instance == taken.instance else None

    def give_back(self, page: Page) -> None:
        """No server touches it any more."""
        self._member.pool.give_back(page.taken)

    def withdraw(self, prefix: Prefix, rank: int) -> None:
        """What a rank has there is wrong: have it deleted, so that it can be stored anew."""
        withdraw(self.connection, prefix, rank, chunk=0, num_groups=1)

    def close(self) -> None:
        """End what is under way, within a bounded time."""
        self.connection.close()
        self._member.close()
