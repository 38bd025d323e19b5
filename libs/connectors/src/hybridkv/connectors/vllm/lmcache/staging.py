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
from hybridkv.connectors.vllm.lmcache.pages import Part, Parts
from hybridkv.connectors.vllm.lmcache.site import Site
from hybridkv.connectors.vllm.lowering import Zeros, load_runs, store_runs
from hybridkv.connectors.vllm.messages import ChunkCopy
from hybridkv.lmcache.page import HEADER_BYTES, PageState, check, seal
from hybridkv.lmcache.pool import Pool, Taken
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
