"""Session of one rank at a server: connection, pool of pages in shared memory, and page headers.

A page has two users: the server, and the copy between the page and the engine's blocks. The page is free when
both have ended, in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridkv.canonical import GroupPages
from hybridkv.connectors.vllm.common.copies.lowering import JobLowering, RankMemory, Zeros
from hybridkv.connectors.vllm.common.copies.table import ChunkPart, CopyRun, CopyTable
from hybridkv.connectors.vllm.lmcache.pages import PageTransfer, TransferPart, block_tables
from hybridkv.connectors.vllm.lmcache.session_spec import SPARE_SHARE, SessionSpec, chunks_at_once
from hybridkv.lmcache.connection import Connection, Down, Ready
from hybridkv.lmcache.geometry import Geometry
from hybridkv.lmcache.operations import Operations, Pages, Prefix
from hybridkv.lmcache.page import HEADER_BYTES, PageState, check, seal
from hybridkv.lmcache.pool import Pool, TakenPages
from hybridkv.lmcache.session import LMCacheSession
from hybridkv.lmcache.withdrawal import withdraw
from hybridkv.tiers import Slot

Bytes: TypeAlias = npt.NDArray[np.uint8]

WORKER, SERVER = "worker", "server"
"""Users of a page."""


class PoolMemory:
    """Memory of a pool, until the pool is recreated. The memory stays mapped as long as this object exists.

    Args:
        pool: the pool.
        pages: engine's blocks by group.
        zeros: source of the padding of stored blocks.
    """

    def __init__(self, pool: Pool, pages: Mapping[int, GroupPages], zeros: Zeros) -> None:
        self.instance, view = pool.current()
        self.memory: Bytes = np.frombuffer(view, dtype=np.uint8)
        self.base_address = int(self.memory.ctypes.data)
        self.capacity_bytes = self.memory.nbytes
        self.pages = pages
        self._pool = pool
        self.groups: list[Bytes] = []
        """One array per group, with one row per page."""
        for group, (number, size) in enumerate(zip(pool.num_blocks, pool.geometry.page_bytes, strict=True)):
            start = pool.offset(group, 0)
            self.groups.append(self.memory[start : start + number * size].reshape(number, size))
        self.lowering = JobLowering(RankMemory(pages, {}, zeros, self))
        """Lowers copies between the engine's blocks and slots of this memory."""

    def page(self, group: int, page: int) -> memoryview:
        """Header and payload of one page."""
        return memoryview(self.groups[group][page])

    def slot(self, group: int, page: int, num_bytes: int) -> Slot:
        """First `num_bytes` payload bytes of one page.

        Raises:
            LMCacheProtocolError: the group has no such page.
        """
        return Slot(((self._pool.offset(group, page) + HEADER_BYTES, num_bytes),))

    def blank(self, taken: TakenPages) -> None:
        """Clears the headers of pages, so that pages that the server does not write are detected."""
        for group, pages in taken.blocks.items():
            self.groups[group][np.asarray(pages, dtype=np.int64), :HEADER_BYTES] = 0


class PageLease:
    """Lease of the pages of one operation, until both users have dropped it. For any thread.

    Args:
        taken: pages of the operation.
        memory: memory of the pages.
        until_s: deadline of the server, in seconds of the clock.
        give_back: returns the pages to the pool.
    """

    def __init__(
        self, taken: TakenPages, memory: PoolMemory, until_s: float, give_back: Callable[[PageLease], None]
    ) -> None:
        self.taken = taken
        self.memory = memory
        self.until_s = until_s
        self._give_back = give_back
        self._users = {WORKER, SERVER}
        self._lock = threading.Lock()

    def drop(self, user: str) -> None:
        """Ends the use by one user. Repeatable."""
        with self._lock:
            is_last = self._users == {user}
            self._users.discard(user)
        if is_last:
            self._give_back(self)

    def drop_all(self) -> None:
        """Ends the use by both users."""
        self.drop(WORKER)
        self.drop(SERVER)


