"""Engine around a connector's scheduler half: requests, block tables over vLLM's own pool, and steps.

The engine computes and schedules nothing: benchmarks choose the requests of each step. Tables are those of vLLM 0.32:
null for blocks that have left a window, and a recurrent state in a separate block at the end of each chunk.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput
from vllm.v1.request import RequestStatus

from hybridkv.planner import GroupKind, GroupSpec, read_blocks

STEP_TOKENS = 8192
"""Limit for the prompt tokens of a step."""
SPARE_BLOCKS = 4096
"""Blocks for stores in flight, and for answers."""
ANSWER_TOKENS = 64
"""Maximum number of answer tokens, if other requests run beside a request."""


@dataclass(eq=False)
class LifeRequest:
    """Request with the attributes of vLLM's request that scheduler halves read."""

    request_id: str
    num_prompt_tokens: int
    block_hashes: list[bytes]
    num_tokens: int = 0
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    kv_transfer_params: None = None
    kv_hints: None = None
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0
    lora_request: None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens

    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)


@dataclass(slots=True)
class Step:
    """One step of the engine.

    Args:
        scheduled: tokens of each request.
        begun: requests that are scheduled for the first time.
        resumed: requests that continue after a preemption.
        preempted: requests that are preempted in this step.
        finished: requests that have ended since the previous step.
    """

    scheduled: Mapping[LifeRequest, int] = field(default_factory=dict)
    begun: Iterable[LifeRequest] = ()
    resumed: Iterable[LifeRequest] = ()
    preempted: Iterable[LifeRequest] = ()
    finished: Iterable[LifeRequest] = ()


