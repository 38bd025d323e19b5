"""KV memory of the fake worker: vLLM's own placement, viewed as cells.

One backing allocation. Groups overlay the same bytes, since a block id belongs to one group at a time; as in the
engine, nothing keeps two groups apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import allocate_kv_cache

from oracle.content import Words, garbage, layer_salt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from oracle.content import Transcript
    from oracle.mixes import Mix

_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class RankShare:
    """The part of each layer on a tensor-parallel rank: its share of all heads."""

    rank: int = 0
    tp_size: int = 1


ONLY_RANK = RankShare()


@dataclass(frozen=True, slots=True)
class Plane:
    """Layers of one shape in one group. `words` is `[kernel block, cell in it, layer, head, word]`, a writable view.

    Its heads are `first_head` and the following ones of the model's `total_heads`.
    """

    index: int
    group: int
    layer_names: tuple[str, ...]
    salts: tuple[int, ...]
    words: Words
    recurrent: bool
    tokens_per_cell: int
    cells_per_block: int
    first_head: int
    total_heads: int

    def expected(self, transcript: Transcript) -> Words:
        """Every cell of a transcript: `[cell, layer, head, word]`."""
        _, _, layers, heads, words = self.words.shape
        whole = transcript.expected(self.index, self.salts, self.tokens_per_cell, (layers, self.total_heads, words))
        return whole[:, :, self.first_head : self.first_head + heads]

    def locate(
        self, table: np.ndarray[tuple[int], np.dtype[np.int64]], first: int, end: int
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """(kernel block, cell in it) of cells `[first, end)` of a request with the manager blocks `table`."""
        cell = np.arange(first, end)
        slot = cell % self.cells_per_block
        block = table[cell // self.cells_per_block]
        per_kernel_block = self.words.shape[1]
        if per_kernel_block != self.cells_per_block:
            block = block * (self.cells_per_block // per_kernel_block) + slot // per_kernel_block
            slot = slot % per_kernel_block
        return block, slot


class KVMemory:
    """The allocation, the tensors that a connector registers, and the worker's writes outside of a forward pass."""

    def __init__(
        self, config: VllmConfig, kv_cache: KVCacheConfig, mix: Mix, seed: int, share: RankShare = ONLY_RANK
    ) -> None:
        layout = config.cache_config.get_resolved_kv_cache_layout()
        kernel_tokens = [group.kernel_tokens or group.block_tokens for group in mix.groups]
        self.tensors = allocate_kv_cache(kv_cache, torch.device("cpu"), layout, kernel_tokens)
        storage = next(iter(self.tensors.values())).untyped_storage()
        whole = torch.empty(0, dtype=torch.int8).set_(storage)
        self._bytes = whole.numpy()
        self._generator = np.random.default_rng(seed)
        self.planes: tuple[tuple[Plane, ...], ...] = self._make_planes(kv_cache, mix, share)
        first = kv_cache.kv_cache_tensors[0]
        stride = first.block_stride
        if layout.is_block_outermost:
            shape, strides = (kv_cache.num_blocks, 1, stride // _WORD_BYTES), (stride, 0, _WORD_BYTES)
        else:
            regions = len(self._bytes) // (stride * kv_cache.num_blocks)
            shape = (kv_cache.num_blocks, regions, stride // _WORD_BYTES)
            strides = (stride, stride * kv_cache.num_blocks, _WORD_BYTES)
        self._blocks = self._view(0, shape, strides)
        self.poison(range(kv_cache.num_blocks))

    def _view(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Words:
        assert not any(number % _WORD_BYTES for number in (offset, *strides)), "sizes of a mix are multiples of 8 bytes"
        base = self._bytes[offset:].view(np.uint64) if len(self._bytes[offset:]) % _WORD_BYTES == 0 else None
        assert base is not None, "the allocation is a multiple of 8 bytes"
        return np.lib.stride_tricks.as_strided(base, shape, strides)

    def _make_planes(self, kv_cache: KVCacheConfig, mix: Mix, share: RankShare) -> tuple[tuple[Plane, ...], ...]:
        planes: list[list[Plane]] = [[] for _ in kv_cache.kv_cache_groups]
        for number, placed in enumerate(kv_cache.kv_cache_tensors):
            name = placed.layers[0]
            group, of_group = next(
                (index, group) for index, group in enumerate(kv_cache.kv_cache_groups) if name in group.layer_names
            )
            spec: KVCacheSpec = of_group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            tensor = self.tensors[name]
            item = tensor.element_size()
            kernel_blocks, heads, cells, content = tensor.shape
            stride = [number * item for number in tensor.stride()]
            words = self._view(
                tensor.storage_offset() * item,
                (kernel_blocks, cells, len(placed.layers), heads, content * item // _WORD_BYTES),
                (stride[0], stride[2], placed.layer_stride, stride[1], _WORD_BYTES),
            )
            recurrent = isinstance(spec, MambaSpec)
            per_cell = 1 if recurrent else int(spec.tokens_per_state)
            # A latent is the same on every rank.
            rank, tp_size = (0, 1) if mix.groups[group].latent else (share.rank, share.tp_size)
            salts = tuple(layer_salt(group, of_group.layer_names.index(layer)) for layer in placed.layers)
            planes[group].append(
                Plane(
                    number,
                    group,
                    tuple(placed.layers),
                    salts,
                    words,
                    recurrent,
                    per_cell,
                    1 if recurrent else spec.block_size // per_cell,
                    rank * heads,
                    tp_size * heads,
                )
            )
        return tuple(tuple(of_group) for of_group in planes)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Overwrites whole blocks with new garbage."""
        if len(block_ids) > 0:
            ids = list(block_ids)
            self._blocks[ids] = garbage(self._generator, (len(ids), *self._blocks.shape[1:]))

    def zero(self, block_ids: Sequence[int]) -> None:
        """As the worker for `new_block_ids_to_zero`: attention layers only (KVBlockZeroer skips mamba)."""
        ids = np.array(block_ids, dtype=np.int64)
        for plane in (plane for of_group in self.planes for plane in of_group if not plane.recurrent):
            ratio = plane.cells_per_block // plane.words.shape[1]
            plane.words[(ids[:, None] * ratio + np.arange(ratio)).ravel()] = 0

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As the worker for `kv_cache_block_copies`: whole blocks, all sources read first."""
        self._blocks[[pair[1] for pair in pairs]] = self._blocks[[pair[0] for pair in pairs]]


_copy_together = KVMemory.copy_blocks


def copy_in_order(memory: KVMemory, pairs: list[tuple[int, int]]) -> None:
    """Replaces `copy_blocks`: one copy after the other, as vLLM intends and does not do."""
    for pair in pairs:
        _copy_together(memory, [pair])
