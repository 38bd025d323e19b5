"""One rank's connection to its server, and the memory that both share: who may take pages of it, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hybridkv.connectors.vllm.lmcache.pages import Parts, tables_of
from hybridkv.connectors.vllm.lmcache.site import SPARE_SHARE, Site, chunks_at_once
from hybridkv.connectors.vllm.lmcache.staging import Hold, PoolMemory
from hybridkv.lmcache.connection import Connection, Down, Ready
from hybridkv.lmcache.geometry import Geometry
from hybridkv.lmcache.member import CacheMember
from hybridkv.lmcache.operations import Operations, Pages, Prefix
from hybridkv.lmcache.withdrawal import withdraw


class Station:
    """For the engine's thread, but for what says otherwise.

    Args:
        site: of the server.
        rank: of this process.
        namespace: digest of whose content is kept.
        register: makes shared memory known to whoever copies.
        clock: seconds.
    """

    def __init__(
        self,
        site: Site,
        rank: int,
        namespace: bytes,
        register: Callable[[PoolMemory], None],
        clock: Callable[[], float],
    ) -> None:
        self.site = site
        self.rank = rank
        self.geometry = Geometry(site.groups, site.chunk_tokens)
        self._register = register
        self._clock = clock
        self._num_chunks = site.num_chunks
        self._reach_until_s = clock() + site.connect_timeout_s
        self._memory: PoolMemory | None = None
        self._lock = threading.Lock()
        self._held: set[Hold] = set()
        self._member = CacheMember(site.groups, namespace, site.world_size, self._num_chunks, site.chunk_tokens)
        self.connection = Connection(site.address, self._member, site.connection, clock)
        self.operations = Operations(self.connection, clock)

    @property
    def ready(self) -> Ready | None:
        """The server, where it can be asked. Any thread."""
        return self.connection.ready

    @property
    def is_coming(self) -> bool:
        """Whether the server was not reached yet, and may be soon."""
        state = self.connection.state
        is_refused = isinstance(state, Down) and state.refusal is not None
        return not self.connection.was_ready and not is_refused and self._clock() < self._reach_until_s

    @property
    def chunks_at_once(self) -> int:
        """Chunks of one store at most: several are under way beside loads."""
        return chunks_at_once(self._num_chunks)

    @property
    def used_bytes(self) -> int:
        """Of pages that are taken."""
        if self._memory is None:
            return 0
        free = (self._member.pool.num_free(group) for group in range(len(self.site.groups)))
        pages = zip(self._member.pool.num_blocks, free, self.geometry.page_bytes, strict=True)
        return sum((number - 1 - left) * size for number, left, size in pages)

    @property
    def capacity_bytes(self) -> int:
        """Of all pages."""
        geometry = self.geometry
        kept = zip(geometry.kept_per_chunk, geometry.page_bytes, strict=True)
        return self._num_chunks * sum(blocks * size for blocks, size in kept)

    def prefix(self, digests: Sequence[bytes]) -> Prefix:
        """The prefix that ends with the last of these chunks. Where the server was reached once."""
        return Prefix(self._member.model, self.site.world_size, self.site.words(digests))

    def has_room(self, parts: Parts) -> bool:
        """Whether the pool would hold these pages if nothing else were in it."""
        kept = self.geometry.kept_per_chunk
        return all(number <= self._num_chunks * kept[group] for group, number in parts.numbers.items())

    def take(self, parts: Parts, until_s: float, *, is_store: bool) -> Hold | None:
        """Pages for an operation that should be over by then; None where too few are free. The server is ready."""
        pool, numbers = self._member.pool, parts.numbers
        memory = self._current_memory()
        if is_store:
            spare = self._num_chunks // SPARE_SHARE
            kept = self.geometry.kept_per_chunk
            if any(pool.num_free(group) - number < spare * kept[group] for group, number in numbers.items()):
                return None
        taken = pool.take(numbers)
        if taken is None:
            return None
        hold = Hold(taken, memory, until_s, self._give_back)
        with self._lock:
            self._held.add(hold)
        if taken.instance != memory.instance:
            # Made anew a moment ago; the next look sees the other one.
            hold.drop_all()
            return None
        return hold

    def pages(self, parts: Parts, hold: Hold) -> Pages:
        """As an operation wants them."""
        return Pages(hold.taken, tables_of(self.geometry, parts, hold.taken.blocks))

    def withdraw(self, prefix: Prefix, chunk: int) -> None:
        """What this rank has of a chunk is wrong: have it deleted, so that it can be stored anew. Any thread."""
        withdraw(self.connection, prefix, self.rank, chunk, len(self.site.groups))

    def starved(self) -> None:
        """Somebody found no room for long. Where pages should have come back by now, nothing is heard of them: a server
        that passes over a question says nothing, and lives. Another connection has other memory."""
        with self._lock:
            now_s, instance = self._clock(), self._memory.instance if self._memory is not None else None
            is_overdue = any(hold.until_s <= now_s and hold.taken.instance == instance for hold in self._held)
        if is_overdue:
            self.connection.doubt()

    def close(self) -> None:
        """End what is under way within a bounded time; nothing is shared any more."""
        self.connection.close()
        self._memory = None
        self._member.close()

    def _current_memory(self) -> PoolMemory:
        pool = self._member.pool
        if self._memory is None or self._memory.instance != pool.instance:
            memory = PoolMemory.of(pool)
            self._register(memory)
            self._memory = memory
            with self._lock:
                self._held = {hold for hold in self._held if hold.taken.instance == self._memory.instance}
        return self._memory

    def _give_back(self, hold: Hold) -> None:
        """Any thread."""
        with self._lock:
            self._held.discard(hold)
        self._member.pool.give_back(hold.taken)
