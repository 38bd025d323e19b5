"""Load tracker: lookups and loads of each request, on the scheduler's side.

One lookup covers all groups: the server returns the longest prefix that every group can resume after, and locks it. The
lock is released when the load has ended on every rank. Each request has one lookup. After a failed load that names a
bad chunk, a second lookup covers the chunks before the bad one, and other requests are not offered that prefix for
`DOUBT_S` seconds.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hybridkv.connectors.vllm.common.explain import Explanation, Reason, log
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.load_room import LoadRoom
from hybridkv.connectors.vllm.common.messages import LoadFailure
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK, TrackedRequest
from hybridkv.connectors.vllm.common.stats import LMCACHE, Recorder
from hybridkv.connectors.vllm.lmcache.messages import PageCopy, PageLoad
from hybridkv.lmcache.block_ids import cut_tables
from hybridkv.lmcache.calls import Answer, CallFailure, Trouble
from hybridkv.lmcache.geometry import Geometry
from hybridkv.lmcache.operations import Lookup
from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    PlanError,
    State,
    TokenSpan,
    Transfer,
    chunk_blocks,
    last_boundary,
    plan_load,
)
from hybridkv.planner.admission import Verdict
from hybridkv.planner.stages import MAX_FAILED_LOADS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


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
        geometry: of the stored groups.
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


def load_copies(spec: CacheSpec, transfers: Sequence[Transfer]) -> tuple[PageCopy, ...]:
    """Copies that load these transfers."""
    copies = []
    for transfer in transfers:
        chunk = transfer.end_token // spec.chunk_tokens - 1
        begins = chunk * spec.chunk_tokens // spec.groups[transfer.group_index].block_tokens
        first = chunk_blocks(spec, transfer.group_index, transfer.end_token).start + transfer.first_block - begins
        copies.append(PageCopy(transfer.group_index, chunk, first, transfer.block_ids))
    return tuple(copies)


logger = logging.getLogger("vllm.hybridkv.lmcache")


DOUBT_S = 30.0
"""Seconds during which no other request is offered a prefix with a bad chunk. The chunk is deleted meanwhile."""
MAX_DOUBTED = 4096
"""Maximum number of suspect chunks; the oldest are dropped."""


class Stage(enum.Enum):
    """Stage of a request."""

    NEW = "no lookup yet"
    ASKED = "lookup is open"
    FOUND = "lookup found chunks; the server locks them"
    LOADING = "load is in flight"
    OVER = "nothing more to load"


class Question(NamedTuple):
    """Lookup of a prefix, with the digests of its chunks."""

    digests: tuple[bytes, ...]
    lookup: Lookup


@dataclass(slots=True)
class Life:
    """State of one request."""

    stage: Stage = Stage.NEW
    question: Question | None = None
    known_chunks: int = 0
    """Chunks that the lookup found."""
    limit_chunks: int | None = None
    """Number of chunks before the first bad one, after a failed load."""
    failed_loads: int = 0
    steps_back: bool = False
    """The load has failed, and `matched_tokens` was not called since."""
    reason: Reason = Reason.NOT_STORED
    """Reason of stage `OVER`."""
    detail: str = ""
    is_told: bool = False
    """`matched_tokens` has replied, and the reply is not explained yet."""
    has_waited: bool = False

    @property
    def found_chunks(self) -> int:
        """Chunks that the server locks for this request."""
        ended = self.question.lookup.ended if self.question is not None else None
        return ended.value.num_chunks if isinstance(ended, Answer) else 0


@dataclass(slots=True)
class _LoadInFlight:
    question: Question | None
    """None if no prefix was offered."""
    num_tokens: int
    num_bytes: int
    failures: list[LoadFailure] = field(default_factory=list)


class Lives:
    """Load tracker: the state of each request, from its lookup to the end of its load.

    Args:
        layout: of the engine's groups.
        ask: starts a lookup of chunks, by their digests.
        max_chunks: maximum length of a load, in chunks; limited by the pool of a rank.
        room: admits concurrent loads.
        recorder: metrics.
        clock: seconds.
    """

    def __init__(
        self,
        layout: CacheLayout,
        ask: Callable[[Sequence[bytes]], Lookup],
        max_chunks: int,
        room: LoadRoom,
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self._layout, self._spec = layout, layout.spec
        self._ask = ask
        self.max_chunks = max_chunks
        self._room = room
        self._recorder = recorder
        self._clock = clock
        self._lives: dict[str, Life] = {}
        self._loads: dict[str, _LoadInFlight] = {}
        self._doubted: dict[bytes, float] = {}
        """End of the suspicion of a chunk, in seconds of the clock, by digest; oldest first."""
        stored = self._spec.stored_groups
        self._naming_group = max(stored, key=lambda index: self._spec.groups[index].lookahead_tokens)
        """Index of the group that names chunks: the one with the longest lookahead. A drafter's part of a chunk depends
        on later tokens, so its keys cover more tokens, and one name must hold for all groups."""

    def of(self, tracked: TrackedRequest) -> Life:
        """Returns the state of a request; creates it if needed."""
        return self._lives.setdefault(tracked.request_id, Life())

    def digests(self, tracked: TrackedRequest, num_chunks: int) -> Sequence[bytes]:
        """Digests of the first `num_chunks` chunks. The request must have keys and that many whole chunks."""
        return tracked.keys().between(self._naming_group, 0, num_chunks) if num_chunks else ()

    def ask(self, tracked: TrackedRequest) -> None:
        """Starts the lookup of a request, once. The request must have keys."""
        life = self.of(tracked)
        if life.stage is not Stage.NEW:
            return
        num_chunks = last_boundary(self._spec, tracked.request.num_tokens) // self._spec.chunk_tokens
        life.reason = Reason.NO_BOUNDARY if not num_chunks else Reason.NOT_STORED
        if life.limit_chunks is not None:
            num_chunks = min(num_chunks, life.limit_chunks)
        num_chunks = min(num_chunks, self.max_chunks)
        digests = self.digests(tracked, num_chunks)
        if life.limit_chunks is None:
            digests = digests[: self._num_trusted(digests)]
        if not digests:
            life.stage = Stage.OVER
            return
        try:
            life.question = Question(tuple(digests), self._ask(digests))
        except Exception as error:  # a bug fails this lookup, not the engine
            logger.exception("a lookup at LMCache's server could not start")
            life.stage, life.detail = Stage.OVER, f"{type(error).__name__}: {error}"
        else:
            life.stage = Stage.ASKED

    def hear(self, tracked: TrackedRequest) -> Life:
        """Returns the state of a request after polling its lookup."""
        life = self.of(tracked)
        if life.stage is not Stage.ASKED or life.question is None:
            return life
        lookup = life.question.lookup
        ended = lookup.ended
        if ended is None:
            if self._clock() >= lookup.until_s:
                self._recorder.wait_timeout("lookup")
                self._end(life, Reason.TIMEOUT, "the server did not answer in time")
        elif isinstance(ended, CallFailure):
            if ended.trouble is Trouble.TIMEOUT:
                self._recorder.wait_timeout("lookup")
            reason = Reason.TIMEOUT if ended.trouble is Trouble.TIMEOUT else Reason.NOT_STORED
            self._end(life, reason, str(ended))
        elif not ended.value.num_chunks:
            self._end(life, Reason.FAILED_LOADS if life.failed_loads else Reason.NOT_STORED, "")
        else:
            life.known_chunks, life.stage = ended.value.num_chunks, Stage.FOUND
            if lookup.is_dropped:
                self._end(life, Reason.NOT_TAKEN, "")
        return life

    def matched_tokens(self, tracked: TrackedRequest, computed_tokens: int) -> int | None:
        """Number of tokens beyond `computed_tokens` that can be loaded; None: ask again later.

        After a failed load the first reply is None, so that waiting requests that hold blocks go first.
        """
        life = self.of(tracked)
        if life.steps_back:
            life.steps_back = False
            return None
        tracked.computed_tokens = computed_tokens
        life.is_told = True
        self.ask(tracked)
        life = self.hear(tracked)
        if life.stage is Stage.ASKED:
            return self._while_asked(tracked, life)
        if life.stage is not Stage.FOUND:
            return 0
        boundary = life.found_chunks * self._spec.chunk_tokens
        if boundary <= computed_tokens:
            self._end(life, Reason.PREFIX_ENDS, "the engine's own prefix cache has as many tokens")
            return 0
        if not self._is_still_so(tracked, life):
            self._end(life, Reason.NOT_STORED, "the request's tokens have changed")
            return 0
        if life.limit_chunks is None and self._is_in_doubt(life):
            self._end(life, Reason.NOT_STORED, "another load of this prefix has failed")
            return 0
        verdict = self._room.verdict(tracked.request_id, tracked.request.num_tokens)
        if verdict is Verdict.REFUSE:
            self._end(life, Reason.ENGINE_ROOM, "")
        return boundary - computed_tokens if verdict is Verdict.ADMIT else 0 if verdict is Verdict.REFUSE else None

    def known_chunks(self, tracked: TrackedRequest) -> int | None:
        """Number of chunks that the server has of a running request; None while the lookup is open.

        Releases the locks of the lookup.
        """
        life = self.hear(tracked)
        self.let_go(tracked.request_id)
        return None if life.stage is Stage.ASKED else life.known_chunks

    def let_go(self, request_id: str) -> None:
        """Releases the locks of a request that loads nothing. An open lookup still delivers its result."""
        life = self._lives.get(request_id)
        if life is None or life.question is None:
            return
        if life.stage is Stage.FOUND:
            self._end(life, Reason.NOT_TAKEN, "")
        else:
            life.question.lookup.drop()

    def _while_asked(self, tracked: TrackedRequest, life: Life) -> int | None:
        assert life.question is not None
        if len(life.question.digests) * self._spec.chunk_tokens <= tracked.computed_tokens:
            # Nothing to load. The result only shows which chunks need no store.
            life.reason, life.detail = Reason.NO_BOUNDARY, ""
            return 0
        if not life.has_waited:
            life.has_waited = True
            self._recorder.pending(is_asked=True)
        return None

    def _num_trusted(self, digests: Sequence[bytes]) -> int:
        """Number of leading chunks that are not suspect."""
        doubted, now_s = self._doubted, self._clock()
        while doubted and doubted[oldest := next(iter(doubted))] <= now_s:
            del doubted[oldest]
        if not doubted:
            return len(digests)
        return next((number for number, digest in enumerate(digests) if digest in doubted), len(digests))

    def _is_in_doubt(self, life: Life) -> bool:
        """True if a chunk that the lookup found became suspect since."""
        if not self._doubted or life.question is None:
            return False
        return self._num_trusted(life.question.digests[: life.found_chunks]) < life.found_chunks

    def _doubt(self, digests: Sequence[bytes]) -> None:
        """Marks all chunks of a prefix as suspect, after a load with a bad chunk.

        All of them, because a shorter load reads windows and states that this load did not read, and with
        `kv_load_failure_policy: fail` each further bad chunk would end one more request.
        """
        until_s = self._clock() + DOUBT_S
        for digest in digests[:MAX_DOUBTED]:
            self._doubted.pop(digest, None)
            self._doubted[digest] = until_s
        while len(self._doubted) > MAX_DOUBTED:
            del self._doubted[next(iter(self._doubted))]

    def _is_still_so(self, tracked: TrackedRequest, life: Life) -> bool:
        assert life.question is not None
        num_chunks = life.found_chunks
        boundary = num_chunks * self._spec.chunk_tokens
        if boundary > last_boundary(self._spec, tracked.request.num_tokens):
            return False
        return tracked.keys().key(self._naming_group, boundary) == life.question.digests[num_chunks - 1]

    def _end(self, life: Life, reason: Reason, detail: str) -> None:
        if life.question is not None:
            life.question.lookup.drop()
        life.question = None
        life.stage, life.reason, life.detail = Stage.OVER, reason, detail

    # Loads.

    def on_allocated(self, tracked: TrackedRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> PageLoad | None:
        """Returns the load of the external tokens into the allocated blocks; None if there are none."""
        life = self.of(tracked)
        is_offered = life.stage is Stage.FOUND and life.question is not None
        self._explain(tracked, life, num_external_tokens if is_offered else 0)
        if not num_external_tokens:
            self.let_go(tracked.request_id)
            return None
        boundary, question = tracked.computed_tokens + num_external_tokens, life.question
        table = [[NULL_BLOCK if b.is_null else b.block_id for b in group] for group in blocks.blocks]
        copies: tuple[PageCopy, ...] = ()
        refused = None
        if life.stage is not Stage.FOUND or question is None:
            refused = f"the engine loads up to token {boundary}, but no prefix was offered"
        elif boundary != life.found_chunks * self._spec.chunk_tokens:
            refused = f"the engine loads up to token {boundary}, but another boundary was offered"
        else:
            try:
                copies = load_copies(
                    self._spec, plan_load(self._spec, boundary, tracked.computed_tokens, table, NULL_BLOCK)
                )
            except PlanError as error:
                refused = str(error)
        if refused is not None:
            # The engine waits for this load, so it is sent to the workers, which fail it without a copy.
            logger.error("request %s cannot load %d tokens: %s", tracked.request_id, num_external_tokens, refused)
        num_bytes = sum(len(copy.block_ids) * self._layout.content_bytes(copy.group_index) for copy in copies)
        self._loads[tracked.request_id] = _LoadInFlight(question, num_external_tokens, num_bytes)
        self._room.take(tracked.request_id, tracked.request.num_tokens)
        digests = question.digests[: life.found_chunks] if question is not None else ()
        life.stage, life.question = Stage.LOADING, None
        start = tracked.computed_tokens // self._spec.chunk_tokens
        return PageLoad(tracked.request_id, digests, start, copies, refused)

    def _explain(self, tracked: TrackedRequest, life: Life, num_external_tokens: int) -> None:
        if not life.is_told:
            return
        life.is_told = False
        spec, num_tokens, computed = self._spec, tracked.request.num_tokens, tracked.computed_tokens
        reason = life.reason
        if life.stage is Stage.FOUND:
            boundary = life.found_chunks * spec.chunk_tokens
            reason = Reason.NOT_TAKEN
            if num_external_tokens:
                is_all = boundary >= last_boundary(spec, num_tokens)
                has_room = life.found_chunks < self.max_chunks
                reason = Reason.COMPLETE if is_all else Reason.PREFIX_ENDS if has_room else Reason.TIER_ROOM
        explanation = Explanation(
            request_id=tracked.request_id,
            result="hit" if life.stage is Stage.FOUND else "miss",
            reason=reason,
            num_tokens=num_tokens,
            engine_tokens=computed,
            offered_tokens=num_external_tokens,
            compute_tokens=num_tokens - computed - num_external_tokens,
            source=LMCACHE if life.stage is Stage.FOUND else "",
            asked=True if life.has_waited or life.stage is Stage.FOUND else None,
            detail=life.detail,
        )
        self._recorder.lookup(explanation)
        log(explanation)

    def has_work(self) -> bool:
        return bool(self._loads)

    def on_failures(self, request_id: str, failures: Sequence[LoadFailure]) -> None:
        """Records why a load failed on some rank. `on_ended` follows."""
        if in_flight := self._loads.get(request_id):
            in_flight.failures += failures

    def on_ended(self, request_id: str, tracked: TrackedRequest | None, failed: bool) -> None:
        """Ends a load that all ranks have ended. After a failure, a retry looks up a shorter prefix."""
        in_flight = self._loads.pop(request_id, None)
        if in_flight is None:
            return
        digests = in_flight.question.digests if in_flight.question is not None else ()
        if in_flight.question is not None:
            in_flight.question.lookup.drop()
        num_bytes = in_flight.num_bytes * self._layout.world_size
        self._recorder.load(in_flight.num_tokens, num_bytes, failed, in_flight.failures)
        bad = [digests.index(failure.key) for failure in in_flight.failures if failure.key in digests]
        if bad:
            self._doubt(digests)
        if tracked is None:
            self._room.give_back((request_id,))
            self._lives.pop(request_id, None)
            return
        life = self.of(tracked)
        life.stage, life.reason = Stage.OVER, Reason.FAILED_LOADS
        if not failed:
            return
        tracked.forget_progress()
        self._room.fail(request_id, tracked.request.num_tokens)
        life.failed_loads += 1
        life.steps_back = True
        life.known_chunks = 0
        if bad and life.failed_loads < MAX_FAILED_LOADS:
            life.stage, life.limit_chunks = Stage.NEW, min(bad)
        reasons = "; ".join(sorted({f"{f.reason}: {f.detail}" for f in in_flight.failures})) or "no reason given"
        logger.warning(
            "request %s: a load of %d tokens failed; kv_load_failure_policy applies (%s)",
            request_id,
            in_flight.num_tokens,
            reasons,
        )

    # Ends.

    def restart(self, tracked: TrackedRequest) -> None:
        """Resets a request after a preemption, or if its lookup is void. Keeps the number of failed loads."""
        life = self._lives.pop(tracked.request_id, None)
        if life is None:
            return
        if life.question is not None:
            life.question.lookup.drop()
        stage = Stage.LOADING if life.stage is Stage.LOADING else Stage.NEW
        self._lives[tracked.request_id] = Life(
            stage, limit_chunks=life.limit_chunks, failed_loads=life.failed_loads, steps_back=life.steps_back
        )

    def on_request_finished(self, request_id: str) -> None:
        """Forgets a finished request. A load in flight is tracked to its end."""
        life = self._lives.get(request_id)
        if life is not None and life.question is not None:
            life.question.lookup.drop()
            life.question = None
        if request_id not in self._loads:
            self._lives.pop(request_id, None)
            self._room.give_back((request_id,))

    def close(self) -> None:
        """Releases all locks."""
        for life in self._lives.values():
            if life.question is not None:
                life.question.lookup.drop()
        for in_flight in self._loads.values():
            if in_flight.question is not None:
                in_flight.question.lookup.drop()
        self._lives.clear()
        self._loads.clear()
