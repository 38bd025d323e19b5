"""Cached blocks of the engine that a load copies in place of chunks from a tier.

An engine may hold attention blocks beyond its last state. A load then begins at that state, and copies these blocks on
the device, which is faster than any link and uses no host memory. Blocks are found by the engine's own block hashes.
The tier holds the chunks too, so no lookup depends on these blocks. The search runs after the engine has allocated the
request's blocks, because an allocation may evict cached blocks.

Blocks with content that may not match their hash are never used: see `compat.hashes_before_computing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.blocks import BlockPins, unpin_frees_any
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.planner import LocalCopies, TransferRun, find_local_copies, has_local_copies, transfers_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class LocalBlocks:
    """Cached blocks of the engine as sources of loads.

    Args:
        layout: the model's groups.
        is_wanted: False switches the search off.
    """

    def __init__(self, layout: CacheLayout, is_wanted: bool = True) -> None:
        self._layout = layout
        # The search does not use hashes that may collide.
        self._is_on = is_wanted and layout.reuses_hashes
        self.is_corrupt: Callable[[int], bool] = lambda block_id: False
        """Returns True for a block with content that does not match its hash."""
        self._pool: BlockPool | None = None
        self._pins = BlockPins()
        self._pinned: dict[str, list[KVCacheBlock]] = {}

    def bind(self, pool: BlockPool) -> None:
        """Sets the engine's block pool."""
        self._pool = pool if compat.can_find_cached_blocks(pool) else None
        self._pins.bind(pool)

    def switch_off(self) -> None:
        """Switches the search off. Copies in flight continue."""
        self._is_on = False

    def find(self, tracked: TrackedRequest, runs: Sequence[TransferRun], computed_tokens: int) -> LocalCopies | None:
        """Blocks of a load that the engine holds, or None. None for a request with an adapter, because a hash covers
        the adapter's name, not its content."""
        pool = self._pool
        if not self._is_on or pool is None or tracked.lora is not None:
            return None
        spec, hashes = self._layout.spec, {}
        for group_index in {run.group_index for run in runs}:
            block_tokens = spec.groups[group_index].block_tokens
            hashes[group_index] = compat.group_block_hashes(
                tracked.request.block_hashes, self._layout.hash_block_tokens, block_tokens
            )

        def held(group_index: int, place: int) -> int | None:
            of_group = hashes[group_index]
            block_id = None if place >= len(of_group) else compat.cached_block(pool, of_group[place], group_index)
            return None if block_id is None or self.is_corrupt(block_id) else block_id

        if not has_local_copies(spec, runs, held):
            return None
        found = find_local_copies(spec, transfers_of(runs, spec.chunk_tokens), computed_tokens, held)
        return found if any(found.block_ids) else None

    def pin(self, request_id: str, found: LocalCopies) -> None:
        """Pins the blocks until `free`."""
        blocks = [block_id for block_ids in found.block_ids for block_id in block_ids]
        if blocks:
            self._pinned[request_id] = self._pins.pin(blocks)

    def free(self, request_id: str) -> None:
        """Unpins a request's blocks, after every rank has read them or given up."""
        blocks = self._pinned.pop(request_id, None)
        if blocks is not None:
            self._pins.free(blocks)

    def holds_freed_blocks(self) -> bool:
        """Whether the end of a load will return blocks to the engine's pool."""
        return any(map(unpin_frees_any, self._pinned.values()))

    def close(self) -> None:
        """Unpins all blocks."""
        for request_id in list(self._pinned):
            self.free(request_id)
