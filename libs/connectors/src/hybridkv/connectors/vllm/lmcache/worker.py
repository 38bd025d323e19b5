"""Worker's half of HybridLMCacheConnector: executes plans. Plans nothing, and raises no error into the engine's step.

Bytes pass through a pool of pages in shared memory. A copy engine copies between blocks and pages; the server copies
between pages and its own memory. Each page has a header, which a load checks before it copies the page.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from hybridkv.canonical.torch_view import KVCache
from hybridkv.connectors.vllm.common.copies.devices import CpuDevice, Device
from hybridkv.connectors.vllm.common.copies.kv_memory import KVMemory, take_kv_memory, zeros_in
from hybridkv.connectors.vllm.common.copies.proof import prove_copies_at_start
from hybridkv.connectors.vllm.common.copies.rank_worker import UNMAPPED, CopyPaths, LoadResults, RankWorker
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import LoadFailure
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.lmcache.load_handler import LoadHandler
from hybridkv.connectors.vllm.lmcache.messages import LMCachePlan, PageLoad
from hybridkv.connectors.vllm.lmcache.session import PoolMemory, RankSession
from hybridkv.connectors.vllm.lmcache.session_spec import SessionSpec
from hybridkv.connectors.vllm.lmcache.store_handler import StoreHandler
from hybridkv.lmcache.operations import OperationCounts
from hybridkv.lmcache.pool import Pool
from hybridkv.tiers import FailureReason
from hybridkv.tiers.ram import RamArena

_NOTHING = OperationCounts()


class ServerCounts:
    """Reports operations of the server to the metrics, each once.

    Args:
        metrics: the connector's metrics.
    """

    def __init__(self, metrics: ConnectorMetrics) -> None:
        self._metrics = metrics
        self._counted = _NOTHING

    def operations(self, now: OperationCounts) -> None:
        """Reports operations since the last call. `now` counts from the start of the connection."""
        before, self._counted = self._counted, now
        if now == before:
            return
        failures = {name: number - before.failures.get(name, 0) for name, number in now.failures.items()}
        found = now.found - before.found
        done = {
            "lookup": now.lookups - before.lookups,
            "retrieve": now.retrieves - before.retrieves,
            "store": now.stores - before.stores,
        }
        for name, number in failures.items():
            operation, _, reason = name.partition(" ")
            done[operation] -= number
            self._count(operation, reason, number)
        self._count("lookup", "done", found)
        self._count("lookup", "nothing", done["lookup"] - found)
        self._count("retrieve", "done", done["retrieve"])
        self._count("store", "done", done["store"])
        for operation, chunks in (
            ("retrieve", now.retrieved_chunks - before.retrieved_chunks),
            ("store", now.stored_chunks - before.stored_chunks),
        ):
            if chunks:
                self._metrics.lmcache_chunks(operation, chunks)

    def _count(self, operation: str, outcome: str, number: int) -> None:
        if number:
            self._metrics.lmcache_operations(operation, outcome, number)


PROOF_BLOCKS = 8
"""Number of blocks of the largest group that the copy proof on a GPU copies."""

logger = logging.getLogger("vllm.hybridkv.worker")


class LMCacheWorker(RankWorker):
    """Worker's half: moves pages between this rank's KV memory and a server.

    For one thread. After the start, only `suspend` and `close` wait.

    Args:
        layout: layout of the model's groups.
        rank: rank of this process.
        session_spec: session parameters.
        paths: copy engines.
        metrics: the connector's metrics.
    """

    def __init__(
        self, layout: CacheLayout, rank: int, session_spec: SessionSpec, paths: CopyPaths, metrics: ConnectorMetrics
    ) -> None:
        super().__init__(paths, metrics)
        self._layout = layout
        self._rank = rank
        self._session_spec = replace(session_spec, rank=rank)
        self._counts = ServerCounts(metrics)
        self._memory: KVMemory | None = None
        self._device: Device = CpuDevice()
        self._session: RankSession | None = None
        self._loads: LoadHandler | None = None
        self._stores: StoreHandler | None = None
        self._has_failed_to_open = False

    def register(self, kv_caches: Mapping[str, KVCache], num_blocks: int, device: Device | None = None) -> None:
        """Registers the engine's KV tensors.

        Raises:
            ConfigurationError: the tensors do not match vLLM's description, are on another device, or have a byte order
                that a later engine may not have; or this GPU copies wrongly.
        """
        self._device = device or self._device
        self._memory = take_kv_memory(self._layout, kv_caches, num_blocks, self._device, outlives_engine=True)
        self._memory.register(self._paths.engines())
        self._prove(self._memory)

    def _prove(self, memory: KVMemory) -> None:
        """Proves the copies with other pinned memory of the same kind, because the pool is created later."""
        proof_bytes = max(pages.block_bytes for pages in memory.pages.values())
        pinned = self._device.arena_memory(PROOF_BLOCKS * proof_bytes)
        if pinned is None:
            return
        arena = RamArena(pinned.nbytes, proof_bytes, pinned)
        for engine in self._paths.engines():
            engine.register(arena.base_address, arena.capacity_bytes, "copy proof")
        prove_copies_at_start(memory, arena, self._paths, self._device)

    def start_loads(self, plan: LMCachePlan) -> None:
        """Starts the step's loads. Opens the session with the first plan that has a namespace."""
        self._open_once(plan)
        for load in plan.loads:
            self._begin_load(load)
        self._step()

    def start_stores(self, plan: LMCachePlan) -> None:
        """Starts the step's stores, after the forward pass that wrote their blocks."""
        self._open_once(plan)
        for release in plan.releases:
            if self._stores is not None:
                self._stores.release(release)
        for store in plan.stores:
            try:
                if self._stores is None:
                    self._outcomes.stored(store.store_id, "no server", str(FailureReason.CLOSED))
                else:
                    self._stores.begin(store)
            except Exception as error:  # any error fails this store, not the engine
                logger.exception("a store could not start")
                self._outcomes.stored(store.store_id, f"{type(error).__name__}: {error}", str(FailureReason.IO))
        self._step()

    def results(self) -> LoadResults:
        """Continues open loads and stores, and reports metrics. Returns the loads that ended since the last call."""
        self._step()
        if self._session is not None:
            self._counts.operations(self._session.operations.counts())
            self._metrics.lmcache_state(self._session.ready is not None)
            self._metrics.lmcache_pool(self._session.used_bytes, self._session.capacity_bytes)
        return self._outcomes.take_results()

    def suspend(self, timeout_s: float) -> bool:
        if not super().suspend(timeout_s):
            return False
        # Operations without a copy yet would copy after `resume`, and the blocks have lost their content by then.
        for each in (self._loads, self._stores):
            if each is not None:
                each.end(UNMAPPED.reason, UNMAPPED.detail)
        return True

    def close(self) -> None:
        """Fails open loads and stores, and closes the session. Takes a bounded time."""
        self._copies.close()
        for each in (self._loads, self._stores):
            if each is not None:
                each.end(str(FailureReason.CLOSED), "the worker was closed")
        if self._session is not None:
            self._session.close()

    def _begin_load(self, load: PageLoad) -> None:
        failure: LoadFailure | None = None
        try:
            if load.refused is not None:
                failure = LoadFailure(str(FailureReason.IO), load.refused)
            elif self._loads is None:
                failure = LoadFailure(str(FailureReason.CLOSED), "no server")
            else:
                self._loads.begin(load)
        except Exception as error:  # any error fails this load, not the engine
            logger.exception("a load could not start")
            failure = LoadFailure(str(FailureReason.IO), f"{type(error).__name__}: {error}")
        if failure is not None:
            self._outcomes.loaded(load.request_id, (failure,))

    def _step(self) -> None:
        self._copies.poll()
        if self._session is None or self._loads is None or self._stores is None:
            return
        self._loads.step()
        self._stores.step(may_begin=not self._loads.is_waiting)
        # Some copy engines finish within `submit`.
        self._copies.poll()

    def _open_once(self, plan: LMCachePlan) -> None:
        if self._session is not None or self._has_failed_to_open or not plan.namespace:
            return
        try:
            self._open(plan)
        except Exception as error:  # no threads, memory or descriptors left, or sizes do not fit
            self._has_failed_to_open = True
            logger.warning("LMCache's server cannot be used: %s: %s", type(error).__name__, error)

    def _open(self, plan: LMCachePlan) -> None:
        assert self._memory is not None, "KV tensors are registered before the first step"
        session_spec = (
            self._session_spec.with_payload_bytes(plan.payload_bytes) if plan.payload_bytes else self._session_spec
        )
        for group, group_index in zip(session_spec.groups, session_spec.group_indexes, strict=True):
            needed = self._memory.pages[group_index].block_bytes
            if needed > group.payload_bytes:
                raise ValueError(f"a block of group {group_index} has {needed} bytes, a page {group.payload_bytes}")
        clock, open_pool = self._paths.clock, partial(self._open_pool, self._memory)
        session = RankSession(session_spec, self._rank, plan.namespace, open_pool, clock)
        self._loads = LoadHandler(session, self._copies, self._paths.load_timeout_s, clock, self._loaded)
        self._stores = StoreHandler(session, self._copies, clock, self._stored)
        self._session = session

    def _open_pool(self, kv_memory: KVMemory, pool: Pool) -> PoolMemory:
        memory = PoolMemory(pool, kv_memory.pages, zeros_in(kv_memory.zeros))
        self._device.pin_pool(memory.memory)
        for engine in self._paths.engines():
            engine.register(memory.base_address, memory.capacity_bytes, "pages")
        return memory

    def _loaded(self, request_id: str, failures: tuple[LoadFailure, ...]) -> None:
        withdrawn = {failure.key for failure in failures} - {None}
        if withdrawn:
            self._metrics.lmcache_withdrawals(len(withdrawn))
        self._outcomes.loaded(request_id, failures)

    def _stored(self, store_id: int, reason: str | None, detail: str | None) -> None:
        self._outcomes.stored(store_id, detail, reason)
