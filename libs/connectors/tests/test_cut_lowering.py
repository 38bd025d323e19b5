"""A chunk that ends inside blocks leaves and comes back token by token, whatever order the engine's memory has."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.canonical import LayerLayout, TokenRange
from hybridkv.canonical.torch_view import canonical_kv_caches, token_pages
from hybridkv.connectors.vllm.cut_lowering import GroupBlocks, cut_load_runs, cut_store_runs
from hybridkv.connectors.vllm.lowering import Zeros
from hybridkv.connectors.vllm.messages import Move
from hybridkv.connectors.vllm.moves import move_of
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, Transfer, chunk_blocks, chunk_span
from hybridkv.tiers import Slot
from hybridkv.transfer import CopyRuns, InlineCopyEngine

BLOCKS, HEADS, BLOCK_TOKENS, CONTENT = 12, 2, 24, 3
ORDERS = {"heads first": (0, 1, 2, 3), "tokens first": (0, 2, 1, 3)}


class Engine:
    """One layer's cache of 12 blocks of 24 tokens, of which the kernels see `kernel_tokens` at a time."""

    def __init__(self, order: str, kernel_tokens: int, seed: int) -> None:
        shape = (BLOCKS * BLOCK_TOKENS // kernel_tokens, HEADS, kernel_tokens, CONTENT)
        physical = [shape[dim] for dim in ORDERS[order]]
        data = np.random.default_rng(seed).integers(-99, 99, physical, dtype=np.int8)
        self.cache = torch.from_numpy(data).permute(*np.argsort(ORDERS[order]).tolist())
        self.kernel_tokens = kernel_tokens
        layers = [LayerLayout("layer", HEADS * BLOCK_TOKENS * CONTENT, token_dim=2)]
        caches = {"layer": self.cache}
        self.blocks = GroupBlocks(
            canonical_kv_caches(caches, [layers], BLOCKS).pages(0),
            BLOCK_TOKENS,
            lambda tokens: token_pages(caches, layers, BLOCKS, tokens),
        )

    def token(self, table: list[int], token: int) -> torch.Tensor:
        """What the engine keeps of a token: for each head its content."""
        slot = table[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS
        return self.cache[slot // self.kernel_tokens, :, slot % self.kernel_tokens]


class Tier:
    """A slot in two pieces, and zeros."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = np.full(num_bytes + 64, 77, dtype=np.uint8)
        self.zero_memory = np.zeros(64, dtype=np.uint8)
        base, first = self.memory.ctypes.data, num_bytes // 3
        self.extents = [(base + 64, first), (base + 64 + first, num_bytes - first)]
        self.zeros = Zeros(self.zero_memory.ctypes.data, 64)


def copy(engine: Engine, tier: Tier, runs: CopyRuns) -> None:
    inline = InlineCopyEngine()
    storage = engine.cache.untyped_storage()
    inline.register(storage.data_ptr(), storage.nbytes(), "engine")
    inline.register(tier.memory.ctypes.data, tier.memory.nbytes, "tier")
    inline.register(tier.zero_memory.ctypes.data, tier.zero_memory.nbytes, "zeros")
    assert inline.submit(1, runs)
    assert [result.failure for result in inline.poll()] == [None]


def part_bytes(engine: Engine, move: Move) -> int:
    return sum(pages.block_bytes * count for pages, _, count in engine.blocks.pieces(move))


chunks = st.sampled_from([2, 6, 10, 16, 20, 28, 36, 44, 54])


@settings(deadline=None)
@given(st.sampled_from(list(ORDERS)), chunks, st.integers(1, 5), st.data())
def test_a_cut_chunk_is_read_by_an_engine_whose_kernels_see_other_blocks(
    order: str, chunk: int, number: int, data: st.DataObject
) -> None:
    spec = CacheSpec((GroupSpec(GroupKind.FULL, BLOCK_TOKENS, part_tokens=2),), chunk)
    end_token = number * chunk
    stored, span = chunk_blocks(spec, 0, end_token), chunk_span(spec, 0, end_token)
    kernel_tokens = st.sampled_from([4, 6, 8, 12, 24])
    giver, taker = Engine(order, data.draw(kernel_tokens), seed=1), Engine(order, data.draw(kernel_tokens), seed=2)
    before = taker.cache.clone()
    table, other = data.draw(st.permutations(range(BLOCKS))), data.draw(st.permutations(range(BLOCKS)))
    ids = tuple(table[stored.start : stored.stop])
    move = move_of(spec, Transfer(0, end_token, 0, ids), b"key", Slot(()))
    tier = Tier(part_bytes(giver, move))
    copy(giver, tier, cut_store_runs(move, giver.blocks, tier.extents, tier.zeros))
    # What the engine holds itself is not loaded: whole blocks, from the chunk's first on.
    held = data.draw(st.integers(0, len(stored) - 1))
    ids = tuple(other[stored.start + held : stored.stop])
    move = move_of(spec, Transfer(0, end_token, held, ids), b"key", Slot(()))
    copy(taker, tier, cut_load_runs(move, taker.blocks, tier.extents))
    start = max(span.start, (stored.start + held) * BLOCK_TOKENS)
    for token in range(min(BLOCKS, stored.stop) * BLOCK_TOKENS):
        slot = other[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS
        own = before[slot // taker.kernel_tokens, :, slot % taker.kernel_tokens]
        expected = giver.token(table, token) if start <= token < span.end else own
        assert torch.equal(taker.token(other, token), expected), token


def test_a_part_of_a_block_is_as_large_as_its_tokens() -> None:
    engine = Engine("heads first", 8, seed=1)
    pages = engine.blocks.of(4, 20)
    assert sum(region.page_bytes for region in pages.regions) == TokenRange(4, 20, 24).share_of(HEADS * 24 * CONTENT)
    # Tokens 4 to 8, 8 to 16 and 16 to 20 of each of two heads.
    assert [region.page_bytes for region in pages.regions] == [12, 24, 12] * 2
