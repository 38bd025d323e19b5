"""The engine's own blocks that hold what a load would read from a tier: found by hash, and kept while they are copied.

An engine that holds attention deeper than any state of it asks for all that lies behind the state. The attention need
not come from a tier then: a copy on the device is faster than any link, and costs host memory nothing. What a block
holds the engine itself would read by the same hash. The chunks are in the tier all the same, so nothing is promised
that depends on these blocks, and they are looked for when the engine has given out the new ones: what it took for that
has lost its hash by then.

No blocks are taken where they might not hold what their hash says: see `compat.hashes_before_computing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks import BlockPins, frees_on_end
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.planner import LocalCopies, TransferRun, find_local_copies, has_local_copies, transfers_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class LocalBlocks:
    """Blocks of the engine that loads copy from.

    Args:
        layout: the model's groups.
        is_wanted: False: none is ever found.
    """

    def __init__(self, layout: CacheLayout, is_wanted: bool = True) -> None:
        self._layout = layout
        # A hash that two contents may share is the engine's to trust; what it names must not get into a tier from here.
        self._is_on = is_wanted and layout.reuses_hashes
        self.is_wrong: Callable[[int], bool] = lambda block_id: False
        """Whether the engine has put something else into a block than its hash says."""
        self._pool: BlockPool | None = None
        self._pins = BlockPins()
        self._pinned: dict[str, list[KVCacheBlock]] = {}

    def bind(self, pool: BlockPool) -> None:
        """The engine's blocks."""
        self._pool = pool if compat.finds_cached_blocks(pool) else None
        self._pins.bind(pool)

    def switch_off(self) -> None:
        """Find none from now on. What is being copied is copied to its end."""
        self._is_on = False

    def find(self, tracked: TrackedRequest, runs: Sequence[TransferRun], computed_tokens: int) -> LocalCopies | None:
        """What of a load the engine holds; None where that is nothing. With an adapter it is: its name is in a hash,
        what it holds is not."""
        pool = self._pool
        if not self._is_on or pool is None or tracked.lora is not None:
            return None
        spec, names = self._layout.spec, {}
        for group_index in {run.group_index for run in runs}:
            block_tokens = spec.groups[group_index].block_tokens
            names[group_index] = compat.block_names(
                tracked.request.block_hashes, self._layout.hash_block_tokens, block_tokens
            )

        def held(group_index: int, place: int) -> int | None:
            named = names[group_index]
            block_id = None if place >= len(named) else compat.cached_block(pool, named[place], group_index)
            return None if block_id is None or self.is_wrong(block_id) else block_id

        if not has_local_copies(spec, runs, held):
            return None
        found = find_local_copies(spec, transfers_of(runs, spec.chunk_tokens), computed_tokens, held)
        return found if any(found.block_ids) else None

    def pin(self, request_id: str, found: LocalCopies) -> None:
        """Keep them as they are until `free`."""
        blocks = [block_id for block_ids in found.block_ids for block_id in block_ids]
        if blocks:
            self._pinned[request_id] = self._pins.pin(blocks)

    def free(self, request_id: str) -> None:
        """Every rank has read what a request copies, or never will."""
        blocks = self._pinned.pop(request_id, None)
        if blocks is not None:
            self._pins.free(blocks)

    def holds_freed_blocks(self) -> bool:
        """Whether the engine has blocks back when a load ends."""
        return any(map(frees_on_end, self._pinned.values()))

    def close(self) -> None:
        """Let all of them go."""
        for request_id in list(self._pinned):
            self.free(request_id)
