"""Block tables of the engine as lazy views, and pins of blocks in the engine's block pool.

A request's table has one entry for each block, also for blocks that left a window. To copy all tables in every step
would take more time than all other work of the connector, so only entries that are read are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_BLOCK_ID = attrgetter("block_id")


class BlockIds(Sequence[int]):
    """Ids of a table's blocks, read from the table at each access.

    Args:
        blocks: the table; it is not copied.
    """

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> BlockIds: ...

    def __getitem__(self, place: int | slice) -> int | BlockIds:
        if isinstance(place, slice):
            return BlockIds(self._blocks[place])
        return self._blocks[place].block_id

    def __iter__(self) -> Iterator[int]:
        return map(_BLOCK_ID, self._blocks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in map(_BLOCK_ID, self._blocks)

    def index(self, block_id: int, start: int = 0, stop: int | None = None) -> int:
        for place, each in enumerate(self[start:stop], start):
            if each == block_id:
                return place
        raise ValueError(f"{block_id} is not in the table")

    def count(self, block_id: int) -> int:
        blocks = self._blocks
        if not blocks:
            return 0
        # All blocks that left a window are the same null block. Comparing objects is faster than reading their ids.
        if blocks[0].block_id == block_id and blocks == [blocks[0]] * len(blocks):
            return len(blocks)
        return list(self).count(block_id)

    def __repr__(self) -> str:
        return repr(list(self))


def tables_of(blocks: Sequence[Sequence[KVCacheBlock]]) -> tuple[BlockIds, ...]:
    """One table for each group."""
    return tuple(map(BlockIds, blocks))


def lazy_resolver(resolve: Callable[[str], Sequence[Sequence[int]]]) -> Callable[[str], Sequence[Sequence[int]]]:
    """Variant of `resolve` that returns lazy views, if `resolve` is a method of an object with `get_blocks`; else
    `resolve` itself."""
    get_blocks = getattr(getattr(resolve, "__self__", None), "get_blocks", None)
    return resolve if get_blocks is None else lambda request_id: tables_of(get_blocks(request_id).blocks)


class BlockPins:
    """Pins in the engine's block pool. Pinned blocks are not given to other requests."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        """Sets the engine's block pool."""
        self._pool = pool

    def pin(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        """Pins blocks.

        Raises:
            RuntimeError: no pool is bound.
        """
        if self._pool is None:
            raise RuntimeError("the engine never bound its block pool")
        blocks = list(map(self._pool.blocks.__getitem__, block_ids))
        self._pool.touch(blocks)
        return blocks

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Unpins blocks."""
        if self._pool is not None:
            self._pool.free_blocks(reversed(blocks))


def unpin_frees_any(blocks: Iterable[KVCacheBlock]) -> bool:
    """True if at least one of these pinned blocks has no other reference. Its unpin frees such a block."""
    return any(block.ref_cnt == 1 for block in blocks)
