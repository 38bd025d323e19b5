"""The scheduler's half of a producer: which finished requests are handed over, and how long their blocks are held.

A request that is to be handed over has a lease from its first step on, so that each rank has written it before the
request can finish. Its clock starts when the request finishes; when it ends the ranks say so by `finished_sending`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.corrupt_blocks import WrongBlocks
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

logger = logging.getLogger("vllm.hybridkv.nixl")


@dataclass(frozen=True, slots=True)
class ProducerTerms:
    """On which prompts are handed over.

    Args:
        engine_id: of this engine.
        host: that consumers are told.
        lease_seconds: how long blocks are held without a word.
        max_leases: at the same time.
        withheld_tokens: at the end of a prompt, left to its consumer.
        hash_block_tokens: that each of the engine's block hashes adds.
        new_nonce: a whole number of 63 bits that nobody can guess.
        saves: peers read a copy in host memory, to be made first.
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
    """Leases by request.

    Args:
        groups: of the model.
        terms: of handing over.
        recorder: counts what happens.
    """

    def __init__(self, groups: Sequence[GroupSpec], terms: ProducerTerms, recorder: NixlMetrics) -> None:
        self._groups = tuple(groups)
        self._terms = terms
        self._recorder = recorder
        self._slots = LeaseSlots(terms.max_leases, terms.new_nonce)
        self._offered: set[str] = set()
        self._shortened: set[str] = set()
        self.saving = HostCopyTracker(groups) if terms.saves else None
        """What is copied to host memory; None where peers read the engine's own."""
        self.wrong = WrongBlocks([group.block_tokens for group in groups], recorder)
        """What the engine has copied wrongly, and whom that misled."""
        self.ranks: tuple[RankAddress, ...] = ()
        """Of this engine, once they have said where they are."""

    @property
    def num_offered(self) -> int:
        """Requests whose blocks are held."""
        return len(self._offered)

    def begin(self, request: Request) -> None:
        """A new request. One that is to be handed over is computed up to the tokens that its consumer computes."""
        withheld = self._terms.withheld_tokens
        if not withheld or not is_remote_decode(request.kv_transfer_params) or request.request_id in self._shortened:
            return
        # One that reads no cache at its consumer, for the log-probabilities of its prompt, is computed there anyway.
        if request.num_prompt_tokens > withheld and not compat.reads_no_cache(request):
            self._shortened.add(request.request_id)
            _shorten(request, withheld, self._terms.hash_block_tokens)

    def on_allocated(self, request: Request, plan: NixlStepPlan) -> None:
        """The engine runs the request, once more perhaps."""
        name = request.request_id
        if not is_remote_decode(request.kv_transfer_params) or self._slots.of(name) is not None:
            return
        lease = self._slots.issue(name)
        if lease is None:
            self._recorder.lease("no_room")
            return
        plan.opened.append(OpenedLease(name, lease))
        if self.saving is not None:
            self.saving.begin(request)

    def finish(
        self, request: Request, block_ids: Sequence[Sequence[int]], plan: NixlStepPlan
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended.

        Returns:
            Whether its blocks stay with it until its id is among `finished_sending`, and what its consumer must know.
        """
        name = request.request_id
        self._shortened.discard(name)
        lease = self._slots.of(name)
        if lease is None:
            return False, None
        num_tokens = request.num_computed_tokens
        is_saved = self.saving is None or self.saving.end(request) >= num_tokens
        is_correct = name not in self.wrong.misled
        if not (_has_ended_well(request) and num_tokens and is_saved and is_correct and self.ranks):
            self._slots.retire(name)
            plan.dropped.append(name)
            self._recorder.lease("dropped")
            return False, None
        self._offered.add(name)
        tables = offered(self._groups, block_ids, num_tokens)
        plan.offered.append(OfferedRequest(name, tables))
        return True, compose(self._prompt(request, tables, lease))

    def _prompt(self, request: Request, tables: BlockTables, lease: Lease) -> RemotePrompt:
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
            prefix=prefix_digest(request, min(num_tokens, request.num_prompt_tokens)),
        )

    def on_released(self, request_ids: set[str]) -> None:
        """All ranks have ended these leases, and the table no longer names them."""
        for name in request_ids:
            if name in self._offered:
                self._offered.discard(name)
                self._slots.retire(name)


def _has_ended_well(request: Request) -> bool:
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def _shorten(request: Request, num_tokens: int, hash_block_tokens: int) -> None:
    """Takes tokens from the end of a prompt that has not begun. What is sampled behind it nobody reads."""
    # Not in place: in one process this is the list of whoever asked, and of every other answer to the same prompt.
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        found = getattr(request, name, None)
        if found is not None:
            setattr(request, name, found[:-num_tokens])
    del request._all_token_ids[-num_tokens:]
    request.num_prompt_tokens -= num_tokens
    request.max_tokens = 1
    # A hash over the last tokens is one of tokens that the request no longer has.
    del request.block_hashes[request.num_prompt_tokens // hash_block_tokens :]
