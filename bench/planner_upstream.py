"""vLLM's own offloading scheduler, set up without an engine, for benchmarks that compare with it.

Written for vLLM 0.32. Its arguments are real classes, or plain objects with the attributes that it reads.
"""

from itertools import count, repeat
from types import SimpleNamespace
from typing import Any

from hybridkv.planner import GroupKind, GroupSpec, read_blocks


class Upstream:
    """vLLM's scheduler half over its CPU manager.

    Args:
        groups: the model's groups.
        stored: for each group, True if its whole prefix is stored, False if no chunk is.
        num_tokens: tokens of every request.
        hashes: block hashes of every request, one for each `hash_tokens`.
        hash_tokens: tokens in a block of the hashes.
    """

    def __init__(
        self, groups: tuple[GroupSpec, ...], stored: list[bool], num_tokens: int, hashes: list[bytes], hash_tokens: int
    ) -> None:
        self.groups, self._hashes, self.num_tokens = groups, hashes, num_tokens
        keys = [key for i in range(len(groups)) if stored[i] for key in offload_keys(groups, i, hashes, hash_tokens)]
        self._scheduler, self._manager = open_upstream(groups, hash_tokens, len(keys) + 1)
        fill_upstream(self._manager, keys)
        self._ids = count()

    def new_request(self) -> Any:
        request = SimpleNamespace(
            request_id=str(next(self._ids)),
            num_tokens=self.num_tokens,
            num_prompt_tokens=self.num_tokens,
            block_hashes=self._hashes,
            kv_transfer_params=None,
            kv_hints=None,
            skip_reading_prefix_cache=False,
        )
        self._scheduler.on_new_request(request)
        return request

    def lookup(self, request: Any, computed_tokens: int = 0) -> int:
        return self._scheduler.get_num_new_matched_tokens(request, computed_tokens)[0] or 0

    def allocate(self, request: Any, blocks: Any, num_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_tokens)

    def num_loading(self, request: Any) -> int:
        """Keys of the request's load."""
        jobs = self._scheduler._req_status[request.request_id].transfer_jobs
        return sum(len(self._scheduler._jobs[job_id].keys) for job_id in jobs)

    def end(self, request: Any) -> None:
        """Ends the request's load outside the clock, and forgets the request."""
        state = self._scheduler._req_status.pop(request.request_id)
        for job_id in state.transfer_jobs:
            keys = self._scheduler._jobs.pop(job_id).keys
            self._scheduler._chunks_being_loaded.difference_update(keys)
            self._manager.complete_load(keys, state.req_context)


def open_upstream(
    groups: tuple[GroupSpec, ...], hash_tokens: int, num_chunks: int, blocks_per_chunk: int = 1
) -> tuple[Any, Any]:
    """vLLM's scheduler half, and its LRU manager with room for `num_chunks` of `blocks_per_chunk` blocks of a group."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(num_chunks=num_chunks)
    cache = SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True)
    parallel = SimpleNamespace(world_size=1, decode_context_parallel_size=1)
    spec = SimpleNamespace(
        config=SimpleNamespace(
            groups=[SimpleNamespace(group_id=i, tokens_per_block=g.block_tokens) for i, g in enumerate(groups)]
        ),
        tokens_per_block=tuple(group.block_tokens for group in groups),
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_hash=hash_tokens,
        offload_prompt_only=True,
        kv_events_config=OffloadingKVEventsConfig(enable_kv_cache_events=False, self_describing_kv_events=False),
        get_manager=lambda: manager,
    )
    config = SimpleNamespace(cache_config=cache, parallel_config=parallel, speculative_config=None)
    return OffloadingConnectorScheduler(spec, config, _kv_cache_config(groups)), manager


def offload_keys(
    groups: tuple[GroupSpec, ...], index: int, hashes: list[bytes], hash_tokens: int, blocks_per_chunk: int = 1
) -> list[Any]:
    """vLLM's keys of a group for all whole chunks of these hashes."""
    from vllm.v1.kv_offload.base import make_offload_key

    step = groups[index].block_tokens * blocks_per_chunk // hash_tokens
    return [make_offload_key(block_hash, index) for block_hash in hashes[step - 1 :: step]]


def fill_upstream(manager: Any, keys: list[Any]) -> None:
    """Stores these keys, up to the capacity of the manager."""
    from vllm.v1.kv_offload.base import ReqContext

    context = ReqContext(req_id="writer")
    manager.on_new_request(context)
    if keys:
        assert manager.prepare_store(keys, context) is not None
        manager.complete_store(keys, context)


def _kv_cache_config(groups: tuple[GroupSpec, ...]) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    specs = []
    for group in groups:
        if group.kind is GroupKind.FULL:
            spec = FullAttentionSpec(block_size=group.block_tokens, **heads)
        elif group.kind is GroupKind.WINDOW:
            spec = SlidingWindowSpec(block_size=group.block_tokens, sliding_window=group.window_tokens, **heads)
        else:
            shapes, dtypes = ((8, 8),), (torch.bfloat16,)
            spec = MambaSpec(block_size=group.block_tokens, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
        specs.append(KVCacheGroupSpec([f"layer{len(specs)}"], spec))
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=specs)


def allocated_blocks(groups: tuple[GroupSpec, ...], num_tokens: int) -> Any:
    """The engine's blocks for a load: real block objects, null for blocks that are not read."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    null, ids = KVCacheBlock(0), count(1)
    null.is_null = True
    lists = []
    for group in groups:
        read = read_blocks(group, num_tokens)
        lists.append([*repeat(null, read.start), *(KVCacheBlock(next(ids)) for _ in read)])
    return SimpleNamespace(blocks=tuple(lists))
