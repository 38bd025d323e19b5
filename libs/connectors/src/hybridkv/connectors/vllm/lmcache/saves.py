"""What a request leaves at a server after a step, and what becomes of it.

Blocks stay pinned in the engine's pool until every rank has copied them; nothing of the engine waits for the server.
What an adapter had a part in is handed over when it is certain that its files are what they were.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks import BlockPins, frees_on_end
from hybridkv.connectors.vllm.common.identity.adapters import Adapters, AdapterVersion
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import StoreOutcome
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.connectors.vllm.common.stats import Recorder
from hybridkv.connectors.vllm.lmcache.lives import Lives, attention_tables, state_copies, store_copies
from hybridkv.connectors.vllm.lmcache.messages import PageCopy, PageStore, Release
from hybridkv.connectors.vllm.lmcache.site import chunks_at_once
from hybridkv.lmcache.block_ids import storable
from hybridkv.lmcache.geometry import Geometry
from hybridkv.planner import GroupKind, State

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger("vllm.hybridkv.lmcache")


@dataclass(slots=True)
class _StoreInFlight:
    tracked: TrackedRequest
    copies: list[PageCopy]
    blocks: list[KVCacheBlock]
    num_bytes: int
    ranks_left: int
    adapter_version: AdapterVersion | None
    failure: str | None = None
    reason: str | None = None


class Saves:
    """Stores by number.

    Args:
        layout: of the engine's groups.
        geometry: of those that are stored.
        keeps_apart: whether the server keeps windows and states apart from whole attention; None while there is none.
        lives: what the server has of each request.
        adapters: whether what an adapter had a part in is what it was stored for.
        recorder: counts what happens.
    """

    def __init__(
        self,
        layout: CacheLayout,
        geometry: Geometry,
        keeps_apart: Callable[[], bool | None],
        lives: Lives,
        adapters: Adapters,
        recorder: Recorder,
    ) -> None:
        self._layout, self._spec = layout, layout.spec
        self._geometry = geometry
        self._keeps_apart = keeps_apart
        self._lives = lives
        self._adapters = adapters
        self._recorder = recorder
        self._pins = BlockPins()
        self._stores: dict[int, _StoreInFlight] = {}
        self._store_ids = itertools.count(1)
        self._releases: list[Release] = []

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The pool whose blocks are pinned while they are read."""
        self._pins.bind(pool)

    def plan(
        self, tracked: TrackedRequest, num_scheduled: int, states: Sequence[State], tables: compat.BlockTables
    ) -> PageStore | None:
        """What can be stored of a request after the forward pass of this step. It has keys."""
        spec, request, chunk = self._spec, tracked.request, self._spec.chunk_tokens
        hashed = len(tracked.prefix_hashes()) * self._layout.hash_block_tokens
        # As for every store: drafts, and tokens that an asynchronous scheduler has not seen yet, are not final.
        final = min(request.num_computed_tokens + num_scheduled, request.num_tokens, hashed)
        known = self._lives.known_chunks(tracked)
        # What the server has already it will say in a moment; until then only states are stored, which are given once.
        copies = self._attention(tracked, known, final, tables) if known is not None else []
        # A state is written by now, and has a name as soon as the tokens behind it are known that a drafter needs.
        named = min(final, hashed - spec.lookahead_tokens)
        copies += state_copies(spec, [state for state in states if state.num_tokens != (known or 0) * chunk], named)
        for _ in range(sum(state.num_tokens % chunk != 0 for state in states)):
            self._recorder.store(GroupKind.RECURRENT, "dropped_not_aligned")
        if not copies:
            return None
        start, end = min(copy.chunk for copy in copies), max(copy.chunk for copy in copies) + 1
        block_ids = [block_id for copy in copies for block_id in copy.block_ids]
        num_bytes = sum(len(copy.block_ids) * self._layout.content_bytes(copy.group_index) for copy in copies)
        store_id = next(self._store_ids)
        self._stores[store_id] = _StoreInFlight(
            tracked, copies, self._pins.pin(block_ids), num_bytes, self._layout.world_size, tracked.adapter_version
        )
        digests = tuple(self._lives.digests(tracked, end))
        return PageStore(store_id, digests, start, tuple(copies), is_held=tracked.adapter_version is not None)

    def _attention(self, tracked: TrackedRequest, known: int, final: int, tables: compat.BlockTables) -> list[PageCopy]:
        """Whole chunks that every group with tokens has, behind what the server has and what was stored before."""
        chunk = self._spec.chunk_tokens
        complete = max(0, final - self._spec.lookahead_tokens)
        begins = max(tracked.stored_tokens, known * chunk)
        separate = self._keeps_apart()
        if separate is None or complete // chunk * chunk <= begins:
            # Without a server: what it would want together nobody knows, and what was seen to is not looked at again.
            return []
        if tracked.adapter_version is not None:
            # It is held until all of it is copied, so all of it must have room at once. The rest follows.
            complete = min(complete, begins + chunks_at_once(self._lives.max_chunks) * chunk)
        blocks = attention_tables(self._spec, tables(tracked.request_id), complete)
        span = storable(self._geometry, blocks, begins, complete)
        tracked.stored_tokens = span.end
        return store_copies(self._geometry, self._spec.stored_groups, blocks, span, separate=separate)

    def take_releases(self) -> tuple[Release, ...]:
        """What the workers hold, and may hand over or must drop."""
        releases, self._releases = tuple(self._releases), []
        return releases

    def holds_freed_blocks(self) -> bool:
        """Whether a store that ends will give blocks back to the engine's pool."""
        return any(frees_on_end(in_flight.blocks) for in_flight in self._stores.values())

    def has_work(self) -> bool:
        return bool(self._stores or self._releases)

    def on_ended(self, outcomes: Mapping[int, StoreOutcome]) -> None:
        """Ranks have copied what they store, or never will."""

        @functools.cache
        def holds(adapter_version: AdapterVersion | None) -> bool:
            """One look at an adapter's files is good for all stores that ended before it."""
            return self._adapters.holds(adapter_version)

        for store_id, ended in outcomes.items():
            in_flight = self._stores[store_id]
            in_flight.ranks_left -= ended.num_ranks
            in_flight.failure = in_flight.failure or ended.failure
            in_flight.reason = in_flight.reason or ended.reason
            if in_flight.ranks_left <= 0:
                del self._stores[store_id]
                self._settle(store_id, in_flight, holds)

    def _settle(self, store_id: int, in_flight: _StoreInFlight, holds: Callable[[AdapterVersion | None], bool]) -> None:
        if in_flight.adapter_version is not None:
            is_good = in_flight.failure is None and holds(in_flight.adapter_version)
            if in_flight.failure is None and not is_good:
                in_flight.failure, in_flight.reason = "the adapter's files changed meanwhile", "adapter"
            self._releases.append(Release(store_id, is_good))
        outcome = "stored"
        if in_flight.failure is not None:
            outcome = "failed"
            # A server finds nothing behind a hole.
            in_flight.tracked.is_storable = False
            logger.warning("%d pages were not stored: %s", len(in_flight.blocks), in_flight.failure)
            self._recorder.store_failed(in_flight.reason or "io")
        else:
            self._recorder.stored_bytes(in_flight.num_bytes * self._layout.world_size)
        for copy in in_flight.copies:
            self._recorder.store(self._spec.groups[copy.group_index].kind, outcome)
        self._pins.free(in_flight.blocks)

    def close(self) -> None:
        """Gives back what is still pinned in the engine's pool."""
        for in_flight in self._stores.values():
            self._pins.free(in_flight.blocks)
        self._stores.clear()
