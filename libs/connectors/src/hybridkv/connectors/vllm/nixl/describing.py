"""What a rank says of itself to its peers: what its bytes depend on, and where they lie.

Pages are described whole, as pieces that nobody may cut: where tokens and heads lie within a page is its attention
backend's affair, on a CPU above all, and nothing that a tensor's shape says. Two ranks whose pages are whole must agree
on block sizes and on tensor-parallel sizes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from hybridkv.canonical.torch_view import CanonicalKVCaches, KVCache, LayoutError, canonical_kv_caches
from hybridkv.connectors.config import OffloadConfig
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.identity import engine_facts, without_ignored
from hybridkv.connectors.vllm.identity.recurrent import that_matter
from hybridkv.connectors.vllm.identity.worker_facts import merged, worker_facts
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.nixl.config import NixlConfig
from hybridkv.hashing import LayerFingerprint
from hybridkv.peers.description import (
    MAX_TEXT,
    PROTOCOL,
    Description,
    GroupDescription,
    LayerDescription,
    Piece,
)
from hybridkv.planner import GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hybridkv.nixl")


class Region(NamedTuple):
    """Memory that peers may read or that is read into, whole: one of the engine's allocations."""

    address: int
    num_bytes: int


class Place(NamedTuple):
    """Which rank of which start of which engine."""

    engine: str
    rank: int
    tp_size: int


def identity_facts(
    vllm_config: VllmConfig,
    config: NixlConfig,
    layout: CacheLayout,
    kv_caches: Mapping[str, KVCache],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Everything that the bytes of this rank depend on, as for a store; only that a peer needs no chunk.

    Raises:
        ConfigurationError: a value has no canonical text, or a file of the weights cannot be read.
    """
    asked = OffloadConfig(tiers=(), weights_digest=config.weights_digest, identity_ignores=config.identity_ignores)
    found = engine_facts(vllm_config, environ, asked)
    if found.unrepeatable:
        logger.warning(
            "HybridNixlConnector: no other engine can have the same content, so peers will be refused: %s",
            "; ".join(f"{name}: {why}" for name, why in sorted(found.unrepeatable.items())),
        )
    ranks = {0: worker_facts(vllm_config, layout, kv_caches, environ)}
    facts = without_ignored(found.facts | merged(ranks, found.facts), config.identity_ignores)
    return {name: _short(value) for name, value in that_matter(facts, layout.spec).items()}


def describe(
    place: Place, facts: dict[str, str], layout: CacheLayout, kv_caches: Mapping[str, KVCache], num_blocks: int
) -> tuple[Description, tuple[Region, ...]]:
    """This rank, and its memory in the order in which it is to be registered.

    Raises:
        ConfigurationError: the tensors are not as the engine describes them.
    """
    try:
        caches = canonical_kv_caches(kv_caches, layout.layers, num_blocks)
    except LayoutError as error:
        raise ConfigurationError(
            "kv_caches", "tensors as the engine describes them", str(error), "report the model and vLLM's version"
        ) from error
    regions = _regions(caches)
    stored = iter(layout.groups)
    groups = []
    for index, spec in enumerate(layout.spec.groups):
        if spec.kind is GroupKind.SCRATCH:
            groups.append(GroupDescription(spec))
            continue
        prints = next(stored).layers
        groups.append(GroupDescription(spec, tuple(_layers(caches, index, prints, regions))))
    description = Description(
        PROTOCOL,
        place.engine,
        facts,
        place.rank,
        place.tp_size,
        num_blocks,
        tuple(region.num_bytes for region in regions),
        tuple(groups),
    )
    return description, regions


def _regions(caches: CanonicalKVCaches) -> tuple[Region, ...]:
    """The allocations below all views, each once. Groups overlay each other in them."""
    found = {}
    for cache in caches.tensors:
        storage = cache.tensor.untyped_storage()
        found[storage.data_ptr()] = Region(storage.data_ptr(), storage.nbytes())
    return tuple(found.values())


def _layers(
    caches: CanonicalKVCaches, group: int, prints: tuple[LayerFingerprint, ...], regions: tuple[Region, ...]
) -> list[LayerDescription]:
    numbers = {region.address: number for number, region in enumerate(regions)}
    layers = []
    for layer_idx, refs in itertools.groupby(caches.group_data_refs[group], key=lambda ref: ref.layer_idx):
        pieces = []
        for ref in refs:
            view = caches.tensors[ref.tensor_idx].tensor
            base = view.untyped_storage().data_ptr()
            pieces.append(
                Piece(
                    region=numbers[base],
                    offset_bytes=view.data_ptr() - base,
                    block_stride_bytes=view.stride(0),
                    item_bytes=ref.page_size_bytes,
                )
            )
        layers.append(LayerDescription(prints[layer_idx].name, _format(prints[layer_idx]), tuple(pieces)))
    return layers


def _format(layer: LayerFingerprint) -> str:
    return _short("; ".join(f"{name} {value}" for name, value in sorted(layer.facts.items())))


def _short(text: str) -> str:
    """A text that fits, which stands for the whole of it."""
    text = text or "nothing"
    if len(text) <= MAX_TEXT:
        return text
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{text[: MAX_TEXT - 64]}... {digest}"
