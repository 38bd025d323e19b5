"""What the scheduler's half remembers of each request, from its first sight to its end.

How far a request is with its load is a value of the planner's (`stage`); what is here besides is whose content it has
and what of it is stored.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.identity.adapters import Adapters, Sworn
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.hashing import ChunkKeys, TokenHashes
from hybridkv.planner import CacheSpec, GroupKind, Hit, Loss, Miss, life, path_order
from hybridkv.planner.checkpoints import Placement, Prompt
from hybridkv.planner.hints import NO_HINTS, Hints
from hybridkv.planner.paths import Part
from hybridkv.planner.stages import NEW, Reply, Stage
from hybridkv.tiers.stack import PathPosition

if TYPE_CHECKING:
    from vllm.v1.request import Request

NULL_BLOCK = 0
"""The block id that stands for "no block" in the engine's tables."""

GROWTH = 8
"""A path is made recent again when it is longer by this part of its length."""
CHURN = 8
"""And before it grows, when others have used this part of a slower tier since."""


def add(mine: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of each slower tier together. `mine` may be empty: nothing yet."""
    if len(mine) == 1:
        return (mine[0] + more[0],)
    return tuple(map(operator.add, mine, more)) if mine else more


class StoredPart(msgspec.Struct, frozen=True, gc=False):
    """A chunk that is stored, or being stored."""

    part: Part
    key: bytes
    on_path: PathPosition
    is_new: bool
    """This store brings it."""


@dataclass(slots=True, eq=False)
class StoredPath:
    """One request's chunks in every tier. A request that begins anew has another."""

    keys: dict[Part, bytes] = field(default_factory=dict)
    num_bytes: tuple[int, ...] = ()
    """What they take up in each slower tier."""
    num_storing: int = 0
    """Stores that are on their way."""
    is_over: bool = False
    """The request has ended."""
    prompt_tokens: int = sys.maxsize
    """Of the request, as soon as it is computed."""
    keep_seconds: float = 0.0
    """How long it is to be kept from its end on."""
    _last_end: int = 0
    """The deepest end of its chunks."""
    _is_in_order: bool = True
    """Its chunks came in `path_order`, as they do unless a group is behind the others."""
    _num_renewed: int = 0
    _renewed_at_bytes: tuple[int, ...] = ()
    """What all paths together had used then."""

    def __post_init__(self) -> None:
        self._is_in_order = not self.keys

    @property
    def is_complete(self) -> bool:
        """Whether nothing comes any more."""
        return self.is_over and not self.num_storing

    def begin(self, prompt_tokens: int, keep_seconds: float = 0.0) -> None:
        """It begins to be computed."""
        self.prompt_tokens, self.keep_seconds = prompt_tokens, keep_seconds

    def come(self, parts: Sequence[Part]) -> None:
        """These are added next, in `path_order`."""
        if parts:
            self._is_in_order = self._is_in_order and parts[0][1] > self._last_end
            self._last_end = max(self._last_end, parts[-1][1])

    def add(self, part: Part, key: bytes, num_bytes: tuple[int, ...]) -> tuple[int, ...]:
        """One more chunk, of those that come. What the path takes up with it."""
        if part not in self.keys:
            self.keys[part] = key
            self.num_bytes = add(self.num_bytes, num_bytes)
        return self.num_bytes

    def extend(self, parts: Sequence[Part], keys: Sequence[bytes], num_bytes: tuple[int, ...]) -> None:
        """More chunks, in `path_order`, and what those of them take up that it does not have."""
        self.come(parts)
        self.keys.update(zip(parts, keys, strict=True))
        self.num_bytes = add(self.num_bytes, num_bytes)

    def drop(self, parts: Sequence[Part]) -> None:
        """These are worth nothing any more. What they take up still counts: it is an upper bound."""
        for part in parts:
            self.keys.pop(part, None)

    def is_overdue(self, used_bytes: Sequence[int], capacities: Sequence[int]) -> bool:
        """Whether it is far from recent by now in a slower tier, given what all paths have used of each, each time that
        they did."""
        if not self._num_renewed:
            return False
        return any(
            (used - renewed_at) * CHURN >= capacity
            for used, renewed_at, capacity in zip(used_bytes, self._renewed_at_bytes, capacities, strict=True)
        )

    def prefix(self, spec: CacheSpec, end_token: int) -> tuple[bytes, ...]:
        """The full prefix before a part that ends there, of every FULL group."""
        full = [index for index in spec.stored_groups if spec.groups[index].kind is GroupKind.FULL]
        chunk = spec.chunk_tokens
        parts = ((part, key) for part, key in self.keys.items() if part[0] in full)
        return tuple(key for (_, end), key in parts if end < end_token and end % chunk == 0)

    def take_renewal(
        self, spec: CacheSpec, used_bytes: tuple[int, ...], is_overdue: bool = False
    ) -> list[bytes] | None:
        """All its keys in the order in which they may go, where it is time to make them recent."""
        grown = len(self.keys) - self._num_renewed
        if not is_overdue and (not grown or (not self.is_complete and grown * GROWTH < self._num_renewed)):
            return None
        self._num_renewed, self._renewed_at_bytes = len(self.keys), used_bytes
        return self.order(spec)

    def order(self, spec: CacheSpec) -> list[bytes]:
        """All its keys in the order in which they may go."""
        if self._is_in_order:
            return list(self.keys.values())[::-1]
        return [self.keys[part] for part in reversed(path_order(spec, self.keys))]


def state_groups(spec: CacheSpec) -> tuple[int, ...]:
    """The groups that have states."""
    return tuple(index for index in spec.stored_groups if spec.groups[index].kind is GroupKind.RECURRENT)


def state_step_tokens(spec: CacheSpec) -> int:
    """Where a state can be had and stored: at boundaries at which a block of every state ends. There is a state."""
    return math.lcm(spec.boundary_tokens, *(spec.groups[index].block_tokens for index in state_groups(spec)))


@dataclass(slots=True)
class Checkpointed:
    """Of one request, from a lookup to when the engine starts it over; whether it was admitted before, for longer."""

    asked: Prompt | None = None
    """What was known of it when it was planned."""
    prompt: Prompt | None = None
    """The same, and what is known of others like it."""
    placement: Placement = field(default_factory=Placement)
    newest_tokens: int = 0
    """Where its newest state is that was stored."""
    was_admitted: bool = False
    """What of its path is stored, and remembered, may be its own."""
    awaited_tokens: int = 0
    """The deepest state of its answer that could be stored."""

    def started_over(self) -> Checkpointed:
        """The engine starts it over."""
        return Checkpointed(was_admitted=self.was_admitted)

    def origin(self, num_tokens: int, num_prompt_tokens: int, boundary_tokens: int) -> str:
        """Where a state comes from that is stored of it: a label of `vllm:hybridkv_states_stored_total`."""
        if num_tokens > num_prompt_tokens:
            return "answer"
        if num_tokens >= (num_prompt_tokens - 1) // boundary_tokens * boundary_tokens:
            return "prompt_end"
        return "stop" if self.reason_at(num_tokens) else "engine"

    def reason_at(self, num_tokens: int) -> str:
        """Why it stops there, "" if it does not."""
        return next((str(stop.reason) for stop in self.placement.stops if stop.num_tokens == num_tokens), "")


@dataclass(slots=True)
class TrackedRequest:
    """One request. Times are seconds of the connector's clock."""

    request: Request
    hashes: TokenHashes | None
    kept_keys: RequestKeys | None
    """None while it is in doubt what the request's adapter holds, so that nothing is asked for or stored."""
    sworn: Sworn | None = None
    """What its adapter holds, None without one."""
    hints: Hints = NO_HINTS
    """What it said of itself."""
    stored_tokens: int = 0
    """Chunks that end here or before have been seen to."""
    path: StoredPath = field(default_factory=StoredPath)
    """What of it is stored."""
    is_storable: bool = True
    """False until the request starts over, after a reset (what it has computed may be what the reset was to forget) and
    where it went on from a block that the engine copied wrongly."""
    seen: tuple[int, int] = (0, 0)
    """Chunks that were complete when stores were last planned: without a drafter's lookahead, and with it."""
    idle_below_tokens: int = 0
    """While a step ends before this many tokens and the engine hands over no state, nothing more of it can be stored,
    and it need not be looked at. 0: it must be."""
    computed_tokens: int = 0
    """What the engine said it holds when it last asked."""
    stage: Stage = NEW
    """How far it is with its load."""
    told: Reply | None = None
    """What the engine was told when it last asked; None when it has acted on that, or never asked."""
    measured: tuple[Hit | Miss, int, Loss] | None = None
    """What a hit could have been, beside the answer and what the engine held when that was measured."""
    checkpointed: Checkpointed = field(default_factory=Checkpointed)
    """Where it stops so that states are stored."""
    followed: tuple[int, bytes] = (0, b"")
    """How many block hashes the engine had for it, and the last of them, which stands for all before it."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def lora(self) -> Any:
        """The request's adapter, None without one."""
        return getattr(self.request, "lora_request", None)

    def prefix_hashes(self) -> Sequence[bytes]:
        """A hash for every full hash block of the tokens that are known by now."""
        unchanged_hashes = self.follow()
        if self.hashes is None:
            return self.request.block_hashes
        return self.hashes.upto(self.request.all_token_ids, unchanged_hashes * self.hashes.block_tokens)

    def follow(self) -> int:
        """Forgets what was concluded from tokens that the request has no longer: the engine takes back what a session
        had sampled last when its next input comes, and the request may be as long as before when it is seen again.

        Returns:
            Block hashes of the engine that are those of the last call; 0 also where it makes none.
        """
        engine = self.request.block_hashes
        num_hashes, last = self.followed
        if num_hashes and len(engine) == num_hashes and engine[-1] == last:
            return num_hashes
        self.followed = (len(engine), engine[-1]) if engine else (0, b"")
        if num_hashes <= len(engine) and (num_hashes == 0 or engine[num_hashes - 1] == last):
            return num_hashes
        if self.hashes is not None:
            self.hashes.upto(())
        self.stored_tokens, self.seen, self.path = 0, (0, 0), StoredPath()
        self.idle_below_tokens = 0
        self.checkpointed = self.checkpointed.started_over()
        self.stage, self.told = life.forget_search(self.stage), None
        return 0

    def keys(self) -> RequestKeys:
        """The keys of the tokens that are known by now, until the next call."""
        if self.kept_keys is None:
            raise RuntimeError("the keys of a request were asked for before its adapter is known")
        return self.kept_keys.follow(self.prefix_hashes())

    def load_ended(self, *, failed: bool, is_explained: bool) -> None:
        """Its load has ended; see `life.load_ended`. After a failure the engine starts it over."""
        self.stage = life.load_ended(self.stage, failed=failed, is_explained=is_explained)
        if failed:
            self.forget_progress()

    def forget_progress(self) -> None:
        """The engine starts this request over."""
        self.stored_tokens, self.path = 0, StoredPath()
        self.is_storable = True
        self.seen, self.idle_below_tokens = (0, 0), 0
        self.measured, self.checkpointed = None, self.checkpointed.started_over()
        self.stage, self.told = life.start_over(self.stage), None
        if self.sworn is not None:
            # The engine may read the adapter anew before it begins again.
            self.kept_keys = self.hashes = self.sworn = None


class Requests:
    """Requests by id. A new request may take the id of one that has ended.

    Args:
        layout: the model's groups.
        keys: of its chunks.
        adapters: what changes them.
        read_hints: what a request says of itself.
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
        """What is remembered of a request, from when it is first seen."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            tracked = self._tracked[request.request_id] = TrackedRequest(request, None, None)
            tracked.hints = self._read_hints(request)
            if tracked.lora is None:
                self._take_keys(tracked, self._keys)
            else:
                self._adapters.notice(tracked.lora)
        return tracked

    def identify(self, tracked: TrackedRequest) -> bool:
        """Whether the request has keys. To be asked before the engine admits it: afterwards it is too late."""
        if tracked.sworn is not None and not (self._is_alone(tracked) and self._adapters.is_unchanged(tracked.sworn)):
            # The engine will read what the files hold now, or nobody knows.
            tracked.forget_progress()
        if tracked.kept_keys is None:
            tracked.sworn = self._adapters.swear(tracked.lora, self._is_alone(tracked))
            if tracked.sworn is not None:
                self._take_keys(tracked, tracked.sworn.keys)
        return tracked.kept_keys is not None

    def beside(self, request: Request) -> TrackedRequest:
        """A request that is looked for and never computed: nothing that becomes of it changes the one that is tracked,
        and nobody else sees it. It has keys when `identify` says so."""
        tracked = TrackedRequest(request, None, None)
        if tracked.lora is None:
            self._take_keys(tracked, self._keys)
        return tracked

    def _take_keys(self, tracked: TrackedRequest, keys: ChunkKeys) -> None:
        if not self._layout.reuses_hashes:
            tracked.hashes = keys.token_hashes(partial(compat.extra_hash_bytes, tracked.request))
        tracked.kept_keys = RequestKeys(self._layout.spec, keys)

    def _is_alone(self, tracked: TrackedRequest) -> bool:
        """Whether a request that loads its adapter in place does: the engine goes by the first that runs with it."""
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
        """Nothing that was concluded under the former keys holds; requests that have begun store nothing more."""
        self._keys = keys
        for tracked in self._tracked.values():
            tracked.forget_progress()
            tracked.is_storable = tracked.request.num_computed_tokens == 0
            if tracked.lora is None:
                self._take_keys(tracked, keys)

    def clear(self) -> None:
        self._tracked.clear()
