"""Digests after a read: one per group and cell, over all layers of the cell.

A digest per cell (16 bytes) locates a mismatch at small cost. Finer digests would not help, because a request with any
missing group is recomputed; coarser digests would not locate the block. The bytes of a cell are digested in the order
of the cell's template, which both sides derive from the same two descriptions. So the producer receives a few numbers
per group and does not need the destination of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from hybridkv.peers.cells import Side
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.pairing import MAX_RUNS, Exchange, Pairing, too_many_runs
from hybridkv.peers.ranges import Int64Array
from hybridkv.peers.tables import BlockTables, lists_refused
from hybridkv.planner import GroupKind


class DigestSpan(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive cells of one group.

    Args:
        group_index: index of the group.
        first_cell: first cell.
        num_cells: 1 or more.
    """

    group_index: int
    first_cell: int
    num_cells: int


class DigestRequest(msgspec.Struct, frozen=True):
    """Request of a reader for the digests of some cells.

    Args:
        num_tokens: resume point. The last cell is cut there if this saves bytes.
        spans: cells of each group.
    """

    num_tokens: int
    spans: tuple[DigestSpan, ...]

    @property
    def columns(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Spans as columns for the wire: group_index, first_cell, num_cells."""
        table = np.array([msgspec.structs.astuple(span) for span in self.spans], dtype=np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    @staticmethod
    def of(num_tokens: int, columns: Sequence[Int64Array]) -> DigestRequest:
        """Inverse of `columns`. The numbers may be invalid: `digest_runs` checks them."""
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return DigestRequest(num_tokens, tuple(DigestSpan(*row) for row in rows))

    def parts(self, max_digests: int) -> tuple[DigestRequest, ...]:
        """Splits the request into requests of at most `max_digests` cells, in the same order."""
        parts: list[list[DigestSpan]] = []
        room = 0
        for span in self.spans:
            first, end = span.first_cell, span.first_cell + span.num_cells
            while first < end:
                if not room:
                    parts.append([])
                    room = max_digests
                count = min(room, end - first)
                parts[-1].append(DigestSpan(span.group_index, first, count))
                first, room = first + count, room - count
        return tuple(DigestRequest(self.num_tokens, tuple(part)) for part in parts)


@dataclass(frozen=True, slots=True)
class DigestRuns:
    """Byte runs in the regions of one side, grouped by digest.

    Args:
        regions: region of each run.
        offsets: offset of each run in its region.
        num_bytes: size of each run.
        ends: for each digest, the index after its last run; ascending.
    """

    regions: Int64Array
    offsets: Int64Array
    num_bytes: Int64Array
    ends: Int64Array


Digester: TypeAlias = Callable[[DigestRuns], Sequence[bytes]]
"""Computes one digest for each entry of `DigestRuns.ends`."""


class Mismatch(NamedTuple):
    """A cell with different digests."""

    group_index: int
    cell: int


def digest_request(pairing: Pairing) -> DigestRequest:
    """Digest request for all cells that a pairing moves."""
    return DigestRequest(
        pairing.num_tokens,
        tuple(
            DigestSpan(index, group.first_cell, group.num_cells)
            for index, group in enumerate(pairing.groups)
            if len(group.ranges)
        ),
    )


def digest_runs(
    exchange: Exchange, side: Side, tables: BlockTables, request: DigestRequest
) -> DigestRuns | Incompatibility:
    """Byte runs of a digest request on this side, or a refusal.

    Args:
        exchange: exchange of the two ranks. "Ours" is the reader, also on the producer.
        side: this side.
        tables: blocks of the request on this side. On the producer these are the blocks that the lease holds, so no
            other block is digested.
        request: request of the reader; may be invalid.
    """
    groups = exchange.agreement.groups
    if refusal := lists_refused(side, tables, len(groups)):
        return refusal
    if not 0 < request.num_tokens <= tables.num_tokens:
        return Incompatibility(
            "digests.num_tokens", str(tables.num_tokens), str(request.num_tokens), "this side has fewer tokens"
        )
    columns: list[list[Int64Array]] = [[], [], [], []]
    seen: set[int] = set()
    room = MAX_RUNS
    for span in request.spans:
        if span.group_index in seen or not 0 <= span.group_index < len(groups):
            return Incompatibility("digests.group_index", f"each of {len(groups)} groups once", str(span.group_index))
        seen.add(span.group_index)
        if groups[span.group_index].kind is GroupKind.RECURRENT and request.num_tokens != tables.num_tokens:
            hint = "a state is valid at one boundary only"
            return Incompatibility("digests.num_tokens", str(tables.num_tokens), str(request.num_tokens), hint)
        found = _refused(exchange, side, tables, span) or _span_runs(
            exchange, side, tables, span, request.num_tokens, room
        )
        if isinstance(found, Incompatibility):
            return found
        for column, part in zip(columns, found, strict=True):
            column.append(part)
        room -= found[0].size
    empty = np.empty(0, dtype=np.int64)
    regions, offsets, sizes, counts = (np.concatenate([empty, *column]) for column in columns)
    return DigestRuns(regions, offsets, sizes, np.cumsum(counts))


_Columns: TypeAlias = tuple[Int64Array, Int64Array, Int64Array, Int64Array]


def _refused(exchange: Exchange, side: Side, tables: BlockTables, span: DigestSpan) -> Incompatibility | None:
    """Checks a span against its block table before memory is allocated for it."""
    pair = exchange.agreement.groups[span.group_index]
    table_end = tables.first_blocks[span.group_index] + len(tables.block_ids[span.group_index])
    most = 1 if pair.kind is GroupKind.RECURRENT else table_end * side.of(pair).spec.block_tokens // pair.cell_tokens
    if 0 <= span.first_cell < span.first_cell + span.num_cells <= most:
        return None
    cells = f"cells {span.first_cell} to {span.first_cell + span.num_cells}"
    return Incompatibility(f"digests.cells of group {span.group_index}", f"cells 0 to {most}", cells)


def _span_runs(
    exchange: Exchange, side: Side, tables: BlockTables, span: DigestSpan, num_tokens: int, room: int
) -> _Columns | Incompatibility:
    """Regions, offsets and sizes of runs in cell order, and the number of runs of each cell."""
    cells = np.arange(span.first_cell, span.first_cell + span.num_cells, dtype=np.int64)
    ids = exchange.block_ids(span.group_index, side, tables, cells, num_tokens)
    if isinstance(ids, Incompatibility):
        return ids
    num_runs = exchange.num_runs(span.group_index, cells, num_tokens)
    if num_runs > room:
        return too_many_runs(span.group_index, num_runs)
    owners, regions, offsets, sizes = [], [], [], []
    for chosen, template in exchange.chosen_templates(span.group_index, cells, num_tokens):
        where, starts, strides = template.local if side is Side.OURS else template.remote
        count = where.size
        owners.append(np.repeat(chosen, count))
        regions.append(np.tile(where, chosen.size))
        offsets.append((starts[None, :] + ids[chosen][:, None] * strides[None, :]).reshape(-1))
        sizes.append(np.tile(template.num_bytes, chosen.size))
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=cells.size).astype(np.int64)
    return (
        np.concatenate(regions)[order],
        np.concatenate(offsets)[order],
        np.concatenate(sizes)[order],
        counts,
    )


def mismatches(request: DigestRequest, ours: Sequence[bytes], theirs: Sequence[bytes]) -> tuple[Mismatch, ...]:
    """Cells with different digests. If a side has more or fewer digests than there are cells: all cells, or (-1, -1) if
    there are no cells."""
    cells = [
        Mismatch(span.group_index, cell)
        for span in request.spans
        for cell in range(span.first_cell, span.first_cell + span.num_cells)
    ]
    if not len(cells) == len(ours) == len(theirs):
        return tuple(cells) or (Mismatch(-1, -1),)
    return tuple(cell for cell, mine, yours in zip(cells, ours, theirs, strict=True) if mine != yours)


def plain_digester(regions: Sequence[Any], new: Callable[[], Any]) -> Digester:
    """Digester over buffers.

    Args:
        regions: one buffer per region.
        new: creates a hash object with `update` and `digest`, for example `xxhash.xxh3_128`.

    The digester raises ValueError for a run outside its region.
    """
    views = [memoryview(region).cast("B") for region in regions]

    def digest(runs: DigestRuns) -> Sequence[bytes]:
        found, start = [], 0
        for end in runs.ends.tolist():
            state = new()
            for region, offset, size in zip(
                runs.regions[start:end].tolist(),
                runs.offsets[start:end].tolist(),
                runs.num_bytes[start:end].tolist(),
                strict=True,
            ):
                part = views[region][offset : offset + size]
                if len(part) != size:
                    raise ValueError(f"{size} bytes at {offset} are outside region {region}")
                state.update(part)
            found.append(state.digest())
            start = end
        return found

    return digest
