"""Description of the KV cache of one rank: its groups and the byte layout of a block.

Two ranks exchange descriptions before any bytes move. A page (one layer in one block) has one or several pieces. A
piece is a strided array of rows, heads and token units; its element is an item, contiguous bytes with the same order on
both sides. Pieces can describe layers or blocks outermost, heads before or after tokens, separate K and V, split kernel
blocks, padded pages and latents. Offsets count from the start of a registered region; a description contains no
addresses. A description comes from another process, so every field is bounded, and `decode` refuses an inconsistent
description.
"""

from __future__ import annotations

from typing import Final

import msgspec

from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.ranks import HeadShare, head_share
from hybridkv.planner import GroupKind, GroupSpec

PROTOCOL: Final = 1
"""Version of the description. Increase this number when the meaning of a field changes."""
NULL_BLOCK: Final = 0
"""Block-table entry for a missing block."""

MAX_GROUPS: Final = 64
MAX_LAYERS: Final = 1024
"""Maximum layers of one group."""
MAX_PIECES: Final = 256
"""Maximum pieces of one layer."""
MAX_REGIONS: Final = 4096
MAX_FACTS: Final = 4096
MAX_TEXT: Final = 4096
"""Maximum characters of a name or a fact."""
MAX_ENCODED_BYTES: Final = 8 << 20
MAX_BYTES: Final = 1 << 50
"""Maximum region size and offset; a sum of a few such numbers stays far below 2**63."""
MAX_ITEMS: Final = 1 << 22
"""Maximum items in one block of each group, over all groups and pieces; bounds the work of a comparison."""
MAX_BLOCKS: Final = 1 << 31
MAX_RANKS: Final = 1024


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """Axis of `count` elements with a stride of `stride_bytes`."""

    count: int = 1
    stride_bytes: int = 0


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Strided byte array in every block.

    Args:
        region: registered region.
        offset_bytes: offset of block 0 in the region.
        block_stride_bytes: distance between blocks.
        item_bytes: contiguous bytes of one row, head and unit.
        heads: heads on this rank; one if the piece has no dimension of heads.
        kernels: kernel blocks per block.
        units: units per kernel block. A unit is the smallest run of tokens that can move alone; all units have equal
            size. The count is 1 for a state, and for a block with tokens that cannot be addressed.
        rows: any other repeated dimension.
        total_heads: heads of the model over all ranks. 0 if the bytes are not split by heads and each rank has its own
            bytes; 1 for latents: every rank has the same latents.
    """

    region: int
    offset_bytes: int
    block_stride_bytes: int
    item_bytes: int
    heads: Axis = Axis()
    kernels: Axis = Axis()
    units: Axis = Axis()
    rows: Axis = Axis()
    total_heads: int = 0

    def __post_init__(self) -> None:
        _bounded("region", self.region, 0, MAX_REGIONS - 1)
        _bounded("total_heads", self.total_heads, 0, MAX_BYTES)
        for field in ("offset_bytes", "block_stride_bytes", "item_bytes"):
            _bounded(field, getattr(self, field), 0 if field == "offset_bytes" else 1, MAX_BYTES)
        for name, axis in self.axes:
            _bounded(f"{name}.count", axis.count, 1, MAX_BYTES)
            _bounded(f"{name}.stride_bytes", axis.stride_bytes, 0, MAX_BYTES)
        _bounded("items in a block", self.num_items, 1, MAX_ITEMS)
        # Axes must nest: elements of an inner axis do not overlap the next element of an outer axis.
        span = self.item_bytes
        for name, axis in sorted(self.axes, key=lambda named: named[1].stride_bytes):
            if axis.count > 1:
                _bounded(f"{name}.stride_bytes", axis.stride_bytes, span, MAX_BYTES)
                span = axis.stride_bytes * (axis.count - 1) + span
        _bounded("span of a block", span, 1, MAX_BYTES)

    @property
    def axes(self) -> tuple[tuple[str, Axis], ...]:
        return ("rows", self.rows), ("heads", self.heads), ("kernels", self.kernels), ("units", self.units)

    @property
    def page_bytes(self) -> int:
        """Content bytes of a block."""
        return self.item_bytes * self.num_items

    @property
    def num_items(self) -> int:
        return self.rows.count * self.heads.count * self.num_units

    @property
    def num_units(self) -> int:
        return self.kernels.count * self.units.count

    @property
    def reach_bytes(self) -> int:
        """Extent of a block in bytes, with gaps."""
        return self.item_bytes + sum((axis.count - 1) * axis.stride_bytes for _, axis in self.axes)


class LayerDescription(msgspec.Struct, frozen=True):
    """Description of one layer.

    Args:
        name: name of the layer in the model.
        item_format: byte format of an item: element type, quantisation, K/V order, and the backend if it packs tokens
            in its own format. Equal strings mean equal formats.
        pieces: pieces of a page, in the same order on both sides.
    """

    name: str
    item_format: str
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        _text("name", self.name)
        _text("item_format", self.item_format)
        _bounded("number of pieces", len(self.pieces), 1, MAX_PIECES)

    @property
    def page_bytes(self) -> int:
        return sum(piece.page_bytes for piece in self.pieces)


class GroupDescription(msgspec.Struct, frozen=True):
    """Description of one KV cache group: its spec and its layers. A SCRATCH group has no layers.

    If several layers share pages, only the first of these layers is listed.
    """

    spec: GroupSpec
    layers: tuple[LayerDescription, ...] = ()

    def __post_init__(self) -> None:
        is_scratch = self.spec.kind is GroupKind.SCRATCH
        _bounded("number of layers", len(self.layers), 0 if is_scratch else 1, 0 if is_scratch else MAX_LAYERS)
        _bounded("block_tokens", self.spec.block_tokens, 1, MAX_BLOCKS)
        for layer in self.layers:
            for piece in layer.pieces:
                if self.spec.kind is GroupKind.RECURRENT:
                    _bounded(f"{layer.name}: units of a state", piece.num_units, 1, 1)
                elif self.spec.block_tokens % piece.num_units:
                    raise ValueError(
                        f"{layer.name}: units must be equal parts of a block of {self.spec.block_tokens} tokens, got "
                        f"{piece.num_units}"
                    )

    def unit_tokens(self, piece: Piece) -> int:
        """Tokens per unit. A state has one unit: the whole block."""
        return self.spec.block_tokens // piece.num_units

    @property
    def block_bytes(self) -> int:
        """Content bytes of one block on this rank."""
        return sum(layer.page_bytes for layer in self.layers)


class Description(msgspec.Struct, frozen=True):
    """Description of one rank of an engine.

    Args:
        protocol: `PROTOCOL` of the sender.
        engine: unique name of this start of the rank's process.
        facts: other properties that the bytes depend on, by dotted name. All facts must be equal on both sides.
        rank: tensor-parallel rank, from 0.
        tp_size: tensor-parallel size.
        num_blocks: number of blocks; block ids are smaller than this number.
        region_bytes: size of each registered region, by the transport's region number.
        groups: groups, in the engine's order.
    """

    protocol: int
    engine: str
    facts: dict[str, str]
    rank: int
    tp_size: int
    num_blocks: int
    region_bytes: tuple[int, ...]
    groups: tuple[GroupDescription, ...]

    def __post_init__(self) -> None:
        _text("engine", self.engine)
        _bounded("number of facts", len(self.facts), 0, MAX_FACTS)
        for name, fact in self.facts.items():
            _text("name of a fact", name)
            _text(f"facts[{name}]", fact)
        _bounded("tp_size", self.tp_size, 1, MAX_RANKS)
        _bounded("rank", self.rank, 0, self.tp_size - 1)
        _bounded("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        _bounded("number of regions", len(self.region_bytes), 1, MAX_REGIONS)
        for num_bytes in self.region_bytes:
            _bounded("region_bytes", num_bytes, 1, MAX_BYTES)
        _bounded("number of groups", len(self.groups), 1, MAX_GROUPS)
        items = sum(p.num_items for group in self.groups for layer in group.layers for p in layer.pieces)
        _bounded("items in all pieces", items, 0, MAX_ITEMS)
        for index, group in enumerate(self.groups):
            for layer in group.layers:
                for number, piece in enumerate(layer.pieces):
                    self._check_piece(f"groups[{index}].{layer.name}.pieces[{number}]", piece)

    def _check_piece(self, path: str, piece: Piece) -> None:
        _bounded(f"{path}.region", piece.region, 0, len(self.region_bytes) - 1)
        end = piece.offset_bytes + (self.num_blocks - 1) * piece.block_stride_bytes + piece.reach_bytes
        _bounded(f"{path}: its end", end, 1, self.region_bytes[piece.region])
        if piece.total_heads:
            share = head_share(piece.total_heads, self.tp_size, self.rank)
            if share is None or share.num_heads != piece.heads.count:
                expected = share.num_heads if share else "no equal part"
                raise ValueError(
                    f"{path}.heads: rank {self.rank} of {self.tp_size} has {expected} of {piece.total_heads} heads, "
                    f"got {piece.heads.count}"
                )

    @property
    def total_heads(self) -> frozenset[int]:
        """All values of `total_heads` of the pieces; see `ranks.source_ranks`."""
        return frozenset(p.total_heads for group in self.groups for layer in group.layers for p in layer.pieces)

    def share(self, piece: Piece) -> HeadShare:
        """Heads of the model that a piece of this rank holds."""
        share = head_share(piece.total_heads, self.tp_size, self.rank) if piece.total_heads else None
        return share or HeadShare(0, piece.heads.count)


def encode(description: Description) -> bytes:
    """Encodes as JSON. JSON has no length prefixes, so a short message cannot cause a large allocation."""
    return msgspec.json.encode(description)


def decode(data: bytes) -> Description | Incompatibility:
    """Decodes bytes from another process. Returns an `Incompatibility` for an invalid description."""
    if len(data) > MAX_ENCODED_BYTES:
        return Incompatibility("description", f"needed: at most {MAX_ENCODED_BYTES} bytes", f"{len(data)} bytes")
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        return Incompatibility("description", f"protocol {PROTOCOL}", str(error)[:MAX_TEXT], _VERSIONS)


_DECODER = msgspec.json.Decoder(Description)
_VERSIONS = "run the same version of hybridkv on both sides"


def _bounded(field: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{field} must be a whole number from {least} to {most}, got {value!r}")


def _text(field: str, value: str) -> None:
    if not value or len(value) > MAX_TEXT:
        raise ValueError(f"{field} must have 1 to {MAX_TEXT} characters, got {len(value)}")
