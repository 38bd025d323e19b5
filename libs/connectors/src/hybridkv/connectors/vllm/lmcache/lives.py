"""What a request can load from a server, when, and what becomes of it.

One question for all groups: the server answers with the longest prefix behind which every group can be resumed, and
keeps it until it is given back. It is kept until the load has ended on every rank, so what was promised stays.
A request is asked about once; after a failed load that names a chunk, once more for what lies before that chunk. Other
requests are not offered that prefix for a while.
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
    """Block ids of each stored group, by its place among the stored ones, as far as `num_tokens` fill them.

    Running states move in their table, so that of a group of states says nothing: it is all null.
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
    """The pages of whole objects in a run of chunks.

    Args:
        geometry: of the stored groups.
        group_indexes: the engine's, of each of them.
        tables: block ids of each, from token 0.
        span: whole chunks, of which every group has a table.
        separate: whether the server keeps windows and states apart from whole attention.
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
    """Of a group's blocks in one of the chunks, those that a server keeps."""
    per_chunk, kept = geometry.blocks_per_chunk[place], geometry.kept_per_chunk[place]
    end = (chunk + 1) * per_chunk
    return tuple(blocks[end - kept : end])


def state_copies(spec: CacheSpec, states: Sequence[State], num_tokens: int) -> list[PageCopy]:
    """The pages of states that lie at the end of a chunk whose tokens are final, where all groups of states have one
    there: a server keeps them together."""
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
    """What a resume needs, page by page."""
    copies = []
    for transfer in transfers:
        chunk = transfer.end_token // spec.chunk_tokens - 1
        begins = chunk * spec.chunk_tokens // spec.groups[transfer.group_index].block_tokens
        first = chunk_blocks(spec, transfer.group_index, transfer.end_token).start + transfer.first_block - begins
        copies.append(PageCopy(transfer.group_index, chunk, first, transfer.block_ids))
    return tuple(copies)


logger = logging.getLogger("vllm.hybridkv.lmcache")


DOUBT_S = 30.0
"""How long other requests are not offered a prefix over which a load failed. Its bad chunks are deleted meanwhile."""
MAX_DOUBTED = 4096
"""Chunks that are in doubt at one time; of more the oldest are forgotten."""


class Stage(enum.Enum):
    """How far a request is with what the server has."""

    NEW = "nobody was asked"
    ASKED = "the server was asked"
    FOUND = "the server keeps what it found"
    LOADING = "it has blocks, into which it loads"
    OVER = "it loads nothing more"


class Question(NamedTuple):
    """A prefix that the server was asked for, by the digests that name its chunks."""

    digests: tuple[bytes, ...]
    lookup: Lookup


@dataclass(slots=True)
class Life:
    """One request. Times are seconds of the connector's clock."""

    stage: Stage = Stage.NEW
    question: Question | None = None
    known_chunks: int = 0
    """That the server had, when it was asked."""
    limit_chunks: int | None = None
    """A load failed over the chunk behind these."""
    failed_loads: int = 0
    steps_back: bool = False
    """Its load has failed, and the engine has not asked since."""
    reason: Reason = Reason.NOT_STORED
    """Why it loads no more."""
    detail: str = ""
    is_told: bool = False
    """The engine was told something that it has not acted on."""
    has_waited: bool = False

    @property
    def found_chunks(self) -> int:
        """That are kept for it."""
        ended = self.question.lookup.ended if self.question is not None else None
        return ended.value.num_chunks if isinstance(ended, Answer) else 0


@dataclass(slots=True)
class _LoadInFlight:
    question: Question | None
    """None where nothing was offered."""
    num_tokens: int
    num_bytes: int
    failures: list[LoadFailure] = field(default_factory=list)


