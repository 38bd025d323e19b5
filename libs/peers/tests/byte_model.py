"""Two engines as arrays, one number per byte, written with plain loops: each number identifies layer, head, token and
byte.

Reference for `pairing`: it knows the layout of a piece and the tokens that a kind reads, but no cells, templates or
runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from hybridkv.peers.description import NULL_BLOCK, Description, GroupDescription, Piece
from hybridkv.peers.ranges import Ranges
from hybridkv.planner import GroupKind, resume_start

Item = tuple[int, ...]
"""Group, piece, row, head of the model, and the token at which a unit begins; for a state, the token that it
follows."""


class ByteNumbers:
    """A positive number for each byte of each item, the same on both sides."""

    def __init__(self) -> None:
        self._known: dict[tuple[Item, int], int] = {}

    def of(self, item: Item, num_bytes: int) -> np.ndarray:
        return np.array(
            [self._known.setdefault((item, byte), len(self._known) + 1) for byte in range(num_bytes)], dtype=np.int64
        )


@dataclasses.dataclass(frozen=True)
class ItemPlace:
    """Position of an item in memory."""

    item: Item
    region: int
    offset: int
    num_bytes: int


def pieces_of(group: GroupDescription) -> list[Piece]:
    return [piece for layer in group.layers for piece in layer.pieces]


def places(side: Description, index: int, table_place: int, block_id: int, num_tokens: int) -> Iterator[ItemPlace]:
    """The items of one block; `num_tokens` identifies a state."""
    group = side.groups[index]
    for number, piece in enumerate(pieces_of(group)):
        own = 1000 * (side.rank + 1) if piece.total_heads == 0 else 0
        first_head = side.share(piece).first if piece.total_heads else own
        for row in range(piece.rows.count):
            for head in range(piece.heads.count):
                for kernel in range(piece.kernels.count):
                    for unit in range(piece.units.count):
                        offset = piece.offset_bytes + block_id * piece.block_stride_bytes
                        offset += row * piece.rows.stride_bytes + head * piece.heads.stride_bytes
                        offset += kernel * piece.kernels.stride_bytes + unit * piece.units.stride_bytes
                        if group.spec.kind is GroupKind.RECURRENT:
                            token = num_tokens
                        else:
                            unit_tokens = group.spec.block_tokens // (piece.kernels.count * piece.units.count)
                            token = table_place * group.spec.block_tokens
                            token += (kernel * piece.units.count + unit) * unit_tokens
                        item = (index, number, row, first_head + head, token)
                        yield ItemPlace(item, piece.region, offset, piece.item_bytes)


def unit_tokens(group: GroupDescription, item: Item) -> int:
    piece = pieces_of(group)[item[1]]
    return group.spec.block_tokens // (piece.kernels.count * piece.units.count)


class Side:
    """The memory of one rank. Bytes outside of items are negative, each with a number of its own."""

    def __init__(self, description: Description, names: ByteNumbers) -> None:
        self.description, self.names = description, names
        self.regions = []
        count = 0
        for num_bytes in description.region_bytes:
            self.regions.append(-np.arange(count + 1, count + num_bytes + 1, dtype=np.int64))
            count += num_bytes

    def fill(self, index: int, table: list[int], first_token: int, num_tokens: int) -> None:
        """Writes the tokens [first_token, num_tokens) of a group, or the state after `num_tokens`, into its blocks."""
        group = self.description.groups[index]
        for table_place, block_id in enumerate(table):
            if block_id == NULL_BLOCK:
                continue
            if group.spec.kind is GroupKind.RECURRENT and table_place != (num_tokens - 1) // group.spec.block_tokens:
                continue
            for place in places(self.description, index, table_place, block_id, num_tokens):
                if group.spec.kind is GroupKind.RECURRENT or first_token <= place.item[-1] < num_tokens:
                    self.write(place)

    def write(self, place: ItemPlace) -> None:
        self.regions[place.region][place.offset : place.offset + place.num_bytes] = self.names.of(
            place.item, place.num_bytes
        )

    def holds(self, place: ItemPlace) -> bool:
        found = self.regions[place.region][place.offset : place.offset + place.num_bytes]
        return bool((found == self.names.of(place.item, place.num_bytes)).all())

    def copy(self) -> list[np.ndarray]:
        return [region.copy() for region in self.regions]


def apply(ranges: Ranges, local: Side, remote: Side) -> None:
    """Copies the ranges as a transport does."""
    for local_region, local_offset, remote_region, remote_offset, num_bytes in zip(*ranges.columns, strict=True):
        source = remote.regions[remote_region][remote_offset : remote_offset + num_bytes]
        assert source.size == num_bytes
        local.regions[local_region][local_offset : local_offset + num_bytes] = source


def wrong_reads(side: Side, index: int, table: list[int], num_tokens: int) -> list[Item]:
    """The items of a group that a resume at `num_tokens` reads and that hold wrong bytes."""
    group = side.description.groups[index]
    if group.spec.kind is GroupKind.SCRATCH:
        return []
    first = resume_start(group.spec, num_tokens)
    if first >= num_tokens:
        return []
    wrong = []
    for table_place, block_id in enumerate(table):
        start = table_place * group.spec.block_tokens
        if start >= num_tokens or start + group.spec.block_tokens <= first:
            continue
        for place in places(side.description, index, table_place, block_id, num_tokens):
            if group.spec.kind is not GroupKind.RECURRENT:
                token = place.item[-1]
                if token >= num_tokens or token + unit_tokens(group, place.item) <= first:
                    continue
            if block_id == NULL_BLOCK or not side.holds(place):
                wrong.append(place.item)
    return wrong


def stray_writes(before: list[np.ndarray], side: Side, tables: list[list[int]], span: tuple[int, int]) -> int:
    """Number of changed bytes that are neither an item of the tokens of `span` in its place, nor after the last token.

    Args:
        before: the memory before the read.
        side: the memory after it.
        tables: of the request.
        span: (computed tokens, tokens).
    """
    computed, num_tokens = span
    allowed = [np.zeros(region.size, dtype=bool) for region in side.regions]
    for index, table in enumerate(tables):
        is_state = side.description.groups[index].spec.kind is GroupKind.RECURRENT
        for table_place, block_id in enumerate(table):
            if block_id == NULL_BLOCK:
                continue
            for place in places(side.description, index, table_place, block_id, num_tokens):
                at = slice(place.offset, place.offset + place.num_bytes)
                behind = not is_state and place.item[-1] >= num_tokens
                if behind or (side.holds(place) and (is_state or place.item[-1] >= computed)):
                    allowed[place.region][at] = True
    changed = [old != new for old, new in zip(before, side.regions, strict=True)]
    return int(sum((one & ~fine).sum() for one, fine in zip(changed, allowed, strict=True)))
