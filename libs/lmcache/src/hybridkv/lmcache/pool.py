"""Pages in shared memory, between an engine's blocks and a server: who has which, until when.

A page is taken for one operation and given back when the server certainly touches it no more. That an operation was
given up says nothing of the sort: until its answer comes, or the process that was asked is gone, its pages are lost to
everybody.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from hybridkv.lmcache.errors import LMCacheProtocolError
from hybridkv.lmcache.geometry import Geometry
from hybridkv.lmcache.shared_memory import SharedMemory
from hybridkv.lmcache.wire import TensorPlace, WireGroup
from hybridkv.planner import GroupKind

_ALIGNMENT_BYTES = 4096


class Pool:
    """The pages of one rank. Any thread may use it.

    Args:
        geometry: which groups, and how large their pages.
        num_chunks: that can be under way at one time.

    Raises:
        LMCacheConfigurationError: there is no room for it.
    """

    def __init__(self, geometry: Geometry, num_chunks: int) -> None:
        if num_chunks <= 0:
            raise LMCacheProtocolError(f"a pool of {num_chunks} chunks")
        self.geometry = geometry
        self._num_blocks = tuple(1 + num_chunks * kept for kept in geometry.kept_per_chunk)  # and the null block
        self._offsets, num_bytes = _offsets(geometry, self._num_blocks)
        self._memory = SharedMemory(num_bytes)
        self._lock = threading.Lock()
        self._free = [list(range(num_blocks - 1, 0, -1)) for num_blocks in self._num_blocks]

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    @property
    def view(self) -> memoryview:
        """All of it: what a copy engine registers."""
        return self._memory.view

    def wire_groups(self) -> tuple[WireGroup, ...]:
        """What a server is told, in its order."""
        geometry = self.geometry
        return tuple(
            WireGroup(
                engine_group=position,
                place=TensorPlace(
                    self._memory.name,
                    self._memory.num_bytes,
                    self._offsets[index],
                    self._num_blocks[index],
                    geometry.page_bytes[index],
                ),
                tokens_per_block=geometry.groups[index].spec.block_tokens,
                window_tokens=geometry.windows[index],
                is_recurrent=geometry.groups[index].spec.kind is GroupKind.RECURRENT,
            )
            for position, index in enumerate(geometry.order)
        )

    def offset(self, group: int, block: int) -> int:
        """Where a page begins in `view`."""
        if not 0 <= block < self._num_blocks[group]:
            raise LMCacheProtocolError(f"group {group} has no page {block}")
        return self._offsets[group] + block * self.geometry.page_bytes[group]

    def page(self, group: int, block: int) -> memoryview:
        """Header and bytes of one page."""
        offset = self.offset(group, block)
        return self._memory.view[offset : offset + self.geometry.page_bytes[group]]

    def num_free(self, group: int) -> int:
        with self._lock:
            return len(self._free[group])

    def take(self, numbers: Mapping[int, int]) -> dict[int, list[int]] | None:
        """So many pages of each group; None, and nothing taken, where one has not as many."""
        with self._lock:
            if any(number > len(self._free[group]) for group, number in numbers.items()):
                return None
            return {group: [self._free[group].pop() for _ in range(number)] for group, number in numbers.items()}

    def give_back(self, taken: Mapping[int, Sequence[int]]) -> None:
        """Pages that no server touches any more."""
        with self._lock:
            for group, blocks in taken.items():
                if any(not 0 < block < self._num_blocks[group] for block in blocks):
                    raise LMCacheProtocolError(f"group {group} has no such pages: {blocks}")
                self._free[group].extend(blocks)

    def close(self) -> None:
        self._memory.close()


def _offsets(geometry: Geometry, num_blocks: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets, end = [], 0
    for page, number in zip(geometry.page_bytes, num_blocks, strict=True):
        offsets.append(end)
        end += -(-page * number // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(offsets), end
