"""Pages of shared memory on the worker's side: who needs them still, and what their headers say.

A page is free again when both are done with it: the server that reads or writes it, and the copy between it and the
engine. Which of them ends first nobody knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridkv.canonical import GroupPages
from hybridkv.connectors.vllm.common.copies.lowering import Zeros, load_runs, store_runs
from hybridkv.connectors.vllm.common.messages import ChunkCopy
from hybridkv.connectors.vllm.lmcache.pages import Part, Parts, tables_of
from hybridkv.connectors.vllm.lmcache.site import SPARE_SHARE, Site, chunks_at_once
from hybridkv.lmcache.connection import Connection, Down, Ready
from hybridkv.lmcache.geometry import Geometry
from hybridkv.lmcache.member import LMCacheSession
from hybridkv.lmcache.operations import Operations, Pages, Prefix
from hybridkv.lmcache.page import HEADER_BYTES, PageState, check, seal
from hybridkv.lmcache.pool import Pool, Taken
from hybridkv.lmcache.withdrawal import withdraw
from hybridkv.tiers import Slot
from hybridkv.transfer import CopyRuns, Extent

Bytes: TypeAlias = npt.NDArray[np.uint8]

_NO_SLOT = Slot(())
HERE, SERVER = "here", "server"
"""Who needs pages."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The memory of a pool until it is made anew. Whoever has this may use it for as long.

    Args:
        instance: of the pool.
        memory: all of it.
        groups: of each, its pages as rows.
    """

    instance: int
    memory: Bytes
    groups: tuple[Bytes, ...]

    @classmethod
    def of(cls, pool: Pool) -> PoolMemory:
        instance, view = pool.current()
        memory = np.frombuffer(view, dtype=np.uint8)
        groups = []
        for group, (number, size) in enumerate(zip(pool.num_blocks, pool.geometry.page_bytes, strict=True)):
            start = pool.offset(group, 0)
            groups.append(memory[start : start + number * size].reshape(number, size))
        return cls(instance, memory, tuple(groups))

    @property
    def address(self) -> int:
        """Of the first byte."""
        return int(self.memory.ctypes.data)

    def page(self, group: int, page: int) -> memoryview:
        """Header and bytes of one page."""
        return memoryview(self.groups[group][page])

    def extents(self, group: int, pages: Sequence[int], num_bytes: int) -> list[Extent]:
        """Where that much of each page's bytes lies."""
        rows = self.groups[group]
        first, stride = int(rows.ctypes.data) + HEADER_BYTES, rows.strides[0]
        return [(first + page * stride, num_bytes) for page in pages]

    def blank(self, taken: Taken) -> None:
        """Let pages say that they are none, so that what a server leaves out shows."""
        for group, pages in taken.blocks.items():
            self.groups[group][np.asarray(pages, dtype=np.int64), :HEADER_BYTES] = 0


class Hold:
    """Pages of one operation until nobody needs them. Any thread may drop it.

    Args:
        taken: which.
        memory: in which they lie.
        until_s: when the server should be done with them.
        give_back: takes them when both are done.
    """

    def __init__(self, taken: Taken, memory: PoolMemory, until_s: float, give_back: Callable[[Hold], None]) -> None:
        self.taken = taken
        self.memory = memory
        self.until_s = until_s
        self._give_back = give_back
        self._users = {HERE, SERVER}
        self._lock = threading.Lock()

    def drop(self, user: str) -> None:
        """One of the two needs them no more. Repeatable."""
        with self._lock:
            is_last = self._users == {user}
            self._users.discard(user)
        if is_last:
            self._give_back(self)

    def drop_all(self) -> None:
        """Neither ever needed them."""
        self.drop(HERE)
        self.drop(SERVER)


def engine_runs(parts: Parts, site: Site, hold: Hold, pages: Mapping[int, GroupPages], zeros: Zeros | None) -> CopyRuns:
    """The runs between the engine's blocks and the pages: into the engine's, or, given zeros, out of them.

    Raises:
        ValueError: a block is outside the engine's pool.
    """
    return CopyRuns.concatenate([_part_runs(part, site, hold, pages, zeros) for part in parts.parts]).coalesce()


def _part_runs(part: Part, site: Site, hold: Hold, pages: Mapping[int, GroupPages], zeros: Zeros | None) -> CopyRuns:
    group_index = site.group_indexes[part.group]
    number = len(part.block_ids)
    copy = ChunkCopy(group_index, b"", _NO_SLOT, 0, number, tuple(part.block_ids))
    of_group = pages[group_index]
    # A chunk is block after block, so what lies in each page is one block's.
    extents = hold.memory.extents(part.group, hold.taken.blocks[part.group], of_group.block_bytes)
    if zeros is None:
        return load_runs(copy, of_group, extents)
    return store_runs(copy, of_group, extents, zeros)


class BadPage(NamedTuple):
    """A page that is not what it should be: the first of its chunk."""

    chunk: int
    group: int
    block: int
    state: PageState


def seal_pages(parts: Parts, site: Site, hold: Hold, digests: Sequence[bytes], pages: Mapping[int, GroupPages]) -> None:
    """Write the headers of pages whose bytes are in place. `digests` name the chunks of the prefix, from the first."""
    for part in parts.parts:
        size = site.groups[part.group].payload_bytes
        filled = HEADER_BYTES + pages[site.group_indexes[part.group]].block_bytes
        rows = hold.memory.groups[part.group]
        for page, chunk, block in _named(parts, part, site, hold):
            row = rows[page]
            row[filled:] = 0
            seal(memoryview(row), site.identity(digests[chunk], part.group, block), size)


def bad_pages(parts: Parts, site: Site, hold: Hold, digests: Sequence[bytes]) -> list[BadPage]:
    """What of the pages is not to be believed, one of each chunk."""
    found: dict[int, BadPage] = {}
    for part in parts.parts:
        size = site.groups[part.group].payload_bytes
        for page, chunk, block in _named(parts, part, site, hold):
            if chunk not in found:
                identity = site.identity(digests[chunk], part.group, block)
                state = check(hold.memory.page(part.group, page), identity, size)
                if state is not PageState.GOOD:
                    found[chunk] = BadPage(chunk, part.group, block, state)
    return [found[chunk] for chunk in sorted(found)]


def _named(parts: Parts, part: Part, site: Site, hold: Hold) -> list[tuple[int, int, int]]:
    """Of each page its number, the chunk of the prefix that it lies in, and its place there."""
    blocks = site.chunk_tokens // site.groups[part.group].spec.block_tokens
    pages = hold.taken.blocks[part.group]
    return [
        (page, parts.chunks.start + position // blocks, position % blocks)
        for page, position in zip(pages, part.positions, strict=True)
    ]


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
        self._member = LMCacheSession(site.groups, namespace, site.world_size, self._num_chunks, site.chunk_tokens)
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
