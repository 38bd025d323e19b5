"""Load tracker: lookups and loads of each request, in the scheduler's half.

One lookup covers all groups: the server returns the longest prefix that every group can resume after, and locks it. The
lock is released when the load has ended on every rank, or when the request will load nothing. Each request has one
lookup, and another after `restart`. After a failed load that names a bad chunk, another lookup covers the chunks before
the bad chunk, and other requests are not offered the prefix of the failed load for `SUSPECT_S` seconds.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hybridkv.connectors.errors import printable
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.common.explain import Explanation, LookupReason, log
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import LoadFailure
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK, TrackedRequest
from hybridkv.connectors.vllm.common.stats import LMCACHE, ConnectorMetrics
from hybridkv.connectors.vllm.lmcache.messages import PageCopy, PageLoad
from hybridkv.lmcache.calls import CallAnswer, CallFailure, CallFailureReason
from hybridkv.lmcache.operations import LookupHandle
from hybridkv.planner import (
    CacheSpec,
    PlanError,
    Transfer,
    chunk_blocks,
    last_boundary,
    plan_load,
)
from hybridkv.planner.admission import Verdict
from hybridkv.planner.stages import MAX_FAILED_LOADS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


def load_copies(spec: CacheSpec, transfers: Sequence[Transfer]) -> tuple[PageCopy, ...]:
    """Page copies for the transfers of a load."""
    copies = []
    for transfer in transfers:
        chunk = transfer.end_token // spec.chunk_tokens - 1
        begins = chunk * spec.chunk_tokens // spec.groups[transfer.group_index].block_tokens
        first = chunk_blocks(spec, transfer.group_index, transfer.end_token).start + transfer.first_block - begins
        copies.append(PageCopy(transfer.group_index, chunk, first, transfer.block_ids))
    return tuple(copies)


logger = logging.getLogger("vllm.hybridkv.lmcache")


SUSPECT_S = 30.0
"""Seconds during which no other request is offered a chunk of a prefix with a bad chunk. The bad chunk is deleted
meanwhile."""
MAX_SUSPECTS = 4096
"""Maximum number of suspect chunks; the oldest are dropped."""


class LoadStage(enum.Enum):
    """Stage of a request."""

    NEW = "no lookup yet"
    LOOKUP = "lookup is open"
    FOUND = "lookup found chunks; the server locks them"
    LOADING = "load is in flight"
    DONE = "nothing more to load"


class PrefixLookup(NamedTuple):
    """Lookup of a prefix, with the digests of its chunks."""

    digests: tuple[bytes, ...]
    lookup: LookupHandle


@dataclass(slots=True)
class RequestLoad:
    """State of one request."""

    stage: LoadStage = LoadStage.NEW
    prefix: PrefixLookup | None = None
    known_chunks: int = 0
    """Chunks that the lookup found; kept after the locks are released. 0 after a failed load."""
    limit_chunks: int | None = None
    """Number of chunks before the first bad one, after a failed load."""
    failed_loads: int = 0
    reason: LookupReason = LookupReason.NOT_STORED
    """Reason of stage `DONE`."""
    detail: str = ""
    has_reply: bool = False
    """`matched_tokens` has replied, and the reply is not explained yet."""
    has_waited: bool = False

    @property
    def found_chunks(self) -> int:
        """Chunks that the server locks for this request."""
        ended = self.prefix.lookup.ended if self.prefix is not None else None
        return ended.value.num_chunks if isinstance(ended, CallAnswer) else 0


@dataclass(slots=True)
class _LMCacheLoad:
    prefix: PrefixLookup | None
    """None if no prefix was offered."""
    num_tokens: int
    num_bytes: int
    failures: list[LoadFailure] = field(default_factory=list)


class LoadTracker:
    """Load tracker: the state of each request, from its lookup to the end of its load.

    Args:
        layout: layout of the engine's groups.
        lookup: starts a lookup of chunks, by their digests.
        max_chunks: maximum length of a load, in chunks; limited by the pool of a rank.
        room: admits concurrent loads.
        metrics: the connector's metrics.
        clock: time in seconds.
    """

    def __init__(
        self,
        layout: CacheLayout,
        lookup: Callable[[Sequence[bytes]], LookupHandle],
        max_chunks: int,
        room: LoadRoom,
        metrics: ConnectorMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._layout, self._spec = layout, layout.spec
        self._lookup = lookup
        self.max_chunks = max_chunks
        self._room = room
        self._metrics = metrics
        self._clock = clock
        self._requests: dict[str, RequestLoad] = {}
        self._loads: dict[str, _LMCacheLoad] = {}
        self._suspects: dict[bytes, float] = {}
        """Time until which a chunk is suspect, in seconds of the clock, by digest; oldest first."""
        stored = self._spec.stored_groups
        self._key_group = max(stored, key=lambda index: self._spec.groups[index].lookahead_tokens)
        """Index of the group with the keys that name chunks: the group with the longest lookahead. One name must
        identify the parts of all groups, and a drafter's part of a chunk depends on later tokens too."""

    def get(self, tracked: TrackedRequest) -> RequestLoad:
        """Returns the state of a request; creates it if needed."""
        return self._requests.setdefault(tracked.request_id, RequestLoad())

    def digests(self, tracked: TrackedRequest, num_chunks: int) -> Sequence[bytes]:
        """Digests of the first `num_chunks` chunks. The request must have keys and that many whole chunks."""
        return tracked.keys().between(self._key_group, 0, num_chunks) if num_chunks else ()

    def start_lookup(self, tracked: TrackedRequest) -> None:
        """Starts the lookup of a request in stage NEW. Without chunks to look up, the stage becomes DONE. The request
        must have keys."""
        state = self.get(tracked)
        if state.stage is not LoadStage.NEW:
            return
        num_chunks = last_boundary(self._spec, tracked.request.num_tokens) // self._spec.chunk_tokens
        state.reason = LookupReason.NO_BOUNDARY if not num_chunks else LookupReason.NOT_STORED
        if state.limit_chunks is not None:
            num_chunks = min(num_chunks, state.limit_chunks)
        num_chunks = min(num_chunks, self.max_chunks)
        digests = self.digests(tracked, num_chunks)
        if state.limit_chunks is None:
            digests = digests[: self._num_unsuspected(digests)]
        if not digests:
            state.stage = LoadStage.DONE
            return
        try:
            state.prefix = PrefixLookup(tuple(digests), self._lookup(digests))
        except Exception as error:  # a bug fails this lookup, not the engine
            logger.exception("a lookup at LMCache's server could not start")
            state.stage, state.detail = LoadStage.DONE, f"{type(error).__name__}: {error}"
        else:
            state.stage = LoadStage.LOOKUP

    def poll_lookup(self, tracked: TrackedRequest) -> RequestLoad:
        """Returns the state of a request after polling its lookup."""
        state = self.get(tracked)
        if state.stage is not LoadStage.LOOKUP or state.prefix is None:
            return state
        lookup = state.prefix.lookup
        ended = lookup.ended
        if ended is None:
            if self._clock() >= lookup.until_s:
                self._metrics.wait_timeout("lookup")
                self._end(state, LookupReason.TIMEOUT, "the server did not answer in time")
        elif isinstance(ended, CallFailure):
            if ended.reason is CallFailureReason.TIMEOUT:
                self._metrics.wait_timeout("lookup")
            reason = LookupReason.TIMEOUT if ended.reason is CallFailureReason.TIMEOUT else LookupReason.NOT_STORED
            self._end(state, reason, str(ended))
        elif not ended.value.num_chunks:
            self._end(state, LookupReason.FAILED_LOADS if state.failed_loads else LookupReason.NOT_STORED, "")
        else:
            state.known_chunks, state.stage = ended.value.num_chunks, LoadStage.FOUND
            if lookup.is_dropped:
                self._end(state, LookupReason.NOT_TAKEN, "")
        return state

    def matched_tokens(self, tracked: TrackedRequest, computed_tokens: int) -> int | None:
        """Number of tokens beyond `computed_tokens` that can be loaded; None if the engine must call again."""
        state = self.get(tracked)
        tracked.computed_tokens = computed_tokens
        state = self.poll_lookup(tracked)
        if state.stage is LoadStage.DONE and state.reason is LookupReason.NOT_TAKEN:
            # The engine starts the request over: another connector was chosen, and its load has failed.
            self.restart(tracked)
        self.get(tracked).has_reply = True
        self.start_lookup(tracked)
        state = self.poll_lookup(tracked)
        if state.stage is LoadStage.LOOKUP:
            return self._reply_during_lookup(tracked, state)
        if state.stage is not LoadStage.FOUND:
            return 0
        boundary = state.found_chunks * self._spec.chunk_tokens
        if boundary <= computed_tokens:
            self._end(state, LookupReason.PREFIX_ENDS, "the engine's own prefix cache has as many tokens")
            return 0
        if not self._still_matches(tracked, state):
            self._end(state, LookupReason.NOT_STORED, "the request's tokens have changed")
            return 0
        if state.limit_chunks is None and self._has_suspects(state):
            self._end(state, LookupReason.NOT_STORED, "another load of this prefix has failed")
            return 0
        verdict = self._room.verdict(tracked.request_id, tracked.request.num_tokens)
        if verdict is Verdict.REFUSE:
            self._end(state, LookupReason.ENGINE_ROOM, "")
        return boundary - computed_tokens if verdict is Verdict.ADMIT else 0 if verdict is Verdict.REFUSE else None

    def known_chunks(self, tracked: TrackedRequest) -> int | None:
        """Number of chunks that the lookup of a running request found. None while the lookup is open; 0 if the lookup
        or the load has failed.

        Releases the locks of the lookup.
        """
        state = self.poll_lookup(tracked)
        self.release_lookup(tracked.request_id)
        return None if state.stage is LoadStage.LOOKUP else state.known_chunks

    def release_lookup(self, request_id: str) -> None:
        """Releases the locks of a request that loads nothing. An open lookup still delivers its result."""
        state = self._requests.get(request_id)
        if state is None or state.prefix is None:
            return
        if state.stage is LoadStage.FOUND:
            self._end(state, LookupReason.NOT_TAKEN, "")
        else:
            state.prefix.lookup.drop()

    def _reply_during_lookup(self, tracked: TrackedRequest, state: RequestLoad) -> int | None:
        assert state.prefix is not None
        if len(state.prefix.digests) * self._spec.chunk_tokens <= tracked.computed_tokens:
            # Nothing to load. The result only shows which chunks need no store.
            state.reason, state.detail = LookupReason.NO_BOUNDARY, ""
            return 0
        if not state.has_waited:
            state.has_waited = True
            self._metrics.pending(is_async=True)
        return None

    def _num_unsuspected(self, digests: Sequence[bytes]) -> int:
        """Number of leading chunks that are not suspect."""
        suspects, now_s = self._suspects, self._clock()
        while suspects and suspects[oldest := next(iter(suspects))] <= now_s:
            del suspects[oldest]
        if not suspects:
            return len(digests)
        return next((number for number, digest in enumerate(digests) if digest in suspects), len(digests))

    def _has_suspects(self, state: RequestLoad) -> bool:
        """True if a chunk that the lookup found is suspect by now."""
        if not self._suspects or state.prefix is None:
            return False
        return self._num_unsuspected(state.prefix.digests[: state.found_chunks]) < state.found_chunks

    def _mark_suspect(self, digests: Sequence[bytes]) -> None:
        """Marks all chunks of a prefix as suspect, after a load with a bad chunk.

        A shorter load reads windows and states that this load did not read. With `kv_load_failure_policy: fail` each
        further bad chunk would end one more request.
        """
        until_s = self._clock() + SUSPECT_S
        for digest in digests[:MAX_SUSPECTS]:
            self._suspects.pop(digest, None)
            self._suspects[digest] = until_s
        while len(self._suspects) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]

    def _still_matches(self, tracked: TrackedRequest, state: RequestLoad) -> bool:
        assert state.prefix is not None
        num_chunks = state.found_chunks
        boundary = num_chunks * self._spec.chunk_tokens
        if boundary > last_boundary(self._spec, tracked.request.num_tokens):
            return False
        return tracked.keys().key(self._key_group, boundary) == state.prefix.digests[num_chunks - 1]

    def _end(self, state: RequestLoad, reason: LookupReason, detail: str) -> None:
        if state.prefix is not None:
            state.prefix.lookup.drop()
        state.prefix = None
        state.stage, state.reason, state.detail = LoadStage.DONE, reason, detail

    # Loads.

    def on_allocated(self, tracked: TrackedRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> PageLoad | None:
        """Returns the load of the external tokens into the allocated blocks. Without external tokens: None, and the
        locks of the lookup are released."""
        state = self.get(tracked)
        is_offered = state.stage is LoadStage.FOUND and state.prefix is not None
        self._explain(tracked, state, num_external_tokens if is_offered else 0)
        if not num_external_tokens:
            self.release_lookup(tracked.request_id)
            return None
        boundary, prefix = tracked.computed_tokens + num_external_tokens, state.prefix
        table = [[NULL_BLOCK if b.is_null else b.block_id for b in group] for group in blocks.blocks]
        copies: tuple[PageCopy, ...] = ()
        refused = None
        if state.stage is not LoadStage.FOUND or prefix is None:
            refused = f"the engine loads up to token {boundary}, but no prefix was offered"
        elif boundary != state.found_chunks * self._spec.chunk_tokens:
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
            logger.error(
                "request %s cannot load %d tokens: %s", printable(tracked.request_id), num_external_tokens, refused
            )
        num_bytes = sum(len(copy.block_ids) * self._layout.content_bytes(copy.group_index) for copy in copies)
        self._loads[tracked.request_id] = _LMCacheLoad(prefix, num_external_tokens, num_bytes)
        self._room.take(tracked.request_id, tracked.request.num_tokens)
        digests = prefix.digests[: state.found_chunks] if prefix is not None else ()
        state.stage, state.prefix = LoadStage.LOADING, None
        start = tracked.computed_tokens // self._spec.chunk_tokens
        return PageLoad(tracked.request_id, digests, start, copies, refused)

    def _explain(self, tracked: TrackedRequest, state: RequestLoad, num_external_tokens: int) -> None:
        if not state.has_reply:
            return
        state.has_reply = False
        spec, num_tokens, computed = self._spec, tracked.request.num_tokens, tracked.computed_tokens
        reason = state.reason
        if state.stage is LoadStage.FOUND:
            boundary = state.found_chunks * spec.chunk_tokens
            reason = LookupReason.NOT_TAKEN
            if num_external_tokens:
                is_all = boundary >= last_boundary(spec, num_tokens)
                has_room = state.found_chunks < self.max_chunks
                reason = (
                    LookupReason.COMPLETE
                    if is_all
                    else LookupReason.PREFIX_ENDS
                    if has_room
                    else LookupReason.TIER_ROOM
                )
        explanation = Explanation(
            request_id=tracked.request_id,
            result="hit" if state.stage is LoadStage.FOUND else "miss",
            reason=reason,
            num_tokens=num_tokens,
            engine_tokens=computed,
            offered_tokens=num_external_tokens,
            compute_tokens=num_tokens - computed - num_external_tokens,
            source=LMCACHE if state.stage is LoadStage.FOUND else "",
            async_lookup=True if state.has_waited or state.stage is LoadStage.FOUND else None,
            detail=state.detail,
        )
        self._metrics.lookup(explanation)
        log(explanation)

    def has_work(self) -> bool:
        return bool(self._loads)

    def on_failures(self, request_id: str, failures: Sequence[LoadFailure]) -> None:
        """Records why a load failed on some rank. `on_ended` follows."""
        if in_flight := self._loads.get(request_id):
            in_flight.failures += failures

    def on_ended(self, request_id: str, tracked: TrackedRequest | None, failed: bool) -> None:
        """Ends a load that all ranks have ended.

        After a failure that names a bad chunk, the retry looks up the prefix before that chunk. After any other
        failure, or after `MAX_FAILED_LOADS` failures, the request loads nothing.
        """
        in_flight = self._loads.pop(request_id, None)
        if in_flight is None:
            return
        digests = in_flight.prefix.digests if in_flight.prefix is not None else ()
        if in_flight.prefix is not None:
            in_flight.prefix.lookup.drop()
        num_bytes = in_flight.num_bytes * self._layout.world_size
        self._metrics.load(num_bytes, failed, in_flight.failures)
        bad = [digests.index(failure.key) for failure in in_flight.failures if failure.key in digests]
        if bad:
            self._mark_suspect(digests)
        if tracked is None:
            self._room.release((request_id,))
            self._requests.pop(request_id, None)
            return
        state = self.get(tracked)
        state.stage, state.reason = LoadStage.DONE, LookupReason.FAILED_LOADS
        if not failed:
            return
        tracked.forget_progress()
        self._room.fail(request_id, tracked.request.num_tokens)
        state.failed_loads += 1
        state.known_chunks = 0
        if bad and state.failed_loads < MAX_FAILED_LOADS:
            state.stage, state.limit_chunks = LoadStage.NEW, min(bad)
        reasons = "; ".join(sorted({f"{f.reason}: {f.detail}" for f in in_flight.failures})) or "no reason given"
        logger.warning(
            "request %s: a load of %d tokens failed; kv_load_failure_policy applies (%s)",
            printable(request_id),
            in_flight.num_tokens,
            reasons,
        )

    # Ends.

    def restart(self, tracked: TrackedRequest) -> None:
        """Resets a request after a preemption, after the failed load of another connector, or if its tokens or keys
        have changed. Keeps its failed loads."""
        state = self._requests.pop(tracked.request_id, None)
        if state is None:
            return
        if state.prefix is not None:
            state.prefix.lookup.drop()
        stage = LoadStage.LOADING if state.stage is LoadStage.LOADING else LoadStage.NEW
        self._requests[tracked.request_id] = RequestLoad(
            stage, limit_chunks=state.limit_chunks, failed_loads=state.failed_loads
        )

    def on_request_finished(self, request_id: str) -> None:
        """Forgets a finished request. A load in flight is tracked to its end."""
        state = self._requests.get(request_id)
        if state is not None and state.prefix is not None:
            state.prefix.lookup.drop()
            state.prefix = None
        if request_id not in self._loads:
            self._requests.pop(request_id, None)
            self._room.release((request_id,))

    def close(self) -> None:
        """Releases all locks."""
        for state in self._requests.values():
            if state.prefix is not None:
                state.prefix.lookup.drop()
        for in_flight in self._loads.values():
            if in_flight.prefix is not None:
                in_flight.prefix.lookup.drop()
        self._requests.clear()
        self._loads.clear()