def copy_table(transfer: PageTransfer, spec: SessionSpec, lease: PageLease) -> CopyTable:
    """Copies between the engine's blocks and the pages. Each page is the slot of one block.

    Raises:
        ValueError: the lease has more or fewer pages than the transfer.
        struct.error: a block id does not fit 32 bits.
    """
    memory = lease.memory
    runs: list[CopyRun] = []
    slots: list[Slot] = []
    for part in transfer.parts:
        group_index = spec.group_indexes[part.group]
        size = memory.pages[group_index].block_bytes
        taken = lease.taken.blocks[part.group]
        runs.append(CopyRun(ChunkPart(group_index, 0, 1, 0, 0), len(part.block_ids), part.block_ids))
        slots += [memory.slot(part.group, page, size) for page, _ in zip(taken, part.block_ids, strict=True)]
    return CopyTable.of_runs(runs, [b""] * len(slots), slots)


class BadPage(NamedTuple):
    """First invalid page of a chunk."""

    chunk: int
    group: int
    block: int
    state: PageState


def seal_pages(
    transfer: PageTransfer,
    spec: SessionSpec,
    lease: PageLease,
    digests: Sequence[bytes],
) -> None:
    """Writes the headers of pages after the copy of their bytes. Fills the rest of each page with zeros.

    Args:
        transfer: pages of the operation.
        spec: session parameters.
        lease: lease of the pages.
        digests: digest of each chunk of the prefix, from chunk 0.
    """
    for part in transfer.parts:
        size = spec.groups[part.group].payload_bytes
        filled = HEADER_BYTES + lease.memory.pages[spec.group_indexes[part.group]].block_bytes
        rows = lease.memory.groups[part.group]
        for page, chunk, block in _page_places(transfer, part, spec, lease):
            row = rows[page]
            row[filled:] = 0
            seal(memoryview(row), spec.identity(digests[chunk], part.group, block), size)


def bad_pages(transfer: PageTransfer, spec: SessionSpec, lease: PageLease, digests: Sequence[bytes]) -> list[BadPage]:
    """Invalid pages: the first one of each chunk."""
    found: dict[int, BadPage] = {}
    for part in transfer.parts:
        size = spec.groups[part.group].payload_bytes
        for page, chunk, block in _page_places(transfer, part, spec, lease):
            if chunk not in found:
                identity = spec.identity(digests[chunk], part.group, block)
                state = check(lease.memory.page(part.group, page), identity, size)
                if state is not PageState.GOOD:
                    found[chunk] = BadPage(chunk, part.group, block, state)
    return [found[chunk] for chunk in sorted(found)]


