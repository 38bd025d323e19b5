"""Differences between the versions 0.30 to 0.33 of vLLM, detected by features of the engine, never by its version."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.blocks.blocks import lazy_resolver

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from hybridkv.connectors.vllm.common.copies.devices import EngineCopies

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HOST_HIT: Any = CacheHitSource.HOST
except ImportError:
    # This engine does not count hits by source.
    HOST_HIT = None

BlockTables = Callable[[str], Sequence[Sequence[int]]]
CheckpointOf = Callable[[int, int], int]
"""Boundary of the state that a backend saves inside a prefill chunk, from the chunk's start and end. 0: none."""
STABLE_HASHES = ("sha256", "sha256_cbor")
"""Algorithms of block hashes that are equal in every process, and collision-resistant."""


def share_log() -> None:
    """Sends the log of hybridkv's libraries to vLLM's handlers, unless the log has handlers of its own."""
    ours, engine = logging.getLogger("hybridkv"), logging.getLogger("vllm")
    if ours.handlers or not engine.handlers:
        return
    for handler in engine.handlers:
        ours.addHandler(handler)
    ours.setLevel(engine.level)
    ours.propagate = False


def transfer_keys() -> list[str]:
    """Keys of vLLM's KVTransferConfig."""
    from vllm.config.kv_transfer import KVTransferConfig

    return [field.name for field in dataclasses.fields(KVTransferConfig)]  # type: ignore[arg-type]


def require_supported_engine() -> None:
    """Refuses an engine without features that a hybrid connector needs.

    Raises:
        ConfigurationError: the engine cannot report the failure of one request's load (new in vLLM 0.30).
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    if not hasattr(base, "KVConnectorTransferResults") or not hasattr(base, "SupportsHMA"):
        raise ConfigurationError(
            "vllm", "0.30 or later", "one without KVConnectorTransferResults", "upgrade vllm; 0.32 is the one tested"
        )


def cacheable_group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Groups with content that can be stored by prefix; the other groups are SCRATCH."""
    ids = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    if ids is not None:
        return tuple(ids)
    return tuple(
        i
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group.kv_cache_spec, "prefix_cacheable", True)
    )


def hash_block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens in each entry of `request.block_hashes`."""
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    if resolved is not None:
        return int(resolved)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def hit_alignment_tokens(kv_cache_config: KVCacheConfig) -> int | None:
    """Alignment of the engine's own hits, in tokens. Smaller than a block if the engine hands over states inside blocks
    (`prefix_match_unit`). None before vLLM 0.32, which introduced the value."""
    resolved = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    return None if resolved is None else int(resolved)


def rank(vllm_config: VllmConfig) -> int:
    """Rank of this worker within its engine."""
    return int(vllm_config.parallel_config.rank)


def max_in_flight_tokens(vllm_config: VllmConfig) -> int:
    """Maximum tokens that are scheduled before the engine frees blocks that left a window."""
    resolved = getattr(vllm_config, "max_in_flight_tokens", None)
    return int(resolved if resolved is not None else vllm_config.scheduler_config.max_num_batched_tokens)


def prefill_lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Tokens after a prefill chunk that a drafter reads; 1 if this engine does not report the number."""
    return int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1))


def is_killed_on_shutdown(vllm_config: VllmConfig) -> bool:
    """Whether a server kills the engine's processes at shutdown without waiting for their end."""
    timeout_s = getattr(vllm_config, "shutdown_timeout", None)
    if timeout_s is None:
        return False
    try:
        from vllm.v1.engine.utils import get_engine_process_shutdown_timeout
    except ImportError:
        return bool(timeout_s == 0)
    # On some platforms the engine has time to release a device even if the timeout for requests is 0.
    return not get_engine_process_shutdown_timeout(timeout_s, timeout_s)


