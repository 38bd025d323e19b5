"""Request state of the scheduler's half, from a request's first lookup to its end.

The planner defines the progress of a load (`stage`). This module adds the request's keys, and the chunks that are
stored for the request.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.identity.adapters import Adapters, AdapterVersion
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.hashing import ChunkKeys, TokenHashes
from hybridkv.planner import CacheSpec, GroupKind, Hit, Loss, Miss, life
from hybridkv.planner.checkpoints import Placement, Prompt
from hybridkv.planner.coverage import Part
from hybridkv.planner.hints import NO_HINTS, Hints
from hybridkv.planner.stages import NEW_REQUEST, Reply, Stage
from hybridkv.tiers import Extends

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from hybridkv.connectors.vllm.common.blocks.step_loads import StepLoad

NULL_BLOCK = 0
"""Block id of the null block in the engine's tables."""


class StoredChunk(msgspec.Struct, frozen=True, gc=False):
    """A chunk that is stored or being stored."""

    part: Part
    key: bytes
    extends: Extends
    """Keys of the previous chunk in the path and of the chunk that this chunk needs; one key if both are the same."""
    is_new: bool
    """Whether this store writes the chunk."""


@dataclass(slots=True, eq=False)
class PrefixChain:
    """Keys of one request's chunks that are stored or being stored, also if they were stored before the request. A
    request that starts over gets a new chain."""

    keys: dict[Part, bytes] = field(default_factory=dict)
    num_storing: int = 0
    """Number of stores in flight."""
    is_over: bool = False
    """Whether the request has ended."""
    prompt_tokens: int = sys.maxsize
    """Length of the request's prompt, set when the request's first store is planned."""
    keep_seconds: float = 0.0
    """Seconds to keep the chain after the request's end."""

    @property
    def is_complete(self) -> bool:
        """Whether no more chunks will be added."""
        return self.is_over and not self.num_storing

    def set_prompt(self, prompt_tokens: int, keep_seconds: float = 0.0) -> None:
        """Sets the length of the prompt and the keep time."""
        self.prompt_tokens, self.keep_seconds = prompt_tokens, keep_seconds

    def drop(self, parts: Sequence[Part]) -> None:
        """Removes chunks from the chain, but not from the tiers."""
        for part in parts:
            self.keys.pop(part, None)


def state_groups(spec: CacheSpec) -> tuple[int, ...]:
    """Recurrent groups."""
    return tuple(index for index in spec.stored_groups if spec.groups[index].kind is GroupKind.RECURRENT)


def state_step_tokens(spec: CacheSpec) -> int:
    """Distance in tokens between the boundaries at which states can be stored: a block of every recurrent group ends
    there. Needs at least one recurrent group."""
    return math.lcm(spec.boundary_tokens, *(spec.groups[index].block_tokens for index in state_groups(spec)))


@dataclass(slots=True)
class CheckpointState:
    """Prefill stops and stored states of one request. If the engine starts the request over, only `was_admitted` stays.

    Boundaries are in tokens from the request's start.
    """

    bare_prompt: Prompt | None = None
    """Prompt for which the stops were planned, without facts about other requests."""
    prompt: Prompt | None = None
    """The same prompt, with facts about earlier requests on its path."""
    placement: Placement = field(default_factory=Placement)
    newest_tokens: int = 0
    """Boundary of the newest stored state of the answer."""
    was_admitted: bool = False
    """Whether the request was admitted before. Then stored and remembered chunks on its path may be its own."""
    awaited_tokens: int = 0
    """Largest boundary in the request's answer at which a state could be stored."""

    def started_over(self) -> CheckpointState:
        """Value after the engine starts the request over."""
        return CheckpointState(was_admitted=self.was_admitted)

    def origin(self, num_tokens: int, num_prompt_tokens: int, boundary_tokens: int) -> str:
        """Origin of a stored state: a label of `vllm:hybridkv_states_stored_total`."""
        if num_tokens > num_prompt_tokens:
            return "answer"
        if num_tokens >= (num_prompt_tokens - 1) // boundary_tokens * boundary_tokens:
            return "prompt_end"
        return "stop" if self.reason_at(num_tokens) else "engine"

    def reason_at(self, num_tokens: int) -> str:
        """Reason why the request stops at this boundary; "" if it does not stop there."""
        return next((str(stop.reason) for stop in self.placement.stops if stop.num_tokens == num_tokens), "")


