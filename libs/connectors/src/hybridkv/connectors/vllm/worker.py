"""A worker's half of HybridOffloadConnector: carries out plans. It decides nothing and raises nothing in the engine.

Bytes are verified on both sides of the tier: a chunk is sealed with its key and checksum after it was copied out, and
checked before a byte of it is copied in. Where the copy engine takes checksums of the bytes that it writes, a chunk is
sealed with that one, else with one of what lies in its slot then.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hybridkv.canonical import PAGE_ALIGN_BYTES, GroupPages, TokenRange
from hybridkv.canonical.torch_view import KVCache, LayoutError, canonical_kv_caches, token_pages
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import cuts, devices, page_order
from hybridkv.connectors.vllm.cut_lowering import GroupBlocks, cut_load_runs, cut_store_runs
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.lowering import Zeros, load_runs, store_runs
from hybridkv.connectors.vllm.messages import ChunkCopy, Load, LoadFailure, StepOutcome, StepPlan, Store, StoreOutcome
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.tiers import Failure, FailureReason, SealedMemory, TierMedium, is_shortage
from hybridkv.tiers.stack import MoveOutcome, TierMover
from hybridkv.transfer import CopyEngine, CopyRuns, JobId, RecordDigests

logger = logging.getLogger("vllm.hybridkv.worker")


DRAIN_S = 10.0
"""How long `close` waits for chunks that are on their way to a slower tier."""


@dataclass(frozen=True, slots=True)
class CopyPaths:
    """How bytes get into and out of the engine's memory.

    Args:
        stores: carries out stores.
        loads: carries out loads; the same engine as `stores`, or one that copies on the calling thread.
        load_timeout_s: a load that has not begun by then fails, and the request is computed instead.
        clock: seconds.
    """

    stores: CopyEngine
    loads: CopyEngine
    load_timeout_s: float
    clock: Callable[[], float]

    def engines(self) -> tuple[CopyEngine, ...]:
        return (self.stores, self.loads) if self.stores is not self.loads else (self.stores,)


@dataclass(slots=True)
class LoadResults:
    """Loads that ended since the last step; a failed one is in both sets."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _CopyInFlight:
    store_id: int | None = None
    request_id: str | None = None
    records: RecordDigests | None = None
    zero_bytes: int = 0
    """Bytes that it copies and that are no page's."""
    failures: list[LoadFailure] = field(default_factory=list)


