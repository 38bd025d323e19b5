"""A worker's half of HybridOffloadConnector: carries out plans. It decides nothing and raises nothing in the engine.

Bytes are verified on both sides of the tier: a chunk is sealed with its key and checksum after it was copied out, and
checked before a byte of it is copied in. Where the copy engine takes checksums of the bytes that it writes, a chunk is
sealed with that one, else with one of what lies in its slot then.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hybridkv.canonical import GroupPages
from hybridkv.canonical.torch_view import KVCache
from hybridkv.connectors.vllm.copy_proof import prove_at_start
from hybridkv.connectors.vllm.devices import CpuDevice, Device
from hybridkv.connectors.vllm.job_lowering import GroupBlocks, JobLowering, RankMemory
from hybridkv.connectors.vllm.kv_memory import take_kv_memory, zeros_in
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.messages import Load, LoadFailure, StepOutcome, StepPlan, Store
from hybridkv.connectors.vllm.rank_work import CopyPaths, LoadResults, Outcomes
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.tiers import Failure, FailureReason, Key, SealedMemory, Slot, TierMedium, is_shortage
from hybridkv.tiers.stack import MoveOutcome, TierMover
from hybridkv.transfer import CopyEngine, CopyRuns, Hook, JobId, RecordDigests

__all__ = ["DRAIN_S", "CopyPaths", "LoadResults", "OffloadWorker"]

logger = logging.getLogger("vllm.hybridkv.worker")


DRAIN_S = 10.0
"""How long `close` waits for chunks that are on their way to a slower tier."""


IDLE_WAIT_S = 0.002
"""How long a step that computes nothing waits for loads. The engine would pause about as long before it looks again;
where it does not pause, its thread keeps the interpreter from the one that copies."""


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
        self._lowering: JobLowering | None = None
        self._in_flight: dict[JobId, _CopyInFlight] = {}
        self._job_ids = itertools.count(1)
        self._outcomes = Outcomes()
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

    def tell(self, facts: dict[str, str]) -> None:
        """What the scheduler must hear before it opens a slower tier."""
        self._outcomes.tell(facts)

    def take_facts(self) -> dict[str, str] | None:
        """What the scheduler has not been told yet."""
        return self._outcomes.take_facts()

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
        memory.register(self._engines)
        for engine in self._engines:
            engine.register(self._arena.base_address, self._arena.capacity_bytes, "arena")
        prove_at_start(memory, self._arena, self._paths, device)

    def start_loads(self, plan: StepPlan) -> None:
        """Submits the step's loads, and its moves between the tiers."""
        self._is_idle = plan.is_idle
        now_s = self._paths.clock()
        for load in plan.loads:
            in_flight = _CopyInFlight(request_id=load.request_id)
            job_id = self._begin(in_flight)
            if load.refused is not None:
                self._end(job_id, load.refused)
                continue
            check = partial(self._check, load, in_flight, now_s)
            self._submit(self._paths.loads, job_id, partial(self._load_runs, load), check)
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
            in_flight = _CopyInFlight(store_id=store.store_id, records=RecordDigests(np.empty(0, dtype=np.int64)))
            self._submit(
                self._paths.stores,
                self._begin(in_flight),
                partial(self._store_runs, store, in_flight),
                partial(self._discard, store),
                partial(self._seal, store, in_flight),
            )

    def _begin(self, in_flight: _CopyInFlight) -> JobId:
        job_id = JobId(next(self._job_ids))
        self._in_flight[job_id] = in_flight
        return job_id

    def _submit(
        self,
        engine: CopyEngine,
        job_id: JobId,
        runs: Callable[[], CopyRuns],
        before: Hook,
        after: Hook | None = None,
    ) -> None:
        in_flight, refused = self._in_flight[job_id], None
        try:
            if not engine.submit(job_id, runs, before, after, in_flight.records):
                refused = "the copy queue is full"
                in_flight.failures.append(LoadFailure("busy", refused))
        except Exception as error:  # whatever it was, it is this copy's failure and not the engine's
            logger.exception("a copy could not be submitted")
            refused = f"{type(error).__name__}: {error}"
        if refused is not None:
            self._end(job_id, refused)

    # On the thread that copies, when a job's turn has come.

    def _of_memory(self) -> JobLowering:
        if self._lowering is None:
            memory = RankMemory(self._pages, self._cut, zeros_in(self._zero_memory), self._arena)
            self._lowering = JobLowering(memory)
        return self._lowering

    def _load_runs(self, load: Load) -> CopyRuns:
        try:
            return self._of_memory().load(load.copies)
        except Exception:
            logger.exception("the load of request %s could not be lowered", load.request_id)
            raise

    def _store_runs(self, store: Store, in_flight: _CopyInFlight) -> CopyRuns:
        try:
            lowered = self._of_memory().store(store.copies)
        except Exception:
            logger.exception("a store could not be lowered")
            raise
        if in_flight.records is not None:
            in_flight.records.ends = lowered.ends
        in_flight.zero_bytes = lowered.zero_bytes
        return lowered.runs

    def _check(self, load: Load, in_flight: _CopyInFlight, since_s: float) -> str | None:
        if self._paths.clock() - since_s >= self._paths.load_timeout_s:
            # Not a byte was moved, so the blocks may go to somebody else.
            in_flight.failures.append(LoadFailure("timeout", "the load waited too long for its turn"))
            return in_flight.failures[0].detail
        # Blocks that the engine holds itself have no checksum.
        chunks = [(key, slot) for key, slot, is_local in load.copies.chunks() if not is_local]
        return self._why_failed(in_flight, chunks, self._arena.check_all(chunks))

    def _discard(self, store: Store) -> str | None:
        for chunk in store.copies.chunks():
            self._arena.discard(chunk.slot)
        return None

    def _seal(self, store: Store, in_flight: _CopyInFlight) -> str | None:
        taken = in_flight.records.digests if in_flight.records is not None else None
        chunks = [(key, slot) for key, slot, _ in store.copies.chunks()]
        return self._why_failed(in_flight, chunks, self._arena.seal_all(chunks, taken))

    @staticmethod
    def _why_failed(
        in_flight: _CopyInFlight, chunks: Sequence[tuple[Key, Slot]], failures: Sequence[Failure | None]
    ) -> str | None:
        """Keeps the failure of each chunk. The text of the first; None if there is none."""
        for (key, _), failure in zip(chunks, failures, strict=True):
            if failure is not None:
                in_flight.failures.append(LoadFailure(str(failure.reason), failure.detail, key))
        return in_flight.failures[0].detail if in_flight.failures else None

    def results(self) -> LoadResults:
        """Loads that ended since the last call. Moves between the tiers that ended are in `outcome`."""
        if self._is_idle and (loading := [job_id for job_id, copy in self._in_flight.items() if copy.request_id]):
            self._paths.loads.wait(loading, IDLE_WAIT_S)
        for engine in self._engines:
            for copied in engine.poll():
                in_flight = self._in_flight[copied.job_id]
                num_bytes = copied.num_bytes and copied.num_bytes - in_flight.zero_bytes
                self._recorder.copied(in_flight.store_id is None, copied.seconds, num_bytes)
                self._end(copied.job_id, copied.failure)
        for move, failure, seconds in self._mover.poll():
            self._recorder.moved(move.direction, move.tier, seconds)
            self._outcomes.moved({move.move_id: MoveOutcome(1, failure)})
        return self._outcomes.take_results()

    def _end(self, job_id: JobId, failure: str | None) -> None:
        in_flight = self._in_flight.pop(job_id)
        if in_flight.store_id is not None:
            reason = in_flight.failures[0].reason if in_flight.failures else "io"
            self._outcomes.stored(in_flight.store_id, failure, reason if failure else None)
        elif in_flight.request_id is not None:
            found = tuple(in_flight.failures) or (LoadFailure("io", failure or ""),)
            self._outcomes.loaded(in_flight.request_id, () if failure is None else found)

    def outcome(self) -> StepOutcome | None:
        """What the scheduler must hear, None if nothing."""
        return self._outcomes.take_outcome()

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Ends copies in flight, then gives up the memory they use."""
        for engine in self._engines:
            engine.close()
        if not self._mover.close(drain_s):
            message = "chunks are still on their way to a slower tier after %.0f s; the next start finds what is whole"
            logger.warning(message, drain_s)
        self._arena.close()