@dataclass(slots=True)
class TrackedRequest:
    """State of one request. Times are seconds of the connector's clock."""

    request: Request
    hashes: TokenHashes | None
    request_keys: RequestKeys | None
    """None for a request with an adapter until `Requests.identify` succeeds, and again after `forget_progress`. Without
    keys, nothing is looked up or stored."""
    adapter_version: AdapterVersion | None = None
    """Version of the request's adapter; None without an adapter, and while `request_keys` is None."""
    hints: Hints = NO_HINTS
    """Hints that the request carries."""
    stored_tokens: int = 0
    """Chunks that end here or before need no more work: they are stored, or are not to be stored."""
    chain: PrefixChain = field(default_factory=PrefixChain)
    """Chunks that are stored for the request."""
    is_storable: bool = True
    """Whether the request may store. False until the request starts over: after a reset, if it had started before;
    after it continued from a corrupt block, or from blocks of another connector's failed load; for LMCache, after a
    failed store."""
    step_load: StepLoad | None = None
    """Load of another connector within a step in flight, which the request may use."""
    planned_chunks: tuple[int, int] = (0, 0)
    """Numbers of complete chunks when stores were last planned: without a drafter's lookahead, and with it."""
    idle_below_tokens: int = 0
    """If a step ends before this many tokens and the engine hands over no state, there is nothing new to store, and the
    step skips the request. 0: no step skips it."""
    computed_tokens: int = 0
    """Tokens that the engine itself held at its last lookup of the request."""
    stage: Stage = NEW_REQUEST
    """Progress of the request's load."""
    last_reply: Reply | None = None
    """Reply to the engine's last lookup; None before the first lookup, after the engine has acted on the reply, and
    after the progress is reset."""
    resumed_tokens: int = 0
    """Token at which the request resumed, from the engine's own cache or from a load. The store planner reads this
    number once and then sets 0."""
    waiting_since_s: float | None = None
    """Start of the wait for a lookup, a promotion, room or a load."""
    last_lookup: tuple[int, float] | None = None
    """Step number and time of the engine's last lookup of the request."""
    awaited_key: bytes | None = None
    """Key of the first chunk after the settled hit, if the async lookup of this key is unanswered; None otherwise."""
    measured: tuple[Hit | Miss, int, Loss] | None = None
    """Last measured (answer, computed tokens, loss). Loss: tokens that more states or windows would have made a hit."""
    checkpoint_state: CheckpointState = field(default_factory=CheckpointState)
    """Prefill stops and stored states of the request."""
    num_preemptions: int = 0
    """Number of the engine's preemptions of the request at the last call of `follow_preemptions`."""
    followed: tuple[int, bytes] = (0, b"")
    """Number of the engine's block hashes at the last call of `follow`, and the last hash, which depends on all earlier
    hashes."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def lora(self) -> Any:
        """Adapter of the request; None without an adapter."""
        return getattr(self.request, "lora_request", None)

    def prefix_hashes(self) -> Sequence[bytes]:
        """One hash for each full hash block of the tokens known so far. Calls `follow` first."""
        unchanged_hashes = self.follow()
        if self.hashes is None:
            return self.request.block_hashes
        return self.hashes.prefix_hashes(self.request.all_token_ids, unchanged_hashes * self.hashes.block_tokens)

    def follow(self) -> int:
        """Drops the state that depends on tokens that the request no longer has.

        When the next input of a session arrives, the engine removes the last sampled tokens. At the next call the
        request may have its former length again, so `follow` compares hashes.

        Returns:
            Number of the engine's block hashes that are unchanged since the last call. 0 if the engine makes none, or
            if state was dropped.
        """
        engine = self.request.block_hashes
        num_hashes, last = self.followed
        if num_hashes and len(engine) == num_hashes and engine[-1] == last:
            return num_hashes
        self.followed = (len(engine), engine[-1]) if engine else (0, b"")
        if num_hashes <= len(engine) and (num_hashes == 0 or engine[num_hashes - 1] == last):
            return num_hashes
        if self.hashes is not None:
            self.hashes.prefix_hashes(())
        self.stored_tokens, self.planned_chunks, self.chain = 0, (0, 0), PrefixChain()
        self.idle_below_tokens = 0
        self.checkpoint_state = self.checkpoint_state.started_over()
        self.stage, self.last_reply = life.forget_search(self.stage), None
        return 0

    def keys(self) -> RequestKeys:
        """Keys of the tokens known so far; valid until the next call. Calls `follow` first.

        Raises:
            RuntimeError: `Requests.identify` has not found the version of the request's adapter.
        """
        if self.request_keys is None:
            raise RuntimeError("the keys of a request were requested before its adapter is known")
        return self.request_keys.follow(self.prefix_hashes())

    def load_ended(self, *, failed: bool, is_explained: bool) -> None:
        """Records the end of a load; see `life.load_ended`. After a failure the engine starts the request over."""
        self.stage = life.load_ended(self.stage, failed=failed, is_explained=is_explained)
        if failed:
            self.forget_progress()

    def follow_preemptions(self) -> bool:
        """Resets the progress if the engine has preempted the request since the last call. Returns whether it has.

        Must be called before the request's next lookup: a reset of the engine's cache preempts running requests between
        two steps, and the next step may admit them again before its plan is made.
        """
        num_preemptions = compat.num_preemptions(self.request)
        if num_preemptions == self.num_preemptions:
            return False
        self.num_preemptions = num_preemptions
        self.forget_progress()
        return True

    def forget_progress(self) -> None:
        """Resets the progress: the engine starts the request over, or the keys change. Allows stores again. With an
        adapter, drops the keys until the next `Requests.identify`."""
        self.stored_tokens, self.chain = 0, PrefixChain()
        self.is_storable, self.step_load = True, None
        self.planned_chunks, self.idle_below_tokens = (0, 0), 0
        self.measured, self.checkpoint_state = None, self.checkpoint_state.started_over()
        self.stage, self.last_reply = life.start_over(self.stage), None
        if self.adapter_version is not None:
            # The engine may load the adapter again before the request restarts.
            self.request_keys = self.hashes = self.adapter_version = None


class Requests:
    """Tracked requests by id. A new request may reuse the id of one that has ended.

    Args:
        layout: the model's groups.
        keys: keys of the model's chunks without an adapter.
        adapters: keys of chunks with an adapter.
        read_hints: reads the hints of a request.
    """

    def __init__(
        self,
        layout: CacheLayout,
        keys: ChunkKeys,
        adapters: Adapters,
        read_hints: Callable[[Request], Hints] = lambda request: NO_HINTS,
    ) -> None:
        self._layout = layout
        self._keys = keys
        self._adapters = adapters
        self._read_hints = read_hints
        self._tracked: dict[str, TrackedRequest] = {}

    def track(self, request: Request) -> TrackedRequest:
        """State of a request. The first call creates the state, and starts to read the files of the adapter."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            tracked = self._tracked[request.request_id] = TrackedRequest(request, None, None)
            tracked.hints = self._read_hints(request)
            if tracked.lora is None:
                self._take_keys(tracked, self._keys)
            else:
                self._adapters.on_request(tracked.lora)
        return tracked

    def identify(self, tracked: TrackedRequest) -> bool:
        """Finds the keys of a request. False if there are none, because the content of its adapter is in doubt.

        First resets the request's progress if the adapter has changed since the last call, or if another request now
        conflicts with its load in place.
        Must be called before the engine admits the request.
        """
        if tracked.adapter_version is not None and not (
            self._is_conflict_free(tracked) and self._adapters.is_unchanged(tracked.adapter_version)
        ):
            # The engine may now load other weights than at the last call.
            tracked.forget_progress()
        if tracked.request_keys is None:
            tracked.adapter_version = self._adapters.current_version(tracked.lora, self._is_conflict_free(tracked))
            if tracked.adapter_version is not None:
                self._take_keys(tracked, tracked.adapter_version.keys)
        return tracked.request_keys is not None

    def untracked_copy(self, request: Request) -> TrackedRequest:
        """Separate state of a request for a lookup without a computation. It has the hints of the tracked request, and
        does not change that request. With an adapter, it has keys after `identify` returns True."""
        tracked = TrackedRequest(request, None, None)
        if (known := self.get(request.request_id)) is not None:
            tracked.hints = known.hints
        if tracked.lora is None:
            self._take_keys(tracked, self._keys)
        return tracked

    def _take_keys(self, tracked: TrackedRequest, keys: ChunkKeys) -> None:
        if not self._layout.reuses_hashes:
            tracked.hashes = keys.token_hashes(partial(compat.extra_hash_bytes, tracked.request))
        tracked.request_keys = RequestKeys(self._layout.spec, keys)

    def _is_conflict_free(self, tracked: TrackedRequest) -> bool:
        """Whether all unfinished requests with the number of this request's adapter load the same adapter in place. If
        not, the engine loads the adapter of the first request. True if this request does not load in place."""
        if not tracked.lora.load_inplace:
            return True
        own = tracked.lora
        others = (each.lora for each in self._tracked.values() if each.lora and not each.request.is_finished())
        return all(
            lora.load_inplace and (lora.lora_name, lora.lora_path) == (own.lora_name, own.lora_path)
            for lora in others
            if lora.lora_int_id == own.lora_int_id
        )

    def get(self, request_id: str) -> TrackedRequest | None:
        return self._tracked.get(request_id)

    def all(self) -> tuple[TrackedRequest, ...]:
        return tuple(self._tracked.values())

    def forget(self, request_id: str) -> None:
        self._tracked.pop(request_id, None)

    def begin_anew(self, keys: ChunkKeys) -> None:
        """Replaces the keys and drops all progress. A request that has already started stores nothing until the engine
        starts it over. Requests with an adapter get their keys from `identify`."""
        self._keys = keys
        for tracked in self._tracked.values():
            tracked.forget_progress()
            tracked.is_storable = tracked.request.num_computed_tokens == 0
            if tracked.lora is None:
                self._take_keys(tracked, keys)

    def clear(self) -> None:
        self._tracked.clear()
