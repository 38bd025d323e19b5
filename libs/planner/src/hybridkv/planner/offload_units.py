"""Offload units of one fixed size for groups of very different block sizes, without their least common multiple.

With blocks of 65,536 tokens beside blocks of 1,056, no usable chunk is a multiple of both. So the chunk is an input,
and the unit of each group follows from the chunk and the group's block. Two cases:

- `unsplittable` names the blocks that cannot be split. The rules are those of `CacheSpec`, and its chunk may cut all
  other blocks: a state or an unsplittable block is stored whole, and boundaries are multiples of each of these blocks.
  `diagnose` reports a chunk that is no such multiple.
- `unsplittable` is None. Then only whole chunks are cut out of larger blocks. The units of a group need not end where
  chunks end, and a prefix is as long as the group with the fewest covered tokens allows.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridkv.planner.groups import GroupKind, GroupSpec


@dataclass(frozen=True, slots=True)
class HybridOffloadPlanner:
    """Plans the units in which groups are offloaded, and the prefixes that they cover.

    The unit of an unsplittable group is its block; that of any other group is the greatest common divisor of its block
    and the chunk. With `unsplittable` None, a group with a block that is a larger multiple of the chunk is split into
    chunks, and any other group keeps its block as its unit.

    Chunks are counted from chunk `first_hashable_chunk_idx` (from 0): a count of 1 means this chunk and all before it.

    Args:
        hash_block_size: tokens in a block of the prefix hashes; prefixes are cut to a multiple of it.
        gpu_block_sizes: tokens in a block of each group.
        fixed_chunk_size: tokens in a chunk; at least a hash block.
        unsplittable: indices of the groups with blocks that move only as a whole; all other blocks can be cut at the
            end of any hash block. None: unknown.

    Raises:
        ValueError: a size is not a positive whole number, there is no group, an index is out of range, or the chunk is
            smaller than the hash block (with `unsplittable` given, `diagnose` reports that instead).
    """

    hash_block_size: int
    gpu_block_sizes: tuple[int, ...]
    fixed_chunk_size: int
    unsplittable: tuple[int, ...] | None = None
    offload_unit_sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Tokens in a unit of each group."""
    requires_partial_group_offload: tuple[bool, ...] = field(init=False, repr=False, compare=False)
    """True for each group with a unit smaller than its block. Then the medium must move parts of blocks."""
    requires_partial_group_offload_any: bool = field(init=False, repr=False, compare=False)
    first_hashable_chunk_idx: int = field(init=False, repr=False, compare=False)
    """Index of the first chunk that ends at or after the first unit of every group and, if `unsplittable` is given, the
    first `boundary_unit`. No shorter prefix has an identity."""
    group_hash_factors: tuple[int | None, ...] = field(init=False, repr=False, compare=False)
    """Hash blocks in a unit of each group; None if a unit is not whole hash blocks."""
    boundary_unit: int = field(init=False, repr=False, compare=False)
    """Prefixes are multiples of this: of the hash block, and of every block that cannot be split."""
    _distinct_units: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require_size("hash_block_size", self.hash_block_size)
        _require_size("fixed_chunk_size", self.fixed_chunk_size)
        if self.fixed_chunk_size < self.hash_block_size and self.unsplittable is None:
            raise ValueError(
                f"fixed_chunk_size must be greater than or equal to hash_block_size ({self.hash_block_size}), "
                f"got {self.fixed_chunk_size}"
            )
        blocks = tuple(self.gpu_block_sizes)
        if not blocks:
            raise ValueError("gpu_block_sizes must name the block of at least one group, got none")
        for index, block in enumerate(blocks):
            _require_size(f"gpu_block_sizes[{index}]", block)
        chunk, hash_block = self.fixed_chunk_size, self.hash_block_size
        whole = self._whole_groups(len(blocks))
        if whole is None:
            units, boundary_unit = tuple(offload_unit(block, chunk) for block in blocks), hash_block
        else:
            units = tuple(block if i in whole else math.gcd(block, chunk) for i, block in enumerate(blocks))
            boundary_unit = math.lcm(hash_block, *(blocks[i] for i in whole))
        partial = tuple(unit < block for unit, block in zip(units, blocks, strict=True))
        first_whole = max(units) if whole is None else max(*units, boundary_unit)
        derived = {
            "gpu_block_sizes": blocks,
            "unsplittable": whole,
            "boundary_unit": boundary_unit,
            "offload_unit_sizes": units,
            "requires_partial_group_offload": partial,
            "requires_partial_group_offload_any": any(partial),
            "first_hashable_chunk_idx": -(-first_whole // chunk) - 1,
            "group_hash_factors": tuple(None if unit % hash_block else unit // hash_block for unit in units),
            "_distinct_units": tuple(sorted(set(units))),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)  # sets a field of a frozen dataclass

    def _whole_groups(self, num_groups: int) -> tuple[int, ...] | None:
        if self.unsplittable is None:
            return None
        whole = tuple(sorted(set(self.unsplittable)))
        if whole and not 0 <= whole[0] <= whole[-1] < num_groups:
            raise ValueError(f"unsplittable must name some of {num_groups} groups, from 0, got {self.unsplittable}")
        return whole

    @classmethod
    def of_groups(
        cls, groups: Sequence[GroupSpec], hash_block_size: int, fixed_chunk_size: int
    ) -> "HybridOffloadPlanner":
        """Planner with the units in which a `CacheSpec` of these groups and this chunk stores.

        SCRATCH groups are not stored, so they are skipped and not counted. The planner's `hash_block_size` is the least
        common multiple of the argument and of the groups' `part_tokens`.

        Raises:
            ValueError: as the planner does.
        """
        stored = [group for group in groups if group.kind is not GroupKind.SCRATCH]
        parts = [group.part_tokens for group in stored if group.part_tokens is not None]
        return cls(
            math.lcm(hash_block_size, *parts),
            tuple(group.block_tokens for group in stored),
            fixed_chunk_size,
            tuple(i for i, group in enumerate(stored) if group.part_tokens is None),
        )

    def group_covered_tokens_for_chunk_count(self, chunk_count: int) -> tuple[int, ...]:
        """For each group, the tokens in its whole units before the end of `chunk_count` chunks.

        Raises:
            ValueError: `chunk_count` is negative.
        """
        end = self.chunk_end_tokens(chunk_count)
        return tuple(end // unit * unit for unit in self.offload_unit_sizes)

    def chunk_end_tokens(self, chunk_count: int) -> int:
        """Tokens that a request must have before `chunk_count` chunks are complete; 0 for none.

        Raises:
            ValueError: `chunk_count` is negative.
        """
        _require_tokens("chunk_count", chunk_count)
        return (chunk_count + self.first_hashable_chunk_idx) * self.fixed_chunk_size if chunk_count else 0

    def chunk_prefix_tokens(self, chunk_count: int) -> int:
        """Prefix that every group covers within `chunk_count` chunks, in whole hash blocks and unsplittable blocks.

        The prefix never shrinks as the count grows. It may stay equal, because a unit can be larger than the chunk.

        Raises:
            ValueError: `chunk_count` is negative.
        """
        return self._common_prefix(self.chunk_end_tokens(chunk_count))

    def chunk_count_for_tokens(self, tokens: int) -> int:
        """Inverse of `chunk_prefix_tokens`: largest number of chunks with a prefix of at most `tokens`. O(log tokens).

        `chunk_prefix_tokens(n) <= tokens` is true exactly for n up to this count.

        Raises:
            ValueError: `tokens` is negative.
        """
        _require_tokens("tokens", tokens)
        # A prefix ends less than one unit and one boundary unit before the end of its chunks.
        beyond = tokens + self._distinct_units[-1] + self.boundary_unit
        low, high = 0, max(1, beyond // self.fixed_chunk_size + 1 - self.first_hashable_chunk_idx)
        while high - low > 1:
            middle = (low + high) // 2
            if self.chunk_prefix_tokens(middle) <= tokens:
                low = middle
            else:
                high = middle
        return low

    def storable_prefix_tokens(self, tokens: int) -> int:
        """Prefix that every group can store of a request with `tokens` computed tokens, cut to a boundary.

        Raises:
            ValueError: `tokens` is negative.
        """
        _require_tokens("tokens", tokens)
        return self._common_prefix(tokens)

    def loadable_prefix_tokens(self, per_group: Sequence[int]) -> int:
        """Prefix that can be loaded if each group covers the given number of tokens, cut to a boundary.

        Raises:
            ValueError: `per_group` is not one number of tokens for each group, or one is negative.
        """
        if len(per_group) != len(self.gpu_block_sizes):
            raise ValueError(
                f"per_group must have one entry for each of {len(self.gpu_block_sizes)} groups, got {len(per_group)}"
            )
        for index, tokens in enumerate(per_group):
            _require_tokens(f"per_group[{index}]", tokens)
        return min(per_group) // self.boundary_unit * self.boundary_unit

    def with_chunk(self, fixed_chunk_size: int) -> "HybridOffloadPlanner":
        """Planner for the same groups with another chunk size."""
        return dataclasses.replace(self, fixed_chunk_size=fixed_chunk_size)

    def _common_prefix(self, tokens: int) -> int:
        common = min(tokens // unit * unit for unit in self._distinct_units)
        return common // self.boundary_unit * self.boundary_unit


def offload_unit(block_tokens: int, chunk_tokens: int) -> int:
    """Tokens in the unit of a group with blocks of `block_tokens`, if the unsplittable groups are unknown."""
    return chunk_tokens if block_tokens > chunk_tokens and block_tokens % chunk_tokens == 0 else block_tokens


def _require_size(field_name: str, value: int) -> None:
    if type(value) is not int or value <= 0:
        raise ValueError(f"{field_name} must be positive, a whole number of tokens, got {value!r}")


def _require_tokens(field_name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{field_name} must be non-negative, got {value}")