class Lives:
    """Loads by request.

    Args:
        layout: of the engine's groups.
        ask: looks chunks up at the server, by their digests.
        max_chunks: that a request may load: as many as have room on their way.
        room: for loads, beside each other.
        recorder: counts what happens.
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
        """Until when a chunk is in doubt, by its digest."""
        stored = self._spec.stored_groups
        self._naming_group = max(stored, key=lambda index: self._spec.groups[index].lookahead_tokens)
        """Whose keys name chunks. What a drafter keeps of a chunk depends on tokens behind it, so its keys name more
        than others do, and one name must be true of all groups."""

    def of(self, tracked: TrackedRequest) -> Life:
        """What is known of a request."""
        return self._lives.setdefault(tracked.request_id, Life())

    def digests(self, tracked: TrackedRequest, num_chunks: int) -> Sequence[bytes]:
        """What names the first chunks of a request. It has keys, and so many whole chunks."""
        return tracked.keys().between(self._naming_group, 0, num_chunks) if num_chunks else ()

    def ask(self, tracked: TrackedRequest) -> None:
        """Ask the server, if it was not asked. It has keys."""
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
        except Exception as error:  # a bug costs this question, and not the engine
            logger.exception("LMCache's server could not be asked")
            life.stage, life.detail = Stage.OVER, f"{type(error).__name__}: {error}"
        else:
            life.stage = Stage.ASKED

    def hear(self, tracked: TrackedRequest) -> Life:
        """A request, with its answer if there is one."""
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
        """Tokens beyond `computed_tokens` that can be loaded, or None to be asked again.

        A request whose load has failed is passed over once, for those behind it that hold blocks.
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
            self._end(life, Reason.PREFIX_ENDS, "the engine holds as much")
            return 0
        if not self._is_still_so(tracked, life):
            self._end(life, Reason.NOT_STORED, "the request has other tokens by now")
            return 0
        if life.limit_chunks is None and self._is_in_doubt(life):
            self._end(life, Reason.NOT_STORED, "a load of this prefix has failed since")
            return 0
        verdict = self._room.verdict(tracked.request_id, tracked.request.num_tokens)
        if verdict is Verdict.REFUSE:
            self._end(life, Reason.ENGINE_ROOM, "")
        return boundary - computed_tokens if verdict is Verdict.ADMIT else 0 if verdict is Verdict.REFUSE else None

    def known_chunks(self, tracked: TrackedRequest) -> int | None:
        """What the server had of a request that runs; None as long as it may still say so. Nothing is kept for it."""
        life = self.hear(tracked)
        self.let_go(tracked.request_id)
        return None if life.stage is Stage.ASKED else life.known_chunks

    def let_go(self, request_id: str) -> None:
        """The request loads nothing now: what the server locks for it is given back. What it says is still heard."""
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
            # There is nothing to wait for; the answer says what need not be stored.
            life.reason, life.detail = Reason.NO_BOUNDARY, ""
            return 0
        if not life.has_waited:
            life.has_waited = True
            self._recorder.pending(is_asked=True)
        return None

    def _num_trusted(self, digests: Sequence[bytes]) -> int:
        """How many chunks, from the first, are not in doubt."""
        doubted, now_s = self._doubted, self._clock()
        while doubted and doubted[oldest := next(iter(doubted))] <= now_s:
            del doubted[oldest]
        if not doubted:
            return len(digests)
        return next((number for number, digest in enumerate(digests) if digest in doubted), len(digests))

    def _is_in_doubt(self, life: Life) -> bool:
        """Whether a load has failed over a chunk that was found for a request."""
        if not self._doubted or life.question is None:
            return False
        return self._num_trusted(life.question.digests[: life.found_chunks]) < life.found_chunks

    def _doubt(self, digests: Sequence[bytes]) -> None:
        """A load of this prefix met a bad chunk. All of it is in doubt: a shorter load reads windows and states that
        this one did not, and with `kv_load_failure_policy: fail` each further bad chunk would end one more request."""
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
        """The engine has given the request blocks; the load of its external tokens into them."""
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
            refused = f"the engine loads up to token {boundary}, and was offered nothing"
        elif boundary != life.found_chunks * self._spec.chunk_tokens:
            refused = f"the engine loads up to token {boundary}, and was offered another boundary"
        else:
            try:
                copies = load_copies(
                    self._spec, plan_load(self._spec, boundary, tracked.computed_tokens, table, NULL_BLOCK)
                )
            except PlanError as error:
                refused = str(error)
        if refused is not None:
            # The engine waits for this load, so it is told that it failed; nothing was written.
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
        """Why a load failed on some rank; that it ended comes by `on_ended`."""
        if in_flight := self._loads.get(request_id):
            in_flight.failures += failures

    def on_ended(self, request_id: str, tracked: TrackedRequest | None, failed: bool) -> None:
        """A load has ended on every rank. After a failure the request's retry asks for less."""
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
            "request %s: loading %d tokens failed; kv_load_failure_policy says what becomes of it (%s)",
            request_id,
            in_flight.num_tokens,
            reasons,
        )

    # Ends.

    def restart(self, tracked: TrackedRequest) -> None:
        """The engine starts this request over, or what was known of it holds no more."""
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
        """The request has ended. A load that is under way is followed to its end."""
        life = self._lives.get(request_id)
        if life is not None and life.question is not None:
            life.question.lookup.drop()
            life.question = None
        if request_id not in self._loads:
            self._lives.pop(request_id, None)
            self._room.give_back((request_id,))

    def close(self) -> None:
        """Give everything back."""
        for life in self._lives.values():
            if life.question is not None:
                life.question.lookup.drop()
        for in_flight in self._loads.values():
            if in_flight.question is not None:
                in_flight.question.lookup.drop()
        self._lives.clear()
        self._loads.clear()
