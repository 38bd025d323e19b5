"""Facts of a worker: named values that the stored bytes depend on and that only a worker has.

A worker chooses the attention backend, and on a CPU the instruction set, which determines the order of elements in the
cache. Layer code changes flags in the worker's copy of the configuration, and the platform sets variables in the
worker's environment. A worker collects its facts when its KV tensors are registered, and sends them once; the
scheduler's half merges the facts of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hybridkv.canonical.torch_view import KVCache
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.identity.environment import ENVIRONMENT, environment_facts
from hybridkv.connectors.vllm.common.identity.fact_text import text
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.planner import CacheSpec, GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "worker"
ELEMENT_ORDER = f"{PREFIX}.element_order"


def worker_facts(
    vllm_config: VllmConfig, layout: CacheLayout, kv_caches: Mapping[str, KVCache], environ: Mapping[str, str]
) -> dict[str, str]:
    """Facts of one rank. The rank's number is not a fact.

    Args:
        vllm_config: the worker's copy, after the model was built.
        layout: layout with the stored layers.
        kv_caches: tensors that the engine registers.
        environ: the worker's environment.
    """
    names = [layer.name for group in layout.spec.stored_groups for layer in layout.layers[group]]
    built = compat.layers(vllm_config)
    per_layer: dict[str, Callable[[str], str]] = {
        "attention_backend": lambda name: _backend(built.get(name)),
        "attention_isa": lambda name: str(getattr(built.get(name), "isa", "none")),
        "kv_scales": lambda name: _scales(built.get(name)),
        "element_order": lambda name: element_order(kv_caches[name]),
    }
    facts = {f"{PREFIX}.{fact}": _of_layers(fact, {name: of(name) for name in names}) for fact, of in per_layer.items()}
    if any(layout.spec.groups[group].kind is GroupKind.RECURRENT for group in layout.spec.stored_groups):
        facts[f"{PREFIX}.conv_state_layout"] = compat.conv_state_layout()
    facts[f"{PREFIX}.byte_order"] = sys.byteorder
    facts[f"{PREFIX}.platform"] = compat.platform()
    facts[f"{PREFIX}.enable_prefix_caching"] = text("", vllm_config.cache_config.enable_prefix_caching)
    return facts | {f"{PREFIX}.{name}": value for name, value in environment_facts(environ).items()}


def merged(ranks: Mapping[int, Mapping[str, str]], of_engine: Mapping[str, str]) -> dict[str, str]:
    """Merged facts of all ranks: one value for a fact if all ranks have the same, else the value of each rank.

    Facts that all workers have with the value of the scheduler's process are left out. A rank that lacks a fact of
    another rank, or a variable of the scheduler's process, has the value "nothing".

    Args:
        ranks: facts of each rank.
        of_engine: facts of the scheduler's process.
    """
    together = {}
    names = {name for facts in ranks.values() for name in facts}
    if ranks:
        names |= {f"{PREFIX}.{name}" for name in of_engine if name.startswith(f"{ENVIRONMENT}.")}
    for name in sorted(names):
        values = {rank: facts.get(name, "nothing") for rank, facts in sorted(ranks.items())}
        agreed = set(values.values())
        if len(agreed) > 1:
            together[name] = text(name, {f"rank {rank}": value for rank, value in values.items()})
        elif of_engine.get(name.removeprefix(f"{PREFIX}.")) not in agreed:
            (together[name],) = agreed
    return together


def _of_layers(fact: str, values: Mapping[str, str]) -> str:
    """The value if all layers have the same; else the names of the layers with each value."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    layers: dict[str, list[str]] = {}
    for name, value in values.items():
        layers.setdefault(value, []).append(name)
    return text(fact, layers)


def _backend(layer: Any) -> str:
    get = getattr(layer, "get_attn_backend", None)
    return get().__name__ if get is not None else "none"


def _scales(layer: Any) -> str:
    scales = [getattr(layer, name, None) for name in ("_k_scale_float", "_v_scale_float")]
    return " ".join("none" if scale is None else float(scale).hex() for scale in scales)


def element_order(cache: KVCache) -> str:
    """Element type of a layer's tensors, and the dimensions of a kernel block with their sizes, in memory order.

    Backends pack tokens within a kernel block in different ways, so the number of tokens is part of the order.
    """
    if not isinstance(cache, torch.Tensor):
        return "; ".join(element_order(each) for each in cache)
    # A dimension of size 1 has a stride, but the stride has no effect on the order.
    inner = [dim for dim in range(1, cache.dim()) if cache.shape[dim] != 1]
    inner.sort(key=lambda dim: -cache.stride(dim))
    return f"{str(cache.dtype).removeprefix('torch.')} {','.join(f'{dim}:{cache.shape[dim]}' for dim in inner)}"


CONV_STATE_FACTS = (
    "environment.VLLM_SSM_CONV_STATE_LAYOUT",
    "worker.environment.VLLM_SSM_CONV_STATE_LAYOUT",
    "worker.conv_state_layout",
)
"""Facts about the layout of convolution states. HybridNixlConnector does not compare them: it describes the layout of
each layer."""
STATE_FACTS = ("cache_config.mamba_cache_dtype", "cache_config.mamba_ssm_cache_dtype", *CONV_STATE_FACTS)
"""Facts about recurrent states. A CPU platform sets them for every model, and their values depend on the instruction
set."""


def relevant_facts(facts: Mapping[str, str], spec: CacheSpec) -> dict[str, str]:
    """The facts; without `STATE_FACTS` if the model has no recurrent group."""
    if any(group.kind is GroupKind.RECURRENT for group in spec.groups):
        return dict(facts)
    return {name: value for name, value in facts.items() if name not in STATE_FACTS}