def _page_places(
    transfer: PageTransfer, part: TransferPart, spec: SessionSpec, lease: PageLease
) -> list[tuple[int, int, int]]:
    """Per page: its number, its chunk in the prefix, and its block index in the chunk."""
    blocks = spec.chunk_tokens // spec.groups[part.group].spec.block_tokens
    pages = lease.taken.blocks[part.group]
    return [
        (page, transfer.chunks.start + position // blocks, position % blocks)
        for page, position in zip(pages, part.positions, strict=True)
    ]


class RankSession:
    """Session of one rank at a server. For the engine's thread, unless a method says otherwise.

    Args:
        spec: session parameters.
        rank: rank of this process.
        namespace: digest of the content's identity.
        open_memory: opens the memory of a pool, and registers it at the copy engines.
        clock: time in seconds.
    """

    def __init__(
        self,
        spec: SessionSpec,
        rank: int,
        namespace: bytes,
        open_memory: Callable[[Pool], PoolMemory],
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.geometry = Geometry(spec.groups, spec.chunk_tokens)
        self._open_memory = open_memory
        self._clock = clock
        self._num_chunks = spec.num_chunks
        self._connect_until_s = clock() + spec.connect_timeout_s
        self._memory: PoolMemory | None = None
        self._lock = threading.Lock()
        self._leases: set[PageLease] = set()
        self._registration = LMCacheSession(
            spec.groups, namespace, spec.world_size, self._num_chunks, spec.chunk_tokens
        )
        self.connection = Connection(spec.address, self._registration, spec.connection, clock)
        self.operations = Operations(self.connection, clock)

    @property
    def ready(self) -> Ready | None:
        """Usable server; None if there is none. Any thread."""
        return self.connection.ready

    @property
    def is_connecting(self) -> bool:
        """True before the first connection, until `connect_timeout_s` or a refusal."""
        state = self.connection.state
        is_refused = isinstance(state, Down) and state.refusal is not None
        return not self.connection.was_ready and not is_refused and self._clock() < self._connect_until_s

    @property
    def chunks_at_once(self) -> int:
        """Maximum number of chunks that one call stores at the server."""
        return chunks_at_once(self._num_chunks)

    @property
    def used_bytes(self) -> int:
        """Bytes of taken pages."""
        if self._memory is None:
            return 0
        free = (self._registration.pool.num_free(group) for group in range(len(self.spec.groups)))
        pages = zip(self._registration.pool.num_blocks, free, self.geometry.page_bytes, strict=True)
        return sum((number - 1 - left) * size for number, left, size in pages)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pages."""
        geometry = self.geometry
        kept = zip(geometry.kept_per_chunk, geometry.page_bytes, strict=True)
        return self._num_chunks * sum(blocks * size for blocks, size in kept)

    def prefix(self, digests: Sequence[bytes]) -> Prefix:
        """Prefix of these chunks. Only after the first connection. Any thread."""
        return Prefix(self._registration.model, self.spec.world_size, self.spec.words(digests))

    def fits_empty_pool(self, transfer: PageTransfer) -> bool:
        """True if the pages fit into an empty pool."""
        kept = self.geometry.kept_per_chunk
        return all(number <= self._num_chunks * kept[group] for group, number in transfer.num_pages_by_group.items())

    def take(self, transfer: PageTransfer, until_s: float, *, is_store: bool) -> PageLease | None:
        """Takes pages for an operation with this deadline. None if too few are free (a store leaves 1/`SPARE_SHARE` of
        the pool to loads), or if the pool was recreated during the call. The server must be ready."""
        pool, numbers = self._registration.pool, transfer.num_pages_by_group
        memory = self._current_memory()
        if is_store:
            spare = self._num_chunks // SPARE_SHARE
            kept = self.geometry.kept_per_chunk
            if any(pool.num_free(group) - number < spare * kept[group] for group, number in numbers.items()):
                return None
        taken = pool.take(numbers)
        if taken is None:
            return None
        lease = PageLease(taken, memory, until_s, self._give_back)
        with self._lock:
            self._leases.add(lease)
        if taken.instance != memory.instance:
            # The pool was recreated meanwhile; the next call reads the new memory.
            lease.drop_all()
            return None
        return lease

    def pages(self, transfer: PageTransfer, lease: PageLease) -> Pages:
        """Pages of a lease, as an operation needs them. Any thread."""
        return Pages(lease.taken, block_tables(self.geometry, transfer, lease.taken.blocks))

    def withdraw(self, prefix: Prefix, chunk: int) -> None:
        """Deletes this rank's corrupt part of a chunk, so that it can be stored again. Any thread."""
        withdraw(self.connection, prefix, self.rank, chunk, len(self.spec.groups))

    def report_starvation(self) -> None:
        """Reports an operation that got no pages until its deadline.

        If a lease is past its deadline, the server may have ignored a call, without an error. Then the connection and
        the pool are replaced.
        """
        with self._lock:
            now_s, instance = self._clock(), self._memory.instance if self._memory is not None else None
            is_overdue = any(lease.until_s <= now_s and lease.taken.instance == instance for lease in self._leases)
        if is_overdue:
            self.connection.reconnect()

    def close(self) -> None:
        """Closes the connection within a bounded time, then frees the shared memory."""
        self.connection.close()
        self._memory = None
        self._registration.close()

    def _current_memory(self) -> PoolMemory:
        pool = self._registration.pool
        if self._memory is None or self._memory.instance != pool.instance:
            self._memory = self._open_memory(pool)
            with self._lock:
                self._leases = {lease for lease in self._leases if lease.taken.instance == self._memory.instance}
        return self._memory

    def _give_back(self, lease: PageLease) -> None:
        with self._lock:
            self._leases.discard(lease)
        self._registration.pool.give_back(lease.taken)
