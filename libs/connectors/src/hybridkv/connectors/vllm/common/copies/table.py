"""Copy table: the copies of many chunks as a few arrays. The scheduler sends a table to a worker, which lowers all
copies in one call.

Most chunks of a job differ only in key, slot and blocks. So a table has the common part once for consecutive chunks,
and no object for a single chunk. `copies_of_runs` makes a table from the planner's transfers.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, groupby
from typing import NamedTuple

import msgspec

from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.planner import CacheSpec, LocalCopies, TransferRun, chunk_blocks, chunk_span
from hybridkv.tiers import Slot


class ChunkCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy between blocks of one group and a chunk in a tier: the whole chunk, or a run of consecutive blocks of it.

    Args:
        group_index: the engine's group.
        key: key of the chunk.
        slot: slot of the chunk.
        first_block: place of `block_ids[0]` among the blocks of the chunk.
        stored_blocks: number of blocks in the chunk.
        block_ids: the engine's blocks, in token order.
        lead_tokens: tokens that the chunk lacks at the start of its first block.
        trail_tokens: tokens that the chunk lacks at the end of its last block.
        local_blocks: for a load: blocks of the engine with the same content, as source in place of the tier. Empty if
            the tier is the source.
    """

    group_index: int
    key: bytes
    slot: Slot
    first_block: int
    stored_blocks: int
    block_ids: tuple[int, ...]
    lead_tokens: int = 0
    trail_tokens: int = 0
    local_blocks: tuple[int, ...] = ()


class CopyShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive copies that differ only in keys, slots and blocks. The fields have the order of a table's numbers."""

    num_copies: int
    group_index: int
    first_block: int
    num_blocks: int
    stored_blocks: int
    lead_tokens: int
    trail_tokens: int
    num_local: int
    num_extents: int
    key_bytes: int


SHAPE_NUMBERS = len(CopyShape.__struct_fields__)


class PlacedChunk(NamedTuple):
    """Chunk of a copy.

    Args:
        key: key of the chunk.
        slot: slot of the chunk.
        is_local: blocks of the engine are the source; the slot is not read.
    """

    key: bytes
    slot: Slot
    is_local: bool


class ChunkPart(NamedTuple):
    """Part of a chunk that a copy moves: fields of `ChunkCopy`."""

    group_index: int
    first_block: int
    stored_blocks: int
    lead_tokens: int
    trail_tokens: int


class CopyRun(NamedTuple):
    """Consecutive copies of the same part of their chunks, with equal numbers of blocks.

    Args:
        part: part of the chunk of each copy.
        num_copies: number of copies.
        block_ids: blocks of all copies, concatenated.
        local_blocks: local blocks of all copies, concatenated; see `ChunkCopy`.
    """

    part: ChunkPart
    num_copies: int
    block_ids: Sequence[int]
    local_blocks: Sequence[int] = ()


