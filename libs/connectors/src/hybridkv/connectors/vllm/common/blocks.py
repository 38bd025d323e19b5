"""The engine's block tables, of which only the part is read that somebody asks for.

A request's table has an entry for each of its blocks and, where a window has passed, for each block that it once had:
to copy all of them in every step costs more than what a step does with them.
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
    """The ids of a table's blocks as it is when they are read.

    Args:
        blocks: the table, which is not copied.
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
        # What a window has left behind is one and the same block, over and over: that is seen without reading ids.
        if blocks[0].block_id == block_id and blocks == [blocks[0]] * len(blocks):
            return len(blocks)
        return list(self).count(block_id)

    def __repr__(self) -> str:
        return repr(list(self))


def tables_of(blocks: Sequence[Sequence[KVCacheBlock]]) -> tuple[BlockIds, ...]:
    """One table for each group."""
    return tuple(map(BlockIds, blocks))


def unread_tables(resolve: Callable[[str], Sequence[Sequence[int]]]) -> Callable[[str], Sequence[Sequence[int]]]:
    """The same tables as `resolve` gives, unread, where it is a method of something that also gives the blocks."""
    get_blocks = getattr(getattr(resolve, "__self__", None), "get_blocks", None)
    return resolve if get_blocks is None else lambda request_id: tables_of(get_blocks(request_id).blocks)


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