class OffloadWorker:
    """Copies between this rank's KV memory and its arena.

    Args:
        layout: the model's groups.
        arena: this rank's part of the fast tier.
        paths: carry out loads and stores.
        recorder: counts what happens.
    """

    def __init__(self, layout: CacheLayout, arena: SealedMemory, paths: CopyPaths, recorder: Recorder) -> None:
        self._layout = layout
        self._arena = arena
        self._paths = paths
        self._engines = paths.engines()
        self._mover = TierMover(arena, {}, paths.clock)
        self._open_medium: Mapping[str, Callable[[bytes], TierMedium]] = {}
        self._at_once: frozenset[str] = frozenset()
        self._recorder = recorder
        self._pages: dict[int, GroupPages] = {}
        self._cut: dict[int, GroupBlocks] = {}
        """Groups whose blocks chunks cut."""
        self._zero_memory: Any = None
        self._in_flight: dict[JobId, _CopyInFlight] = {}
        self._job_ids = itertools.count(1)
        self._outcome = StepOutcome()
        self._results = LoadResults()
        self._facts: dict[str, str] | None = None

    def bind_slower_tiers(
        self, open_medium: Mapping[str, Callable[[bytes], TierMedium]], at_once: frozenset[str] = frozenset()
    ) -> None:
        """How to reach each slower tier by its name. The namespace comes with the first moves, or with the first step:
        those that are `at_once` are open from then on, whether anything moves or not."""
        self._open_medium = open_medium
        self._at_once = at_once

    @property
    def has_slower_tiers(self) -> bool:
        """Whether some of what is stored outlives the engine."""
        return bool(self._open_medium)

    def tell(self, facts: dict[str, str]) -> None:
        """What the scheduler must hear before it opens a slower tier."""
        self._facts = facts

    def take_facts(self) -> dict[str, str] | None:
        """What the scheduler has not been told yet."""
        facts, self._facts = self._facts, None
        return facts

    def register(self, kv_caches: Mapping[str, KVCache], num_blocks: int, device_type: str = "cpu") -> None:
        """Takes the engine's KV tensors.

        Raises:
            ConfigurationError: their bytes are not where the engine's own description says, or not on this device, or
                in an order that an engine which reads a slower tier later might not have.
        """
        devices.require_same_device(kv_caches, device_type)
        devices.permit_instructions(device_type)
        try:
            layers = [page_order.with_token_dims(kv_caches, group) for group in self._layout.layers]
            caches = canonical_kv_caches(kv_caches, layers, num_blocks)
            for group_index in self._layout.spec.stored_groups:
                self._pages[group_index] = caches.pages(group_index)
                if self.has_slower_tiers:
                    page_order.require_one_order(kv_caches, layers[group_index], num_blocks)
        except LayoutError as error:
            raise ConfigurationError(
                "kv_caches", "tensors as the engine describes them", str(error), "report the model and vLLM's version"
            ) from error
        for group_index in self._layout.spec.cut_groups:
            part = partial(token_pages, kv_caches, layers[group_index], num_blocks)
            self._cut[group_index] = self._blocks(group_index, part)
        self._zero_memory = devices.zero_memory(caches.tensors[0].tensor.device)
        for engine in self._engines:
            engine.register(self._zero_memory.data_ptr(), self._zero_memory.nbytes, "zeros")
            engine.register(self._arena.base_address, self._arena.capacity_bytes, "arena")
            seen = set()
            for cache in caches.tensors:
                storage = cache.tensor.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    engine.register(storage.data_ptr(), storage.nbytes(), "kv cache")

    def _blocks(self, group_index: int, part: Callable[[TokenRange], GroupPages]) -> GroupBlocks:
        """Of a group that chunks cut, once it is certain that they can."""
        spec = self._layout.spec
        block_tokens = spec.groups[group_index].block_tokens
        blocks = GroupBlocks(self._pages[group_index], block_tokens, part)
        try:
            # Of any tokens it is as certain as of the first.
            blocks.of(0, math.gcd(block_tokens, spec.chunk_tokens))
        except LayoutError as error:
            raise cuts.not_divisible(self._layout, group_index, str(error)) from error
        return blocks

    def start_loads(self, plan: StepPlan) -> None:
        """Submits the step's loads, and its moves between the tiers."""
        now_s = self._paths.clock()
        for load in plan.loads:
            in_flight = _CopyInFlight(request_id=load.request_id)
            self._submit(self._paths.loads, in_flight, load, partial(self._check, load, in_flight, now_s), None)
        self.start_moves(plan)

    def start_moves(self, plan: StepPlan) -> None:
        """Submits moves between the tiers."""
        moves = plan.moves
        if plan.namespace:
            for tier in self._at_once - {move.tier for move in moves} - self._mover.media.keys():
                self._open(tier, plan.namespace)
        for tier in {move.tier for move in moves} - self._mover.media.keys():
            failure = self._open(tier, plan.namespace)
            if failure is not None:
                lost = [move for move in moves if move.tier == tier]
                self._outcome.moves.update({move.move_id: MoveOutcome(1, failure) for move in lost})
                moves = tuple(move for move in moves if move.tier != tier)
        if moves:
            self._mover.start(moves)

    def _open(self, tier: str, namespace: bytes) -> Failure | None:
        """This rank's part of a slower tier, at its first move. Why it cannot be used for now."""
        try:
            self._mover.media[tier] = self._open_medium[tier](namespace)
        except Exception as error:  # threads, memory or descriptors have run out: the engine goes on without this tier
            logger.warning("the %s tier cannot be used for now: %s: %s", tier, type(error).__name__, error)
            reason = FailureReason.BUSY if is_shortage(error) else FailureReason.CLOSED
            return Failure(reason, f"{type(error).__name__}: {error}")
        return None

    def start_stores(self, plan: StepPlan) -> None:
        """Submits the step's stores. The forward pass that wrote their blocks is over."""
        for store in plan.stores:
            in_flight = _CopyInFlight(store_id=store.store_id)
            self._submit(
                self._paths.stores,
                in_flight,
                store,
                partial(self._discard, store),
                partial(self._seal, store, in_flight),
            )

    def _submit(
        self,
        engine: CopyEngine,
        in_flight: _CopyInFlight,
        work: Load | Store,
        before: Callable[[], str | None],
        after: Callable[[], str | None] | None,
    ) -> None:
        job_id = JobId(next(self._job_ids))
        self._in_flight[job_id] = in_flight
        refused = work.refused if isinstance(work, Load) else None
        try:
            if refused is None:
                parts = [self._runs(copy, isinstance(work, Load)).coalesce() for copy in work.copies]
                if isinstance(work, Store):
                    # Each writes the whole of its slot, which is what is sealed.
                    in_flight.records = RecordDigests(np.cumsum([len(part) for part in parts], dtype=np.int64))
                runs = CopyRuns.concatenate(parts)
                if in_flight.records is None:
                    runs = runs.coalesce()
                else:
                    # What joins runs of two chunks would join two records.
                    in_flight.zero_bytes = self._zeros().num_bytes_in(runs)
                if not engine.submit(job_id, runs, before, after, in_flight.records):
                    refused = "the copy queue is full"
                    in_flight.failures.append(LoadFailure("busy", refused))
        except Exception as error:  # whatever it was, it is this copy's failure and not the engine's
            logger.exception("a copy could not be submitted")
            refused = f"{type(error).__name__}: {error}"
        if refused is not None:
            self._end(job_id, refused)

    def _runs(self, copy: ChunkCopy, to_engine: bool) -> CopyRuns:
        extents, cut = self._arena.addresses(copy.slot), self._cut.get(copy.group_index)
        if cut is not None:
            return cut_load_runs(copy, cut, extents) if to_engine else cut_store_runs(copy, cut, extents, self._zeros())
        pages = self._pages[copy.group_index]
        return load_runs(copy, pages, extents) if to_engine else store_runs(copy, pages, extents, self._zeros())

    def _zeros(self) -> Zeros:
        # Its ends are not used: beside other memory a run might be joined to one there, and lie in two registrations.
        return Zeros(self._zero_memory.data_ptr() + PAGE_ALIGN_BYTES, self._zero_memory.nbytes - 2 * PAGE_ALIGN_BYTES)

    def _check(self, load: Load, in_flight: _CopyInFlight, since_s: float) -> str | None:
        if self._paths.clock() - since_s >= self._paths.load_timeout_s:
            # Not a byte was moved, so the blocks may go to somebody else.
            in_flight.failures.append(LoadFailure("timeout", "the load waited too long for its turn"))
            return in_flight.failures[0].detail
        for copy in load.copies:
            if failure := self._arena.check(copy.key, copy.slot):
                in_flight.failures.append(LoadFailure(str(failure.reason), failure.detail, copy.key))
        return in_flight.failures[0].detail if in_flight.failures else None

    def _discard(self, store: Store) -> str | None:
        for copy in store.copies:
            self._arena.discard(copy.slot)
        return None

    def _seal(self, store: Store, in_flight: _CopyInFlight) -> str | None:
        taken = in_flight.records.digests if in_flight.records is not None else None
        for number, copy in enumerate(store.copies):
            if failure := self._arena.seal(copy.key, copy.slot, None if taken is None else taken[number]):
                in_flight.failures.append(LoadFailure(str(failure.reason), failure.detail, copy.key))
                return str(failure)
        return None

    def results(self) -> LoadResults:
        """Loads that ended since the last call. Moves between the tiers that ended are in `outcome`."""
        for engine in self._engines:
            for copied in engine.poll():
                in_flight = self._in_flight[copied.job_id]
                num_bytes = copied.num_bytes and copied.num_bytes - in_flight.zero_bytes
                self._recorder.copied(in_flight.store_id is None, copied.seconds, num_bytes)
                self._end(copied.job_id, copied.failure)
        for move, failure, seconds in self._mover.poll():
            self._recorder.moved(move.direction, move.tier, seconds)
            self._outcome.moves[move.move_id] = MoveOutcome(1, failure)
        results, self._results = self._results, LoadResults()
        return results

    def _end(self, job_id: JobId, failure: str | None) -> None:
        in_flight = self._in_flight.pop(job_id)
        if in_flight.store_id is not None:
            reason = in_flight.failures[0].reason if in_flight.failures else "io"
            self._outcome.stores[in_flight.store_id] = StoreOutcome(1, failure, reason if failure else None)
        elif in_flight.request_id is not None:
            self._results.finished.add(in_flight.request_id)
            if failure is not None:
                self._results.failed.add(in_flight.request_id)
                self._outcome.load_failures[in_flight.request_id] = tuple(in_flight.failures) or (
                    LoadFailure("io", failure),
                )

    def outcome(self) -> StepOutcome | None:
        """What the scheduler must hear, None if nothing."""
        outcome, self._outcome = self._outcome, StepOutcome()
        return None if outcome.is_empty else outcome

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Ends copies in flight, then gives up the memory they use."""
        for engine in self._engines:
            engine.close()
        if not self._mover.close(drain_s):
            message = "chunks are still on their way to a slower tier after %.0f s; the next start finds what is whole"
            logger.warning(message, drain_s)
        self._arena.close()
