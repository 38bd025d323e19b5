"""Group mixes: small models of how real hybrid families lay out their KV groups.

Byte sizes are tiny, the relations are real: block sizes, windows, which groups share pages, which pages are padded. The
KVCacheConfig comes from vLLM's own placement (`get_kv_cache_config_from_groups`), from group specs written by hand.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(enum.Enum):
    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class Layers:
    """Same-shaped layers of one group. `cell_bytes` is the size of one cell of one head (or of the whole state)."""

    count: int = 1
    cell_bytes: int = 16
    heads: int = 1
    tokens_per_cell: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """One KV group. `reach_tokens` is the window or the attention chunk; 0 for FULL and RECURRENT."""

    kind: Kind
    block_tokens: int
    layers: tuple[Layers, ...] = (Layers(),)
    reach_tokens: int = 0
    latent: bool = False
    page_bytes: int | None = None
    kernel_tokens: int | None = None

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Blocks that one request of `num_tokens` may hold at once, rounded up generously."""
        whole = math.ceil(num_tokens / self.block_tokens) + 1
        if self.kind is Kind.RECURRENT:
            return min(whole, 4)
        if self.kind in (Kind.WINDOW, Kind.CHUNKED):
            return min(whole, math.ceil((self.reach_tokens + max_step_tokens) / self.block_tokens) + 2)
        return whole


@dataclass(frozen=True, slots=True)
class Mix:
    """A model's groups. `layout` is a vLLM KV cache layout name; packed mixes need a block-outermost one."""

    name: str
    groups: tuple[Group, ...]
    layout: str = "LBHNC"

    @property
    def has_recurrent(self) -> bool:
        return any(group.kind is Kind.RECURRENT for group in self.groups)

    @property
    def is_sparse(self) -> bool:
        """Whether vLLM keeps only some cached blocks of some group (its retention interval)."""
        return any(group.kind in (Kind.WINDOW, Kind.RECURRENT) for group in self.groups)

    @property
    def misleads(self) -> bool:
        """Whether vLLM keeps wrong states in its own cache: it cuts prefill at multiples of the smallest block, so
        inside larger blocks of a RECURRENT group (vllm-project/vllm#54076)."""
        smallest = min(group.block_tokens for group in self.groups)
        return any(group.kind is Kind.RECURRENT and group.block_tokens > smallest for group in self.groups)

    @property
    def alignment_tokens(self) -> int:
        return math.lcm(*(group.block_tokens for group in self.groups))

    def max_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        return sum(group.max_blocks(num_tokens, max_step_tokens) for group in self.groups)


def _spec(group: Group, layers: Layers) -> KVCacheSpec:
    if group.kind is Kind.RECURRENT:
        return MambaSpec(
            block_size=group.block_tokens,
            shapes=((layers.cell_bytes,),),
            dtypes=(torch.int8,),
            page_size_padded=group.page_bytes,
            mamba_cache_mode="align",
        )
    # K and V of `head_size` float16 each, or one latent vector: `cell_bytes` either way.
    shape = {"num_kv_heads": layers.heads, "dtype": torch.float16, "page_size_padded": group.page_bytes}
    if group.latent:
        latent = {**shape, "head_size": layers.cell_bytes // 2, "tokens_per_state": layers.tokens_per_cell}
        if group.kind is Kind.WINDOW:
            return SlidingWindowMLASpec(block_size=group.block_tokens, sliding_window=group.reach_tokens, **latent)
        return MLAAttentionSpec(block_size=group.block_tokens, **latent)
    shape["head_size"] = layers.cell_bytes // 4
    if group.kind is Kind.WINDOW:
        return SlidingWindowSpec(block_size=group.block_tokens, sliding_window=group.reach_tokens, **shape)
    if group.kind is Kind.CHUNKED:
        return ChunkedLocalAttentionSpec(
            block_size=group.block_tokens, attention_chunk_size=group.reach_tokens, **shape
        )
    return FullAttentionSpec(block_size=group.block_tokens, **shape)


def group_specs(mix: Mix) -> list[KVCacheGroupSpec]:
    """vLLM's group specs of a mix. A group with one layer shape gets the plain spec, else the per-layer wrapper."""
    specs = []
    for index, group in enumerate(mix.groups):
        by_layer: Mapping[str, KVCacheSpec] = {
            f"model.layers.{index}.{shape}.{layer}": _spec(group, layers)
            for shape, layers in enumerate(group.layers)
            for layer in range(layers.count)
        }
        spec: KVCacheSpec | None = next(iter(by_layer.values()))
        if len(group.layers) > 1 or mix.layout.startswith("B"):
            spec = UniformTypeKVCacheSpecs.from_specs(dict(by_layer))
        assert spec is not None, f"vLLM cannot hold these layers in one group: {group}"
        specs.append(KVCacheGroupSpec(list(by_layer), spec))
    return specs


QWEN3_NEXT: Final = Mix(
    "qwen3_next",
    (
        *(Group(Kind.RECURRENT, 16, (Layers(2, cell_bytes=392),), page_bytes=512) for _ in range(3)),
        Group(Kind.FULL, 16, (Layers(2, cell_bytes=16, heads=2),)),
    ),
)
GEMMA3: Final = Mix(
    "gemma3",
    (*(Group(Kind.WINDOW, 8, reach_tokens=20) for _ in range(5)), Group(Kind.FULL, 8)),
)
GPT_OSS: Final = Mix(
    "gpt_oss",
    (
        Group(Kind.WINDOW, 8, (Layers(2, heads=2),), reach_tokens=12),
        Group(Kind.FULL, 8, (Layers(2, heads=2),), kernel_tokens=4),
    ),
)
# 256 / 64 x 4 / 4 / 8 tokens a block in the real model; halved here, with its windows (128, 8, 128).
DEEPSEEK_V4: Final = Mix(
    "deepseek_v4",
    (
        Group(
            Kind.FULL,
            128,
            (Layers(1, cell_bytes=16, tokens_per_cell=4), Layers(1, cell_bytes=24, tokens_per_cell=32)),
            latent=True,
        ),
        *(Group(Kind.WINDOW, 32, (Layers(1, cell_bytes=16),), reach_tokens=64, latent=True) for _ in range(4)),
        Group(Kind.WINDOW, 2, (Layers(1, cell_bytes=64),), reach_tokens=4, latent=True),
        Group(Kind.WINDOW, 4, (Layers(1, cell_bytes=40),), reach_tokens=64, latent=True),
    ),
    layout="BLHNC",
)
LLAMA4: Final = Mix(
    "llama4",
    (
        Group(Kind.CHUNKED, 8, (Layers(2),), reach_tokens=32),
        Group(Kind.CHUNKED, 8, (Layers(2),), reach_tokens=32),
        Group(Kind.FULL, 8, (Layers(2),)),
    ),
)
HEADS_BEFORE_LAYERS: Final = Mix(
    "heads_before_layers",
    (
        Group(Kind.WINDOW, 8, (Layers(3, heads=2),), reach_tokens=12),
        Group(Kind.FULL, 8, (Layers(3, heads=2),)),
        Group(Kind.FULL, 16, (Layers(1, heads=1),)),
    ),
    layout="BHLNC",
)
"""Blocks that hold heads, and each head all layers: the page of a layer is in pieces. vLLM requires one page size
there."""
NAMED: Final = (QWEN3_NEXT, GEMMA3, GPT_OSS, DEEPSEEK_V4, LLAMA4)
