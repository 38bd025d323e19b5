"""What a rank says of itself to its peers: what its bytes depend on, and where they lie.

Pages of which `page_parts` knows where heads and tokens lie are described so. All others are pieces that nobody may
cut, and two ranks of these must agree on block sizes and on tensor-parallel sizes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from hybridkv.canonical import LayerLayout
from hybridkv.canonical.torch_view import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    KVCache,
    LayoutError,
    canonical_kv_caches,
)
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.identity import engine_facts, without_ignored
from hybridkv.connectors.vllm.common.identity.worker_facts import (
    ELEMENT_ORDER,
    OF_CONVOLUTIONS,
    merged,
    that_matter,
    worker_facts,
)
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.nixl.config import NixlConfig
from hybridkv.connectors.vllm.nixl.memory.page_parts import (
    LayerParts,
    PageOrder,
    layer_parts,
    locator,
    whole_format,
)
from hybridkv.hashing import GroupFingerprint
from hybridkv.peers.description import (
    MAX_ITEMS,
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

FACTS_IN_LAYERS = frozenset({ELEMENT_ORDER, "cache_config.kv_cache_layout", *OF_CONVOLUTIONS})
"""Facts of the order in which bytes lie: each layer's description says it where it matters, and those of two engines
may differ."""


class MemoryRegion(NamedTuple):
    """Memory that peers may read or that is read into, whole: one of the engine's allocations."""

    address: int
    num_bytes: int


class RegisteredPages(NamedTuple):
    """Where pages lie: as registered, and as `canonical` has looked through them."""

    kv_caches: Mapping[str, KVCache]
    canonical: CanonicalKVCaches
    num_blocks: int
    regions: tuple[MemoryRegion, ...]


class RankPlace(NamedTuple):
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
    """Everything that the bytes of this rank depend on, as for a store; only that a peer needs no chunk, and that each
    layer says itself in which order its bytes lie.

    Raises:
        ConfigurationError: a value has no canonical text, or a file of the weights cannot be read.
    """
    found = engine_facts(vllm_config, environ, config)
    if found.unrepeatable:
        logger.warning(
            "HybridNixlConnector: no other engine can have the same content, so peers will be refused: %s",
            "; ".join(f"{name}: {why}" for name, why in sorted(found.unrepeatable.items())),
        )
    ranks = {0: worker_facts(vllm_config, layout, kv_caches, environ)}
    facts = without_ignored(found.facts | merged(ranks, found.facts), config.identity_ignores)
    matter = that_matter(facts, layout.spec)
    return {name: _short(value) for name, value in matter.items() if name not in FACTS_IN_LAYERS}


def describe(
    place: RankPlace,
    facts: dict[str, str],
    layout: CacheLayout,
    kv_caches: Mapping[str, KVCache],
    num_blocks: int,
    orders: Mapping[str, PageOrder],
) -> tuple[Description, tuple[MemoryRegion, ...]]:
    """This rank, and its memory in the order in which it is to be registered.

    Args:
        place: which rank this is.
        facts: what its bytes depend on.
        layout: of the model.
        kv_caches: as the engine registers them.
        num_blocks: of its pool.
        orders: what is known of the pages of each layer; one that is not named is taken whole.

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
    pages = RegisteredPages(kv_caches, caches, num_blocks, regions)
    groups = _groups(layout, pages, orders)
    if _num_items(groups) > MAX_ITEMS:
        logger.warning("HybridNixlConnector: too many elements of states to name them, so states move whole")
        groups = _groups(layout, pages, {name: order._replace(state=()) for name, order in orders.items()})
    if _num_items(groups) > MAX_ITEMS:
        logger.warning("HybridNixlConnector: too many tokens and heads to name them, so pages move whole")
        groups = _groups(layout, pages, {})
    description = Description(
        PROTOCOL,
        place.engine,
        facts,
        place.rank,
        place.tp_size,
        num_blocks,
        tuple(region.num_bytes for region in regions),
        groups,
    )
    return description, regions


def _num_items(groups: Sequence[GroupDescription]) -> int:
    return sum(piece.num_items for group in groups for layer in group.layers for piece in layer.pieces)


def _regions(caches: CanonicalKVCaches) -> tuple[MemoryRegion, ...]:
    """The allocations below all views, each once. Groups overlay each other in them."""
    found = {}
    for cache in caches.tensors:
        storage = cache.tensor.untyped_storage()
        found[storage.data_ptr()] = MemoryRegion(storage.data_ptr(), storage.nbytes())
    return tuple(found.values())


def _groups(
    layout: CacheLayout, pages: RegisteredPages, orders: Mapping[str, PageOrder]
) -> tuple[GroupDescription, ...]:
    stored = iter(layout.groups)
    groups = []
    for index, spec in enumerate(layout.spec.groups):
        if spec.kind is GroupKind.SCRATCH:
            groups.append(GroupDescription(spec))
            continue
        known = next(stored)
        groups.append(GroupDescription(spec, tuple(_layers(index, layout.layers[index], known, pages, orders))))
    return tuple(groups)


def _layers(
    group: int,
    layers: Sequence[LayerLayout],
    fingerprint: GroupFingerprint,
    pages: RegisteredPages,
    orders: Mapping[str, PageOrder],
) -> Iterator[LayerDescription]:
    """Of a group, those that share no page with one before them."""
    is_state = fingerprint.kind is GroupKind.RECURRENT
    for layer_idx, refs in itertools.groupby(pages.canonical.group_data_refs[group], key=lambda ref: ref.layer_idx):
        layer, known, uses = layers[layer_idx], fingerprint.layers[layer_idx], list(refs)
        order, cache = orders.get(layer.name), pages.kv_caches[layer.name]
        parts = None
        if sum(ref.page_size_bytes for ref in uses) == layer.page_bytes:
            parts = layer_parts(layer, cache, order, pages.num_blocks, locator(pages.regions))
        if parts is None:
            total_heads = int(order is not None and order.is_shared)
            parts = LayerParts(whole_format(cache, is_state), tuple(_whole(ref, pages, total_heads) for ref in uses))
        words = "; ".join(
            f"{name} {value}" for name, value in sorted(known.facts.items()) if name not in parts.covered_facts
        )
        yield LayerDescription(layer.name, _short(f"{parts.item_format}; {words}"), parts.pieces)


def _whole(ref: CanonicalKVCacheRef, pages: RegisteredPages, total_heads: int) -> Piece:
    view = pages.canonical.tensors[ref.tensor_idx].tensor
    region, offset_bytes = locator(pages.regions)(view.data_ptr())
    return Piece(
        region=region,
        offset_bytes=offset_bytes,
        block_stride_bytes=view.stride(0),
        item_bytes=ref.page_size_bytes,
        total_heads=total_heads,
    )


def _short(text: str) -> str:
    """A text that fits, which stands for the whole of it."""
    text = text or "nothing"
    if len(text) <= MAX_TEXT:
        return text
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{text[: MAX_TEXT - 64]}... {digest}"
