"""Blocks of the engine that must not go to anybody else while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockPins:
    """Pins in the engine's pool, once it has been bound."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """The engine's blocks."""
        self._pool = pool

    def pin(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        """Keep blocks as they are.

        Raises:
            RuntimeError: no pool was bound.
        """
        if self._pool is None:
            raise RuntimeError("the engine never bound its block pool")
        blocks = list(map(self._pool.blocks.__getitem__, block_ids))
        self._pool.touch(blocks)
        return blocks

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let them go."""
        if self._pool is not None:
            self._pool.free_blocks(reversed(blocks))


def frees_on_end(blocks: Iterable[KVCacheBlock]) -> bool:
    """Whether one of these blocks is pinned by nobody else, so that the engine has it back when the pin goes."""
    return any(block.ref_cnt == 1 for block in blocks)