class CopyTable(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies, in order. Numbers are in the machine's byte order, because a table is never stored.

    Args:
        shapes: one `CopyShape` after the other, as ten 32-bit numbers each.
        keys: keys of all chunks, concatenated.
        block_ids: blocks of all copies, as 32-bit numbers.
        local_ids: blocks of the engine that are sources of copies, as 32-bit numbers.
        extents: (offset, num_bytes) of all extents of all slots, as 64-bit numbers.
    """

    shapes: bytes = b""
    keys: bytes = b""
    block_ids: bytes = b""
    local_ids: bytes = b""
    extents: bytes = b""

    @classmethod
    def of(cls, copies: Iterable[ChunkCopy]) -> CopyTable:
        """Table of `copies`.

        Raises:
            struct.error: a block id does not fit 32 bits.
        """
        each = list(copies)
        runs = [
            CopyRun(
                ChunkPart(copy.group_index, copy.first_block, copy.stored_blocks, copy.lead_tokens, copy.trail_tokens),
                1,
                copy.block_ids,
                copy.local_blocks,
            )
            for copy in each
        ]
        return cls.of_runs(runs, [copy.key for copy in each], [copy.slot for copy in each])

    @classmethod
    def of_runs(cls, runs: Sequence[CopyRun], keys: Sequence[bytes], slots: Sequence[Slot]) -> CopyTable:
        """Table of runs, with the keys and slots of all their chunks in order.

        Raises:
            ValueError: the numbers of copies, keys and slots differ.
            struct.error: a block id does not fit 32 bits.
        """
        num_copies = sum(run.num_copies for run in runs)
        if not num_copies == len(keys) == len(slots):
            raise ValueError(f"expected {num_copies} keys and slots, got {len(keys)} and {len(slots)}")
        extents = [slot.extents for slot in slots]
        shapes, start = [], 0
        for (part, num_blocks, num_local), alike in groupby(runs, _key_of):
            end = start + sum([run.num_copies for run in alike])
            for number, num_extents, key_bytes in _equal_runs((extents[start:end], keys[start:end])):
                shapes.append(_shape(number, part, num_blocks, num_local, num_extents, key_bytes))
            start = end
        return cls(
            b"".join(shapes),
            b"".join(keys),
            _packed("i", [run.block_ids for run in runs]),
            _packed("i", [run.local_blocks for run in runs]),
            _packed("q", chain.from_iterable(extents)),
        )

    def rows(self) -> Iterator[CopyShape]:
        """Shapes of the copies, in order: one shape for each run of consecutive copies of this shape."""
        numbers = array("i", self.shapes)
        for start in range(0, len(numbers), SHAPE_NUMBERS):
            yield CopyShape(*numbers[start : start + SHAPE_NUMBERS])

    def local_blocks(self) -> Sequence[int]:
        """Blocks of the engine that are sources of copies, concatenated over all copies."""
        return array("i", self.local_ids)

    def from_tier(self) -> CopyTable:
        """The same copies without local blocks: all copies have slots as sources."""
        shapes = array("i", self.shapes)
        column = CopyShape.__struct_fields__.index("num_local")
        shapes[column::SHAPE_NUMBERS] = array("i", bytes(len(self.shapes) // SHAPE_NUMBERS))
        return msgspec.structs.replace(self, shapes=shapes.tobytes(), local_ids=b"")

    def chunks(self) -> Iterator[PlacedChunk]:
        """Chunks of the copies, in order, without their blocks."""
        extents = array("q", self.extents)
        extent = key = 0
        for shape in self.rows():
            is_local, step, key_bytes = shape.num_local > 0, 2 * shape.num_extents, shape.key_bytes
            for _ in range(shape.num_copies):
                numbers = extents[extent : extent + step]
                slot = Slot(tuple(zip(numbers[::2], numbers[1::2], strict=True)))
                yield PlacedChunk(self.keys[key : key + key_bytes], slot, is_local)
                extent, key = extent + step, key + key_bytes

    def __len__(self) -> int:
        return sum(array("i", self.shapes)[::SHAPE_NUMBERS])

    def __iter__(self) -> Iterator[ChunkCopy]:
        """Yields the copies, one object for each."""
        block_ids, local_ids, chunks = array("i", self.block_ids), array("i", self.local_ids), self.chunks()
        block = local = 0
        for shape in self.rows():
            for _ in range(shape.num_copies):
                chunk = next(chunks)
                yield ChunkCopy(
                    shape.group_index,
                    chunk.key,
                    chunk.slot,
                    shape.first_block,
                    shape.stored_blocks,
                    tuple(block_ids[block : block + shape.num_blocks]),
                    shape.lead_tokens,
                    shape.trail_tokens,
                    tuple(local_ids[local : local + shape.num_local]),
                )
                block, local = block + shape.num_blocks, local + shape.num_local


def _key_of(run: CopyRun) -> tuple[ChunkPart, int, int]:
    """Part of the chunks, and for each copy the number of blocks and of local blocks."""
    part, num_copies, block_ids, local_blocks = run
    return part, len(block_ids) // num_copies, len(local_blocks) // num_copies


def _shape(
    num_copies: int, part: ChunkPart, num_blocks: int, num_local: int, num_extents: int, key_bytes: int
) -> bytes:
    """A row of the table: a `CopyShape`."""
    return struct.pack(
        f"{SHAPE_NUMBERS}i",
        num_copies,
        part.group_index,
        part.first_block,
        num_blocks,
        part.stored_blocks,
        part.lead_tokens,
        part.trail_tokens,
        num_local,
        num_extents,
        key_bytes,
    )


def _equal_runs(columns: Sequence[Sequence[Sized]]) -> Iterator[tuple[int, ...]]:
    """Runs of rows in which the items of each column have equal lengths. Yields the number of rows, then these lengths.
    The usual case, a single run, is detected first."""
    sizes = [set(map(len, column)) for column in columns]
    if all(len(of_column) == 1 for of_column in sizes):
        yield len(columns[0]), *(size for [size] in sizes)
        return
    for row, rows in groupby(zip(*(map(len, column) for column in columns), strict=True)):
        yield len(list(rows)), *row


def _packed(kind: str, each: Iterable[Iterable[int]]) -> bytes:
    """Bytes of all numbers, as `array` stores them."""
    numbers = list(chain.from_iterable(each))
    return struct.pack(f"{len(numbers)}{kind}", *numbers)


def copy_bytes(layout: CacheLayout, copy: CopyShape) -> int:
    """Bytes of the engine's pages that one copy of this shape reads or writes on one rank, without the zeros that align
    pages in a chunk."""
    size = layout.spec.groups[copy.group_index].block_tokens
    num_tokens = copy.num_blocks * size
    if copy.first_block == 0:
        num_tokens -= copy.lead_tokens
    if copy.first_block + copy.num_blocks == copy.stored_blocks:
        num_tokens -= copy.trail_tokens
    return layout.content_bytes(copy.group_index) * num_tokens // size


class Copies(NamedTuple):
    """Copies of one load or store, and their bytes on one rank: to or from a tier, and from local blocks."""

    copies: CopyTable
    tier_bytes: int
    local_bytes: int


def copies_of_runs(
    layout: CacheLayout,
    runs: Sequence[TransferRun],
    keys: Sequence[bytes],
    slots: Sequence[Slot],
    local: LocalCopies | None = None,
) -> Copies:
    """Copies of a store or a load. The source of a load is the slot of each chunk, or blocks that the engine still
    holds (`local`). Creates no object for a single chunk.

    Raises:
        ValueError: the numbers of transfers, keys, slots and local blocks differ.
    """
    copied = _copied(layout.spec, runs)
    if local is not None:
        if len(local.block_ids) != len(keys):
            raise ValueError(f"expected local blocks of {len(keys)} transfers, got {len(local.block_ids)}")
        copied = _with_local(copied, local.block_ids)
    return _with_sizes(layout, CopyTable.of_runs(list(copied), keys, slots))


def _copied(spec: CacheSpec, runs: Iterable[TransferRun]) -> Iterator[CopyRun]:
    whole = _whole_parts(spec)
    for run in runs:
        part = None if run.first_block or run.end_token % spec.chunk_tokens else whole[run.group_index]
        if part is not None:
            yield CopyRun(part, run.num_transfers, run.block_ids)
            continue
        for each in run.transfers(spec.chunk_tokens):
            yield CopyRun(_part(spec, each.group_index, each.end_token, each.first_block), 1, each.block_ids)


def _with_local(runs: Iterable[CopyRun], local_blocks: Sequence[Sequence[int]]) -> Iterator[CopyRun]:
    """The runs with local blocks, split where copies have other numbers of these."""
    start = 0
    for run in runs:
        block, num_blocks = 0, len(run.block_ids) // run.num_copies
        for _, alike in groupby(local_blocks[start : start + run.num_copies], len):
            each = list(alike)
            end = block + len(each) * num_blocks
            yield CopyRun(run.part, len(each), run.block_ids[block:end], list(chain.from_iterable(each)))
            block = end
        start += run.num_copies


def _with_sizes(layout: CacheLayout, table: CopyTable) -> Copies:
    num_bytes = {False: 0, True: 0}
    for shape in table.rows():
        num_bytes[shape.num_local > 0] += shape.num_copies * copy_bytes(layout, shape)
    return Copies(table, num_bytes[False], num_bytes[True])


def _whole_parts(spec: CacheSpec) -> list[ChunkPart | None]:
    """For each group: the part that is a whole chunk; None if the chunks of the group have different parts."""
    return [
        None if blocks is None else ChunkPart(group_index, 0, len(blocks), 0, 0)
        for group_index, blocks in enumerate(spec.uniform_chunk_blocks)
    ]


def _part(spec: CacheSpec, group_index: int, end_token: int, first_block: int) -> ChunkPart:
    stored = chunk_blocks(spec, group_index, end_token)
    if group_index not in spec.cut_groups:
        return ChunkPart(group_index, first_block, len(stored), 0, 0)
    span, size = chunk_span(spec, group_index, end_token), spec.groups[group_index].block_tokens
    return ChunkPart(
        group_index, first_block, len(stored), span.start - stored.start * size, stored.stop * size - span.end
    )
