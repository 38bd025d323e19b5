"""Loads of requests: lookup, offer, plan, and the end of the load.

`hybridkv.planner.life` decides. This module gathers the facts, runs the errands in the tiers, gives the answers to the
engine and counts them. `LoadsInFlight` plans a load once the engine has given blocks for it, pins all that it reads,
and follows it until every rank has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from hybridkv.connectors.vllm.common.blocks import tables_of
from hybridkv.connectors.vllm.common.copies.table import copies_of, copies_of_runs
from hybridkv.connectors.vllm.common.explain import Admission, Explanation, explain, log
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.lookups import TierLookup, Unasked
from hybridkv.connectors.vllm.common.messages import CopyTable, Load, LoadFailure
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK, TrackedRequest
from hybridkv.connectors.vllm.common.stats import RAM, Recorder
from hybridkv.connectors.vllm.offload.local_blocks import LocalBlocks
from hybridkv.planner import (
    Hit,
    LoadAdmission,
    LocalCopies,
    LookupResult,
    Loss,
    Miss,
    Pending,
    PlanError,
    Transfer,
    TransferRun,
    last_boundary,
    life,
    longest_hit,
    measure_loss,
    needed_parts,
    plan_load_runs,
    transfers_of,
)
from hybridkv.planner.stages import (
    Ask,
    AskAgain,
    Bounds,
    Bring,
    Brought,
    Compute,
    Errand,
    Facts,
    Holding,
    HoldState,
    Offer,
    Release,
    Reply,
    Search,
    Searched,
    Stage,
)
from hybridkv.tiers import FailureReason, Refusal, Slot
from hybridkv.tiers.stack import HoldFailure, TierStack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

logger = logging.getLogger("vllm.hybridkv.scheduler")


_READ_NOTHING = frozenset({"timeout", "busy"})
"""Reasons of loads that failed before they read a byte."""


@dataclass(slots=True)
class _LoadInFlight:
    tracked: TrackedRequest
    boundary: int
    keys: list[bytes]
    num_tokens: int
    num_bytes: int
    """That come from the tiers, on one rank."""
    local_tokens: int = 0
    local_bytes: int = 0
    """That are copied from blocks of the engine, on one rank."""
    source: str = RAM
    """The slowest tier that had a part of it."""
    failures: list[LoadFailure] = field(default_factory=list)


class LoadsInFlight:
    """Plans loads that the engine has given blocks for, and follows them to their end.

    Args:
        layout: the model's groups.
        stack: the tiers.
        admission: which loads may hold blocks at the same time.
        recorder: counts what happens.
        local: blocks of the engine that loads may copy from; none where it is left out.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        admission: LoadAdmission,
        recorder: Recorder,
        local: LocalBlocks | None = None,
    ) -> None:
        self._layout = layout
        self._local = local or LocalBlocks(layout, is_wanted=False)
        self._stack = stack
        self._admission = admission
        self._recorder = recorder
        self._loads: dict[str, _LoadInFlight] = {}

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The engine's blocks."""
        self._local.bind(pool)

    def begin(self, tracked: TrackedRequest, boundary: int, blocks: KVCacheBlocks) -> Load:
        """The load up to a boundary, into blocks that the engine has given the request, with all that it reads pinned.
        One that cannot be is refused: it fails without a byte moved."""
        load, in_flight = self._plan(tracked, boundary, blocks)
        self._loads[tracked.request_id] = in_flight
        self._admission.take(tracked.request_id, tracked.request.num_tokens)
        return load

    def local_tokens(self, request_id: str) -> int:
        """How many tokens of its load are copied from blocks of the engine."""
        return self._loads[request_id].local_tokens

    def _plan(self, tracked: TrackedRequest, boundary: int, blocks: KVCacheBlocks) -> tuple[Load, _LoadInFlight]:
        request_id, computed = tracked.request_id, tracked.computed_tokens
        table = tables_of(blocks.blocks)
        hold = self._stack.hold(request_id)
        source = RAM if hold is None else hold.source
        in_flight = _LoadInFlight(tracked, boundary, [], boundary - computed, 0, source=source)
        try:
            runs = plan_load_runs(self._layout.spec, boundary, computed, table, NULL_BLOCK)
            local = self._local.find(tracked, runs, computed)
            load = Load(request_id, self._pin(tracked, runs, local, in_flight))
        except PlanError as error:
            # The engine waits for this load, so it is told that it failed; nothing was written.
            self._stack.unpin_all(in_flight.keys)
            in_flight.keys.clear()
            logger.error("request %s cannot load %d tokens: %s", request_id, in_flight.num_tokens, error)
            load = Load(request_id, CopyTable(), str(error))
        return load, in_flight

    def _pin(
        self, tracked: TrackedRequest, runs: Sequence[TransferRun], local: LocalCopies | None, in_flight: _LoadInFlight
    ) -> CopyTable:
        """The copies, with every chunk pinned in its tier, also those that are copied from elsewhere: they are in use
        as much as the others, and what cannot be copied from there after all is read from here."""
        wanted = self._keys_of(tracked, runs)
        slots = self._stack.pin_all(wanted)
        if slots is None:
            raise PlanError(self._what_is_missing(runs, wanted))
        if self._stack.has_late:
            self._require_sizes(runs, wanted, slots)
        in_flight.keys += wanted
        if local is None:
            planned = copies_of_runs(self._layout, runs, wanted, slots)
        else:
            in_flight.local_tokens = local.num_tokens
            planned = copies_of(self._layout, self._transfers(runs), wanted, slots, local)
            self._local.pin(tracked.request_id, local)
        in_flight.num_bytes += planned.tier_bytes
        in_flight.local_bytes += planned.local_bytes
        return planned.copies

    def _transfers(self, runs: Sequence[TransferRun]) -> tuple[Transfer, ...]:
        return transfers_of(runs, self._layout.spec.chunk_tokens)

    def _keys_of(self, tracked: TrackedRequest, runs: Sequence[TransferRun]) -> list[bytes]:
        keys, chunk = tracked.keys(), self._layout.spec.chunk_tokens
        wanted: list[bytes] = []
        for group_index, of_group in groupby(runs, key=attrgetter("group_index")):
            wanted += keys.ending_at(group_index, [end for run in of_group for end in run.end_tokens(chunk)])
        return wanted

    def _require_sizes(self, runs: Sequence[TransferRun], keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Refuses, and withdraws everywhere, chunks of another length than theirs: a tier elsewhere was believed what
        it said of them, and the next request would meet them again.

        Raises:
            PlanError: there is one. None of the chunks is pinned any more.
        """
        size = self._layout.chunk_bytes
        bad = [
            (key, slot.num_bytes)
            for part, key, slot in zip(self._transfers(runs), keys, slots, strict=True)
            if slot.num_bytes != size(part.group_index, part.end_token)
        ]
        if bad:
            self._stack.unpin_all(keys)
            for key, _ in bad:
                self._stack.invalidate(key, FailureReason.WRONG_KEY)
            raise PlanError(
                f"{len(bad)} of its chunks have another length, as {bad[0][0].hex()} with {bad[0][1]} bytes"
            )

    def _what_is_missing(self, runs: Sequence[TransferRun], keys: Sequence[bytes]) -> str:
        lookup = self._stack.lookup_near
        for part, key in zip(self._transfers(runs), keys, strict=True):
            if lookup(key) is not LookupResult.HIT:
                return f"the chunk of group {part.group_index} that ends at {part.end_token} is not stored"
        return "the fast tier pins none of its chunks"

    def from_tiers_alone(self, loads: Iterable[Load]) -> list[Load]:
        """The same loads, each of which reads all of its chunks from the tier. So does every later one: who loads for
        the pass that is to come may fail, and blocks that were to hold it have their hashes for a while."""
        self._local.switch_off()
        return [self._from_tiers(load) for load in loads]

    def without_wrong_blocks(self, loads: Iterable[Load], is_wrong: Callable[[int], bool]) -> list[Load]:
        """The same loads, but for those that would copy from a block which turned out to be wrong when the step was
        planned: these read all of their chunks from the tier."""
        return [self._from_tiers(load) if any(map(is_wrong, load.copies.local_blocks())) else load for load in loads]

    def _from_tiers(self, load: Load) -> Load:
        in_flight = self._loads[load.request_id]
        in_flight.num_bytes, in_flight.local_bytes = in_flight.num_bytes + in_flight.local_bytes, 0
        in_flight.local_tokens = 0
        self._local.free(load.request_id)
        return msgspec.structs.replace(load, copies=load.copies.from_tier())

    def has_work(self) -> bool:
        return bool(self._loads)

    def holds_freed_blocks(self) -> bool:
        """Whether a load that ends will give blocks back to the engine's pool."""
        return self._local.holds_freed_blocks()

    def close(self) -> None:
        """Gives back what is still pinned in the engine's pool."""
        self._local.close()

    # What the workers report.

    def on_failures(self, request_id: str, failures: Iterable[LoadFailure]) -> None:
        """Why a load failed on some rank; that it ended comes by `on_ended`."""
        if in_flight := self._loads.get(request_id):
            in_flight.failures += failures

    def on_ended(self, request_id: str, tracked: TrackedRequest | None, failed: bool) -> None:
        """A load has ended on every rank. After a failure the request's retry asks for less."""
        in_flight = self._loads.pop(request_id, None)
        if in_flight is None:
            return
        if tracked is None:
            self._admission.give_back(request_id)
        culprits = {failure.key for failure in in_flight.failures if failure.key is not None}
        for key in self._in_doubt(in_flight, culprits):
            self._stack.withdraw(key)
        self._stack.unpin_all(reversed(in_flight.keys))
        self._local.free(request_id)
        num_ranks = self._layout.world_size
        self._recorder.load(in_flight.num_tokens, in_flight.num_bytes * num_ranks, failed, in_flight.failures)
        if not failed:
            self._recorder.local(in_flight.source, in_flight.local_tokens, in_flight.local_bytes * num_ranks)
        if tracked is not None:
            tracked.load_ended(failed=failed, is_explained=bool(culprits))
        if failed and tracked is not None:
            self._admission.fail(request_id, tracked.request.num_tokens)
            reasons = "; ".join(sorted({f"{f.reason}: {f.detail}" for f in in_flight.failures})) or "no reason given"
            logger.warning(
                "request %s: loading %d tokens failed; kv_load_failure_policy says what becomes of it (%s)",
                request_id,
                in_flight.num_tokens,
                reasons,
            )

    def _in_doubt(self, in_flight: _LoadInFlight, culprits: set[bytes]) -> Iterable[bytes]:
        """Keys of the fast tier that nobody may be offered after a load, since with `kv_load_failure_policy: fail` each
        further damaged chunk would end one more request.

        Where chunks are to blame, that is the prefix up to the boundary, but for chunks that every rank has verified: a
        shorter load would read windows and states that this one did not. Where none is, all that the load read.
        """
        if not culprits:
            has_read = any(failure.reason not in _READ_NOTHING for failure in in_flight.failures)
            return in_flight.keys if has_read else ()
        doubted = culprits | set(self._prefix_keys(in_flight))
        # A rank that names no chunk has checked none. Chunks that are copied from the engine's blocks are not checked.
        if not in_flight.local_bytes and all(failure.key is not None for failure in in_flight.failures):
            doubted -= set(in_flight.keys) - culprits
        else:
            doubted |= set(in_flight.keys)
        return [key for key in doubted if self._stack.in_near(key)]

    def _prefix_keys(self, in_flight: _LoadInFlight) -> list[bytes]:
        """The keys of all groups up to the boundary of a load."""
        tracked, step = in_flight.tracked, self._layout.spec.boundary_tokens
        if tracked.kept_keys is None:
            return []
        keys, ends = tracked.keys(), range(step, min(in_flight.boundary, tracked.request.num_tokens) + 1, step)
        return [key for group in self._layout.spec.stored_groups for key in keys.ending_at(group, ends)]

    def on_gone(self, request_id: str) -> None:
        """The request has ended. A load of it that is on its way ends by itself."""
        if request_id not in self._loads:
            self._admission.give_back(request_id)


# CPython 3.11 takes longer to look a member up than for most else of a question.
_READY, _WAITING = HoldState.READY, HoldState.WAITING
_FAILED_HOLDS = {HoldFailure.TIMEOUT: HoldState.LATE, HoldFailure.LOST: HoldState.LOST}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a request waits, in seconds from its first wait.

    Args:
        lookup_s: for chunks that are being stored.
        load_s: for slower tiers.
        clock: what time it is.
        tokens_per_s: what the engine computes meanwhile.
    """

    lookup_s: float
    load_s: float
    clock: Callable[[], float]
    tokens_per_s: float = 10_000.0


class LoadPlanner:
    """Answers what can be loaded.

    Args:
        layout: the model's groups.
        stack: the tiers.
        admission: which loads may hold blocks at the same time.
        deadlines: how long a request waits.
        recorder: counts what happens.
        in_flight: takes what begins to be loaded.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        admission: LoadAdmission,
        deadlines: Deadlines,
        recorder: Recorder,
        in_flight: LoadsInFlight,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._admission = admission
        self._clock = deadlines.clock
        self._bounds = Bounds(deadlines.lookup_s, deadlines.load_s, tokens_per_s=deadlines.tokens_per_s)
        self._recorder = recorder
        self._has_slower, self._has_late = bool(stack.slower), stack.has_late
        self._pool: BlockPool | None = None
        self._in_flight = in_flight

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The pool that loads take their blocks from."""
        self._pool = pool

    # What the engine asks before it admits a request.

    def matched_tokens(self, tracked: TrackedRequest, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded, or None to be asked again."""
        tracked.follow()
        tracked.computed_tokens = computed_tokens
        facts = self._facts(tracked)
        stage, step = life.resume(tracked.stage, facts, self._bounds)
        while True:
            if type(step) is Offer:
                tracked.stage, tracked.told = stage, step
                return step.num_tokens
            if type(step) is AskAgain:
                tracked.stage, tracked.told = stage, step
                return None
            if type(step) is Compute:
                tracked.stage, tracked.told = stage, step
                if facts.hold is not None or type(stage) is Holding:
                    self._stack.release(tracked.request_id)
                return 0
            stage, facts, step = self._run(tracked, stage, facts, step)

    def _facts(self, tracked: TrackedRequest) -> Facts:
        """What is so now."""
        num_tokens, hold = tracked.request.num_tokens, self._stack.hold(tracked.request.request_id)
        generation, held, room = 0, None, None
        if hold is None:
            generation = self._stack.generation
        elif hold.failure is not None:
            held = _FAILED_HOLDS[hold.failure]
        else:
            held = _WAITING if hold.waiting else _READY
        if not self._admission.is_idle:
            pool_blocks, free_blocks = 0, 0
            if self._pool is not None:
                pool_blocks, free_blocks = self._pool.num_gpu_blocks - 1, self._pool.get_num_free_blocks()
            room = self._admission.room(tracked.request_id, num_tokens, pool_blocks, free_blocks)
        ask_s = self._stack.ask_s if self._has_late else 0.0
        return Facts(
            num_tokens, tracked.computed_tokens, generation, self._clock(), self._has_slower, held, room, ask_s
        )

    def _run(
        self, tracked: TrackedRequest, stage: Stage, facts: Facts, errand: Errand
    ) -> tuple[Stage, Facts, Reply | Errand]:
        """Does what must be done first, and tells of it."""
        match errand:
            case Search():
                answer = self._search(tracked, stage, errand, facts.now_s)
                settled = self._settled(tracked, errand) if self._has_late and type(answer) is Pending else None
                stage, step = life.searched(stage, facts, self._bounds, errand, answer, settled)
            case Ask(limit_tokens):
                self.ask(tracked, limit_tokens)
                facts = self._facts(tracked)
                stage, step = life.asked(stage, facts, self._bounds, errand)
            case Bring():
                outcome = self._bring(tracked, errand)
                stage, step = life.brought(stage, facts, self._bounds, errand, outcome)
            case Release(is_late):
                if is_late:
                    self._tell_late(tracked.request_id)
                self._stack.release(tracked.request_id)
                facts = self._facts(tracked)
                stage, step = life.resume(stage, facts, self._bounds)
        return stage, facts, step

    def _tell_late(self, request_id: str) -> None:
        self._recorder.wait_timeout("load")
        hold = self._stack.hold(request_id)
        why = "they had no time for it" if hold is None else f"{hold.source} did not answer in time"
        logger.warning("request %s goes without slower tiers: %s", request_id, why)

    # Where it can resume.

    def _search(self, tracked: TrackedRequest, stage: Stage, errand: Search, now_s: float) -> Hit | Pending | Miss:
        if errand.is_last:
            self._recorder.wait_timeout("lookup")
        answer = self._longest_hit(tracked, errand)
        if type(answer) is Pending and not (type(stage) is Searched and type(stage.answer) is Pending):
            asked_until_s = stage.past.asked_until_s
            self._recorder.pending(is_asked=asked_until_s is not None and now_s < asked_until_s)
        return answer

    def _longest_hit(self, tracked: TrackedRequest, errand: Search) -> Hit | Pending | Miss:
        near_only = errand.near_only
        tiers = self._stack if self._has_slower and not near_only else self._stack.only_near
        lookup = TierLookup(tracked.keys(), tiers, errand.is_last or near_only)
        return longest_hit(self._layout.spec, errand.limit_tokens, tracked.computed_tokens, lookup, lookup)

    def _settled(self, tracked: TrackedRequest, errand: Search) -> Hit | Pending | Miss:
        """What is found where nothing counts of which a tier was only asked."""
        lookup = TierLookup(tracked.keys(), Unasked(self._stack))
        return longest_hit(self._layout.spec, errand.limit_tokens, tracked.computed_tokens, lookup, lookup)

    def ask(self, tracked: TrackedRequest, limit_tokens: int) -> None:
        """Every chunk beyond what the engine holds: the first of all groups, then the second of all groups, and so on.

        As much is asked as may be: where that ends, what was asked is a beginning at which all groups may resume. Of
        windows and states too, though a resume reads only their last ones: at which boundary is to be found out.
        Of tails, whose keys are many, only those behind the last chunk: where the request was stored itself.
        """
        spec, keys = self._layout.spec, tracked.keys()
        last = last_boundary(spec, limit_tokens)
        first, stop = tracked.computed_tokens // spec.chunk_tokens, last // spec.chunk_tokens
        asked: list[bytes] = []
        if first < stop:
            by_group = [keys.between(group, first, stop) for group in spec.stored_groups]
            asked = [key for chunk in zip(*by_group, strict=True) for key in chunk]
        if stop * spec.chunk_tokens < last:
            behind = max(stop * spec.chunk_tokens, tracked.computed_tokens)
            ends = range(last, behind, -spec.boundary_tokens)
            asked += [keys.key(group, end) for end in ends for group in spec.stored_groups]
        if asked:
            self._stack.ask(asked)

    def _bring(self, tracked: TrackedRequest, errand: Bring) -> Brought:
        keys = tracked.keys()
        needed = [keys.key(*part) for part in needed_parts(self._layout.spec, errand.boundary, tracked.computed_tokens)]
        if all(self._stack.in_near(key) for key in needed):
            return Brought.NEAR
        if not errand.has_time:
            return Brought.BUSY
        hold = self._stack.acquire(tracked.request_id, needed, errand.since_s)
        if isinstance(hold, Refusal):
            return Brought.NO_ROOM if hold in (Refusal.NO_ROOM, Refusal.TOO_LARGE) else Brought.BUSY
        return Brought.READY if hold.is_ready else Brought.HELD

    # What the engine makes of the answer.

    def on_allocated(self, tracked: TrackedRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> Load | None:
        """The engine has given the request blocks; the load of its external tokens into them."""
        request_id = tracked.request_id
        # A request that goes on where it is was not looked up again, whatever is known of it.
        answer = None if tracked.told is None else life.answer_of(tracked.stage)
        explained = None
        if answer is not None and not isinstance(answer, Pending):
            explained = self._explain(tracked, answer, num_external_tokens)
        boundary = tracked.computed_tokens + num_external_tokens if num_external_tokens else None
        tracked.stage, tracked.told = life.allocated(tracked.stage, boundary), None
        load = None
        if boundary is not None:
            load = self._in_flight.begin(tracked, boundary, blocks)
            if explained is not None:
                local_tokens = self._in_flight.local_tokens(request_id)
                explained = msgspec.structs.replace(explained, local_tokens=local_tokens)
        self._stack.release(request_id)
        if explained is not None:
            self._recorder.lookup(explained)
            log(explained)
        return load

    def loss(self, tracked: TrackedRequest) -> Loss | None:
        """What the request's hit could have been, if it is known where it resumes. Measured once for each answer."""
        answer, computed = life.answer_of(tracked.stage), tracked.computed_tokens
        if answer is None or isinstance(answer, Pending):
            return None
        known = tracked.measured
        if known is not None and known[0] is answer and known[1] == computed:
            return known[2]
        lookup = TierLookup(tracked.keys(), self._stack.only_near if tracked.stage.past.near_only else self._stack)
        resumed = max(answer.num_tokens, computed) if isinstance(answer, Hit) else computed
        limit = self._limit(tracked)
        loss = measure_loss(self._layout.spec, limit, computed, resumed, lookup, lookup)
        tracked.measured = (answer, computed, loss)
        return loss

    def _limit(self, tracked: TrackedRequest) -> int:
        return max(life.limit_tokens(tracked.stage, tracked.request.num_tokens), tracked.computed_tokens)

    def _explain(self, tracked: TrackedRequest, answer: Hit | Miss, num_external_tokens: int) -> Explanation:
        """Why the request loads so much and no more."""
        loss = self.loss(tracked)
        assert loss is not None, "there is an answer"
        hold = self._stack.hold(tracked.request_id)
        source = RAM if hold is None else hold.source
        asked = None
        if self._stack.has_late and (self._stack.ask_s or tracked.stage.past.asked_until_s is not None):
            asked = tracked.stage.past.asked_until_s is not None
        admission = Admission(answer, self._limit(tracked), num_external_tokens, loss, source, asked)
        return explain(self._layout.spec, tracked, admission)

    def on_gone(self, request_id: str) -> None:
        """The request has ended."""
        self._stack.release(request_id)
        self._in_flight.on_gone(request_id)
