"""Cache layout: vLLM's KV cache groups as groups of the planner, their fingerprints, and the sizes of their pages.

This module also chooses the chunk length: an automatic length, or the operator's. The planner finds the nearest length
that works; if this is another length, this module raises a configuration error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from hybridkv.canonical import LayerLayout, TokenRange, aligned_page_bytes
from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.identity.configuration import spec_facts
from hybridkv.connectors.vllm.common.specs import cuts
from hybridkv.hashing import Fingerprint, GroupFingerprint, LayerFingerprint
from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    HybridOffloadPlanner,
    TokenSpan,
    chunk_blocks,
    chunk_span,
    chunk_unit,
    whole_chunk_unit,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheTensor

AUTO_CHUNK_TOKENS = 128
"""Minimum length of an automatic chunk, rounded up to a length that fits all groups. Not used with recurrent groups."""
MAX_CHUNK_BLOCKS_WITH_TAILS = 8
"""Maximum blocks of a chunk with tails. Each tail stores the beginning of its chunk again, and each length of a tail is
another slot size."""


def choose_chunk(
    specs: Sequence[GroupSpec], wanted: int | Literal["auto"], max_model_len: int, hash_tokens: int
) -> int:
    """Tokens in a chunk, according to the operator's setting.

    Args:
        specs: the engine's groups.
        wanted: value of `chunk_tokens`.
        max_model_len: maximum tokens of a request.
        hash_tokens: tokens in each of the engine's block hashes.

    Raises:
        ConfigurationError: a chunk of this length ends inside a block that cannot be cut there, or inside a block hash;
            or no prompt can hit. The hint names a valid length or, if there is none, other settings to change.
    """
    chunk = _auto_chunk(specs, max_model_len, hash_tokens) if wanted == "auto" else wanted
    planner = HybridOffloadPlanner(specs, hash_tokens, max_model_len)
    nearest = planner.nearest_chunk(chunk)
    if nearest == chunk:
        return chunk
    unit, path = planner.unit_tokens, f"{ROOT}.chunk_tokens"
    if chunk % unit:
        whole = sorted(
            {spec.block_tokens for spec in specs if spec.kind is not GroupKind.SCRATCH and not spec.part_tokens}
        )
        raise ConfigurationError(
            path,
            f"a multiple of {unit} tokens, so that a chunk is whole blocks of every group that cannot be cut "
            f"(blocks of {whole}){_largest_part(specs, hash_tokens)}",
            chunk,
            f'use {nearest}, or "auto"' if nearest else _engine_options_hint(unit),
        )
    raise ConfigurationError(
        path,
        f"less than max_model_len, so that some prompt can hit; the groups need multiples of {unit} tokens"
        + _largest_part(specs, hash_tokens),
        f"{chunk} with max_model_len {max_model_len}",
        f"use {nearest}, or {_engine_options_hint(chunk)}" if nearest else _engine_options_hint(chunk),
    )


def _largest_part(specs: Sequence[GroupSpec], hash_tokens: int) -> str:
    """Text that names the groups with the block or part length that enlarges the common multiple most; "" if all groups
    have the same length."""
    units = {index: spec.unit_tokens for index, spec in enumerate(specs) if spec.kind is not GroupKind.SCRATCH}
    without = {unit: math.lcm(hash_tokens, *(set(units.values()) - {unit})) for unit in units.values()}
    if len(without) < 2:
        return ""
    largest = min(without, key=lambda unit: (without[unit], -unit))
    names = ", ".join(
        f"{index} ({specs[index].kind}, {'parts' if specs[index].part_tokens else 'blocks'} of {unit} tokens)"
        for index, unit in units.items()
        if unit == largest
    )
    return f"; without group {names}, multiples of {without[largest]} tokens would be enough"


def _auto_chunk(specs: Sequence[GroupSpec], max_model_len: int, hash_tokens: int) -> int:
    """Automatic chunk length: whole blocks of every group; if no prompt is that long, whole blocks only of the groups
    that cannot be cut."""
    is_recurrent = any(spec.kind is GroupKind.RECURRENT for spec in specs)
    units = [math.lcm(unit, hash_tokens) for unit in (whole_chunk_unit(specs), chunk_unit(specs))]
    chunks = [unit if is_recurrent else -(-AUTO_CHUNK_TOKENS // unit) * unit for unit in units]
    return next((chunk for chunk in chunks if chunk < max_model_len), chunks[0])


def choose_tail(spec: CacheSpec, hit_tokens: int | None, hash_tokens: int) -> int | None:
    """Distance between the possible ends of tails, in tokens; None if no tails are stored.

    A tail needs a state at its end, and the engine hands over such states only if its own hits end inside blocks. The
    last block of a tail is stored whole, so no block is cut. No tails are stored:
    - if the engine's hits end only at the ends of blocks, or inside block hashes, or if this is not known;
    - with a drafter, because this is untested;
    - without a FULL and a RECURRENT group, or with a group of another kind;
    - with a group that has smaller blocks than a recurrent group: vLLM 0.32 may end a prefill at the end of a smaller
      block, where no state's block ends;
    - if a chunk cuts blocks, is no multiple of `hit_tokens`, or is longer than `MAX_CHUNK_BLOCKS_WITH_TAILS` of the
      smallest blocks.

    Args:
        spec: the engine's groups, and the chunk.
        hit_tokens: alignment of the engine's own hits; None if the engine does not report it.
        hash_tokens: tokens in each of the engine's block hashes, from which the keys of tails are made.
    """
    if hit_tokens is None or hit_tokens % hash_tokens or hit_tokens >= whole_chunk_unit(spec.groups):
        return None
    groups = [spec.groups[index] for index in spec.stored_groups]
    if {group.kind for group in groups} != {GroupKind.FULL, GroupKind.RECURRENT} or spec.lookahead_tokens:
        return None
    shortest = min(group.block_tokens for group in groups)
    if any(group.kind is GroupKind.RECURRENT and group.block_tokens != shortest for group in groups):
        return None
    if spec.cut_groups or spec.chunk_tokens % hit_tokens or spec.chunk_tokens > MAX_CHUNK_BLOCKS_WITH_TAILS * shortest:
        return None
    return hit_tokens


def _engine_options_hint(chunk: int) -> str:
    return f"raise --max-model-len above {chunk}, or lower --block-size"


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Layout of the engine's groups, equal in both halves of the connector.

    The layout does not identify the content; `fingerprint` does, with facts that the scheduler's half collects.

    Args:
        spec: groups in the engine's order, and the chunk.
        layers: layers of every group; none for SCRATCH.
        groups: fingerprints of the stored groups, in order.
        hash_block_tokens: tokens in each of the engine's block hashes.
        hash_algorithm: algorithm of the engine's block hashes.
        world_size: number of ranks; each holds its own part of every chunk.
        inner_checkpoints: see `compat.inner_checkpoints`.
    """

    spec: CacheSpec
    layers: tuple[tuple[LayerLayout, ...], ...]
    groups: tuple[GroupFingerprint, ...]
    hash_block_tokens: int
    hash_algorithm: str
    world_size: int
    inner_checkpoints: Mapping[int, compat.CheckpointOf] = field(default_factory=dict, repr=False, compare=False)
    _block_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _content_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _equal_chunk_bytes: tuple[int | None, ...] = field(init=False, repr=False, compare=False)
    """Bytes of each group's part of a chunk, if they are equal for all chunks."""
    _part_sizes: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)
    """Cache of bytes by (group, tokens). A model has few entries."""

    def __post_init__(self) -> None:
        sizes = tuple(sum(aligned_page_bytes(layer.page_bytes) for layer in layers) for layers in self.layers)
        content = tuple(sum(layer.page_bytes for layer in layers) for layers in self.layers)
        object.__setattr__(self, "_block_bytes", sizes)  # sets a field of a frozen dataclass
        object.__setattr__(self, "_content_bytes", content)
        parts = zip(self.spec.uniform_chunk_blocks, sizes, strict=True)
        equal = tuple(None if part is None else len(part) * num_bytes for part, num_bytes in parts)
        object.__setattr__(self, "_equal_chunk_bytes", equal)
        object.__setattr__(self, "_part_sizes", {})

    @property
    def reuses_hashes(self) -> bool:
        """Whether keys come from the engine's own block hashes."""
        return self.hash_algorithm in compat.STABLE_HASHES

    def fingerprint(self, facts: dict[str, str]) -> Fingerprint:
        """Fingerprint of the stored content. All ranks of an engine are tensor-parallel: pipeline and context
        parallelism are refused.

        Args:
            facts: facts that the content depends on beside the layout.
        """
        return Fingerprint(
            facts=facts,
            chunk_tokens=self.spec.chunk_tokens,
            hash_algorithm=self.hash_algorithm,
            tensor_parallel_size=self.world_size,
            groups=self.groups,
        )

    def block_bytes(self, group_index: int) -> int:
        """Bytes of one block in a chunk on one rank, with the zeros that align its pages.

        A worker may need fewer bytes: it stores no padding of the engine, and layers may share pages.
        """
        return self._block_bytes[group_index]

    def content_bytes(self, group_index: int) -> int:
        """Bytes of one block's pages on one rank, without zeros. If blocks can be cut, all tokens have equal shares."""
        return self._content_bytes[group_index]

    def span_bytes(self, group_index: int, span: TokenSpan) -> int:
        """Bytes of a token range in a chunk on one rank. Only for groups with blocks that chunks cut."""
        size = self.spec.groups[group_index].block_tokens
        first, last = -(-span.start // size), span.end // size
        if first > last:
            return self._part_bytes(group_index, span.num_tokens)
        whole = (last - first) * self.block_bytes(group_index)
        parts = (first * size - span.start, span.end - last * size)
        return whole + sum(self._part_bytes(group_index, num_tokens) for num_tokens in parts if num_tokens)

    def _part_bytes(self, group_index: int, num_tokens: int) -> int:
        num_bytes = self._part_sizes.get((group_index, num_tokens))
        if num_bytes is None:
            tokens = TokenRange(0, num_tokens, self.spec.groups[group_index].block_tokens)
            shares = (tokens.share_of(layer.page_bytes) for layer in self.layers[group_index])
            num_bytes = self._part_sizes[group_index, num_tokens] = sum(map(aligned_page_bytes, shares))
        return num_bytes

    def chunk_bytes(self, group_index: int, end_token: int) -> int:
        """Bytes of a group's part of a chunk or tail on one rank; 0 if no hit needs a token of this part."""
        equal = self._equal_chunk_bytes[group_index]
        if equal is not None and end_token % self.spec.chunk_tokens == 0:
            return equal
        if group_index in self.spec.cut_groups:
            return self.span_bytes(group_index, chunk_span(self.spec, group_index, end_token))
        return len(chunk_blocks(self.spec, group_index, end_token)) * self.block_bytes(group_index)

    def largest_chunk_bytes(self, group_index: int) -> int:
        """Maximum bytes of a group's part of a chunk or tail on one rank."""
        chunk, group = self.spec.chunk_tokens, self.spec.groups[group_index]
        if self.spec.tail_tokens is not None:
            return max(self._all_chunk_bytes(group_index))
        if group_index in self.spec.cut_groups:
            # After the first window, sizes repeat when chunks start at the same offset in a block.
            num_chunks = -(-(group.window_tokens or 0) // chunk) + group.block_tokens // math.gcd(
                group.block_tokens, chunk
            )
            return max(self.chunk_bytes(group_index, chunk * (i + 1)) for i in range(num_chunks))
        if group.kind is GroupKind.CHUNKED:
            # The needed part of a chunk depends on the position of the chunk. A whole chunk is the upper bound.
            return chunk // group.block_tokens * self.block_bytes(group_index)
        return self.chunk_bytes(group_index, chunk)

    def chunk_sizes(self) -> tuple[int, ...]:
        """All sizes in bytes of the groups' parts of chunks and tails on one rank, ascending."""
        sizes = {num_bytes for index in self.spec.stored_groups for num_bytes in self._all_chunk_bytes(index)}
        return tuple(sorted(sizes - {0}))

    def _all_chunk_bytes(self, group_index: int) -> set[int]:
        """All sizes in bytes of a group's part of chunks and tails."""
        chunk, step, group = self.spec.chunk_tokens, self.spec.boundary_tokens, self.spec.groups[group_index]
        # After the first window, sizes repeat when chunks start at the same offset in a block and an attention chunk.
        period_tokens = math.lcm(chunk, group.block_tokens, group.align_tokens or 1)
        last = -(-(group.window_tokens or 0) // chunk) * chunk + period_tokens
        return {self.chunk_bytes(group_index, end) for end in range(step, last + 1, step)}


class ResolvedGroups(NamedTuple):
    """The engine's groups before a chunk is chosen. Enough for HybridNixlConnector, which has no chunks.

    Args:
        specs: all groups, in the engine's order.
        layers: layers of every group; none for SCRATCH.
        fingerprints: fingerprints of the groups that can be stored.
    """

    specs: tuple[GroupSpec, ...]
    layers: tuple[tuple[LayerLayout, ...], ...]
    fingerprints: tuple[GroupFingerprint, ...]


def resolve_layout(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    chunk_tokens: int | Literal["auto"],
    *,
    with_tails: bool = False,
) -> CacheLayout:
    """Reads the engine's groups and chooses the chunk.

    Args:
        vllm_config: final configuration.
        kv_cache_config: KV cache configuration of either half.
        chunk_tokens: the operator's setting.
        with_tails: whether to store tails, if the engine hands over states inside chunks.

    Raises:
        ConfigurationError: the kind of a group is unknown, the parallel layout is not supported, or the chunk does not
            fit.
    """
    groups = resolve_groups(vllm_config, kv_cache_config)
    hash_tokens = compat.hash_block_tokens(vllm_config, kv_cache_config)
    max_model_len = vllm_config.model_config.max_model_len
    cache = CacheSpec(groups.specs, choose_chunk(groups.specs, chunk_tokens, max_model_len, hash_tokens))
    if with_tails:
        hit_tokens = compat.hit_alignment_tokens(kv_cache_config)
        cache = msgspec.structs.replace(cache, tail_tokens=choose_tail(cache, hit_tokens, hash_tokens))
    return CacheLayout(
        spec=cache,
        layers=groups.layers,
        groups=groups.fingerprints,
        hash_block_tokens=hash_tokens,
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        world_size=vllm_config.parallel_config.world_size,
        inner_checkpoints=compat.inner_checkpoints(vllm_config, kv_cache_config),
    )


def resolve_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ResolvedGroups:
    """Reads the engine's groups.

    Raises:
        ConfigurationError: the kind of a group is unknown, the parallel layout is not supported, or no group can be
            stored.
    """
    _require_plain_parallelism(vllm_config)
    stored = compat.cacheable_group_ids(kv_cache_config)
    placements = {name: tensor for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    in_pieces = compat.heads_before_layers(kv_cache_config)
    hash_tokens = compat.hash_block_tokens(vllm_config, kv_cache_config)
    specs: list[GroupSpec] = []
    layers: list[tuple[LayerLayout, ...]] = []
    fingerprints: list[GroupFingerprint] = []
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        path = f"kv_cache_groups[{i}]"
        if i not in stored:
            specs.append(GroupSpec(kind=GroupKind.SCRATCH, block_tokens=group.kv_cache_spec.block_size))
            layers.append(())
            continue
        spec = _group_spec(path, group, hash_tokens)
        prints = tuple(
            _layer_fingerprint(name, layer_spec(group, name), None if in_pieces else placements.get(name))
            for name in group.layer_names
        )
        if spec.kind in (GroupKind.FULL, GroupKind.WINDOW) and not in_pieces:
            sizes = {layer.name: layer.page_bytes for layer in prints}
            part = cuts.part_tokens(vllm_config, group, sizes, hash_tokens)
            spec = msgspec.structs.replace(spec, part_tokens=part)
        specs.append(spec)
        layers.append(tuple(LayerLayout(layer.name, layer.page_bytes, interleaved=in_pieces) for layer in prints))
        fingerprints.append(
            GroupFingerprint(
                kind=spec.kind,
                block_tokens=spec.block_tokens,
                layers=prints,
                window_tokens=spec.window_tokens,
                align_tokens=spec.align_tokens,
                lookahead_tokens=spec.lookahead_tokens,
            )
        )
    if not fingerprints:
        raise no_stored_group()
    return ResolvedGroups(tuple(specs), tuple(layers), tuple(fingerprints))


def group_specs(kv_cache_config: KVCacheConfig) -> tuple[GroupSpec, ...]:
    """Planner specs of the engine's groups, as for `resolve_layout` but without `part_tokens` and `lookahead_tokens`.

    Raises:
        ConfigurationError: the kind of a group is unknown.
    """
    stored = compat.cacheable_group_ids(kv_cache_config)
    return tuple(
        _group_spec(f"kv_cache_groups[{i}]", group, 0)
        if i in stored
        else GroupSpec(kind=GroupKind.SCRATCH, block_tokens=group.kv_cache_spec.block_size)
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
    )


def no_stored_group() -> ConfigurationError:
    """Error for a model without a group that can be stored."""
    return ConfigurationError(
        "kv_cache_groups", "a group that can be stored", "none", "this model keeps no reusable KV cache"
    )


def _require_plain_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigurationError(name, "1", size, "use tensor parallelism; this version stores no other layout")


def _group_spec(path: str, group: KVCacheGroupSpec, hash_tokens: int) -> GroupSpec:
    lookahead = hash_tokens if group.is_eagle_group else 0
    translated = {_translate(path, layer_spec(group, name), group, lookahead) for name in group.layer_names}
    if len(translated) != 1:
        raise ConfigurationError(
            f"{path}.kv_cache_spec",
            "layers that need the same tokens",
            f"{len(translated)} kinds of them",
            "this version of hybridkv does not know such a group; report the model",
        )
    return translated.pop()


def _translate(path: str, spec: KVCacheSpec, group: KVCacheGroupSpec, lookahead: int) -> GroupSpec:
    # Exact classes: an unlisted subclass may keep other content in its blocks.
    make = _KINDS.get(type(spec).__name__)
    layers = f"layers {', '.join(group.layer_names[:2])}, ..."
    hint = "hybridkv cannot store this group; start vLLM without hybridkv, or report the model"
    if make is None:
        found = f"{type(spec).__name__} ({layers})"
        raise ConfigurationError(f"{path}.kv_cache_spec", "one of " + ", ".join(_KINDS), found, hint)
    if getattr(group, "host_resident", False):
        raise ConfigurationError(f"{path}.host_resident", "False", f"True ({layers})", hint)
    role = getattr(group, "role", "default")
    if role != "default":
        raise ConfigurationError(f"{path}.role", "default", f"{getattr(role, 'value', role)} ({layers})", hint)
    return make(spec, lookahead)


def _full(spec: Any, lookahead: int) -> GroupSpec:
    return GroupSpec(kind=GroupKind.FULL, block_tokens=spec.block_size, lookahead_tokens=lookahead)


def _window(spec: Any, lookahead: int) -> GroupSpec:
    return GroupSpec(
        kind=GroupKind.WINDOW,
        block_tokens=spec.block_size,
        window_tokens=spec.sliding_window + getattr(spec, "extra_retained_tokens", 0),
        lookahead_tokens=lookahead,
    )


def _chunked(spec: Any, lookahead: int) -> GroupSpec:
    return GroupSpec(
        kind=GroupKind.CHUNKED,
        block_tokens=spec.block_size,
        align_tokens=spec.attention_chunk_size,
        lookahead_tokens=lookahead,
    )


def _recurrent(spec: Any, lookahead: int) -> GroupSpec:
    return GroupSpec(kind=GroupKind.RECURRENT, block_tokens=spec.block_size)


_KINDS: dict[str, Callable[[Any, int], GroupSpec]] = {
    "FullAttentionSpec": _full,
    "MLAAttentionSpec": _full,
    "SlidingWindowSpec": _window,
    "SlidingWindowMLASpec": _window,
    "ChunkedLocalAttentionSpec": _chunked,
    "MambaSpec": _recurrent,
}


def layer_spec(group: KVCacheGroupSpec, name: str) -> KVCacheSpec:
    """Spec of one layer. A group of `UniformTypeKVCacheSpecs` has one spec for each layer, another group has one for
    all layers."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return per_layer[name] if per_layer else group.kv_cache_spec


def _layer_fingerprint(name: str, spec: KVCacheSpec, placement: KVCacheTensor | None) -> LayerFingerprint:
    """Fingerprint of one layer. `placement` is the place of its pages; None if a page is split into pieces."""
    page_bytes = compat.unpadded_page_bytes(spec)
    if placement and placement.layer_stride < placement.block_stride and placement.layer_stride != spec.page_size_bytes:
        # Pages of different sizes, packed block by block. The scheduler has the spec of only one layer of the group, so
        # `spec` may belong to another layer. The placement gives the page's size, with padding.
        page_bytes = placement.layer_stride
    return LayerFingerprint(name=name, facts=spec_facts(spec), page_bytes=page_bytes)
