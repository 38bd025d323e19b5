"""The stored bytes of a block match the engine's own description, in every memory order of vLLM."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from hybridkv.canonical import GroupPages, aligned_page_bytes
from hybridkv.canonical.torch_view import LayoutError, canonical_kv_caches
from hybridkv.connectors.vllm import CONNECTOR
from hybridkv.connectors.vllm.common.copies.page_order import with_token_dims
from hybridkv.connectors.vllm.common.layout import CacheLayout, resolve_layout
from oracle.memory import KVMemory
from oracle.mixes import HEADS_BEFORE_LAYERS, NAMED, QWEN3_NEXT, Mix
from oracle.settings import Connector, EngineSettings, make_configs

BLOCKS = 7


class Engine:
    """KV memory as vLLM lays it out, and the layouts that scheduler and worker derive from it."""

    def __init__(self, order: str, mix: Mix = HEADS_BEFORE_LAYERS) -> None:
        mix = replace(mix, layout=order)
        connector = Connector(CONNECTOR, {"tiers": [{"type": "ram", "capacity": "1MiB"}]})
        configs = make_configs(mix, EngineSettings(num_blocks=BLOCKS, connector=connector))
        self.memory = KVMemory(configs.vllm, configs.worker, mix, 0)
        self.layouts = [resolve_layout(configs.vllm, each, "auto") for each in (configs.worker, configs.scheduler)]

    def number(self, group: int) -> None:
        """Gives every word of a group a different value, in the order [kernel block, cell, layer, head, word]."""
        (plane,) = self.memory.planes[group]
        plane.words[...] = np.arange(plane.words.size, dtype=np.uint64).reshape(plane.words.shape)

    def described(self, group: int, block: int) -> set[bytes]:
        """Every word of a block, at the place that vLLM's layout gives."""
        (plane,) = self.memory.planes[group]
        return {word.tobytes() for word in plane.words[block].reshape(-1)}

    def stored(self, layout: CacheLayout, group: int, block: int) -> list[bytes]:
        layers = [with_token_dims(self.memory.tensors, each) for each in layout.layers]
        caches = canonical_kv_caches(self.memory.tensors, layers, BLOCKS)
        pages = [
            caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes].numpy().tobytes()
            for ref in caches.group_data_refs[group]
        ]
        data = b"".join(pages)
        return [data[at : at + 8] for at in range(0, len(data), 8)]

    def pages(self, group: int) -> GroupPages:
        layers = [with_token_dims(self.memory.tensors, each) for each in self.layouts[0].layers]
        return canonical_kv_caches(self.memory.tensors, layers, BLOCKS).pages(group)

    def chunk(self, group: int, blocks: list[int]) -> bytes:
        """The expected bytes of a chunk of these blocks, with padding 0xEE."""
        pages = self.pages(group)
        data = bytearray(b"\xee" * (pages.block_bytes * len(blocks)))
        offsets = pages.chunk_offsets(0, len(blocks), len(blocks))
        for address, size, offset in zip(*pages.addresses(blocks), offsets, strict=True):
            data[offset : offset + size] = ctypes.string_at(int(address), int(size))
        return bytes(data)


@pytest.mark.parametrize("order", [layout.name for layout in KVCacheLayout])
def test_every_word_of_a_block_is_stored_once_in_every_memory_order(order: str) -> None:
    engine = Engine(order)
    assert engine.layouts[0].layers == engine.layouts[1].layers, "scheduler and worker describe the same pages"
    for group in range(len(HEADS_BEFORE_LAYERS.groups)):
        engine.number(group)
        for block in range(BLOCKS):
            words = engine.stored(engine.layouts[0], group, block)
            assert len(words) == len(set(words))
            assert set(words) == engine.described(group, block)


def test_a_page_in_pieces_is_refused_if_its_memory_order_has_no_name() -> None:
    engine = Engine("BHLNC")
    layers: Any = [[layer._replace(interleaved=False) for layer in each] for each in engine.layouts[0].layers]
    with pytest.raises(LayoutError, match="not contiguous"):
        canonical_kv_caches(engine.memory.tensors, layers, BLOCKS)


def test_heads_and_layers_in_blocks_are_stored_with_heads_outside_of_layers() -> None:
    """The stored bytes of one layer keep the same order, heads before tokens, wherever the layers lie."""
    words = {}
    for order in ("LBHNC", "BLHNC", "BHLNC"):
        engine = Engine(order)
        engine.number(0)
        words[order] = [engine.stored(engine.layouts[0], 0, block) for block in range(BLOCKS)]
    assert words["LBHNC"] == words["BLHNC"] == words["BHLNC"]


def test_the_bytes_of_a_chunk_do_not_depend_on_where_heads_and_layers_lie() -> None:
    """The blocks follow each other, each with the bytes that it has alone."""
    for group in range(len(HEADS_BEFORE_LAYERS.groups)):
        chunks = {}
        for order in ("LHBNC", "LBHNC", "BLHNC", "BHLNC"):
            engine = Engine(order)
            engine.number(group)
            chunks[order] = engine.chunk(group, [5, 2, 3])
            assert chunks[order] == b"".join(engine.chunk(group, [block]) for block in (5, 2, 3))
        assert len(set(chunks.values())) == 1, "a separate memory order"
        assert engine.chunk(group, [2, 5, 3]) != chunks["BHLNC"]


@pytest.mark.parametrize("mix", NAMED, ids=lambda mix: mix.name)
def test_the_size_of_a_block_covers_its_pages_and_their_padding(mix: Mix) -> None:
    engine = Engine(mix.layout, mix)
    worker, scheduler = engine.layouts
    for group in worker.spec.stored_groups:
        pages = engine.pages(group)
        assert pages.block_bytes == sum(aligned_page_bytes(layer.page_bytes) for layer in worker.layers[group])
        assert scheduler.block_bytes(group) >= worker.block_bytes(group) == pages.block_bytes


def test_a_state_whose_size_is_not_a_multiple_of_16_bytes_is_padded() -> None:
    engine = Engine(QWEN3_NEXT.layout, QWEN3_NEXT)
    assert [layer.page_bytes for layer in engine.layouts[0].layers[0]] == [392, 392]
    assert engine.layouts[0].block_bytes(0) == 800