class Engine:
    """Blocks and tables for one connector.

    Args:
        groups: groups of the model.
        hash_tokens: tokens in a block of the hashes.
        max_tokens: largest number of tokens of a request; the pool has blocks for one such request.
        num_beside: number of further requests of that length, which share its blocks of full attention.
    """

    def __init__(self, groups: tuple[GroupSpec, ...], hash_tokens: int, max_tokens: int, num_beside: int = 0) -> None:
        self.groups, self.hash_tokens = groups, hash_tokens
        self._step_tokens = STEP_TOKENS
        for group in groups:
            if group.kind is GroupKind.RECURRENT:
                self._step_tokens = STEP_TOKENS // group.block_tokens * group.block_tokens
        num_blocks = SPARE_BLOCKS
        for group in groups:
            live_tokens = max_tokens if group.kind is GroupKind.FULL else 2 * STEP_TOKENS + (group.window_tokens or 0)
            # Blocks for two requests: a request that will share blocks first gets its own blocks.
            num_blocks += (1 + bool(num_beside)) * min(live_tokens, max_tokens) // group.block_tokens
            num_blocks += num_beside * ((group.window_tokens or 0) + ANSWER_TOKENS) // group.block_tokens
            num_blocks += 2 * num_beside
        self.pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=hash_tokens)
        self._tables: dict[str, list[list[KVCacheBlock]]] = {}

    def admit(self, request: LifeRequest, num_tokens: int) -> KVCacheBlocks:
        """Allocates blocks for the loaded tokens of a request: null for blocks that are not read."""
        null, pool = self.pool.null_block, self.pool
        reads = [read_blocks(group, num_tokens) for group in self.groups]
        self._tables[request.request_id] = [[null] * read.start + pool.get_new_blocks(len(read)) for read in reads]
        return self.blocks(request)

    def share(self, request: LifeRequest, other: LifeRequest) -> None:
        """Replaces the request's blocks of full attention with another request's blocks, if there is no room for all.
        Neither request may be freed afterwards."""
        tables = self._tables[request.request_id]
        for index, group in enumerate(self.groups):
            if group.kind is GroupKind.FULL:
                self.pool.free_blocks(reversed(tables[index]))
                tables[index] = list(self._tables[other.request_id][index][: len(tables[index])])

    def blocks(self, request: LifeRequest) -> KVCacheBlocks:
        return KVCacheBlocks(tuple(self._tables[request.request_id]))

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Blocks of a request, as in vLLM's manager."""
        return KVCacheBlocks(tuple(self._tables[request_id]))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.get_blocks(request_id).get_block_ids()

    def next_tokens(self, request: LifeRequest) -> int:
        """Prompt tokens of the request's next step. The step stops at the prompt's last boundary, to leave a state
        there."""
        computed, num_tokens = request.num_computed_tokens, request.num_tokens
        stop = min(computed + self._step_tokens, num_tokens)
        for group in self.groups:
            if group.kind is GroupKind.RECURRENT:
                last = (num_tokens - 1) // group.block_tokens * group.block_tokens
                stop = last if computed < last < stop else stop
        return stop - computed

    def run(self, step: Step) -> SchedulerOutput:
        """The scheduler output for a connector. Call `computed` after it."""
        begun = list(step.begun)
        new_ids: dict[str, tuple[list[int], ...]] = {}
        states: dict[str, list[tuple[int, int, int]]] = {}
        for request, num_tokens in step.scheduled.items():
            new_ids[request.request_id] = self._grow(request, num_tokens)
            if handed_over := self._states(request, num_tokens):
                states[request.request_id] = handed_over
        whole = {request.request_id for request in (*begun, *step.resumed)}
        new_ids |= {request_id: self.get_block_ids(request_id) for request_id in whole}
        going_on = [request for request in step.scheduled if request not in begun]
        scheduled = {request.request_id: num_tokens for request, num_tokens in step.scheduled.items()}
        cached = CachedRequestData(
            req_ids=[request.request_id for request in going_on],
            resumed_req_ids={request.request_id for request in step.resumed},
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[_or_none(new_ids[request.request_id]) for request in going_on],
            num_computed_tokens=[request.num_computed_tokens for request in going_on],
            num_output_tokens=[request.num_tokens - request.num_prompt_tokens for request in going_on],
        )
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [_new_data(request, new_ids[request.request_id]) for request in begun]
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.finished_req_ids = {request.request_id for request in step.finished}
        output.preempted_req_ids = {request.request_id for request in step.preempted}
        output.kv_connector_block_state = KVConnectorBlockState(set(scheduled), self.get_block_ids, states)
        return output

    def computed(self, step: Step) -> None:
        """Counts the tokens of the step as computed."""
        for request, num_tokens in step.scheduled.items():
            request.num_computed_tokens += num_tokens

    def free(self, request: LifeRequest) -> None:
        """Frees the blocks of a request that has ended or was preempted."""
        for table in self._tables.pop(request.request_id):
            self.pool.free_blocks(block for block in reversed(table) if not block.is_null)

    def _grow(self, request: LifeRequest, num_tokens: int) -> tuple[list[int], ...]:
        """Frees blocks that have left a window, and adds blocks for the tokens of a step. Returns the new blocks."""
        pool, null, computed = self.pool, self.pool.null_block, request.num_computed_tokens
        added = []
        for group, table in zip(self.groups, self._tables[request.request_id], strict=True):
            place = read_blocks(group, computed).start - 1
            while place >= 0 and not table[place].is_null:
                pool.free_blocks((table[place],))
                table[place] = null
                place -= 1
            more = -(-(computed + num_tokens) // group.block_tokens) - len(table)
            num_states = min(more, 1) if group.kind is GroupKind.RECURRENT else more
            blocks = [null] * (more - num_states) + pool.get_new_blocks(num_states) if more > 0 else []
            table.extend(blocks)
            added.append([block.block_id for block in blocks])
        return tuple(added)

    def _states(self, request: LifeRequest, num_tokens: int) -> list[tuple[int, int, int]]:
        """The states at the prompt's last boundary, if the step ends there."""
        end = request.num_computed_tokens + num_tokens
        states = []
        for index, group in enumerate(self.groups):
            size = group.block_tokens
            if group.kind is GroupKind.RECURRENT and end == (request.num_prompt_tokens - 1) // size * size:
                states.append((index, self._tables[request.request_id][index][end // size - 1].block_id, end))
        return states


def _or_none(block_ids: tuple[list[int], ...]) -> tuple[list[int], ...] | None:
    return block_ids if any(block_ids) else None


def _new_data(request: LifeRequest, block_ids: tuple[list[int], ...]) -> Any:
    return SimpleNamespace(
        req_id=request.request_id, block_ids=block_ids, num_computed_tokens=request.num_computed_tokens
    )
