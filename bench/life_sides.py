"""The two scheduler halves for `request_life.py`, with one interface, and the reports of their workers.

Written for vLLM 0.32. Neither side moves a byte: a worker only reports the outcome of a plan.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from life_engine import Engine, LifeRequest
from planner_lookup import HASH_TOKENS, PRESETS, make_layout, open_scheduler
from planner_upstream import fill_upstream, offload_keys, open_upstream
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from hybridkv.connectors.vllm.common.messages import StepOutcome, StepPlan, StoreOutcome
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.hashing import ChunkKeys
from hybridkv.planner import GroupKind
from hybridkv.tiers.ram import RamIndex, choose_granule_bytes
from hybridkv.tiers.stack import TierStack


class Work(NamedTuple):
    """Blocks of the engine that a plan moves."""

    num_loaded: int
    num_stored_full: int
    """Stored blocks of full attention only: vLLM stores no window blocks that no hit at a chunk's end reads."""


class Side(Protocol):
    """Calls of a connector's scheduler half by the engine. `sources` is for the engine's counters."""

    engine: Engine

    def fill(self, hashes: Sequence[bytes]) -> None:
        """Stores all groups of a prompt."""
        ...

    def begin(self, request: LifeRequest) -> None: ...

    def lookup(self, request: LifeRequest, computed_tokens: int) -> int: ...

    def allocate(self, request: LifeRequest, blocks: KVCacheBlocks, num_tokens: int) -> None: ...

    def sources(self, request: LifeRequest, num_tokens: int) -> None: ...

    def plan(self, output: SchedulerOutput) -> Any: ...

    def update(self, output: KVConnectorOutput) -> None: ...

    def report(self) -> None: ...

    def finish(self, request: LifeRequest, block_ids: tuple[list[int], ...]) -> None:
        """Finishes a request. The engine reads its tables for this call, even if a connector does not use them."""
        ...

    def outcome(self, plan: Any) -> KVConnectorOutput | None:
        """Report of the workers after a plan; None for an empty plan."""
        ...

    def work(self, plan: Any) -> Work: ...


class Ours:
    """The connector over a tier in host memory with room for `room_tokens`."""

    def __init__(self, preset: str, engine: Engine, room_tokens: int) -> None:
        self.engine = engine
        self.layout = make_layout(preset)
        self.keys = ChunkKeys(self.layout.fingerprint({}), self.layout.hash_block_tokens)
        granule_bytes = choose_granule_bytes(self.layout.chunk_sizes())
        sizes = [num_bytes for _, _, num_bytes in self._parts(room_tokens)]
        capacity_bytes = sum(-(-num_bytes // granule_bytes) * granule_bytes for num_bytes in sizes)
        self.index = RamIndex(capacity_bytes, granule_bytes)
        self._metrics = ConnectorMetrics()
        self._scheduler = open_scheduler(
            self.layout, self.keys, TierStack(self.index, (), 1, time.monotonic), self._metrics
        )
        self._scheduler.bind_block_pool(engine.pool)
        self._full = _full_groups(preset)

    def _parts(self, num_tokens: int) -> Iterable[tuple[int, int, int]]:
        chunk = self.layout.spec.chunk_tokens
        for end in range(chunk, num_tokens + 1, chunk):
            for group in self.layout.spec.stored_groups:
                yield group, end, self.layout.chunk_bytes(group, end)

    def fill(self, hashes: Sequence[bytes]) -> None:
        for group, end, num_bytes in self._parts(len(hashes) * self.layout.hash_block_tokens):
            key = self.keys.key(group, hashes, end)
            self.index.reserve(key, num_bytes)
            self.index.commit(key)

    def begin(self, request: Any) -> None:
        self._scheduler.track(request)

    def lookup(self, request: Any, computed_tokens: int) -> int:
        return self._scheduler.matched_tokens(request, computed_tokens) or 0

    def allocate(self, request: Any, blocks: KVCacheBlocks, num_tokens: int) -> None:
        self._scheduler.on_allocated(request, blocks, num_tokens)

    def sources(self, request: LifeRequest, num_tokens: int) -> None:
        """Does nothing: with one tier, vLLM's base class answers this call."""

    def plan(self, output: SchedulerOutput) -> StepPlan:
        return self._scheduler.plan_step(output)

    def update(self, output: KVConnectorOutput) -> None:
        self._scheduler.on_output(output)

    def report(self) -> None:
        self._scheduler.record_tiers()
        self._metrics.take()
        self._scheduler.take_events()

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> None:
        self._scheduler.on_finished(request, block_ids)

    def outcome(self, plan: StepPlan) -> KVConnectorOutput | None:
        if not plan.loads and not plan.stores:
            return None
        stores = {store.store_id: StoreOutcome(1) for store in plan.stores}
        loaded = {load.request_id for load in plan.loads}
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=StepOutcome(stores=stores))

    def work(self, plan: StepPlan) -> Work:
        loaded = sum(len(copy.block_ids) for load in plan.loads for copy in load.copies)
        stored = [copy for store in plan.stores for copy in store.copies if copy.group_index in self._full]
        return Work(loaded, sum(len(copy.block_ids) for copy in stored))


class Theirs:
    """vLLM's scheduler half over its LRU manager, with the interface of `Ours`."""

    def __init__(self, preset: str, engine: Engine, room_tokens: int, blocks_per_chunk: int) -> None:
        self.engine = engine
        self._groups, self._hash_tokens = PRESETS[preset], HASH_TOKENS[preset]
        self._blocks_per_chunk = blocks_per_chunk
        sizes = [group.block_tokens * blocks_per_chunk for group in self._groups]
        num_chunks = sum(room_tokens // size for size in sizes)
        self._scheduler, self.manager = open_upstream(self._groups, self._hash_tokens, num_chunks, blocks_per_chunk)
        self._full = _full_groups(preset)

    def fill(self, hashes: Sequence[bytes]) -> None:
        for index in range(len(self._groups)):
            keys = offload_keys(self._groups, index, list(hashes), self._hash_tokens, self._blocks_per_chunk)
            fill_upstream(self.manager, keys)

    def begin(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def lookup(self, request: Any, computed_tokens: int) -> int:
        return self._scheduler.get_num_new_matched_tokens(request, computed_tokens)[0] or 0

    def allocate(self, request: Any, blocks: KVCacheBlocks, num_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_tokens)

    def sources(self, request: Any, num_tokens: int) -> None:
        self._scheduler.get_external_cache_hit_sources(request, num_tokens)

    def plan(self, output: SchedulerOutput) -> Any:
        return self._scheduler.build_connector_meta(output)

    def update(self, output: KVConnectorOutput) -> None:
        self._scheduler.update_connector_output(output)

    def report(self) -> None:
        self._scheduler.get_stats()
        list(self._scheduler.take_events())

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> None:
        self._scheduler.request_finished(request)

    def outcome(self, plan: Any) -> KVConnectorOutput | None:
        jobs = plan.load_jobs | plan.store_jobs
        if not jobs:
            return None
        loaded = {job.req_id for job in plan.load_jobs.values()}
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=done)

    def work(self, plan: Any) -> Work:
        loaded = sum(len(job.dst_spec.block_ids) for job in plan.load_jobs.values())
        stored = sum(job.src_spec.group_sizes[index] for job in plan.store_jobs.values() for index in self._full)
        return Work(loaded, stored)


def _full_groups(preset: str) -> tuple[int, ...]:
    return tuple(index for index, group in enumerate(PRESETS[preset]) if group.kind is GroupKind.FULL)
