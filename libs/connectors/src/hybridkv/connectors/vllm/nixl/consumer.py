"""Consumer in the scheduler: decides which requests load a producer's blocks, and into which blocks.

A request loads from its producer at most once. The engine looks up the request again after every failure and
preemption, but there is no second load, because the producer may have freed its blocks after the first load.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.errors import printable
from hybridkv.connectors.hosts import AllowedHosts
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan, PromptLoad, WaitingRequest
from hybridkv.connectors.vllm.nixl.params import ParamsError, RemotePrompt, is_remote_prefill, parse
from hybridkv.connectors.vllm.nixl.prompts import prefix_digest, require_blocks, usable_tokens
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.planner import GroupSpec
from hybridkv.planner.admission import Verdict

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.hybridkv.nixl")

_NULL = 0


class RemoteLoadStage(enum.Enum):
    """Stage of a request's load from its producer."""

    WAITING = "the engine has not admitted the request"
    LOADING = "a read into its blocks is running"
    OVER = "it does not need its producer any more"


@dataclass(slots=True)
class _RemoteLoad:
    request: Request
    prompt: RemotePrompt
    adapter: bytes | None
    """Digest of the adapter's content; empty without an adapter; None while the content is in doubt."""
    usable_tokens: int = 0
    """Tokens that can be loaded with this content of the adapter."""
    stage: RemoteLoadStage = RemoteLoadStage.WAITING
    computed_tokens: int = -1
    """Tokens that the engine had computed at its last lookup; -1 before it."""


