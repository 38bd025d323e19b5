"""What is digested after a read: one digest for each group and cell, over all its layers, as they lie on both sides.

A cell is what a mismatch can be laid to, and 16 bytes for each are little beside what moves. Finer ones (a layer's
page) would name nothing that anybody acts on, since a request whose groups do not all arrive is computed again; coarser
ones would not say which block. The bytes of a cell are taken in the order of its template, which both sides derive from
the same two descriptions: so a producer is sent a few numbers for each group, and need not know where the bytes went.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from hybridkv.peers.cells import Side
from hybridkv.peers.pairing import MAX_RUNS, Exchange, Pairing, too_many_runs
from hybridkv.peers.ranges import Int64Array
from hybridkv.peers.refusal import Refusal
from hybridkv.peers.tables import BlockTables, lists_refused
from hybridkv.planner import GroupKind


class DigestSpan(msgspec.Struct, frozen=True, array_like=True):
    """Cells of one group.

    Args:
        group_index: of which.
        first_cell: of them.
        num_cells: 1 or more.
    """

    group_index: int
    first_cell: int
    num_cells: int


class DigestRequest(msgspec.Struct, frozen=True):
    """What a reader asks to have digested.

    Args:
        num_tokens: the boundary: the last cell holds no more than these.
        spans: of groups.
    """

    num_tokens: int
    spans: tuple[DigestSpan, ...]

    @property
    def num_digests(self) -> int:
        return sum(span.num_cells for span in self.spans)

    @property
    def columns(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Of the spans: group_index, first_cell, num_cells, as they travel."""
        table = np.array([msgspec.structs.astuple(span) for span in self.spans], dtype=np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    @staticmethod
    def of(num_tokens: int, columns: Sequence[Int64Array]) -> DigestRequest:
        """From `columns`. They may be a stranger's: `digest_runs` looks at every number."""
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return DigestRequest(num_tokens, tuple(DigestSpan(*row) for row in rows))

    def parts(self, max_digests: int) -> tuple[DigestRequest, ...]:
        """The same cells in the same order, asked for in questions of at most so many, of few spans each."""
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
    """Runs of bytes in one side's regions, and which of them make a digest: those behind the end of the one before.

    Args:
        regions: of each run.
        offsets: in its region.
        num_bytes: of it.
        ends: ascending, one for each digest: after how many runs it ends.
    """

    regions: Int64Array
    offsets: Int64Array
    num_bytes: Int64Array
    ends: Int64Array


Digester: TypeAlias = Callable[[DigestRuns], Sequence[bytes]]
"""Digests the bytes where they lie: one digest for each of `ends`."""


class Mismatch(NamedTuple):
    """A cell whose bytes are not those that were sent."""

    group_index: int
    cell: int


def digest_request(pairing: Pairing) -> DigestRequest:
    """Everything that a pairing moves."""
    return DigestRequest(
        pairing.num_tokens,
        tuple(
            DigestSpan(index, group.first_cell, group.num_cells)
            for index, group in enumerate(pairing.groups)
            if len(group.ranges)
        ),
    )


def digest_runs(exchange: Exchange, side: Side, tables: BlockTables, request: DigestRequest) -> DigestRuns | Refusal:
    """Where the bytes lie on one side.

    Args:
        exchange: under which they move; on the side that is read, of the agreement as its reader sees it.
        side: whose regions.
        tables: of the request on that side. On the side that is read, those that its lease holds: nothing else is
            digested, whatever was asked for.
        request: as the reader sent it.
    """
    groups = exchange.agreement.groups
    if refusal := lists_refused(side, tables, len(groups)):
        return refusal
    if not 0 < request.num_tokens <= tables.num_tokens:
        return Refusal("digests.num_tokens", str(tables.num_tokens), str(request.num_tokens), "it must hold as many")
    columns: list[list[Int64Array]] = [[], [], [], []]
    seen: set[int] = set()
    room = MAX_RUNS
    for span in request.spans:
        if span.group_index in seen or not 0 <= span.group_index < len(groups):
            return Refusal("digests.group_index", f"each of {len(groups)} groups once", str(span.group_index))
        seen.add(span.group_index)
        if groups[span.group_index].kind is GroupKind.RECURRENT and request.num_tokens != tables.num_tokens:
            return Refusal("digests.num_tokens", str(tables.num_tokens), str(request.num_tokens), "a state is of one")
        found = _refused(exchange, side, tables, span) or _span_runs(
            exchange, side, tables, span, request.num_tokens, room
        )
        if isinstance(found, Refusal):
            return found
        for column, part in zip(columns, found, strict=True):
            column.append(part)
        room -= found[0].size
    empty = np.empty(0, dtype=np.int64)
    regions, offsets, sizes, counts = (np.concatenate([empty, *column]) for column in columns)
    return DigestRuns(regions, offsets, sizes, np.cumsum(counts))


_Columns: TypeAlias = tuple[Int64Array, Int64Array, Int64Array, Int64Array]


def _refused(exchange: Exchange, side: Side, tables: BlockTables, span: DigestSpan) -> Refusal | None:
    """Before anything is made of a span: a table is as long as its request, and what is asked for may not be."""
    pair = exchange.agreement.groups[span.group_index]
    table_end = tables.first_blocks[span.group_index] + len(tables.block_ids[span.group_index])
    most = 1 if pair.kind is GroupKind.RECURRENT else table_end * side.of(pair).spec.block_tokens // pair.cell_tokens
    if 0 <= span.first_cell < span.first_cell + span.num_cells <= most:
        return None
    cells = f"cells {span.first_cell} to {span.first_cell + span.num_cells}"
    return Refusal(f"digests.cells of group {span.group_index}", f"cells 0 to {most}", cells)


def _span_runs(
    exchange: Exchange, side: Side, tables: BlockTables, span: DigestSpan, num_tokens: int, room: int
) -> _Columns | Refusal:
    """Regions, offsets and sizes of runs, cell after cell, and how many runs each cell has."""
    cells = np.arange(span.first_cell, span.first_cell + span.num_cells, dtype=np.int64)
    ids = exchange.block_ids(span.group_index, side, tables, cells, num_tokens)
    if isinstance(ids, Refusal):
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
    """The cells whose digests differ; a digest that is missing differs."""
    cells = [
        Mismatch(span.group_index, cell)
        for span in request.spans
        for cell in range(span.first_cell, span.first_cell + span.num_cells)
    ]
    if not len(cells) == len(ours) == len(theirs):
        return tuple(cells) or (Mismatch(-1, -1),)
    return tuple(cell for cell, mine, yours in zip(cells, ours, theirs, strict=True) if mine != yours)


def plain_digester(regions: Sequence[Any], new: Callable[[], Any]) -> Digester:
    """A digester over buffers, a run at a time.

    Args:
        regions: one buffer of bytes for each region.
        new: makes a hash with `update` and `digest`, for instance `xxhash.xxh3_128`.

    The digester raises ValueError for a run that leaves its region.
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
                    raise ValueError(f"{size} bytes at {offset} leave region {region}")
                state.update(part)
            found.append(state.digest())
            start = end
        return found

    return digest
