"""Groups of a model's KV cache, and the chunk in which they are offloaded.

Plain values, without the layout of bytes (hybridkv.canonical) and without the engine (hybridkv.connectors).
"""

import enum
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class GroupKind(enum.StrEnum):
    """Kind of a KV cache group: the content that the group needs so that a request can resume at token N."""

    FULL = "full"
    """Every token before N."""
    WINDOW = "window"
    """The last `window_tokens - 1` tokens before N."""
    CHUNKED = "chunked"
    """The tokens since the last multiple of `align_tokens`."""
    RECURRENT = "recurrent"
    """One state, exactly at N."""
    SCRATCH = "scratch"
    """Nothing: the engine rebuilds the content, and it is never stored."""


_DIVISIBLE = (GroupKind.FULL, GroupKind.WINDOW)
"""Kinds with blocks that can be cut between tokens. States cannot be cut; parts of CHUNKED blocks are not supported."""


class TokenSpan(NamedTuple):
    """Half-open range of tokens [start, end)."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return max(0, self.end - self.start)


class GroupSpec(msgspec.Struct, frozen=True):
    """One KV cache group.

    Args:
        kind: kind of the group; a string such as "full" is accepted.
        block_tokens: tokens in one block.
        window_tokens: WINDOW only: number of tokens that a query attends to, itself included, plus the number of older
            tokens that the engine keeps.
        align_tokens: CHUNKED only: attention does not cross a multiple of this.
        lookahead_tokens: number of tokens after a chunk that its bytes depend on. 0 except for layers of a drafter
            (EAGLE, MTP), which computes its last position from the next token.
        part_tokens: FULL and WINDOW only: tokens in the smallest part of a block that can move alone; it divides the
            block. None if a block moves only as a whole, like a state.

    Raises:
        ValueError: unknown kind, or a size that is not a positive whole number or does not belong to the kind.
    """

    kind: GroupKind
    block_tokens: int
    window_tokens: int | None = None
    align_tokens: int | None = None
    lookahead_tokens: int = 0
    part_tokens: int | None = None

    def __post_init__(self) -> None:
        if type(self.kind) is not GroupKind:
            # Kinds are compared by identity, so the string "full", which equals GroupKind.FULL, must be converted.
            msgspec.structs.force_setattr(self, "kind", _kind(self.kind))
        _require_size("block_tokens", self.block_tokens)
        if type(self.lookahead_tokens) is not int or self.lookahead_tokens < 0:
            raise ValueError(
                f"lookahead_tokens must be a whole number of tokens, 0 or more, got {self.lookahead_tokens!r}"
            )
        for field, kind in (("window_tokens", GroupKind.WINDOW), ("align_tokens", GroupKind.CHUNKED)):
            value = getattr(self, field)
            if self.kind is kind:
                _require_size(field, value)
            elif value is not None:
                raise ValueError(f"{field} belongs to {kind.name} groups, got {value} for a {self.kind.name} group")
        if self.part_tokens is not None:
            _require_size("part_tokens", self.part_tokens)
            if self.kind not in _DIVISIBLE:
                raise ValueError(
                    f"part_tokens belongs to groups whose blocks can be cut (FULL, WINDOW), got {self.part_tokens} for "
                    f"a {self.kind.name} group"
                )
            if self.block_tokens % self.part_tokens:
                raise ValueError(f"part_tokens must divide the block of {self.block_tokens}, got {self.part_tokens}")

    @property
    def unit_tokens(self) -> int:
        """Chunks are multiples of this: the block, or its smallest part that can move alone."""
        return self.part_tokens or self.block_tokens


class CacheSpec(msgspec.Struct, frozen=True, dict=True):  # dict: for the cached properties
    """All groups of one model, and the chunk size. The chunk size is the same for every group.

    Args:
        groups: in the engine's order; a group's index is its position here.
        chunk_tokens: a multiple of every stored group's unit. A chunk contains whole blocks of groups that cannot be
            cut, so boundaries are multiples of these blocks. It may cut blocks of other groups.
        tail_tokens: None if no tails are stored. A tail is the first part of a chunk; its length is a multiple of this.
            A request can also resume at the end of a tail, if every group stored its part of the tail. Usually the
            engine's hash unit. Must divide the chunk. Must be None if chunks cut blocks.

    Raises:
        ValueError: the chunk does not fit the groups, the tails do not fit the chunk, or nothing would be stored.
    """

    groups: tuple[GroupSpec, ...]
    chunk_tokens: int
    tail_tokens: int | None = None

    def __post_init__(self) -> None:
        _require_size("chunk_tokens", self.chunk_tokens)
        if not self.stored_groups:
            raise ValueError("groups must contain one that can be stored, got only SCRATCH groups or none")
        unit = chunk_unit(self.groups)
        if self.chunk_tokens % unit:
            raise ValueError(
                f"chunk_tokens must be a multiple of {unit} tokens, the least common multiple of the groups' units "
                f"{[self.groups[i].unit_tokens for i in self.stored_groups]}, got {self.chunk_tokens}"
            )
        if self.tail_tokens is not None:
            _require_size("tail_tokens", self.tail_tokens)
            if self.chunk_tokens % self.tail_tokens:
                raise ValueError(f"tail_tokens must divide the chunk of {self.chunk_tokens}, got {self.tail_tokens}")
            if self.cut_groups:
                raise ValueError(f"tail_tokens needs chunks of whole blocks, and groups {self.cut_groups} are cut")

    @property
    def boundary_tokens(self) -> int:
        """Requests resume at multiples of this: `tail_tokens` if tails are stored, else the chunk."""
        return self.tail_tokens or self.chunk_tokens

    @functools.cached_property
    def stored_groups(self) -> tuple[int, ...]:
        """Indices of the groups that are offloaded."""
        return tuple(i for i, group in enumerate(self.groups) if group.kind is not GroupKind.SCRATCH)

    @functools.cached_property
    def cut_groups(self) -> tuple[int, ...]:
        """Indices of the stored groups in which chunks end inside a block."""
        return tuple(i for i in self.stored_groups if self.chunk_tokens % self.groups[i].block_tokens)

    @functools.cached_property
    def uniform_chunk_blocks(self) -> tuple[range | None, ...]:
        """For each group, which blocks of a chunk are stored, if the answer is the same for every chunk. Block 0 is the
        chunk's first block.

        None if chunks can differ (CHUNKED groups, groups with cut blocks), and for SCRATCH groups.
        """
        return tuple(
            self._uniform_blocks(group) if i in self.stored_groups and i not in self.cut_groups else None
            for i, group in enumerate(self.groups)
        )

    def _uniform_blocks(self, group: GroupSpec) -> range | None:
        num_blocks = self.chunk_tokens // group.block_tokens
        if group.kind is GroupKind.FULL:
            return range(num_blocks)
        if group.kind is GroupKind.RECURRENT:
            return range(num_blocks - 1, num_blocks)
        if group.kind is GroupKind.WINDOW:
            assert group.window_tokens is not None
            return range(max(0, self.chunk_tokens - (group.window_tokens - 1)) // group.block_tokens, num_blocks)
        return None

    @functools.cached_property
    def full_groups(self) -> tuple[int, ...]:
        """Indices of the stored groups that need every token."""
        return tuple(i for i in self.stored_groups if self.groups[i].kind is GroupKind.FULL)

    @functools.cached_property
    def scarce_first(self) -> tuple[int, ...]:
        """Indices of the stored groups in lookup order: kinds that need few chunks for a boundary come first."""
        order = (GroupKind.RECURRENT, GroupKind.CHUNKED, GroupKind.WINDOW, GroupKind.FULL)
        return tuple(sorted(self.stored_groups, key=lambda i: order.index(self.groups[i].kind)))

    @functools.cached_property
    def first_full(self) -> int | None:
        """Index of the first FULL group; None if there is none."""
        return next(iter(self.full_groups), None)

    @functools.cached_property
    def lookahead_tokens(self) -> int:
        """Largest number of tokens after a boundary on which the bytes of a stored group depend."""
        return max(self.groups[i].lookahead_tokens for i in self.stored_groups)


def chunk_unit(groups: Sequence[GroupSpec]) -> int:
    """Smallest chunk, in tokens, that is a multiple of `unit_tokens` of every stored group."""
    return math.lcm(*(group.unit_tokens for group in groups if group.kind is not GroupKind.SCRATCH))


def whole_chunk_unit(groups: Sequence[GroupSpec]) -> int:
    """Smallest chunk, in tokens, that cuts no block of any stored group, even if its blocks can be cut."""
    return math.lcm(*(group.block_tokens for group in groups if group.kind is not GroupKind.SCRATCH))


def _kind(value: str) -> GroupKind:
    try:
        return GroupKind(value)
    except ValueError:
        raise ValueError(f"kind must be one of {', '.join(GroupKind)}, got {value!r}") from None


def _require_size(field: str, value: int | None) -> None:
    if type(value) is not int or value <= 0:
        raise ValueError(f"{field} must be a positive whole number of tokens, got {value!r}")
