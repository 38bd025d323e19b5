"""Compatibility check of two ranks, before any bytes move. A refusal names the field that differs.

These properties may differ: block sizes, for a state or if one divides the other and tokens are addressable;
tensor-parallel sizes and ranks, if pages are split by heads; names of engines; numbers of blocks, regions, strides and
the order of axes. Everything else must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.peers.description import PROTOCOL, Description, GroupDescription, Piece
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.ranks import head_sources
from hybridkv.planner import GroupKind


class PiecePair(NamedTuple):
    """The same piece on both sides.

    Args:
        local: piece of this side.
        remote: piece of the other side.
        local_head: first head to read, within the local piece.
        remote_head: the same head within the remote piece.
        heads: number of heads; 0 if this remote rank provides none.
    """

    local: Piece
    remote: Piece
    local_head: int
    remote_head: int
    heads: int


@dataclass(frozen=True, slots=True)
class GroupPair:
    """One group on both sides.

    Args:
        local: description of this side.
        remote: description of the other side.
        cell_tokens: the smaller of the two block sizes, the unit of moves. A state is one cell.
        pieces: pieces of all layers, in order.
    """

    local: GroupDescription
    remote: GroupDescription
    cell_tokens: int
    pieces: tuple[PiecePair, ...]

    @property
    def kind(self) -> GroupKind:
        return self.local.spec.kind


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two compatible ranks; `ours` reads from `theirs`."""

    ours: Description
    theirs: Description
    groups: tuple[GroupPair, ...]


_MODEL = "both engines must serve the same model with the same settings"
_BLOCKS = "start both engines with the same block size"
_RANKS = "start both engines with the same tensor-parallel size"
_LAYOUT = "use the same attention backend, KV cache type and layout on both sides"


def compare(ours: Description, theirs: Description) -> Agreement | Incompatibility:
    """Compares two ranks. Returns their agreement, or a refusal for the first field that differs.

    Args:
        ours: description of the reader.
        theirs: description of the producer. Both sides pass the reader's description first, and get the same agreement.
    """
    if ours.protocol != PROTOCOL or ours.protocol != theirs.protocol:
        return _refused("protocol", ours.protocol, theirs.protocol, "run the same version of hybridkv on both sides")
    if refusal := _facts(ours.facts, theirs.facts):
        return refusal
    if len(ours.groups) != len(theirs.groups):
        return _refused("number of groups", len(ours.groups), len(theirs.groups), _MODEL)
    pairs = []
    for index, (local, remote) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        path = f"groups[{index}]"
        refusal = next(_group_differences(path, local, remote), None)
        if refusal is not None:
            return refusal
        pieces: list[PiecePair] = []
        for layer, other in zip(local.layers, remote.layers, strict=True):
            for number, (mine, yours) in enumerate(zip(layer.pieces, other.pieces, strict=True)):
                at = f"{path}.{layer.name}.pieces[{number}]"
                pair = _pair(at, (ours, local, mine), (theirs, remote, yours))
                if isinstance(pair, Incompatibility):
                    return pair
                pieces.append(pair)
        # A state moves whole, so its two block sizes may be any numbers.
        cell_tokens = min(local.spec.block_tokens, remote.spec.block_tokens)
        pairs.append(GroupPair(local, remote, cell_tokens, tuple(pieces)))
    return Agreement(ours, theirs, tuple(pairs))


def _facts(ours: dict[str, str], theirs: dict[str, str]) -> Incompatibility | None:
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if not differing:
        return None
    name, *others = differing
    also = f"; also differing: {', '.join(others[:8])}" if others else ""
    return _refused(f"facts[{name}]", ours.get(name, "absent"), theirs.get(name, "absent"), _MODEL + also)


def _group_differences(path: str, local: GroupDescription, remote: GroupDescription) -> Iterator[Incompatibility]:
    for field in ("kind", "window_tokens", "align_tokens", "lookahead_tokens"):
        mine, yours = getattr(local.spec, field), getattr(remote.spec, field)
        if mine != yours:
            yield _refused(f"{path}.{field}", mine, yours, _MODEL)
    ours, theirs = local.spec.block_tokens, remote.spec.block_tokens
    if local.spec.kind not in (GroupKind.RECURRENT, GroupKind.SCRATCH) and max(ours, theirs) % min(ours, theirs):
        yield _refused(f"{path}.block_tokens", ours, theirs, "one block size must divide the other")
    names = [[layer.name for layer in side.layers] for side in (local, remote)]
    if names[0] != names[1]:
        mine, yours = next(((a, b) for a, b in zip(*names, strict=False) if a != b), (len(names[0]), len(names[1])))
        yield _refused(f"{path}.layers", mine, yours, _MODEL)
    for layer, other in zip(local.layers, remote.layers, strict=False):
        if layer.item_format != other.item_format:
            yield _refused(f"{path}.{layer.name}.item_format", layer.item_format, other.item_format, _LAYOUT)
        if len(layer.pieces) != len(other.pieces):
            yield _refused(f"{path}.{layer.name}.pieces", len(layer.pieces), len(other.pieces), _LAYOUT)


_Side = tuple[Description, GroupDescription, Piece]


def _pair(path: str, ours: _Side, theirs: _Side) -> PiecePair | Incompatibility:
    (we, local, mine), (they, remote, yours) = ours, theirs
    if mine.total_heads != yours.total_heads:
        return _refused(f"{path}.total_heads", mine.total_heads, yours.total_heads, _LAYOUT)
    if local.spec.kind is not GroupKind.RECURRENT and local.unit_tokens(mine) != remote.unit_tokens(yours):
        hint = _BLOCKS + ": tokens of these blocks are not addressable on both sides in the same way"
        if local.spec.block_tokens == remote.spec.block_tokens:
            hint = _LAYOUT
        return _refused(
            f"{path}.unit_tokens (smallest number of tokens that can move)",
            f"{local.unit_tokens(mine)} in blocks of {local.spec.block_tokens}",
            f"{remote.unit_tokens(yours)} in blocks of {remote.spec.block_tokens}",
            hint,
        )
    for field, a, b in (("item_bytes", mine.item_bytes, yours.item_bytes), ("rows", mine.rows.count, yours.rows.count)):
        if a != b:
            return _refused(f"{path}.{field}", a, b, _LAYOUT)
    if mine.total_heads == 0:
        if we.tp_size != they.tp_size or we.rank != they.rank:
            ranks = f"rank {we.rank} of {we.tp_size}", f"rank {they.rank} of {they.tp_size}"
            return _refused(f"{path}: not split by heads, tp_size", *ranks, _RANKS)
        if mine.heads.count != yours.heads.count:
            return _refused(f"{path}.heads", mine.heads.count, yours.heads.count, _LAYOUT)
        return PiecePair(mine, yours, 0, 0, mine.heads.count)
    sources = head_sources(mine.total_heads, we.tp_size, we.rank, they.tp_size)
    if sources is None:
        return _refused("tp_size", we.tp_size, they.tp_size, _RANKS)
    for source in sources:
        if source.rank == they.rank:
            first = source.first
            return PiecePair(
                mine, yours, first - we.share(mine).first, first - they.share(yours).first, source.num_heads
            )
    return PiecePair(mine, yours, 0, 0, 0)


def _refused(field: str, ours: object, theirs: object, hint: str) -> Incompatibility:
    return Incompatibility(field, str(ours), str(theirs), hint)
