"""What the scheduler's half remembers of each request, from its first sight to its end.

How far a request is with its load is a value of the planner's (`stage`); what is here besides is whose content it has
and what of it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.checkpointed import Checkpointed
from hybridkv.connectors.vllm.common.identity.adapters import Adapters, Sworn
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.prefix_chain import StoredPath
from hybridkv.hashing import ChunkKeys, TokenHashes
from hybridkv.planner import Hit, Loss, Miss, life
from hybridkv.planner.hints import NO_HINTS, Hints
from hybridkv.planner.stages import NEW, Reply, Stage

if TYPE_CHECKING:
    from vllm.v1.request import Request

NULL_BLOCK = 0
"""The block id that stands for "no block" in the engine's tables."""


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
