"""Geometry: groups under a server's chunk size, their order, and checks for layouts that a server refuses silently.

A server numbers groups in registration order and stores groups with the same window rule in one object. A server 0.5.6
on a CPU stores such groups wrongly if they are not adjacent. So groups are registered in the order of window rules, and
block ids follow that order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hybridkv.lmcache.detection import ServerFacts
from hybridkv.lmcache.errors import LMCacheConfigurationError, LMCacheProtocolError
from hybridkv.lmcache.page import page_bytes
from hybridkv.planner import GroupKind, GroupSpec, TokenSpan

_WHOLE = -1
MAX_GROUPS = 64
NULL_BLOCK = 0
"""The null block: never stored, and never read."""


class PageGroup(msgspec.Struct, frozen=True):
    """One stored group.

    Args:
        spec: spec of any kind except SCRATCH, which is not stored.
        payload_bytes: bytes of all layers in one block.
    """

    spec: GroupSpec
    payload_bytes: int


@dataclass(frozen=True)
class Geometry:
    """Groups under a server's chunk size. Indexes refer to `groups`; `order` is the server's order.

    Raises:
        LMCacheConfigurationError: the groups cannot be stored with this chunk size.
    """

    groups: tuple[PageGroup, ...]
    chunk_tokens: int

    def __post_init__(self) -> None:
        if not 0 < len(self.groups) <= MAX_GROUPS:
            raise LMCacheConfigurationError("groups", f"1 to {MAX_GROUPS} that are stored", len(self.groups))
        if any(group.spec.kind is GroupKind.SCRATCH for group in self.groups):
            raise LMCacheConfigurationError("groups", "groups that are stored", "a SCRATCH group", "leave it out")
        unit = chunk_alignment(self.groups)
        if self.chunk_tokens <= 0 or self.chunk_tokens % unit:
            blocks = [group.spec.block_tokens for group in self.groups]
            up = -(-self.chunk_tokens // unit) * unit
            raise LMCacheConfigurationError(
                "chunk_size",
                f"a multiple of {unit} tokens, the least common multiple of the groups' blocks {blocks}",
                self.chunk_tokens,
                f"start the server with --chunk-size {up}",
            )

    @functools.cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens before a boundary that each group needs to resume there, in whole blocks; None: all tokens."""
        return tuple(_window_tokens(group.spec) for group in self.groups)

    @functools.cached_property
    def page_bytes(self) -> tuple[int, ...]:
        return tuple(page_bytes(group.payload_bytes) for group in self.groups)

    @functools.cached_property
    def blocks_per_chunk(self) -> tuple[int, ...]:
        return tuple(self.chunk_tokens // group.spec.block_tokens for group in self.groups)

    @functools.cached_property
    def kept_per_chunk(self) -> tuple[int, ...]:
        """Blocks at the end of each chunk that a server reads and writes. The server skips the earlier blocks."""
        return tuple(
            blocks if window is None else min(blocks, window // group.spec.block_tokens)
            for group, blocks, window in zip(self.groups, self.blocks_per_chunk, self.windows, strict=True)
        )

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Indexes of the groups in registration order: groups with the same window rule are adjacent."""
        return tuple(sorted(range(len(self.groups)), key=lambda index: (self._window_rule(index), index)))

    def objects(self, *, separate: bool) -> tuple[tuple[int, ...], ...]:
        """Groups of each object of a chunk. A server stores an object completely or not at all.

        Args:
            separate: True if the server separates window rules (`ServerFacts.separate_groups`).
        """
        if not separate:
            return (self.order,)
        return tuple(tuple(each) for _, each in itertools.groupby(self.order, self._window_rule))

    def _window_rule(self, index: int) -> tuple[bool, int]:
        """Window rule of a group: True if it has states; number of chunks that its window spans."""
        window = self.windows[index]
        chunks = _WHOLE if window is None else -(-window // self.chunk_tokens)
        return self.groups[index].spec.kind is GroupKind.RECURRENT, chunks

    @functools.cached_property
    def needs_separate_groups(self) -> bool:
        """True if a server with all groups in one object cannot find the resume points of a group."""
        return any(group.spec.kind is GroupKind.RECURRENT for group in self.groups)

    def digest(self) -> bytes:
        """Encoding of the layout. Clients that share a cache must have equal encodings."""
        return msgspec.msgpack.encode((self.groups, self.chunk_tokens, self.order, self.windows))


def chunk_alignment(groups: Sequence[PageGroup]) -> int:
    """Alignment of the chunk size: whole blocks of every group."""
    return math.lcm(*(group.spec.block_tokens for group in groups))


def require_compatible_server(geometry: Geometry, facts: ServerFacts) -> None:
    """Checks that a server can store such groups.

    Raises:
        LMCacheConfigurationError: the server has an unsuitable setting.
    """
    if geometry.needs_separate_groups and not facts.separate_groups:
        raise LMCacheConfigurationError(
            "separate_object_groups",
            "true, because a state is valid at one boundary only",
            facts.separate_groups,
            "start the server with --separate-object-groups",
        )
    if facts.null_block != 0:
        raise LMCacheConfigurationError(
            "null_block_id", "0", facts.null_block, "start the server without --null-block-id"
        )
    if facts.keeps_whole_windows:
        raise LMCacheConfigurationError("engine_type", "default", "another", "start the server without --engine-type")


def _window_tokens(spec: GroupSpec) -> int | None:
    block = spec.block_tokens
    match spec.kind:
        case GroupKind.RECURRENT:
            return block
        case GroupKind.WINDOW:
            assert spec.window_tokens is not None
            # Blocks of the last window before a boundary; boundaries are ends of blocks.
            return max(1, -(-(spec.window_tokens - 1) // block)) * block
        case GroupKind.CHUNKED:
            assert spec.align_tokens is not None
            # A boundary may be anywhere in an attention chunk, so a resume needs at most one whole attention chunk.
            return -(-spec.align_tokens // block) * block
    return None


# Block ids of a token range, as a server expects them: one list for each group, in registration order.


def common_chunks(geometry: Geometry, tables: Mapping[int, Sequence[int]]) -> int:
    """Number of leading chunks with all blocks of every group. 0 if a group has no table."""
    tokens = (len(tables.get(index, ())) * group.spec.block_tokens for index, group in enumerate(geometry.groups))
    return min(tokens, default=0) // geometry.chunk_tokens


def cut_tables(
    geometry: Geometry, tables: Mapping[int, Sequence[int]], start_token: int, end_token: int
) -> list[list[int]]:
    """Blocks of each group in [start_token, end_token), in the server's order.

    Args:
        geometry: geometry of the groups.
        tables: block ids of each group, from token 0.
        start_token: first token; a multiple of the chunk size.
        end_token: token after the last; a multiple of the chunk size.

    Raises:
        LMCacheProtocolError: the range is not whole chunks, or a group lacks blocks. A server stores nothing for a list
            that is too short, and reports the error in its own log only.
    """
    chunk = geometry.chunk_tokens
    if start_token % chunk or end_token % chunk or not 0 <= start_token < end_token:
        raise LMCacheProtocolError(f"[{start_token}, {end_token}) is not a range of whole chunks of {chunk} tokens")
    if end_token // chunk > common_chunks(geometry, tables):
        raise LMCacheProtocolError(f"a group has no blocks up to token {end_token}")
    blocks = [geometry.groups[index].spec.block_tokens for index in geometry.order]
    return [
        list(tables[index][start_token // tokens : end_token // tokens])
        for index, tokens in zip(geometry.order, blocks, strict=True)
    ]


def storable(geometry: Geometry, tables: Mapping[int, Sequence[int]], stored_tokens: int, num_tokens: int) -> TokenSpan:
    """Tokens that a request can store now: whole computed chunks with blocks of every group.

    Args:
        geometry: geometry of the groups.
        tables: block ids of each group, from token 0.
        stored_tokens: length of the stored prefix.
        num_tokens: number of computed tokens.
    """
    chunk = geometry.chunk_tokens
    end = min(common_chunks(geometry, tables), num_tokens // chunk) * chunk
    return TokenSpan(stored_tokens, max(stored_tokens, end))