class Consumer:
    """Loads from producers, by request.

    Args:
        groups: groups of the model.
        withheld_tokens: tokens at the end of a prompt that this engine always computes.
        hosts: hosts of producers that a request may name.
        room: admission of concurrent loads.
        metrics: counters of this half.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        withheld_tokens: int,
        hosts: AllowedHosts,
        room: LoadRoom,
        metrics: NixlMetrics,
    ) -> None:
        self._groups = tuple(groups)
        self._withheld_tokens = withheld_tokens
        self._hosts = hosts
        self._room = room
        self._metrics = metrics
        self._loads: dict[str, _RemoteLoad] = {}

    def begin(self, request: Request, plan: NixlStepPlan) -> None:
        """Handles a new request. If a producer holds its prompt, the workers start to renew the producer's lease."""
        if not is_remote_prefill(request.kv_transfer_params):
            return
        try:
            prompt = parse(request.kv_transfer_params or {})
            if prompt.host not in self._hosts:
                raise ParamsError("remote_host", f"{prompt.host[:80]!r} is not among allowed_hosts")
        except ParamsError as error:
            self._refuse(request, error)
            return
        adapter = b"" if request.lora_request is None else None
        read = self._loads[request.request_id] = _RemoteLoad(request, prompt, adapter)
        # Workers apply `ended` after `waiting`, so an entry of an earlier request with this id would end the new lease.
        plan.ended = [name for name in plan.ended if name != request.request_id]
        plan.waiting.append(WaitingRequest(request.request_id, prompt))
        self._set_usable_tokens(read)

    def _set_usable_tokens(self, read: _RemoteLoad) -> None:
        """Compares the request with the producer's prompt, after each change of the adapter's content."""
        read.usable_tokens = 0
        if read.adapter is None or compat.skips_prefix_cache(read.request):
            return
        try:
            read.usable_tokens = self._usable_tokens(read.request, read.prompt, read.adapter)
        except ParamsError as error:
            self._refuse(read.request, error)

    def _require_blocks(self, read: _RemoteLoad) -> None:
        """Refuses the load if the producer lacks blocks. With more computed tokens later, it stays refused."""
        try:
            require_blocks(self._groups, read.prompt, read.usable_tokens, read.computed_tokens)
        except ParamsError as error:
            read.usable_tokens = 0
            self._refuse(read.request, error)

    def _usable_tokens(self, request: Request, prompt: RemotePrompt, adapter: bytes) -> int:
        num_tokens = usable_tokens(self._groups, prompt, request.num_prompt_tokens, self._withheld_tokens)
        if prompt.prefix_tokens < num_tokens or prompt.prefix_tokens > request.num_prompt_tokens:
            raise ParamsError("hybridkv.prefix_tokens", "this number of tokens does not match the prompt")
        if prefix_digest(request, prompt.prefix_tokens, adapter) != prompt.prefix:
            found = "the producer computed a different prompt" + (
                ", or with other files of the adapter" if adapter else ""
            )
            raise ParamsError("hybridkv.prefix", found)
        return num_tokens

    def _refuse(self, request: Request, why: ParamsError | str) -> None:
        self._metrics.count_prompt("refused")
        logger.warning("request %s is computed instead of loaded: %s", printable(request.request_id), why)

    def matched_tokens(self, request: Request, computed_tokens: int, adapter: bytes | None) -> int | None:
        """Tokens after `computed_tokens` that the producer's blocks hold. None: look up again in the next step.

        `adapter` is the digest of the content that the engine has, or will load, for the request's adapter; empty
        without an adapter; None if the content is in doubt. Then nothing is loaded.
        """
        if self._room.take_deferral(request.request_id):
            return None
        read = self._load_of(request)
        if read is None or read.stage is not RemoteLoadStage.WAITING:
            return 0
        if (adapter, computed_tokens) != (read.adapter, read.computed_tokens):
            read.computed_tokens = computed_tokens
            if adapter != read.adapter:
                read.adapter = adapter
                self._set_usable_tokens(read)
            if read.usable_tokens:
                self._require_blocks(read)
        num_tokens = max(0, read.usable_tokens - computed_tokens)
        if not num_tokens:
            return 0
        verdict = self._room.verdict(request.request_id, request.num_tokens)
        if verdict is Verdict.REFUSE:
            self._refuse(request, "there are not enough free blocks beside other loads")
            read.usable_tokens = 0
            return 0
        return num_tokens if verdict is Verdict.ADMIT else None

    def on_allocated(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int, plan: NixlStepPlan
    ) -> None:
        """Handles the allocation of blocks. Plans the load of `num_external_tokens`. Without external tokens, the
        request no longer needs its producer."""
        read = self._load_of(request)
        if read is None or read.stage is not RemoteLoadStage.WAITING:
            return
        if num_external_tokens == 0:
            self._end(read, plan)
            if read.adapter is None and not compat.skips_prefix_cache(request):
                self._refuse(request, "the files of its adapter are not read yet, or their content is in doubt")
            elif read.usable_tokens:
                self._metrics.count_prompt("held_already")
            return
        read.stage = RemoteLoadStage.LOADING
        self._room.take(request.request_id, request.num_tokens)
        num_tokens = read.computed_tokens + num_external_tokens
        refused = None
        if num_tokens != read.usable_tokens:
            refused = f"the engine loads up to token {num_tokens}, but the offer was up to {read.usable_tokens}"
        tables = tuple(tuple(_NULL if b.is_null else b.block_id for b in group) for group in blocks.blocks)
        plan.loads.append(
            PromptLoad(request.request_id, read.prompt, num_tokens, read.computed_tokens, tables, refused)
        )

    def on_loaded(self, finished: set[str], failed: set[str]) -> None:
        """Handles loads that all ranks have ended."""
        for name in finished:
            read = self._loads.get(name)
            if read is None or read.stage is not RemoteLoadStage.LOADING:
                continue
            read.stage = RemoteLoadStage.OVER
            self._metrics.count_prompt(_outcome(read.request, name in failed))
            if read.request.is_finished():
                self._room.release((name,))
                del self._loads[name]
            elif name in failed:
                self._room.fail(name, read.request.num_tokens)

    def finish(self, request: Request, plan: NixlStepPlan) -> None:
        """Handles the end of the request. Cancels a running load; the engine frees the blocks after the load ends."""
        read = self._load_of(request)
        if read is None:
            return
        if read.stage is RemoteLoadStage.LOADING:
            plan.ended.append(request.request_id)
            return
        if read.stage is RemoteLoadStage.WAITING:
            self._end(read, plan)
        self._room.release((request.request_id,))
        del self._loads[request.request_id]

    def reset(self, plan: NixlStepPlan) -> None:
        """Ends the loads of requests that wait for admission: the engine may now have other weights than the producer
        had. A running load holds blocks, so vLLM reports that the reset has failed."""
        for read in self._loads.values():
            if read.stage is RemoteLoadStage.WAITING:
                self._end(read, plan)
                if read.usable_tokens:
                    self._refuse(read.request, "the engine's caches were reset")

    def on_scheduled(self, request_ids: Iterable[str]) -> None:
        """Handles requests that run in this step. These requests have their blocks, so they no longer need room."""
        self._room.release(request_ids)

    def _end(self, read: _RemoteLoad, plan: NixlStepPlan) -> None:
        read.stage = RemoteLoadStage.OVER
        plan.ended.append(read.request.request_id)

    def _load_of(self, request: Request) -> _RemoteLoad | None:
        read = self._loads.get(request.request_id)
        return read if read is not None and read.request is request else None


def _outcome(request: Request, has_failed: bool) -> str:
    """Metrics label of an ended load. A failed load of an aborted request counts as cancelled, not as failed."""
    from vllm.v1.request import RequestStatus

    if not has_failed:
        return "loaded"
    return "cancelled" if request.status == RequestStatus.FINISHED_ABORTED else "failed"
