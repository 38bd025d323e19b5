"""Groups as a server sees them: which pages, in which order, under which chunk; and what it would refuse in silence.

A server numbers groups by the order in which they are registered, and keeps together in one object those that follow
one law of windows. A server on a CPU stores wrongly what it keeps together and what does not lie together (0.5.6). So
groups are registered sorted by that law, and block ids are put into that order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hybridkv.lmcache.detection import ServerFacts
from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.page import page_bytes
from hybridkv.planner import GroupKind, GroupSpec

_WHOLE = -1
MAX_GROUPS = 64


class PageGroup(msgspec.Struct, frozen=True):
    """One group that is stored: what it needs to resume, and the bytes of one of its blocks.

    Args:
        spec: SCRATCH groups are not stored, and have none.
        payload_bytes: of all of its layers in one block.
    """

    spec: GroupSpec
    payload_bytes: int


@dataclass(frozen=True)
class Geometry:
    """Groups under a server's chunk. Indexes are those of `groups`; `order` says in which a server has them.

    Raises:
        LMCacheConfigurationError: such groups cannot be stored under this chunk, and why.
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
        """The tokens before a boundary that each group needs there, in whole blocks; None where it needs all."""
        return tuple(_window_tokens(group.spec) for group in self.groups)

    @functools.cached_property
    def page_bytes(self) -> tuple[int, ...]:
        return tuple(page_bytes(group.payload_bytes) for group in self.groups)

    @functools.cached_property
    def blocks_per_chunk(self) -> tuple[int, ...]:
        return tuple(self.chunk_tokens // group.spec.block_tokens for group in self.groups)

    @functools.cached_property
    def kept_per_chunk(self) -> tuple[int, ...]:
        """Blocks at the end of each chunk that a server reads and writes; it passes over those before them."""
        return tuple(
            blocks if window is None else min(blocks, window // group.spec.block_tokens)
            for group, blocks, window in zip(self.groups, self.blocks_per_chunk, self.windows, strict=True)
        )

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Indexes of the groups as they are registered: neighbours follow one law."""

        return tuple(sorted(range(len(self.groups)), key=lambda index: (self._law(index), index)))

    def objects(self, *, separate: bool) -> tuple[tuple[int, ...], ...]:
        """Indexes of the groups that a server keeps in one object of a chunk, whole or not at all.

        Args:
            separate: whether the server was told to keep laws apart (`ServerFacts.separate_groups`).
        """
        if not separate:
            return (self.order,)
        return tuple(tuple(each) for _, each in itertools.groupby(self.order, self._law))

    def _law(self, index: int) -> tuple[bool, int]:
        """Of a group: whether it has states, and how many chunks its window reaches into."""
        window = self.windows[index]
        chunks = _WHOLE if window is None else -(-window // self.chunk_tokens)
        return self.groups[index].spec.kind is GroupKind.RECURRENT, chunks

    @functools.cached_property
    def needs_separate_groups(self) -> bool:
        """Whether a server that keeps all groups in one object could not say where one of them can resume."""
        return any(group.spec.kind is GroupKind.RECURRENT for group in self.groups)

    def digest(self) -> bytes:
        """Everything about the layout of objects that two clients must have alike."""
        return msgspec.msgpack.encode((self.groups, self.chunk_tokens, self.order, self.windows))


def chunk_alignment(groups: Sequence[PageGroup]) -> int:
    """The chunk of a server is a multiple of this: whole blocks of every group."""
    return math.lcm(*(group.spec.block_tokens for group in groups))


def demand_server(geometry: Geometry, facts: ServerFacts) -> None:
    """Refuse a server that would keep such groups wrongly.

    Raises:
        LMCacheConfigurationError: what it was started with, and what it needs.
    """
    if geometry.needs_separate_groups and not facts.separate_groups:
        raise LMCacheConfigurationError(
            "separate_object_groups",
            "true, because a state stands at one boundary and not at others",
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
            # The blocks that the last window before a boundary reaches back to; boundaries are ends of blocks.
            return max(1, -(-(spec.window_tokens - 1) // block)) * block
        case GroupKind.CHUNKED:
            assert spec.align_tokens is not None
            # A boundary, which is the end of a block, may lie anywhere in an attention chunk: all of one at most.
            return -(-spec.align_tokens // block) * block
    return None
