"""A whole job's copies to runs: by one native call without the interpreter lock, or chunk by chunk with numpy.

Both give the same runs in the same order. `lowering.py` and `cut_lowering.py` say which; they are what the native one
is compared with, and what is used where it is not installed. Called when a job's turn has come, on the thread that
copies, so that the engine's thread pays for none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hybridkv.canonical import GroupPages
from hybridkv.connectors.vllm.copy_table import ChunkCopy, CopyTable
from hybridkv.connectors.vllm.cut_lowering import GroupBlocks, cut_load_runs, cut_store_runs
from hybridkv.connectors.vllm.lowering import Zeros, joined_loads, load_runs, local_runs, store_runs
from hybridkv.tiers import SealedMemory
from hybridkv.transfer import CopyRuns, native_lowering


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Where the two sides of a rank's copies lie.

    Args:
        pages: of whole blocks, of each stored group.
        cut: groups whose blocks chunks cut.
        zeros: where padding comes from.
        arena: that slots lie in.
    """

    pages: Mapping[int, GroupPages]
    cut: Mapping[int, GroupBlocks]
    zeros: Zeros
    arena: SealedMemory


class StoreRuns(NamedTuple):
    """The runs of a store.

    Args:
        runs: of every slot as a whole, one slot after the other. None is of two.
        ends: of each slot's, counted in runs.
        zero_bytes: that are no page's.
    """

    runs: CopyRuns
    ends: npt.NDArray[np.int64]
    zero_bytes: int


class JobLowering(Protocol):
    """Any thread may call.

    Raises:
        ValueError: a slot is too small or not in the arena, a block is outside of the pool, or a chunk that is stored
            lacks some of its own.
    """

    def load(self, copies: CopyTable) -> CopyRuns:
        """Runs that write every page of the copies once: of those that come from the tier, then of those that come
        from blocks of the engine. No two of either could be joined."""
        ...

    def store(self, copies: CopyTable) -> StoreRuns:
        """Runs that write every byte of every slot once, in order. No two of one slot could be joined."""
        ...


def job_lowering(memory: RankMemory) -> JobLowering:
    """The native one where it is installed."""
    return PlainLowering(memory) if native_lowering() is None else NativeLowering(memory)


class PlainLowering:
    """Chunk by chunk."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory

    def load(self, copies: CopyTable) -> CopyRuns:
        each = list(copies)
        return joined_loads(each, [self._load(copy) for copy in each])

    def _load(self, copy: ChunkCopy) -> CopyRuns:
        memory = self._memory
        if copy.local_blocks:
            return local_runs(copy, memory.pages[copy.group_index])
        extents, cut = memory.arena.addresses(copy.slot), memory.cut.get(copy.group_index)
        if cut is not None:
            return cut_load_runs(copy, cut, extents)
        return load_runs(copy, memory.pages[copy.group_index], extents)

    def store(self, copies: CopyTable) -> StoreRuns:
        parts = [self._store(copy).coalesce() for copy in copies]
        # What joins runs of two chunks would join two records.
        runs = CopyRuns.concatenate(parts)
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return StoreRuns(runs, ends, self._memory.zeros.num_bytes_in(runs))

    def _store(self, copy: ChunkCopy) -> CopyRuns:
        memory = self._memory
        extents, cut = memory.arena.addresses(copy.slot), memory.cut.get(copy.group_index)
        if cut is not None:
            return cut_store_runs(copy, cut, extents, memory.zeros)
        return store_runs(copy, memory.pages[copy.group_index], extents, memory.zeros)


class NativeLowering:
    """All at once. `RuntimeError` where it is not installed."""

    def __init__(self, memory: RankMemory) -> None:
        native = native_lowering()
        if native is None:
            raise RuntimeError("hybridkv.native is not installed")
        arena, zeros = memory.arena, memory.zeros
        self._native = native(arena.base_address, arena.capacity_bytes, zeros.address, zeros.num_bytes)
        self._cut = memory.cut
        for group_index, pages in memory.pages.items():
            cut = memory.cut.get(group_index)
            self._native.add_group(group_index, cut.block_tokens if cut is not None else 0, *_columns(pages))
        self._known: set[tuple[int, int, int, int]] = set()
        """Cuts whose parts were added."""

    def load(self, copies: CopyTable) -> CopyRuns:
        self._add_parts(copies)
        arrays = self._native.lower(False, copies.shapes, copies.block_ids, copies.local_ids, copies.extents)
        return CopyRuns(*arrays[:3])

    def store(self, copies: CopyTable) -> StoreRuns:
        self._add_parts(copies)
        sources, destinations, num_bytes, ends, zero_bytes = self._native.lower(
            True, copies.shapes, copies.block_ids, copies.local_ids, copies.extents
        )
        return StoreRuns(CopyRuns(sources, destinations, num_bytes), ends, zero_bytes)

    def _add_parts(self, copies: CopyTable) -> None:
        """Pages of parts of blocks are looked at when they are first copied: of all parts that there could be, most
        never are."""
        for shape in copies.rows() if self._cut else ():
            cut = (shape.group_index, shape.stored_blocks, shape.lead_tokens, shape.trail_tokens)
            blocks = self._cut.get(shape.group_index)
            if blocks is None or cut in self._known:
                continue
            for part in blocks.parts(*cut[1:]):
                if part.end - part.start < blocks.block_tokens:
                    pages = blocks.of(part.start, part.end)
                    self._native.add_part(shape.group_index, part.start, part.end, *_columns(pages))
            self._known.add(cut)


def _columns(pages: GroupPages) -> tuple[bytes, int, int]:
    """Address, stride, size and place in a chunk's block of each page; then bytes of such a block, and the pool's
    number of blocks."""
    places = pages.chunk_offsets(0, 1, 1).tolist()
    rows = [
        (region.address, region.stride_bytes, region.page_bytes, place)
        for region, place in zip(pages.regions, places, strict=True)
    ]
    return np.array(rows, dtype=np.int64).tobytes(), pages.block_bytes, pages.num_blocks
