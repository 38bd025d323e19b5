"""Description of a rank for its peers: the facts on which its KV bytes depend, and the layout of its memory.

If `page_parts` can locate heads and tokens in a page, the description lists them. All other pages are indivisible
pieces: two ranks can exchange such pages only if their block sizes are equal, and also their tensor-parallel sizes,
unless all ranks of an engine have the same bytes.
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
from hybridkv.connectors.vllm.common.identity.engine import engine_facts
from hybridkv.connectors.vllm.common.identity.excluded import without_ignored
from hybridkv.connectors.vllm.common.identity.worker_facts import (
    CONV_STATE_FACTS,
    ELEMENT_ORDER,
    merged,
    relevant_facts,
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

FACTS_IN_LAYERS = frozenset({ELEMENT_ORDER, "cache_config.kv_cache_layout", *CONV_STATE_FACTS})
"""Facts about the order of bytes. These may differ: the description of a layer states the order if needed."""


class MemoryRegion(NamedTuple):
    """Memory region that is registered with the transport: one whole allocation."""

    address: int
    num_bytes: int


class RegisteredPages(NamedTuple):
    """Location of pages: the tensors as registered, and their canonical views."""

    kv_caches: Mapping[str, KVCache]
    canonical: CanonicalKVCaches
    num_blocks: int
    regions: tuple[MemoryRegion, ...]


class RankPlace(NamedTuple):
    """Name of a rank (new at each start of its process), its number, and its engine's tensor-parallel size."""

    name: str
    rank: int
    tp_size: int


def identity_facts(
    vllm_config: VllmConfig,
    config: NixlConfig,
    layout: CacheLayout,
    kv_caches: Mapping[str, KVCache],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Facts on which the bytes of this rank depend: those of a store, except the chunk length and the order of bytes.
    The description of each layer states the order of bytes.

    Raises:
        ConfigurationError: a value has no canonical text, or a file of the weights cannot be read.
    """
    found = engine_facts(vllm_config, environ, config)
    if found.unrepeatable:
        logger.warning(
            "HybridNixlConnector: facts that no other engine can share, so peers will be refused: %s",
            "; ".join(f"{name}: {why}" for name, why in sorted(found.unrepeatable.items())),
        )
    ranks = {0: worker_facts(vllm_config, layout, kv_caches, environ)}
    facts = without_ignored(found.facts | merged(ranks, found.facts), config.identity_ignores)
    matter = relevant_facts(facts, layout.spec)
    return {name: _short(value) for name, value in matter.items() if name not in FACTS_IN_LAYERS}


def describe(
    place: RankPlace,
    facts: dict[str, str],
    layout: CacheLayout,
    kv_caches: Mapping[str, KVCache],
    num_blocks: int,
    orders: Mapping[str, PageOrder],
) -> tuple[Description, tuple[MemoryRegion, ...]]:
    """Describes this rank. Returns the description, and the regions in the order in which they must be registered.

    Args:
        place: name and rank.
        facts: facts on which the rank's bytes depend.
        layout: groups of the model.
        kv_caches: tensors that the engine registers.
        num_blocks: blocks in the engine's pool.
        orders: page order by layer. Pages of a layer that is missing here move whole.

    Raises:
        ConfigurationError: the tensors differ from the engine's description.
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
        logger.warning("HybridNixlConnector: states have too many elements to list, so states move whole")
        groups = _groups(layout, pages, {name: order._replace(state=()) for name, order in orders.items()})
    if _num_items(groups) > MAX_ITEMS:
        logger.warning("HybridNixlConnector: pages have too many tokens and heads to list, so pages move whole")
        groups = _groups(layout, pages, {})
    description = Description(
        PROTOCOL,
        place.name,
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
    """Allocations of all views, each allocation once. Groups may share an allocation."""
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
    """Describes the layers of a group. Skips layers that share pages with an earlier layer."""
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
    """Shortens a text to `MAX_TEXT` characters; a digest of the whole text replaces the rest."""
    text = text or "nothing"
    if len(text) <= MAX_TEXT:
        return text
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{text[: MAX_TEXT - 64]}... {digest}"
