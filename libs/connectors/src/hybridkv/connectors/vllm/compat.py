"""What differs between vLLM 0.30, 0.31 and 0.32, found by looking at the engine and never at its version number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HOST_HIT: Any = CacheHitSource.HOST
except ImportError:
    # The engine does not ask where hits come from.
    HOST_HIT = None

BlockTables = Callable[[str], Sequence[Sequence[int]]]
STABLE_HASHES = ("sha256", "sha256_cbor")
"""Block hashes that are the same in every process and that nobody can collide."""


def share_log() -> None:
    """What the libraries below say goes where the engine's own log goes, unless somebody has seen to it already."""
    ours, engine = logging.getLogger("hybridkv"), logging.getLogger("vllm")
    if ours.handlers or not engine.handlers:
        return
    for handler in engine.handlers:
        ours.addHandler(handler)
    ours.setLevel(engine.level)
    ours.propagate = False


def require_supported_engine() -> None:
    """Refuses an engine that lacks what a hybrid connector cannot do without.

    Raises:
        ConfigurationError: it cannot report the failure of one request's load, which came with vLLM 0.30.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    if not hasattr(base, "KVConnectorTransferResults") or not hasattr(base, "SupportsHMA"):
        raise ConfigurationError(
            "vllm", "0.30 or later", "one without KVConnectorTransferResults", "upgrade vllm; 0.32 is the one tested"
        )


def cacheable_group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Groups whose blocks a store keyed by content may hold; the rest is scratch."""
    ids = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    if ids is not None:
        return tuple(ids)
    return tuple(
        i
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group.kv_cache_spec, "prefix_cacheable", True)
    )


def hash_block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that each entry of `request.block_hashes` adds."""
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    if resolved is not None:
        return int(resolved)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def rank(vllm_config: VllmConfig) -> int:
    """This worker's rank among those that share an engine."""
    return int(vllm_config.parallel_config.rank)


def max_in_flight_tokens(vllm_config: VllmConfig) -> int:
    """Tokens that may be scheduled before blocks that left a window are given back."""
    resolved = getattr(vllm_config, "max_in_flight_tokens", None)
    return int(resolved if resolved is not None else vllm_config.scheduler_config.max_num_batched_tokens)


def prefill_lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Tokens behind a prompt that a drafter of several modules reads while the prompt is computed; 1 for others."""
    return int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1))


def is_killed_at_its_end(vllm_config: VllmConfig) -> bool:
    """Whether a server kills the engine's processes as soon as it has asked them to end."""
    timeout_s = getattr(vllm_config, "shutdown_timeout", None)
    if timeout_s is None:
        return False
    try:
        from vllm.v1.engine.utils import get_engine_process_shutdown_timeout
    except ImportError:
        return bool(timeout_s == 0)
    # Some platforms give an engine time to release a device also where no request has any.
    return not get_engine_process_shutdown_timeout(timeout_s, timeout_s)


def unpadded_page_bytes(spec: Any) -> int:
    """Bytes of one layer's page that hold content."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes"):
        value = getattr(spec, name, None)
        if value is not None:
            return int(value)
    return int(spec.page_size_bytes)


def heads_before_layers(kv_cache_config: KVCacheConfig) -> bool:
    """Whether a block holds heads and each head all layers (BHLNC), so that a layer's page lies in pieces. The engine
    allows that where all pages are of one size."""
    return getattr(kv_cache_config, "kv_cache_layout", None) == "BHLNC"


def conv_state_layout() -> str:
    """How recurrent layers lay out their convolution state: it differs between connectors unless the user sets it."""
    try:
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    except ImportError:
        return ""
    return str(get_conv_state_layout())


def boundary_states(scheduler_output: SchedulerOutput) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """The recurrent states that the scheduler hands over this step: request to (group, block id, tokens)."""
    block_state = scheduler_output.kv_connector_block_state
    return block_state.boundary_state_offloads if block_state is not None else {}


def block_tables(scheduler_output: SchedulerOutput) -> BlockTables:
    """The block tables of the requests of this step, to be read before it is over."""
    block_state = scheduler_output.kv_connector_block_state
    if block_state is None:
        return lambda request_id: ()
    resolve = getattr(block_state, "resolve_block_ids", None)
    if resolve is not None:
        return resolve
    tables: Mapping[str, Sequence[Sequence[int]]] = block_state.block_ids
    return lambda request_id: tables[request_id]


def reads_no_cache(request: Any) -> bool:
    """Whether a request computes all its tokens whatever is cached (prompt log-probabilities, pooling). The engine asks
    a connector all the same, and does not take its answer; vLLM 0.30 takes it, and returns less than was asked for."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def extra_hash_bytes(request: Any, start: int, end: int) -> bytes:
    """What tells tokens apart besides their ids: adapter, cache salt, multimodal input."""
    import msgspec
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    return msgspec.msgpack.encode(keys, enc_hook=repr) if keys else b""


def layers(vllm_config: VllmConfig) -> Mapping[str, Any]:
    """The layers that have a KV cache, by name, as the worker has built them; none in the scheduler's process."""
    return getattr(vllm_config.compilation_config, "static_forward_context", None) or {}


def platform() -> str:
    """The kind of device that the worker runs on."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def waits_for_device() -> AbstractContextManager[Any]:
    """In which a copy may be waited for: an engine that looks for waits by mistake is told that this is none."""
    try:
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed
    except ImportError:
        return nullcontext()
    allowed: AbstractContextManager[Any] = gpu_sync_allowed()
    return allowed


def carries_handshakes() -> bool:
    """Whether what this worker says at the start reaches its own half in the scheduler, and nobody else's.

    vLLM's MultiConnector hands what its first child says to every child, and others raise at words that are not theirs.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return True
    return not any(base.__name__ == "MultiConnector" for base in type(get_kv_transfer_group()).__mro__)


def permit_amx() -> None:
    """Asks the kernel for AMX where there is any, as the engine's own linear layers do in a prompt of some length.

    vLLM's attention takes it for granted, and an engine that begins with what a peer has computed, or with what a tier
    has kept, may begin with one token: on such a machine it would end there and then.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()
