"""Producer in the scheduler: decides which finished requests to hand over.

A request that may be handed over has a lease from its first step on, so that each rank writes the lease before the
request can finish. The lease time starts when the request finishes. Ranks report the end of the lease in
`finished_sending`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import CorruptBlocks
from hybridkv.connectors.vllm.nixl.memory.host_buffer import HostCopyTracker
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan, OfferedRequest, OpenedLease
from hybridkv.connectors.vllm.nixl.params import RankAddress, RemotePrompt, compose, is_remote_decode
from hybridkv.connectors.vllm.nixl.prompts import prefix_digest
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.peers.leases import Lease, LeaseSlots
from hybridkv.peers.tables import BlockTables, offered
from hybridkv.planner import GroupSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class ProducerTerms:
    """Settings of a producer.

    Args:
        engine_id: id of this engine.
        host: address of this engine for consumers.
        lease_seconds: duration of a lease without a renewal.
        max_leases: maximum leases at the same time.
        withheld_tokens: tokens at the end of a prompt that the consumer computes.
        hash_block_tokens: tokens per block hash of the engine.
        new_nonce: returns an unpredictable integer from 1 to `MAX_NONCE`.
        saves: True if peers read a copy in host memory; then workers copy blocks before the hand-over.
    """

    engine_id: str
    host: str
    lease_seconds: float
    max_leases: int
    withheld_tokens: int
    hash_block_tokens: int
    new_nonce: Callable[[], int]
    saves: bool = False


class Producer:
    """Hand-overs of this engine's requests, and the leases of these requests.

    Args:
        groups: groups of the model.
        terms: settings.
        metrics: counters of this half.
    """

    def __init__(self, groups: Sequence[GroupSpec], terms: ProducerTerms, metrics: NixlMetrics) -> None:
        self._groups = tuple(groups)
        self._terms = terms
        self._metrics = metrics
        self._slots = LeaseSlots(terms.max_leases, terms.new_nonce)
        self._offered: set[str] = set()
        self._shortened: set[str] = set()
        self.host_copies = HostCopyTracker(groups) if terms.saves else None
        """Tracks copies to host memory; None if peers read the engine's memory."""
        self.corrupt_blocks = CorruptBlocks(groups, metrics)
        """Tracks corrupt blocks of the engine and requests that resumed from them."""
        self.ranks: tuple[RankAddress, ...] = ()
        """Addresses of this engine's ranks; empty until all are known."""

    @property
    def num_offered(self) -> int:
        """Number of requests with held blocks."""
        return len(self._offered)

    def begin(self, request: Request) -> None:
        """Handles a new request. If its prompt may be handed over, removes the tokens that the consumer computes, and
        sets `max_tokens` to 1."""
        self.corrupt_blocks.track(request)
        withheld = self._terms.withheld_tokens
        if not withheld or not may_be_handed_over(request) or request.request_id in self._shortened:
            return
        # The consumer of a request for prompt log-probabilities uses no cache, so it computes the whole prompt.
        if request.num_prompt_tokens > withheld and not compat.skips_prefix_cache(request):
            self._shortened.add(request.request_id)
            _shorten(request, withheld, self._terms.hash_block_tokens)

    def on_allocated(self, request: Request, plan: NixlStepPlan) -> None:
        """Handles the allocation of blocks. The first allocation of a request issues its lease."""
        name = request.request_id
        if not may_be_handed_over(request) or self._slots.of(name) is not None:
            return
        lease = self._slots.issue(name)
        if lease is None:
            self._metrics.count_lease("no_room")
            return
        plan.opened.append(OpenedLease(name, lease))
        if self.host_copies is not None:
            self.host_copies.begin(request)

    def finish(
        self, request: Request, block_ids: Sequence[Sequence[int]], plan: NixlStepPlan, adapter: bytes | None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handles the end of the request.

        Args:
            request: the request.
            block_ids: its blocks of each group.
            plan: plan of the next step.
            adapter: digest of the content with which the engine computed; empty without an adapter; None if the
                content is in doubt. Then the request is not handed over.

        Returns:
            True if the engine must hold the request's blocks until its id is in `finished_sending`; and the parameters
            for the consumer, or None.
        """
        name = request.request_id
        self._shortened.discard(name)
        lease = self._slots.of(name)
        if lease is None:
            return False, None
        num_tokens = request.num_computed_tokens
        is_saved = self.host_copies is None or self.host_copies.end(request) >= num_tokens
        is_misled = name in self.corrupt_blocks.misled or self.corrupt_blocks.has_wrong_state(name, num_tokens)
        is_handed_over = has_ended_well(request) and num_tokens and is_saved and not is_misled and self.ranks
        if adapter is None or not is_handed_over:
            self._slots.retire(name)
            plan.dropped.append(name)
            self._metrics.count_lease("dropped")
            return False, None
        self._offered.add(name)
        tables = offered(self._groups, block_ids, num_tokens)
        plan.offered.append(OfferedRequest(name, tables))
        return True, compose(self._prompt(request, tables, lease, adapter))

    def _prompt(self, request: Request, tables: BlockTables, lease: Lease, adapter: bytes) -> RemotePrompt:
        num_tokens, terms = tables.num_tokens, self._terms
        return RemotePrompt(
            engine_id=terms.engine_id,
            request_id=request.request_id,
            host=terms.host,
            ranks=self.ranks,
            num_tokens=num_tokens,
            block_ids=tables.block_ids,
            first_blocks=tables.first_blocks,
            block_tokens=tuple(group.block_tokens for group in self._groups),
            lease=lease,
            lease_seconds=terms.lease_seconds,
            prefix_tokens=min(num_tokens, request.num_prompt_tokens),
            prefix=prefix_digest(request, min(num_tokens, request.num_prompt_tokens), adapter),
        )

    def on_released(self, request_ids: set[str]) -> None:
        """Handles leases that all ranks have ended and removed from their tables."""
        for name in request_ids:
            if name in self._offered:
                self._offered.discard(name)
                self._slots.retire(name)


def may_be_handed_over(request: Request) -> bool:
    """True if a consumer may load the blocks of this request. False for a session: its next input would follow the
    shortened prompt, and a copy in host memory may keep a token that the engine drops before this input."""
    return is_remote_decode(request.kv_transfer_params) and not compat.is_session(request)


def has_ended_well(request: Request) -> bool:
    """True if the request ran to its end, without an error or an abort."""
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def _shorten(request: Request, num_tokens: int, hash_block_tokens: int) -> None:
    """Removes tokens from the end of a prompt before the request runs. The request then samples one token, which the
    consumer ignores."""
    # Do not change lists in place: in one process, the caller and other requests for the same prompt share them.
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        found = getattr(request, name, None)
        if found is not None:
            setattr(request, name, found[:-num_tokens])
    del request._all_token_ids[-num_tokens:]
    request.num_prompt_tokens -= num_tokens
    request.max_tokens = 1
    # Remove hashes that include the removed tokens.
    del request.block_hashes[request.num_prompt_tokens // hash_block_tokens :]
