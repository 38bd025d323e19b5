"""One process's side of a cache at an LMCache server: a pool, a connection, and blocking calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hybridkv.lmcache.calls import MAY_STILL_RUN, CallAnswer, CallFailure, CallResult
from hybridkv.lmcache.connection import DEFAULT_OPTIONS, Connection, ConnectionOptions, Down, ServerAddress
from hybridkv.lmcache.geometry import NULL_BLOCK, Geometry, PageGroup
from hybridkv.lmcache.keys import page_identity, prefix_words
from hybridkv.lmcache.operations import Operations, Pages, Prefix, PrefixHit
from hybridkv.lmcache.page import HEADER_BYTES, PageState, check, payload_of, seal
from hybridkv.lmcache.pool import Pool, TakenPages
from hybridkv.lmcache.session import LMCacheSession
from hybridkv.lmcache.wire import RpcCall

T = TypeVar("T")

WAIT_S = 300.0
OWN = -1
Blocks = dict[int, dict[int, bytes]]
"""Bytes by group and position in its table."""


class Rig:
    """A rank that stores and retrieves bytes.

    Args:
        address: of the server.
        groups: that are stored.
        fingerprint: of the cache.
        num_chunks: of the pool.
        rank: of this process.
        world_size: of all.
        options: of the connection.
    """

    def __init__(
        self,
        address: ServerAddress,
        groups: Sequence[PageGroup],
        fingerprint: bytes,
        num_chunks: int = 8,
        *,
        rank: int = 0,
        world_size: int = 1,
        options: ConnectionOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.rank = rank
        self._world_size = world_size
        self.member = LMCacheSession(groups, fingerprint, world_size, num_chunks)
        self.settled = 0
        self.connection = Connection(address, self.member, options)
        self.operations = Operations(self.connection, time.monotonic)

    # Operations of a test.

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        return self.geometry.groups

    @property
    def geometry(self) -> Geometry:
        return self.member.geometry

    @property
    def pool(self) -> Pool:
        return self.member.pool

    def ready(self) -> Rig:
        """Returns once the server is ready."""
        state = self.connection.wait_ready(WAIT_S)
        if isinstance(state, Down):
            raise AssertionError(state)
        return self

    def prefix(self, digests: Sequence[bytes]) -> Prefix:
        """The prefix that ends with the last of these chunks."""
        return Prefix(self.member.model, self._world_size, prefix_words(digests, self.geometry.chunk_tokens))

    def ask(self, call: RpcCall[T]) -> CallResult[T]:
        """Makes one call and returns how it ended."""
        return wait(lambda end: self.connection.channel.call(call, WAIT_S, end))

    def lookup(
        self, digests: Sequence[bytes], timeout_s: float = WAIT_S, *, rank: int | None = OWN
    ) -> CallResult[PrefixHit]:
        """Looks up for this rank, for another, or for all of them (None)."""
        worker = self.rank if rank == OWN else rank
        return wait(lambda end: self.operations.lookup(self.prefix(digests), worker, timeout_s, end))

    def lookup_when_down(self, digests: Sequence[bytes], timeout_s: float = WAIT_S) -> CallResult[PrefixHit]:
        """Looks up at a server with an unknown chunk size."""
        prefix = Prefix("nothing", self._world_size, prefix_words(digests, 256))
        return wait(lambda end: self.operations.lookup(prefix, self.rank, timeout_s, end))

    def num_found(self, digests: Sequence[bytes]) -> int:
        """Number of chunks that can be read now."""
        ended = self.lookup(digests)
        assert isinstance(ended, CallAnswer), ended
        self.operations.release(ended.value)
        return ended.value.num_chunks

    def store(
        self, digests: Sequence[bytes], content: Blocks, start_chunk: int = 0, timeout_s: float = WAIT_S
    ) -> CallResult[None]:
        """Stores the blocks that `content` has of the chunks from `start_chunk`; a missing position has no block."""
        geometry, pool, num_chunks = self.geometry, self.pool, len(digests) - start_chunk
        positions = {
            group: [
                at
                for at in kept_blocks(geometry, group, num_chunks)
                if self._at(group, at, start_chunk) in content[group]
            ]
            for group in range(len(self.groups))
        }
        taken = pool.take({group: len(each) for group, each in positions.items()})
        assert taken is not None
        for group, each in positions.items():
            for block, at in zip(taken.blocks[group], each, strict=True):
                page, size = pool.page(group, block), self.groups[group].payload_bytes
                position = self._at(group, at, start_chunk)
                payload_of(page, size)[:] = content[group][position]
                seal(page, self.identity(digests, group, position), size)
        pages = Pages(taken, self._tables(positions, taken, num_chunks))
        chunks = (start_chunk, len(digests))
        prefix = self.prefix(digests)
        return self._moved(
            lambda end, settle: self.operations.store(prefix, self.rank, chunks, pages, timeout_s, end, settle),
            taken,
            lambda: None,
        )

    def store_readable(self, digests: Sequence[bytes], content: Blocks, start_chunk: int = 0) -> None:
        """Stores, and returns once the chunks can be read."""
        stored = self.store(digests, content, start_chunk)
        assert stored == CallAnswer(None), stored
        confirmed: CallResult[None] = wait(
            lambda end: self.operations.confirm(self.prefix(digests), self.rank, WAIT_S, end)
        )
        assert confirmed == CallAnswer(None), confirmed

    def retrieve(
        self, digests: Sequence[bytes], start_chunk: int = 0, timeout_s: float = WAIT_S
    ) -> tuple[CallResult[None], Blocks, dict[PageState, int]]:
        """Retrieves the blocks that a resume at the end of the hit needs: how the call ended, the valid content, and
        the number of pages by state."""
        ended = self.lookup(digests)
        if isinstance(ended, CallFailure) or not ended.value.num_chunks:
            return ended if isinstance(ended, CallFailure) else CallAnswer(None), {}, {}
        return self.retrieve_found(digests, ended.value, start_chunk, timeout_s)

    def retrieve_found(
        self, digests: Sequence[bytes], found: PrefixHit, start_chunk: int = 0, timeout_s: float = WAIT_S
    ) -> tuple[CallResult[None], Blocks, dict[PageState, int]]:
        geometry, pool, num_chunks = self.geometry, self.pool, found.num_chunks - start_chunk
        positions = {group: needed_blocks(geometry, group, num_chunks) for group in range(len(self.groups))}
        taken = pool.take({group: len(each) for group, each in positions.items()})
        assert taken is not None
        for group, each in taken.blocks.items():
            for block in each:
                pool.page(group, block)[:HEADER_BYTES] = bytes(HEADER_BYTES)
        pages = Pages(taken, self._tables(positions, taken, num_chunks))
        content: Blocks = {group: {} for group in positions}
        states: dict[PageState, int] = {}

        def read() -> None:
            for group, each in positions.items():
                size = self.groups[group].payload_bytes
                for block, at in zip(taken.blocks[group], each, strict=True):
                    page, position = pool.page(group, block), self._at(group, at, start_chunk)
                    state = check(page, self.identity(digests, group, position), size)
                    states[state] = states.get(state, 0) + 1
                    if state is PageState.GOOD:
                        content[group][position] = bytes(payload_of(page, size))

        ended = self._moved(
            lambda end, settle: self.operations.retrieve(found, start_chunk, pages, timeout_s, end, settle),
            taken,
            read,
        )
        return ended, content, states

    def identity(self, digests: Sequence[bytes], group: int, position: int) -> bytes:
        """Identity of the page of one block."""
        blocks = self.geometry.blocks_per_chunk[group]
        return page_identity(digests[position // blocks], group, position % blocks)

    def close(self) -> None:
        self.connection.close()
        self.member.close()

    def __enter__(self) -> Rig:
        return self.ready()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _at(self, group: int, at: int, start_chunk: int) -> int:
        return start_chunk * self.geometry.blocks_per_chunk[group] + at

    def _tables(self, positions: Mapping[int, Sequence[int]], taken: TakenPages, num_chunks: int) -> list[list[int]]:
        tables = []
        for group in self.geometry.order:
            table = [NULL_BLOCK] * (num_chunks * self.geometry.blocks_per_chunk[group])
            for block, at in zip(taken.blocks[group], positions[group], strict=True):
                table[at] = block
            tables.append(table)
        return tables

    def _moved(
        self,
        begin: Callable[[Callable[[CallResult[None]], None], Callable[[], None]], None],
        taken: TakenPages,
        read: Callable[[], None],
    ) -> CallResult[None]:
        """Returns how a move ended. Its pages are given back once they were read and the server has finished with
        them."""
        settled, lock, over = threading.Event(), threading.Lock(), [0]

        def one_of_two() -> None:
            with lock:
                over[0] += 1
                is_second = over[0] == 2
            if is_second:
                self.pool.give_back(taken)

        def settle() -> None:
            self.settled += 1
            one_of_two()
            settled.set()

        ended: CallResult[None] = wait(lambda end: begin(end, settle))
        if isinstance(ended, CallAnswer) or ended.reason not in MAY_STILL_RUN:
            assert settled.wait(WAIT_S)
        if isinstance(ended, CallAnswer):
            read()
        one_of_two()
        return ended


def kept_blocks(geometry: Geometry, group: int, num_chunks: int) -> list[int]:
    """Positions, in a table of `num_chunks` chunks, of the blocks of a group that a server reads and writes."""
    blocks, kept = geometry.blocks_per_chunk[group], geometry.kept_per_chunk[group]
    return [chunk * blocks + block for chunk in range(num_chunks) for block in range(blocks - kept, blocks)]


def needed_blocks(geometry: Geometry, group: int, num_chunks: int) -> list[int]:
    """Positions of the blocks of a group that a resume at the end of `num_chunks` chunks needs."""
    window = geometry.windows[group]
    blocks = num_chunks * geometry.blocks_per_chunk[group]
    needed = blocks if window is None else min(blocks, window // geometry.groups[group].spec.block_tokens)
    return list(range(blocks - needed, blocks))


def wait(begin: Callable[[Callable[[CallResult[T]], None]], object], timeout_s: float = 2 * WAIT_S) -> CallResult[T]:
    """Starts a call that ends with a callback; returns what it ended with."""
    done = threading.Event()
    answers: list[CallResult[T]] = []

    def end(ended: CallResult[T]) -> None:
        answers.append(ended)
        done.set()

    begin(end)
    assert done.wait(timeout_s), "the call never ended"
    assert len(answers) == 1
    return answers[0]
