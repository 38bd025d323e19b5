"""What is stored after a step, and what becomes of it.

A source block stays pinned in the engine's pool until every rank has read it; a key is offered only after every rank
has committed it. What depends on other chunks is made to leave the tiers before them.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm import compat
from hybridkv.connectors.vllm.identity.adapters import Adapters, Sworn
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.messages import Move, Store, StoreOutcome
from hybridkv.connectors.vllm.requests import NULL_BLOCK, RequestState
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.planner import GroupKind, LookupResult, State, Transfer, chunk_blocks, plan_store
from hybridkv.tiers import Refusal
from hybridkv.tiers.stack import TierStack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger("vllm.hybridkv.scheduler")

_OUTCOMES = {Refusal.PRESENT: "present", Refusal.TOO_LARGE: "dropped_too_large"}
"""What becomes of a chunk that the fast tier refuses; otherwise there is no room for it."""

Chunk = tuple[bytes, GroupKind]
"""A key, and the kind of its group."""


def eviction_order(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Chunks of one prefix, given from its beginning, in the order in which they should be evicted.

    States and windows serve one boundary, the full prefix every later one; and the end of a prefix is worth nothing
    without its beginning.
    """
    from_the_end = list(chunks)[::-1]
    return sorted(from_the_end, key=lambda chunk: chunk[1] is GroupKind.FULL)


@dataclass(slots=True)
class _StoreJob:
    chunks: list[Chunk]
    blocks: list[KVCacheBlock]
    num_bytes: int
    ranks_left: int
    sworn: Sworn | None
    failure: str | None = None
    reason: str | None = None


