"""A worker's half of HybridOffloadConnector: carries out plans. It decides nothing and raises nothing in the engine.

Bytes are verified on both sides of the tier: a chunk is sealed with its key and checksum after it was copied out, and
checked before a byte of it is copied in. Where the copy engine takes checksums of the bytes that it writes, a chunk is
sealed with that one, else with one of what lies in its slot then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hybridkv.canonical import GroupPages
from hybridkv.canonical.torch_view import KVCache
from hybridkv.connectors.vllm.common.copies.devices import CpuDevice, Device
from hybridkv.connectors.vllm.common.copies.kv_memory import take_kv_memory, zeros_in
from hybridkv.connectors.vllm.common.copies.lowering import GroupBlocks, JobLowering, RankMemory
from hybridkv.connectors.vllm.common.copies.proof import prove_at_start
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyJob, CopyPaths, LoadResults, RankWorker
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import Load, LoadFailure, StepPlan, Store
from hybridkv.connectors.vllm.common.stats import Recorder
from hybridkv.tiers import Failure, FailureReason, Key, SealedMemory, Slot, TierMedium, is_shortage
from hybridkv.tiers.stack import MoveOutcome, TierMover
from hybridkv.transfer import CopyRuns, RecordDigests

__all__ = ["DRAIN_S", "CopyPaths", "LoadResults", "OffloadWorker"]

logger = logging.getLogger("vllm.hybridkv.worker")


DRAIN_S = 10.0
"""How long `close` waits for chunks that are on their way to a slower tier."""


IDLE_WAIT_S = 0.002
"""How long a step that computes nothing waits for loads. The engine would pause about as long before it looks again;
where it does not pause, its thread keeps the interpreter from the one that copies."""


class OffloadWorker(RankWorker):
    """Copies between this rank's KV memory and its arena.

    Args:
        layout: the model's groups.
        arena: this rank's part of the fast tier.
        paths: carry out loads and stores.
        recorder: counts what happens.
    """

    def __init__(self, layout: CacheLayout, arena: SealedMemory, paths: CopyPaths, recorder: Recorder) -> None:
        super().__init__(paths, recorder)
        self._layout = layout
        self._arena = arena
        self._mover = TierMover(arena, {}, paths.clock)
        self._open_medium: Mapping[str, Callable[[bytes], TierMedium]] = {}
        self._at_once: frozenset[str] = frozenset()
        self._pages: dict[int, GroupPages] = {}
        self._cut: dict[int, GroupBlocks] = {}
        """Groups whose blocks chunks cut."""
        self._zero_memory: Any = None
        self._lowering: JobLowering | None = None
        self._is_idle = False
        """Whether the step computes nothing."""

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

    def register(self, kv_caches: Mapping[str, KVCache], num_blocks: int, device: Device | None = None) -> None:
        """Takes the engine's KV tensors.

        Raises:
            ConfigurationError: their bytes are not where the engine's own description says, or not on this device, or
                in an order that an engine which reads a slower tier later might not have; or this GPU copies wrongly.
        """
        device = device or CpuDevice()
        memory = take_kv_memory(self._layout, kv_caches, num_blocks, device, outlives_engine=self.has_slower_tiers)
        self._pages, self._cut, self._zero_memory = memory.pages, memory.cut, memory.zeros
        self._lowering = None
        engines = self._paths.engines()
        memory.register(engines)
        for engine in engines:
            engine.register(self._arena.base_address, self._arena.capacity_bytes, "arena")
        prove_at_start(memory, self._arena, self._paths, device)

    def start_loads(self, plan: StepPlan) -> None:
        """Submits the step's loads, and its moves between the tiers."""
        self._is_idle = plan.is_idle
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
        """Submits moves between the tiers."""
        moves = plan.moves
        if plan.namespace:
            for tier in self._at_once - {move.tier for move in moves} - self._mover.media.keys():
                self._open(tier, plan.namespace)
        for tier in {move.tier for move in moves} - self._mover.media.keys():
            failure = self._open(tier, plan.namespace)
            if failure is not None:
                lost = [move for move in moves if move.tier == tier]
                self._outcomes.moved({move.move_id: MoveOutcome(1, failure) for move in lost})
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
            # Each copy writes the whole of its slot, which is what is sealed. Where each ends is known with the runs.
            self._copies.submit(
                CopyJob(
                    False,
                    partial(self._store_runs, store),
                    partial(self._stored, store.store_id),
                    partial(self._discard, store),
                    partial(self._seal, store),
                    RecordDigests(np.empty(0, dtype=np.int64)),
                )
            )

    def _stored(self, store_id: int, failures: tuple[LoadFailure, ...]) -> None:
        self._outcomes.stored(store_id, *((failures[0].detail, failures[0].reason) if failures else (None, None)))

    # On the thread that copies, when a job's turn has come.

    def _of_memory(self) -> JobLowering:
        if self._lowering is None:
            memory = RankMemory(self._pages, self._cut, zeros_in(self._zero_memory), self._arena)
            self._lowering = JobLowering(memory)
        return self._lowering

    def _load_runs(self, load: Load, _: CopyJob) -> CopyRuns:
        try:
            return self._of_memory().load(load.copies)
        except Exception:
            logger.exception("the load of request %s could not be lowered", load.request_id)
            raise

    def _store_runs(self, store: Store, job: CopyJob) -> CopyRuns:
        try:
            lowered = self._of_memory().store(store.copies)
        except Exception:
            logger.exception("a store could not be lowered")
            raise
        if job.records is not None:
            job.records.ends = lowered.ends
        job.zero_bytes = lowered.zero_bytes
        return lowered.runs

    def _check(self, load: Load, since_s: float, job: CopyJob) -> str | None:
        if self._paths.clock() - since_s >= self._paths.load_timeout_s:
            # Not a byte was moved, so the blocks may go to somebody else.
            job.failures.append(LoadFailure("timeout", "the load waited too long for its turn"))
            return job.failures[0].detail
        # Blocks that the engine holds itself have no checksum.
        chunks = [(key, slot) for key, slot, is_local in load.copies.chunks() if not is_local]
        return self._why_failed(job, chunks, self._arena.check_all(chunks))

    def _discard(self, store: Store, _: CopyJob) -> str | None:
        for chunk in store.copies.chunks():
            self._arena.discard(chunk.slot)
        return None

    def _seal(self, store: Store, job: CopyJob) -> str | None:
        taken = job.records.digests if job.records is not None else None
        chunks = [(key, slot) for key, slot, _ in store.copies.chunks()]
        return self._why_failed(job, chunks, self._arena.seal_all(chunks, taken))

    @staticmethod
    def _why_failed(job: CopyJob, chunks: Sequence[tuple[Key, Slot]], failures: Sequence[Failure | None]) -> str | None:
        """Keeps the failure of each chunk. The text of the first; None if there is none."""
        for (key, _), failure in zip(chunks, failures, strict=True):
            if failure is not None:
                job.failures.append(LoadFailure(str(failure.reason), failure.detail, key))
        return job.failures[0].detail if job.failures else None

    def results(self) -> LoadResults:
        """Loads that ended since the last call. Moves between the tiers that ended are in `outcome`."""
        if self._is_idle:
            self._copies.wait_for_loads(IDLE_WAIT_S)
        self._copies.poll()
        for move, failure, seconds in self._mover.poll():
            self._recorder.moved(move.direction, move.tier, seconds)
            self._outcomes.moved({move.move_id: MoveOutcome(1, failure)})
        return self._outcomes.take_results()

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Ends copies in flight, then gives up the memory they use."""
        self._copies.close()
        if not self._mover.close(drain_s):
            message = "chunks are still on their way to a slower tier after %.0f s; the next start finds what is whole"
            logger.warning(message, drain_s)
        self._arena.close()
