"""Worker's half of HybridOffloadConnector: executes plans. Plans nothing, and raises no error into the engine's step.

A store seals each chunk with its key, extents and checksum. A load compares these before it copies a byte; if
`verify_ram` is "sampled" or "off", it compares some or all chunks without their checksum. The copy engine may compute
the checksum of a store while it copies; otherwise the checksum is computed from the slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hybridkv.canonical import GroupPages
from hybridkv.canonical.torch_view import KVCache
from hybridkv.connectors.errors import printable
from hybridkv.connectors.vllm.common.copies.devices import CpuDevice, Device
from hybridkv.connectors.vllm.common.copies.kv_memory import take_kv_memory, zeros_in
from hybridkv.connectors.vllm.common.copies.lowering import GroupBlocks, JobLowering, RankMemory
from hybridkv.connectors.vllm.common.copies.proof import prove_copies_at_start
from hybridkv.connectors.vllm.common.copies.ram_checks import RamChecks, VerifyRam, choose_verify_ram
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyJob, CopyPaths, LoadResults, RankWorker
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import Load, LoadFailure, StepPlan, Store
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.tiers import Failure, FailureReason, Key, SealedMemory, Slot, TierMedium, is_shortage
from hybridkv.tiers.stack import MoveOutcome, TierMover
from hybridkv.transfer import CopyRuns, InlineCopyEngine, RecordDigests

logger = logging.getLogger("vllm.hybridkv.worker")


DRAIN_S = 10.0
"""Longest wait of `close` for moves to secondary tiers."""


OPEN_AGAIN_S = 10.0
"""First pause between two attempts to open a medium that should be open from the start. Each pause is twice as long as
the one before, up to `LONGEST_PAUSE_S`, because an attempt may take a tenth of a second of a step."""
LONGEST_PAUSE_S = 300.0


IDLE_WAIT_S = 0.002
"""Longest wait for loads in a step without a forward pass. vLLM's engine process pauses about as long between such
steps. An engine inside the caller's process does not pause: without this wait, its thread would hold the interpreter
lock, which the copy thread needs."""


class OffloadWorker(RankWorker):
    """Copies between this rank's KV memory and its arena.

    Args:
        layout: the model's groups.
        arena: this rank's part of the primary tier.
        paths: copy engines for loads and stores.
        metrics: the connector's metrics.
        verify_ram: the setting `verify_ram`; None if it is not set.
    """

    def __init__(
        self,
        layout: CacheLayout,
        arena: SealedMemory,
        paths: CopyPaths,
        metrics: ConnectorMetrics,
        verify_ram: VerifyRam | None = None,
    ) -> None:
        super().__init__(paths, metrics)
        self._layout = layout
        self._arena = arena
        self._verify_ram = verify_ram
        self._ram_checks = RamChecks(arena, verify_ram or "always")
        self._all_ranks_read_all = self._verify_ram in ("always", None)
        """Whether each rank reads every chunk of a load. On GPUs, ranks may choose different values of `verify_ram`."""
        self._mover = TierMover(arena, {}, paths.clock)
        self._open_medium: Mapping[str, Callable[[bytes], TierMedium]] = {}
        self._opened_at_start: frozenset[str] = frozenset()
        self._namespace = b""
        self._open_again_s = 0.0
        """Time before which tiers in `_opened_at_start` are not tried again."""
        self._open_pause_s = OPEN_AGAIN_S
        self._pages: dict[int, GroupPages] = {}
        self._cut_blocks: dict[int, GroupBlocks] = {}
        """Groups with chunks that end inside a block."""
        self._zero_memory: Any = None
        self._lowering: JobLowering | None = None
        self._is_engine_idle = False
        """Whether the current step has no forward pass."""

    def bind_secondary_tiers(
        self, open_medium: Mapping[str, Callable[[bytes], TierMedium]], opened_at_start: frozenset[str] = frozenset()
    ) -> None:
        """Sets the functions that open the media of secondary tiers, by tier name. Each takes the namespace.

        Tiers in `opened_at_start` are opened with the first plan that carries the namespace. If that fails, later steps
        try again, after `OPEN_AGAIN_S` and then after longer pauses. Others are opened at their first move.
        """
        self._open_medium = open_medium
        self._opened_at_start = opened_at_start

    @property
    def has_secondary_tiers(self) -> bool:
        """Whether there are secondary tiers. If so, other and later engines may read stored bytes."""
        return bool(self._open_medium)

    def register(self, kv_caches: Mapping[str, KVCache], num_blocks: int, device: Device | None = None) -> None:
        """Registers the engine's KV tensors. Then tests the copies, and chooses `verify_ram` if it is not set.

        Raises:
            ConfigurationError: the bytes are not at the addresses that follow from the engine's specs, or not on this
                device; the copy test on this GPU fails; or chunks may outlive the engine in secondary tiers, but a
                later engine may order the bytes differently.
        """
        device = device or CpuDevice()
        memory = take_kv_memory(self._layout, kv_caches, num_blocks, device, outlives_engine=self.has_secondary_tiers)
        self._pages, self._cut_blocks, self._zero_memory = memory.pages, memory.cut, memory.zeros
        self._lowering = None
        engines = self._paths.engines()
        memory.register(engines)
        for engine in engines:
            engine.register(self._arena.base_address, self._arena.capacity_bytes, "arena")
        sizes = (self._layout.largest_chunk_bytes(index) for index in memory.pages)
        chunk_sizes = [size for size in sizes if size]
        rates = prove_copies_at_start(memory, self._arena, self._paths, device, chunk_sizes)
        is_overlapped = not isinstance(self._paths.loads, InlineCopyEngine)
        chosen = choose_verify_ram(self._verify_ram, rates, is_overlapped=is_overlapped)
        self._ram_checks = RamChecks(self._arena, chosen)
        is_same_on_all = self._verify_ram is not None or rates is None or self._layout.world_size == 1
        self._all_ranks_read_all = chosen == "always" and is_same_on_all

    def start_loads(self, plan: StepPlan) -> None:
        """Submits the step's loads and its moves between tiers. Fails refused loads at once."""
        self._is_engine_idle = plan.is_idle
        if plan.measured_step:
            # Not in `start_stores`: with a drafter, vLLM takes the outcome of a step before its stores start.
            self._outcomes.measured(plan.measured_step)
        now_s = self._paths.clock()
        for load in plan.loads:
            ended = partial(self._outcomes.loaded, load.request_id)
            if load.refused is not None:
                ended((LoadFailure("io", load.refused),))
                continue
            check = partial(self._check, load, now_s)
            self._copies.submit(CopyJob(True, partial(self._load_runs, load), ended, check))
        self.start_moves(plan)

    def start_moves(self, plan: StepPlan) -> None:
        """Opens the media of the plan's moves, and media that should be open from the start. Then submits the
        moves; moves of a medium that cannot be opened fail."""
        moves = plan.moves
        self._namespace = plan.namespace or self._namespace
        unopened = self._opened_at_start - self._mover.media.keys()
        if unopened and self._namespace and self._paths.clock() >= self._open_again_s:
            self._open_again_s = self._paths.clock() + self._open_pause_s
            self._open_pause_s = min(2 * self._open_pause_s, LONGEST_PAUSE_S)
            for tier in unopened - {move.tier for move in moves}:
                self._open_tier(tier, self._namespace)
        for tier in {move.tier for move in moves} - self._mover.media.keys():
            failure = self._open_tier(tier, self._namespace)
            if failure is not None:
                failed = [move for move in moves if move.tier == tier]
                self._outcomes.moved({move.move_id: MoveOutcome(1, failure) for move in failed})
                moves = tuple(move for move in moves if move.tier != tier)
        if moves:
            self._mover.start(moves)

    def _open_tier(self, tier: str, namespace: bytes) -> Failure | None:
        """Opens this rank's medium of a secondary tier. Returns the failure, if any."""
        try:
            self._mover.media[tier] = self._open_medium[tier](namespace)
        except Exception as error:  # such as no threads, memory or descriptors: the engine goes on without the tier
            logger.warning("the %s tier cannot be opened now: %s: %s", tier, type(error).__name__, error)
            reason = FailureReason.BUSY if is_shortage(error) else FailureReason.CLOSED
            return Failure(reason, f"{type(error).__name__}: {error}")
        return None

    def start_stores(self, plan: StepPlan) -> None:
        """Submits the step's stores, after the forward pass that writes their blocks."""
        for store in plan.stores:
            # A copy writes the whole slot of each chunk, and `_seal` then seals the slot. `RecordDigests` requests the
            # checksum of each chunk. It is empty until `_store_runs` sets which runs belong to which chunk.
            self._copies.submit(
                CopyJob(
                    False,
                    partial(self._store_runs, store),
                    partial(self._stored, store.store_id),
                    partial(self._discard_slots, store),
                    partial(self._seal, store),
                    RecordDigests(np.empty(0, dtype=np.int64)),
                )
            )

    def _stored(self, store_id: int, failures: tuple[LoadFailure, ...]) -> None:
        self._outcomes.stored(store_id, *((failures[0].detail, failures[0].reason) if failures else (None, None)))

    # The private methods below are called on the copy thread, before and after the copies of a job.

    def _get_lowering(self) -> JobLowering:
        if self._lowering is None:
            memory = RankMemory(self._pages, self._cut_blocks, zeros_in(self._zero_memory), self._arena)
            self._lowering = JobLowering(memory)
        return self._lowering

    def _load_runs(self, load: Load, _: CopyJob) -> CopyRuns:
        try:
            return self._get_lowering().load(load.copies)
        except Exception:
            logger.exception("the load of request %s could not be lowered", printable(load.request_id))
            raise

    def _store_runs(self, store: Store, job: CopyJob) -> CopyRuns:
        try:
            lowered = self._get_lowering().store(store.copies)
        except Exception:
            logger.exception("a store could not be lowered")
            raise
        if job.records is not None:
            job.records.ends = lowered.ends
        job.zero_bytes = lowered.zero_bytes
        return lowered.runs

    def _check(self, load: Load, since_s: float, job: CopyJob) -> str | None:
        if self._paths.clock() - since_s >= self._paths.load_timeout_s:
            # No byte was copied, so the engine may give the blocks to another request.
            job.failures.append(LoadFailure("timeout", "the load waited too long in the copy queue"))
            return job.failures[0].detail
        # Chunks that are copied from the engine's blocks have no checksum.
        chunks = [(key, slot) for key, slot, is_local in load.copies.chunks() if not is_local]
        failure = self._record_failures(job, chunks, self._ram_checks.check_all(chunks))
        if failure is not None and not self._all_ranks_read_all:
            # Without a key: the other chunks of this load are suspect too, also on ranks that found no failure.
            job.failures.append(LoadFailure(job.failures[0].reason, "`verify_ram` does not read every chunk"))
        return failure

    def _discard_slots(self, store: Store, _: CopyJob) -> str | None:
        for chunk in store.copies.chunks():
            self._arena.discard(chunk.slot)
        return None

    def _seal(self, store: Store, job: CopyJob) -> str | None:
        taken = job.records.digests if job.records is not None else None
        chunks = [(key, slot) for key, slot, _ in store.copies.chunks()]
        return self._record_failures(job, chunks, self._arena.seal_all(chunks, taken))

    @staticmethod
    def _record_failures(
        job: CopyJob, chunks: Sequence[tuple[Key, Slot]], failures: Sequence[Failure | None]
    ) -> str | None:
        """Adds the failures to the job. Returns the text of its first failure, None without one."""
        for (key, _), failure in zip(chunks, failures, strict=True):
            if failure is not None:
                job.failures.append(LoadFailure(str(failure.reason), failure.detail, key))
        return job.failures[0].detail if job.failures else None

    def results(self) -> LoadResults:
        """Loads that ended since the last call. Also collects ended moves; the base class's `outcome` returns these. In
        a step without a forward pass, first waits up to `IDLE_WAIT_S` for loads."""
        if self._is_engine_idle:
            self._copies.wait_for_loads(IDLE_WAIT_S)
        self._copies.poll()
        for move, failure, seconds in self._mover.poll():
            self._metrics.moved(move.direction, move.tier, seconds)
            self._outcomes.moved({move.move_id: MoveOutcome(1, failure)})
        return self._outcomes.take_results()

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Finishes running copies, fails queued copies, waits up to `drain_s` for moves, then releases the arena."""
        self._copies.close()
        self._opened_at_start = frozenset()
        if not self._mover.close(drain_s):
            message = (
                "moves to a secondary tier are still in flight after %.0f s; the next start finds the complete chunks"
            )
            logger.warning(message, drain_s)
        self._arena.close()