class StorePlanner:
    """Plans stores, and follows those that are on their way.

    Args:
        layout: the model's groups.
        stack: the tiers.
        adapters: whether what an adapter had a part in is what it was stored for.
        recorder: counts what happens.
    """

    def __init__(self, layout: CacheLayout, stack: TierStack, adapters: Adapters, recorder: Recorder) -> None:
        self._layout = layout
        self._stack = stack
        self._adapters = adapters
        self._recorder = recorder
        self._pool: BlockPool | None = None
        self._stores: dict[int, _StoreJob] = {}
        self._job_ids = itertools.count(1)

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The pool whose blocks are pinned while they are read."""
        self._pool = pool

    def plan(
        self, state: RequestState, num_scheduled: int, states: list[State], tables: compat.BlockTables
    ) -> Store | None:
        """What becomes storable of a request after the forward pass of this step. It has keys."""
        spec, request = self._layout.spec, state.request
        hashes = state.prefix_hashes()
        # Content is final where the token is known: drafts that may be rejected, and tokens that an asynchronous
        # scheduler has not seen yet, are not.
        hashed = len(hashes) * self._layout.hash_block_tokens
        final = min(request.num_computed_tokens + num_scheduled, request.num_tokens, hashed)
        states = [s for s in states if s.group_index in spec.stored_groups and s.num_tokens <= hashed]
        complete = (final // spec.chunk_tokens, max(0, final - spec.lookahead_tokens) // spec.chunk_tokens)
        if not states and complete == state.seen:
            return None
        state.seen = complete
        derived = state.keys()
        keys: dict[tuple[int, int], bytes] = {}
        present: list[Chunk] = []

        def wanted(group_index: int, end_token: int) -> bool:
            key = keys[group_index, end_token] = derived.key(group_index, end_token)
            # A chunk that only the slow tier holds is stored again: this costs no read, and the fast tier gets it.
            stored = self._stack.near.lookup(key)
            if stored is LookupResult.HIT:
                present.append((key, spec.groups[group_index].kind))
            elif stored is LookupResult.PENDING:
                self._recorder.store(spec.groups[group_index].kind, "present")
            return stored is LookupResult.MISS

        table = tables(request.request_id)
        plan = plan_store(spec, state.stored_tokens, final, table, states, wanted, NULL_BLOCK)
        # A drafter's chunk comes later than the others, which are then looked at again.
        state.stored_tokens = max(complete[1] * spec.chunk_tokens, state.stored_tokens)
        for _ in range(plan.unaligned_states):
            self._recorder.store("recurrent", "dropped_not_aligned")
        self._renew(present)
        return self._reserve(state, plan.transfers, keys)

    def _renew(self, present: Sequence[Chunk]) -> None:
        """Chunks that are stored already have been of use."""
        for _, kind in present:
            self._recorder.store(kind, "present")
        self._stack.touch([key for key, _ in eviction_order(present)])
        for key, _ in present:
            self._stack.cascade(key)

    def _reserve(
        self, state: RequestState, transfers: Sequence[Transfer], keys: Mapping[tuple[int, int], bytes]
    ) -> Store | None:
        job = _StoreJob([], [], 0, self._layout.world_size, state.sworn)
        moves = []
        for transfer in transfers:
            key = keys[transfer.group_index, transfer.end_token]
            kind = self._layout.spec.groups[transfer.group_index].kind
            num_bytes = self._layout.chunk_bytes(transfer.group_index, transfer.end_token)
            slot = self._stack.reserve(key, num_bytes)
            if isinstance(slot, Refusal):
                self._recorder.store(kind, _OUTCOMES.get(slot, "dropped_no_room"))
                continue
            stored = len(chunk_blocks(self._layout.spec, transfer.group_index, transfer.end_token))
            moves.append(Move(transfer.group_index, key, slot, transfer.first_block, stored, transfer.block_ids))
            job.chunks.append((key, kind))
            job.num_bytes += num_bytes
            job.blocks += self._pin_blocks(transfer.block_ids)
        if not moves:
            return None
        job_id = next(self._job_ids)
        self._stores[job_id] = job
        return Store(job_id, tuple(moves))

    def _pin_blocks(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        if self._pool is None:
            raise RuntimeError("the engine never bound its block pool")
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        return blocks

    def holds_freed_blocks(self) -> bool:
        """Whether a store that ends will give blocks back to the engine's pool."""
        return any(block.ref_cnt == 1 for job in self._stores.values() for block in job.blocks)

    def has_work(self) -> bool:
        return bool(self._stores)

    def on_ended(self, outcomes: Mapping[int, StoreOutcome]) -> None:
        """Ranks are done with stores; the last of them commits or aborts each."""

        @functools.cache
        def holds(sworn: Sworn | None) -> bool:
            """One look at an adapter's files is good for all stores that ended before it."""
            return self._adapters.holds(sworn)

        for job_id, ended in outcomes.items():
            self._on_ended(job_id, ended, holds)

    def _on_ended(self, job_id: int, ended: StoreOutcome, holds: Callable[[Sworn | None], bool]) -> None:
        job = self._stores[job_id]
        job.ranks_left -= ended.num_ranks
        job.failure = job.failure or ended.failure
        job.reason = job.reason or ended.reason
        if job.ranks_left > 0:
            return
        del self._stores[job_id]
        if job.failure is None and not holds(job.sworn):
            job.failure, job.reason = "the adapter's files changed meanwhile", "adapter"
        if job.failure is not None:
            logger.warning("%d chunks were not stored: %s", len(job.chunks), job.failure)
            self._recorder.store_failed(job.reason or "io")
        for key, kind in eviction_order(job.chunks):
            is_stored = job.failure is None and self._stack.commit(key)
            if job.failure is not None:
                self._stack.abort(key)
            self._recorder.store(kind, "stored" if is_stored else "failed")
        if job.failure is None:
            self._recorder.stored_bytes(job.num_bytes * self._layout.world_size)
        self._free(job)

    def _free(self, job: _StoreJob) -> None:
        if self._pool is not None:
            self._pool.free_blocks(reversed(job.blocks))

    def close(self) -> None:
        """Gives back what is still pinned in the engine's pool."""
        for job in self._stores.values():
            self._free(job)
        self._stores.clear()