def unpadded_page_bytes(spec: Any) -> int:
    """Bytes of content in one layer's page, without padding."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes"):
        value = getattr(spec, name, None)
        if value is not None:
            return int(value)
    return int(spec.page_size_bytes)


def heads_before_layers(kv_cache_config: KVCacheConfig) -> bool:
    """Whether the layout is BHLNC: a block holds heads, and each head holds all layers. A layer's page is then split
    into pieces. The engine allows this layout only if all pages have one size."""
    return getattr(kv_cache_config, "kv_cache_layout", None) == "BHLNC"


def copies_whole_blocks() -> bool:
    """Whether the engine copies a whole block if its own hit ends inside the block. vLLM 0.32 copies only the page
    bytes of the first layer that begins at the same address (vllm-project/vllm#55112). True if this cannot be
    determined."""
    try:
        import torch
        from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

        memory = torch.zeros(64, dtype=torch.int8)
        state, attention = (memory.as_strided((2, 1, 1, size), (16, size, size, 1)) for size in (8, 16))
        attention[0] = 1
        copy_kv_cache_blocks_inplace([state, attention], 2, [(0, 1)])
        return bool(attention[1].all())
    except Exception:  # the function may have changed in any way; True is the safe default
        return True


def has_blocks_outermost(vllm_config: VllmConfig) -> bool:
    """Whether the pages of all layers of a block lie together. False if the engine does not report its layout."""
    layout = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    return str(getattr(layout, "name", layout)).startswith("B")


def conv_state_layout() -> str:
    """Layout of the convolution state of recurrent layers. It depends on the connector unless the user sets it."""
    try:
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    except ImportError:
        return ""
    return str(get_conv_state_layout())


def boundary_states(scheduler_output: SchedulerOutput) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Recurrent states that the scheduler hands over in this step: for each request, (group, block id, tokens)."""
    block_state = scheduler_output.kv_connector_block_state
    return block_state.boundary_state_offloads if block_state is not None else {}


@contextmanager
def with_boundary_states(
    scheduler_output: SchedulerOutput, states: Mapping[str, list[tuple[int, int, int]]]
) -> Iterator[None]:
    """Context in which the step hands over these states in place of its own. The step must have a block state.

    The step is changed, not copied, because a connector may write attributes of a step.
    """
    before = scheduler_output.kv_connector_block_state
    scheduler_output.kv_connector_block_state = dataclasses.replace(before, boundary_state_offloads=dict(states))
    try:
        yield
    finally:
        scheduler_output.kv_connector_block_state = before


def block_tables(scheduler_output: SchedulerOutput) -> BlockTables:
    """Block tables of this step's requests, by request id. Valid until the end of the step; only entries that are read
    are copied."""
    block_state = scheduler_output.kv_connector_block_state
    if block_state is None:
        return lambda request_id: ()
    resolve = getattr(block_state, "resolve_block_ids", None)
    if resolve is not None:
        return lazy_resolver(resolve)
    tables: Mapping[str, Sequence[Sequence[int]]] = block_state.block_ids
    return lambda request_id: tables[request_id]


def block_copies(scheduler_output: SchedulerOutput) -> Sequence[tuple[int, int]]:
    """Blocks that the engine copies before the step's forward pass, as (source, destination). The source is a block in
    which a hit ends, or a state that the engine keeps while the request continues. Empty before vLLM 0.32."""
    copies = getattr(scheduler_output, "kv_cache_block_copies", None) or ()
    return [(int(source), int(destination)) for source, destination in copies]


def prefill_cut_tokens(vllm_config: VllmConfig) -> int:
    """Alignment of prefill ends, in tokens, in an engine that keeps recurrent states: the smallest block size of all
    groups, even if recurrent groups have larger blocks (vllm-project/vllm#54076)."""
    return int(vllm_config.cache_config.block_size)


def inner_checkpoints(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[int, CheckpointOf]:
    """RECURRENT groups with a backend that saves a state inside a prefill chunk, and with blocks inside which a chunk
    may begin. Each value maps a chunk to the boundary of its saved state. It always returns 0 if vLLM's functions
    cannot be used."""
    hash_tokens = hash_block_tokens(vllm_config, kv_cache_config)
    unit = hit_alignment_tokens(kv_cache_config) or hash_tokens
    found = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec: Any = group.kv_cache_spec
        if getattr(spec, "num_prefill_checkpoint_blocks", 0) and hash_tokens < spec.block_size:
            checkpoint: CheckpointOf = partial(_inner_checkpoint, vllm_config, unit, hash_tokens, spec)
            try:
                checkpoint(0, 2 * spec.block_size)
            except Exception:  # vLLM's functions may have changed in any way; 0 is the safe default
                checkpoint = _no_checkpoint
            found[index] = checkpoint
    return found


def _no_checkpoint(start: int, end: int) -> int:
    return 0


def _inner_checkpoint(vllm_config: VllmConfig, unit: int, hash_tokens: int, spec: Any, start: int, end: int) -> int:
    from vllm.v1.kv_cache_interface import get_mamba_prefill_checkpoint_position, is_mamba_prefill_checkpoint_valid

    speculative = vllm_config.speculative_config
    drops_block = speculative is not None and speculative.use_eagle_block_drop()
    boundary = int(get_mamba_prefill_checkpoint_position(end, unit, drops_block))
    is_saved = is_mamba_prefill_checkpoint_valid(
        start, end, boundary, hash_tokens, spec.block_size, spec.prefill_checkpoint_alignment
    )
    return boundary if is_saved else 0


def draft_tokens(scheduler_output: SchedulerOutput) -> Mapping[str, Sequence[int]]:
    """Draft tokens of each request in this step; empty without a drafter."""
    return getattr(scheduler_output, "scheduled_spec_decode_tokens", None) or {}


def computed_tokens(scheduler_output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """Tokens `[start, end)` that this step computes for each request, without drafts."""
    cached = scheduler_output.scheduled_cached_reqs
    starts = {each.req_id: each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    drafts = draft_tokens(scheduler_output)
    return {
        request_id: (starts[request_id], starts[request_id] + number - len(drafts.get(request_id, ())))
        for request_id, number in scheduler_output.num_scheduled_tokens.items()
        if request_id in starts
    }


def preempted_ids(scheduler_output: SchedulerOutput) -> Collection[str]:
    """Ids of the requests that this step preempts."""
    return scheduler_output.preempted_req_ids or ()


def finished_ids(scheduler_output: SchedulerOutput) -> Collection[str]:
    """Ids of the requests that have finished since the previous step."""
    return scheduler_output.finished_req_ids or ()


def evict_cached_blocks(pool: BlockPool, block_ids: Iterable[int]) -> None:
    """Evicts blocks from the engine's prefix cache. Running requests keep these blocks. The engine does the same after
    a failed load. Does nothing in an engine without `evict_blocks`."""
    if hasattr(pool, "evict_blocks"):
        pool.evict_blocks(set(block_ids))


def evict_beyond(
    pool: BlockPool, num_groups: int, block_hashes: Sequence[Any], num_tokens: int, max_tokens: int
) -> None:
    """Evicts blocks of one prefix from the engine's prefix cache: those that end in the first `max_tokens` tokens after
    `num_tokens`. Also evicts blocks with the same content that other requests have computed.

    Args:
        pool: the engine's block pool.
        num_groups: number of the engine's groups.
        block_hashes: the engine's hashes of the prefix. A block of any size has the hash at its end.
        num_tokens: tokens of the prefix whose blocks remain.
        max_tokens: number of tokens to search.
    """
    if not can_find_cached_blocks(pool):
        return
    hash_tokens = pool.hash_block_size
    end = min(len(block_hashes), (num_tokens + max_tokens) // hash_tokens)
    for place in range(num_tokens // hash_tokens, end):
        for group in range(num_groups):
            evicted = None
            while (block_id := cached_block(pool, block_hashes[place], group)) not in (None, evicted):
                evict_cached_blocks(pool, (block_id,))
                evicted = block_id


def admitted(scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Requests that start in this step, or resume in it after a preemption, in order of admission. The values are their
    computed tokens before the step."""
    cached = scheduler_output.scheduled_cached_reqs
    computed = {each.req_id: each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs}
    for request_id, num_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in cached.resumed_req_ids:
            computed[request_id] = num_tokens
    return {each: computed[each] for each in scheduler_output.num_scheduled_tokens if each in computed}


def added_blocks(scheduler_output: SchedulerOutput) -> dict[str, list[int]]:
    """New blocks of running requests in this step."""
    cached = scheduler_output.scheduled_cached_reqs
    return {
        request_id: [block_id for group in added for block_id in group]
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True)
        if added is not None and request_id not in cached.resumed_req_ids
    }


def can_find_cached_blocks(pool: BlockPool) -> bool:
    """Whether blocks of the engine can be found by hash."""
    return bool(getattr(pool, "enable_caching", False)) and hasattr(pool, "get_cached_block")


def group_block_hashes(block_hashes: Any, hash_tokens: int, block_tokens: int) -> Sequence[Any]:
    """Hashes of a group's full blocks, in token order, from hashes of `hash_tokens` tokens each. A lazy view: a hash is
    made when it is read."""
    if block_tokens == hash_tokens:
        hashes: Sequence[Any] = block_hashes
        return hashes
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    return BlockHashListWithBlockSize(block_hashes, hash_tokens, block_tokens)


def cached_block(pool: BlockPool, block_hash: Any, group_index: int) -> int | None:
    """Id of the block that the engine caches for a group under this hash; None if there is none. `block_hash`: an entry
    of `group_block_hashes`."""
    found = pool.get_cached_block(block_hash, [group_index])
    return None if not found or found[0].is_null else int(found[0].block_id)


def hashes_before_computing(vllm_config: VllmConfig) -> bool:
    """Whether a block may have a hash although its tokens are never computed. The engine hashes a block when its tokens
    are scheduled, and only the priority policy may preempt a request in the same step."""
    policy = getattr(vllm_config.scheduler_config, "policy", "fcfs")
    return str(getattr(policy, "value", policy)) != "fcfs"


def max_uncomputed_tokens(vllm_config: VllmConfig) -> int:
    """Maximum tokens after a request's computed tokens that may have hashes although the engine does not compute them:
    the tokens of one step and the drafts of the last two. 0 unless `hashes_before_computing`."""
    if not hashes_before_computing(vllm_config):
        return 0
    drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", 0) or 0
    return int(vllm_config.scheduler_config.max_num_batched_tokens) + 2 * int(drafts)


def loads_after_forward(scheduler_output: SchedulerOutput) -> bool:
    """Whether the loads of this step begin after its forward pass, which writes all blocks that are hashed now. False
    if a connector has a synchronous load in this step, and in older engines."""
    return not getattr(scheduler_output, "has_sync_kv_loads", True)


def has_loads_within(scheduler_output: SchedulerOutput) -> bool:
    """Whether a connector has a synchronous load in this step: its blocks are filled before the forward pass, and the
    output of the step reports whether the load failed."""
    return bool(getattr(scheduler_output, "has_sync_kv_loads", False))


def returns_routing(vllm_config: VllmConfig) -> bool:
    """Whether the engine returns the experts of each token, also of tokens that it did not compute
    (`--enable-return-routed-experts`). False in vLLM 0.30, which refuses the option with a connector."""
    output = getattr(vllm_config, "aux_output_config", None)
    return output is not None and bool(output.enabled)


def limits_loads_to_known_routing() -> bool:
    """Whether the engine refuses a load of tokens whose experts it does not know. Before vLLM 0.33 it does not, and
    then raises an error in the worker."""
    try:
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    except ImportError:
        return False
    return hasattr(AuxOutputSchedulerConnector, "cap_external_hit")


def skips_prefix_cache(request: Any) -> bool:
    """Whether a request ignores all caches and computes every token (prompt log-probabilities, pooling). The engine
    still calls the connector and ignores its hit. vLLM 0.30 does not ignore the hit, and returns too few results."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def num_preemptions(request: Any) -> int:
    """Number of times that the engine has preempted a request."""
    return int(getattr(request, "num_preemptions", 0))


def is_session(request: Any) -> bool:
    """Whether a request is a session: its client may send further input after each answer (streaming input)."""
    return bool(getattr(request, "resumable", False))


def get_prefill_stop(request: Any) -> int | None:
    """Prefill stop of a request: the boundary, in tokens from its start, at which the engine ends a prefill chunk and
    keeps the recurrent states. 0: no boundary. None: this engine has no settable boundary and chooses the states."""
    boundary = getattr(request, "shared_prefix_boundary", None)
    return None if boundary is None else int(boundary)


def set_prefill_stop(request: Any, num_tokens: int) -> None:
    """Sets the prefill stop of a request. The engine reads the stop at every prefill chunk, rounds it down to a block,
    and overwrites it just before every lookup in the connector."""
    request.shared_prefix_boundary = num_tokens


def finished_normally(request: Any) -> bool:
    """Whether an ended request produced its full output. Then all its steps have run."""
    return request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def uses_speculative_decoding(vllm_config: VllmConfig) -> bool:
    """Whether the engine uses speculative decoding. Running states then move between blocks."""
    return vllm_config.speculative_config is not None


def max_chunk_tokens(vllm_config: VllmConfig) -> int:
    """Maximum tokens of one prompt in one step."""
    settings = vllm_config.scheduler_config
    threshold = int(getattr(settings, "long_prefill_token_threshold", 0) or 0)
    budget = int(settings.max_num_batched_tokens)
    return min(budget, threshold) if threshold > 0 else budget


HINTS_KEY = "hybridkv_hints"
MAX_HINT_ACTIONS = 64
"""Maximum of one request's hint actions that are read; later ones are ignored."""


def hint_objects(request: Any) -> list[tuple[str, Any]]:
    """Hints of a request to this connector, as (path, hint). The hints are not validated.

    A client of the server writes `kv_transfer_params`, which may hold any value. `kv_hints` (vLLM 0.31) can be set only
    through the Python interface.
    """
    found = []
    params = getattr(request, "kv_transfer_params", None)
    if isinstance(params, Mapping) and HINTS_KEY in params:
        found.append((f"kv_transfer_params.{HINTS_KEY}", params[HINTS_KEY]))
    actions = getattr(getattr(request, "kv_hints", None), "actions", None)
    if isinstance(actions, Sequence):
        found += [
            (f"kv_hints.actions[{i}].payload", action.payload)
            for i, action in enumerate(actions[:MAX_HINT_ACTIONS])
            if getattr(action, "action_type", None) == HINTS_KEY
        ]
    return found


def extra_hash_bytes(request: Any, start: int, end: int) -> bytes:
    """Encoded inputs that distinguish equal token ids in tokens [start, end): adapter, cache salt, multimodal input.
    Empty if there are none."""
    import msgspec
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    return msgspec.msgpack.encode(keys, enc_hook=repr) if keys else b""


def layers(vllm_config: VllmConfig) -> Mapping[str, Any]:
    """Layers with a KV cache by name, as the worker built them; empty in the scheduler's process."""
    return getattr(vllm_config.compilation_config, "static_forward_context", None) or {}


def platform() -> str:
    """Device type of the worker."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def engine_copies() -> EngineCopies:
    """vLLM's own functions for copies between a GPU and host memory.

    Raises:
        ConfigurationError: this vLLM or this build of it lacks the functions, or the GPU's runtime cannot be loaded.
    """
    import torch
    import vllm
    from vllm import _custom_ops

    from hybridkv.connectors.vllm.common.copies.devices import EngineCopies

    lacks = []
    swap_blocks_batch: Any = getattr(_custom_ops, "swap_blocks_batch", None)
    has_order = callable(swap_blocks_batch) and "is_src_access_order_any" in signature(swap_blocks_batch).parameters
    if not has_order or not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        lacks.append("swap_blocks_batch")
    try:
        from vllm.v1.kv_offload.cpu import host_register

        if not hasattr(host_register.CudaRTLibrary, "cudaGetLastError"):
            lacks.append("cudaGetLastError")
    except ImportError:
        lacks.append("host_register")
    if lacks:
        expected = "a vLLM with swap_blocks_batch and host_register"
        got = f"vLLM {vllm.__version__} without {' and '.join(lacks)}"
        raise ConfigurationError(f"{ROOT}.copies", expected, got, "0.32 for CUDA or ROCm has both")
    try:
        runtime = host_register.CudaRTLibrary()
    except (AssertionError, AttributeError, OSError) as error:
        expected, hint = "the GPU's runtime in this process", "set VLLM_CUDART_SO_PATH to libcudart"
        raise ConfigurationError(f"{ROOT}.copies", expected, f"{type(error).__name__}: {error}", hint) from error
    load_small, max_small_bytes = _small_loads()
    return EngineCopies(
        swap_blocks_batch,
        host_register.host_register,
        host_register.host_unregister,
        lambda: int(runtime.cudaGetLastError()),
        load_small,
        max_small_bytes,
    )


def _small_loads() -> tuple[Callable[..., Any] | None, int]:
    """vLLM's kernel for small loads, and the size limit of its copies in bytes; (None, 0) if vLLM does not use it."""
    try:
        from vllm.platforms import current_platform
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.kv_offload.cpu import swap_blocks_triton as small
    except ImportError:
        return None, 0
    load_small, max_bytes = getattr(small, "swap_blocks_batch", None), getattr(small, "THRESHOLD_BYTES", 0)
    takes_chunks = callable(load_small) and "bytes_per_chunk" in signature(load_small).parameters
    if not (HAS_TRITON and takes_chunks) or current_platform.is_rocm():
        return None, 0
    return load_small, int(max_bytes)


def allow_device_waits() -> AbstractContextManager[Any]:
    """Context in which this thread may wait for the device. Engines that detect GPU syncs report waits elsewhere."""
    try:
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed
    except ImportError:
        return nullcontext()
    allowed: AbstractContextManager[Any] = gpu_sync_allowed()
    return allowed


def delivers_handshakes() -> bool:
    """Whether this worker's handshake reaches only the scheduler's half of this connector.

    vLLM's MultiConnector gives the handshake of its first child to every child, and children raise on foreign types.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return True
    return not any(base.__name__ == "MultiConnector" for base in type(get_kv_transfer_group()).__mro__)


def supports_sleep_mode(connector_class: Any, kv_transfer_config: Any) -> bool:
    """Whether a connector permits that the engine sleeps. True for a connector without that method: before vLLM 0.33
    the engine sleeps with every connector, without a call to it."""
    method = getattr(connector_class, "supports_sleep_mode", None)
    return method is None or bool(method(kv_transfer_config))


def unregister_kv_caches(connector: Any) -> None:
    """Tells a connector that the KV cache is about to be unmapped, if the connector has that method (vLLM 0.33)."""
    if (method := getattr(connector, "unregister_kv_caches", None)) is not None:
        method()


def restore_kv_caches(connector: Any) -> None:
    """Tells a connector that the KV cache is mapped again, if the connector has that method (vLLM 0.33)."""
    if (method := getattr(connector, "restore_kv_caches", None)) is not None:
        method()


def permit_amx() -> None:
    """Requests permission for AMX from the operating system if the CPU has AMX.

    vLLM's attention kernels need this permission, but only its linear layers request it, in a long prompt. After a
    load, an engine may first compute a single token, and would crash without this call.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()


def publishes_kv_events(vllm_config: VllmConfig) -> bool:
    """Whether the engine publishes KV events; a store then publishes events too."""
    events = getattr(vllm_config, "kv_events_config", None)
    return bool(events is not None and events.enable_kv_cache_events)


def event_groups(kv_cache_config: KVCacheConfig) -> tuple[Mapping[str, Any], ...]:
    """Fields for each group, as in the engine's own events."""
    from vllm.v1 import kv_cache_interface

    kind_of = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    window_of = getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        fields: dict[str, Any] = {"group_idx": index}
        if kind_of is not None:
            fields["kv_cache_spec_kind"] = kind_of(group.kv_cache_spec).value
        if window_of is not None:
            fields["kv_cache_spec_sliding_window"] = window_of(group.kv_cache_spec)
        groups.append(fields)
    return tuple(groups)


def block_stored(**fields: Any) -> Any:
    """The engine's event `BlockStored`. Fields that this version lacks are dropped."""
    from vllm.distributed.kv_events import BlockStored

    return BlockStored(**{name: value for name, value in fields.items() if name in BlockStored.__struct_fields__})


def block_removed(**fields: Any) -> Any:
    """The engine's event `BlockRemoved`. Fields that this version lacks are dropped."""
    from vllm.distributed.kv_events import BlockRemoved

    return BlockRemoved(**{name: value for name, value in fields.items() if name in BlockRemoved.__struct_fields__})


def event_hash(block_hash: bytes) -> Any:
    """A block hash in the form of events: bytes, or an integer if the operator has set that form."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return maybe_convert_block_hash(block_hash)  # type: ignore[arg-type]


def event_extra_keys(request: Any, spans: Sequence[tuple[int, int]]) -> list[Any] | None:
    """Extra keys of blocks, one entry for each block, as in the engine's own events."""
    from vllm.v1.core import kv_cache_utils

    keys = [kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)[0] for start, end in spans]
    convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
    if convert is None:
        return keys
    converted: list[Any] | None = convert(keys)
    return converted


def cached_blocks(pool: Any) -> object:
    """The engine's map of cached blocks. A reset of the whole cache replaces the map by a new object."""
    return getattr(pool, "cached_block_hash_to_block", None)
