"""Chunk lengths at which groups of very different block sizes can be offloaded.

A chunk may cut blocks that can move in parts. So with blocks of 65,536 tokens beside blocks of 1,056, a chunk need not
be a multiple of both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv.planner.groups import GroupSpec, chunk_unit


@dataclass(frozen=True, slots=True)
class HybridOffloadPlanner:
    """Finds the chunk length for groups of any block sizes. It does not choose hits or plan copies.

    A chunk length works if it is a multiple of `unit_tokens` and less than `max_model_len`: a prompt that hits has a
    token to compute after the chunk.

    Args:
        groups: the model's groups; SCRATCH groups are not stored and have no effect.
        hash_tokens: tokens in each of the engine's block hashes, 1 or more.
        max_model_len: maximum tokens of a request.
    """

    groups: Sequence[GroupSpec]
    hash_tokens: int
    max_model_len: int

    @property
    def unit_tokens(self) -> int:
        """Chunk lengths are multiples of this, in tokens: of every stored group's unit (see `CacheSpec`) and of the
        hash, so that a hash names each chunk."""
        return math.lcm(chunk_unit(self.groups), self.hash_tokens)

    def nearest_chunk(self, chunk_tokens: int) -> int | None:
        """Nearest chunk length that works, in tokens, the shorter one of two: `chunk_tokens` itself if it works; None
        if no length works."""
        unit = self.unit_tokens
        below = min(chunk_tokens, self.max_model_len - 1) // unit * unit
        working = [chunk for chunk in (below, below + unit) if 0 < chunk < self.max_model_len]
        return min(working, key=lambda chunk: abs(chunk - chunk_tokens), default=None)
