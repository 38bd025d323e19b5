"""Store tracker: stores of each request, in the scheduler's half.

Blocks stay pinned in the engine's pool until every rank has copied them. The engine never waits for the server.
Some stores are held, so that the worker sends them to the server only after a check:

- With an adapter: its files have not changed.
- If another connector may have loaded blocks of the request within a step: that load has not failed.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.blocks import BlockPins, unpin_frees_any
from hybridkv.connectors.vllm.common.blocks.step_loads import STORE_FAILURE, STORE_FAILURE_REASON, StepLoad
from hybridkv.connectors.vllm.common.identity.adapters import Adapters, AdapterVersion
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import StoreOutcome
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK, PrefixChain, TrackedRequest
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.lmcache.load_tracker import LoadTracker
from hybridkv.connectors.vllm.lmcache.messages import PageCopy, PageStore, StoreRelease
from hybridkv.connectors.vllm.lmcache.session_spec import chunks_at_once
from hybridkv.lmcache.geometry import Geometry, cut_tables, storable
from hybridkv.planner import CacheSpec, GroupKind, State, TokenSpan

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger("vllm.hybridkv.lmcache")


def attention_tables(spec: CacheSpec, table: Sequence[Sequence[int]], num_tokens: int) -> dict[int, list[int]]:
    """Block table of each stored group over the first `num_tokens` tokens, by position among the stored groups.

    Blocks are null for groups of recurrent states: their states move within the table.
    """
    tables = {}
    for place, index in enumerate(spec.stored_groups):
        group = spec.groups[index]
        num_blocks = num_tokens // group.block_tokens
        is_recurrent = group.kind is GroupKind.RECURRENT
        tables[place] = [NULL_BLOCK] * num_blocks if is_recurrent else list(table[index][:num_blocks])
    return tables


def store_copies(
    geometry: Geometry,
    group_indexes: Sequence[int],
    tables: Mapping[int, Sequence[int]],
    span: TokenSpan,
    *,
    separate: bool,
) -> list[PageCopy]:
    """Copies of the complete objects in a run of chunks.

    Args:
        geometry: geometry of the stored groups.
        group_indexes: engine's index of each stored group.
        tables: block ids of each stored group, from token 0.
        span: whole chunks that every table covers.
        separate: the server stores windows and states in objects of their own.
    """
    if not span.num_tokens:
        return []
    cut = dict(zip(geometry.order, cut_tables(geometry, tables, span.start, span.end), strict=True))
    first, num_chunks = span.start // geometry.chunk_tokens, span.num_tokens // geometry.chunk_tokens
    copies = []
    for chunk in range(num_chunks):
        for together in geometry.objects(separate=separate):
            parts = {place: _kept(geometry, place, cut[place], chunk) for place in together}
            if any(NULL_BLOCK in ids for ids in parts.values()):
                continue
            for place, ids in parts.items():
                before = geometry.blocks_per_chunk[place] - len(ids)
                copies.append(PageCopy(group_indexes[place], first + chunk, before, ids))
    return copies


def _kept(geometry: Geometry, place: int, blocks: Sequence[int], chunk: int) -> tuple[int, ...]:
    """Blocks of one chunk that the server keeps for a group."""
    per_chunk, kept = geometry.blocks_per_chunk[place], geometry.kept_per_chunk[place]
    end = (chunk + 1) * per_chunk
    return tuple(blocks[end - kept : end])


def state_copies(spec: CacheSpec, states: Sequence[State], num_tokens: int) -> list[PageCopy]:
    """Copies of recurrent states at chunk boundaries within the first `num_tokens` (final) tokens.

    A boundary counts only if every recurrent group has a state at it: the server stores them as one object.
    """
    chunk = spec.chunk_tokens
    recurrent = {index for index in spec.stored_groups if spec.groups[index].kind is GroupKind.RECURRENT}
    by_end: dict[int, dict[int, int]] = {}
    for state in states:
        end = state.num_tokens
        if end % chunk == 0 and 0 < end <= num_tokens and state.block_id != NULL_BLOCK:
            by_end.setdefault(end, {})[state.group_index] = state.block_id
    return [
        PageCopy(index, end // chunk - 1, chunk // spec.groups[index].block_tokens - 1, (blocks[index],))
        for end, blocks in by_end.items()
        if blocks.keys() >= recurrent
        for index in sorted(recurrent)
    ]


@dataclass(slots=True)
class _LMCacheStore:
    tracked: TrackedRequest
    chain: PrefixChain
    """`TrackedRequest.chain` when the store was planned. A request that starts over gets a new one."""
    copies: list[PageCopy]
    blocks: list[KVCacheBlock]
    num_bytes: int
    ranks_left: int
    adapter_version: AdapterVersion | None
    step_load: StepLoad | None
    """`TrackedRequest.step_load` when the store was planned."""
    is_held: bool
    """The worker sends the store to the server only after a `StoreRelease`."""
    failure: str | None = None
    reason: str | None = None


def _must_hold(tracked: TrackedRequest) -> bool:
    """Whether the stores of a request must be checked before they are sent to the server."""
    return tracked.adapter_version is not None or tracked.step_load is not None


class StoreTracker:
    """Store tracker: plans stores and tracks them until all ranks have ended them.

    Args:
        layout: layout of the engine's groups.
        geometry: geometry of the stored groups.
        separate_objects: True if the server stores windows and states in objects of their own; None without a server.
        load_tracker: lookup results of each request.
        adapters: checks that the files of an adapter are unchanged.
        metrics: the connector's metrics.
    """

    def __init__(
        self,
        layout: CacheLayout,
        geometry: Geometry,
        separate_objects: Callable[[], bool | None],
        load_tracker: LoadTracker,
        adapters: Adapters,
        metrics: ConnectorMetrics,
    ) -> None:
        self._layout, self._spec = layout, layout.spec
        self._geometry = geometry
        self._separate_objects = separate_objects
        self._load_tracker = load_tracker
        self._adapters = adapters
        self._metrics = metrics
        self._pins = BlockPins()
        self._stores: dict[int, _LMCacheStore] = {}
        self._store_ids = itertools.count(1)
        self._releases: list[StoreRelease] = []

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Sets the engine's pool, where blocks are pinned while a store reads them."""
        self._pins.bind(pool)

    def plan(
        self, tracked: TrackedRequest, num_scheduled: int, states: Sequence[State], tables: compat.BlockTables
    ) -> PageStore | None:
        """Store of a request after the forward pass of this step; None if there is nothing to store.

        Releases the locks of the request's lookup. The request must have keys.
        """
        spec, request, chunk = self._spec, tracked.request, self._spec.chunk_tokens
        hashed = len(tracked.prefix_hashes()) * self._layout.hash_block_tokens
        # Draft tokens, and tokens that an asynchronous scheduler does not have yet, are not final.
        final = min(request.num_computed_tokens + num_scheduled, request.num_tokens, hashed)
        known = self._load_tracker.known_chunks(tracked)
        # While the lookup is open, only states are stored: the engine hands over each state once.
        copies = self._attention(tracked, known, final, tables) if known is not None else []
        # A state's key needs the lookahead tokens of a drafter after it.
        named = min(final, hashed - spec.lookahead_tokens)
        new = state_copies(spec, [state for state in states if state.num_tokens != (known or 0) * chunk], named)
        is_held = _must_hold(tracked)
        copies += self._newest(new) if is_held else new
        for _ in range(sum(state.num_tokens % chunk != 0 for state in states)):
            self._metrics.store(GroupKind.RECURRENT, "dropped_not_aligned")
        if not copies:
            return None
        start, end = min(copy.chunk for copy in copies), max(copy.chunk for copy in copies) + 1
        block_ids = [block_id for copy in copies for block_id in copy.block_ids]
        num_bytes = sum(len(copy.block_ids) * self._layout.content_bytes(copy.group_index) for copy in copies)
        store_id = next(self._store_ids)
        self._stores[store_id] = _LMCacheStore(
            tracked,
            tracked.chain,
            copies,
            self._pins.pin(block_ids),
            num_bytes,
            self._layout.world_size,
            tracked.adapter_version,
            tracked.step_load,
            is_held,
        )
        digests = tuple(self._load_tracker.digests(tracked, end))
        return PageStore(store_id, digests, start, tuple(copies), is_held=is_held)

    def _attention(self, tracked: TrackedRequest, known: int, final: int, tables: compat.BlockTables) -> list[PageCopy]:
        """Copies of whole attention chunks that the server lacks and that no earlier step has stored."""
        chunk = self._spec.chunk_tokens
        complete = max(0, final - self._spec.lookahead_tokens)
        begins = max(tracked.stored_tokens, known * chunk)
        separate = self._separate_objects()
        if separate is None or complete // chunk * chunk <= begins:
            # Without a server, it is unknown which groups form one object.
            return []
        if _must_hold(tracked):
            # A held store keeps all its pages in the pool at once, so it has at most the chunks of one call to the
            # server. The rest follows in a later step.
            complete = min(complete, begins + chunks_at_once(self._load_tracker.max_chunks) * chunk)
        blocks = attention_tables(self._spec, tables(tracked.request_id), complete)
        span = storable(self._geometry, blocks, begins, complete)
        tracked.stored_tokens = span.end
        return store_copies(self._geometry, self._spec.stored_groups, blocks, span, separate=separate)

    def _newest(self, copies: Sequence[PageCopy]) -> list[PageCopy]:
        """Copies of the last states, as many as one call to the server stores: a held store keeps all its pages."""
        boundaries = sorted({copy.chunk for copy in copies})[-chunks_at_once(self._load_tracker.max_chunks) :]
        newest = [copy for copy in copies if copy.chunk in boundaries]
        if len(newest) < len(copies):
            self._metrics.store(GroupKind.RECURRENT, "dropped_no_room", len(copies) - len(newest))
        return newest

    def take_releases(self) -> tuple[StoreRelease, ...]:
        """Returns and clears the decisions on held stores."""
        releases, self._releases = tuple(self._releases), []
        return releases

    def holds_freed_blocks(self) -> bool:
        """True if the end of a store will return blocks to the engine's pool."""
        return any(unpin_frees_any(in_flight.blocks) for in_flight in self._stores.values())

    def has_work(self) -> bool:
        return bool(self._stores or self._releases)

    def on_ended(self, outcomes: Mapping[int, StoreOutcome]) -> None:
        """Records stores that ranks have ended: copied or failed."""

        @functools.cache
        def is_valid(adapter_version: AdapterVersion | None) -> bool:
            """Cached: one check of an adapter's files covers all stores of this call."""
            return self._adapters.is_still_valid(adapter_version)

        for store_id, ended in outcomes.items():
            in_flight = self._stores[store_id]
            in_flight.ranks_left -= ended.num_ranks
            in_flight.failure = in_flight.failure or ended.failure
            in_flight.reason = in_flight.reason or ended.reason
            if in_flight.ranks_left <= 0:
                del self._stores[store_id]
                self._settle(store_id, in_flight, is_valid)

    def _settle(
        self, store_id: int, in_flight: _LMCacheStore, is_valid: Callable[[AdapterVersion | None], bool]
    ) -> None:
        if in_flight.step_load is not None and in_flight.step_load.has_failed:
            in_flight.failure, in_flight.reason = STORE_FAILURE, STORE_FAILURE_REASON
        if in_flight.failure is None and not is_valid(in_flight.adapter_version):
            in_flight.failure, in_flight.reason = "the adapter's files changed during the store", "adapter"
        if in_flight.is_held:
            self._releases.append(StoreRelease(store_id, in_flight.failure is None))
        outcome = "stored"
        if in_flight.failure is not None:
            outcome = "failed"
            if in_flight.tracked.chain is in_flight.chain:  # else the request has started over
                # A lookup ends at the first missing chunk, so later chunks are useless.
                in_flight.tracked.is_storable = False
            logger.warning("%d pages were not stored: %s", len(in_flight.blocks), in_flight.failure)
            self._metrics.store_failed(in_flight.reason or "io")
        else:
            self._metrics.stored_bytes(in_flight.num_bytes * self._layout.world_size)
        for copy in in_flight.copies:
            self._metrics.store(self._spec.groups[copy.group_index].kind, outcome)
        self._pins.free(in_flight.blocks)

    def close(self) -> None:
        """Unpins all blocks."""
        for in_flight in self._stores.values():
            self._pins.free(in_flight.blocks)
        self._stores.clear()
