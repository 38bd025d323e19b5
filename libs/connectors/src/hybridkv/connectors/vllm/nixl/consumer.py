"""The scheduler's half of a consumer: which requests begin with a producer's blocks, and into which of its own.

Each request reads once at most. Whatever became of that, it is not tried again: the producer was told that it may have
its blocks back, and the engine asks anew after every failure and preemption.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.load_room import LoadRoom
from hybridkv.connectors.vllm.nixl.hosts import AllowedHosts
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan, PromptLoad, WaitingRequest
from hybridkv.connectors.vllm.nixl.params import ParamsError, RemotePrompt, is_remote_prefill, parse
from hybridkv.connectors.vllm.nixl.prompts import prefix_digest, usable_tokens
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.planner import GroupSpec
from hybridkv.planner.admission import Verdict

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.hybridkv.nixl")

_NULL = 0


class RemoteLoadStage(enum.Enum):
    """How far a request is with what its producer holds."""

    WAITING = "the engine has not admitted it"
    LOADING = "its blocks are being read into"
    OVER = "it needs nothing of its producer any more"


@dataclass(slots=True)
class _RemoteLoad:
    request: Request
    prompt: RemotePrompt
    usable_tokens: int
    stage: RemoteLoadStage = RemoteLoadStage.WAITING
    computed_tokens: int = 0
    """What the engine said it holds when it last asked."""
    skip_once: bool = False
    """Its load has failed, and the engine has not asked since."""


class Consumer:
    """Reads by request.

    Args:
        groups: of the model.
        withheld_tokens: at the end of a prompt, computed here in any case.
        hosts: that a request may name.
        room: for loads, beside each other.
        recorder: counts what happens.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        withheld_tokens: int,
        hosts: AllowedHosts,
        room: LoadRoom,
        recorder: NixlMetrics,
    ) -> None:
        self._groups = tuple(groups)
        self._withheld_tokens = withheld_tokens
        self._hosts = hosts
        self._room = room
        self._recorder = recorder
        self._loads: dict[str, _RemoteLoad] = {}

    def begin(self, request: Request, plan: NixlStepPlan) -> None:
        """A new request. If a producer holds its prompt, that is told to go on doing so."""
        if not is_remote_prefill(request.kv_transfer_params):
            return
        try:
            prompt = parse(request.kv_transfer_params or {})
            if prompt.host not in self._hosts:
                raise ParamsError("remote_host", f"{prompt.host[:80]!r} is not among allowed_hosts")
        except ParamsError as error:
            self._refuse(request, error)
            return
        read = self._loads[request.request_id] = _RemoteLoad(request, prompt, 0)
        plan.waiting.append(WaitingRequest(request.request_id, prompt))
        try:
            read.usable_tokens = self._usable_tokens(request, prompt)
        except ParamsError as error:
            self._refuse(request, error)

    def _usable_tokens(self, request: Request, prompt: RemotePrompt) -> int:
        if compat.reads_no_cache(request):
            return 0
        num_tokens = usable_tokens(self._groups, prompt, request.num_prompt_tokens, self._withheld_tokens)
        if prompt.prefix_tokens < num_tokens or prompt.prefix_tokens > request.num_prompt_tokens:
            raise ParamsError("hybridkv.prefix_tokens", "another number of tokens than the prompt's")
        if prefix_digest(request, prompt.prefix_tokens) != prompt.prefix:
            raise ParamsError("hybridkv.prefix", "the producer computed another prompt")
        return num_tokens

    def _refuse(self, request: Request, why: ParamsError | str) -> None:
        self._recorder.prompt("refused")
        logger.warning("request %s is computed here: %s", request.request_id, why)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that the producer's blocks hold; None: to be asked again in the next step.

        The engine looks first at requests that hold blocks for a load, and at no other behind one that cannot have
        what it needs. One whose load has failed holds nothing any more and still stands among them: if it does not fit
        beside those behind it, whose loads have ended, nobody ever goes on. Passed over once, it waits with the others.
        """
        read = self._load_of(request)
        if read is not None and read.skip_once:
            read.skip_once = False
            return None
        if read is None or read.stage is not RemoteLoadStage.WAITING:
            return 0
        read.computed_tokens = computed_tokens
        num_tokens = max(0, read.usable_tokens - computed_tokens)
        if not num_tokens:
            return 0
        verdict = self._room.verdict(request.request_id, request.num_tokens)
        if verdict is Verdict.REFUSE:
            self._refuse(request, "there is no room beside other loads")
            read.usable_tokens = 0
            return 0
        return num_tokens if verdict is Verdict.ADMIT else None

    def on_allocated(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int, plan: NixlStepPlan
    ) -> PromptLoad | None:
        """The engine has given the request blocks, to load `num_external_tokens` into or to compute. The load."""
        read = self._load_of(request)
        if read is None or read.stage is not RemoteLoadStage.WAITING:
            return None
        if num_external_tokens == 0:
            self._end(read, plan)
            if read.usable_tokens:
                self._recorder.prompt("held_already")
            return None
        read.stage = RemoteLoadStage.LOADING
        self._room.take(request.request_id, request.num_tokens)
        num_tokens = read.computed_tokens + num_external_tokens
        refused = None
        if num_tokens != read.usable_tokens:
            refused = f"the engine loads up to token {num_tokens}, and was offered {read.usable_tokens}"
        tables = tuple(tuple(_NULL if b.is_null else b.block_id for b in group) for group in blocks.blocks)
        load = PromptLoad(request.request_id, read.prompt, num_tokens, read.computed_tokens, tables, refused)
        plan.loads.append(load)
        return load

    def on_loaded(self, finished: set[str], failed: set[str]) -> None:
        """All ranks have ended these loads."""
        for name in finished:
            read = self._loads.get(name)
            if read is None or read.stage is not RemoteLoadStage.LOADING:
                continue
            read.stage = RemoteLoadStage.OVER
            read.skip_once = name in failed
            self._recorder.prompt(_outcome(read.request, name in failed))
            if read.request.is_finished():
                self._room.give_back((name,))
                del self._loads[name]
            elif name in failed:
                self._room.fail(name, read.request.num_tokens)

    def finish(self, request: Request, plan: NixlStepPlan) -> None:
        """The request has ended, in whatever way. A load that is under way ends before its blocks are free."""
        read = self._load_of(request)
        if read is None:
            return
        if read.stage is RemoteLoadStage.LOADING:
            plan.ended.append(request.request_id)
            return
        if read.stage is RemoteLoadStage.WAITING:
            self._end(read, plan)
        self._room.give_back((request.request_id,))
        del self._loads[request.request_id]

    def on_scheduled(self, request_ids: Iterable[str]) -> None:
        """The engine runs these requests in this step: what they need they have."""
        self._room.give_back(request_ids)

    def _end(self, read: _RemoteLoad, plan: NixlStepPlan) -> None:
        read.stage = RemoteLoadStage.OVER
        plan.ended.append(read.request.request_id)

    def _load_of(self, request: Request) -> _RemoteLoad | None:
        read = self._loads.get(request.request_id)
        return read if read is not None and read.request is request else None


def _outcome(request: Request, has_failed: bool) -> str:
    """Of a load, in counts. One whose request was aborted meanwhile is nobody's failure."""
    from vllm.v1.request import RequestStatus

    if not has_failed:
        return "loaded"
    return "cancelled" if request.status == RequestStatus.FINISHED_ABORTED else "failed"
