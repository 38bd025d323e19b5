"""Tensors as vLLM makes them, described, paired and moved: each token arrives where attention reads it.

The memory is the model: it is written and read through vLLM's own views, without the descriptions.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from examples import thinned

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.identity.configuration import spec_facts
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.hashing import GroupFingerprint, LayerFingerprint
from hybridkv.peers.comparison import compare
from hybridkv.peers.description import decode, encode
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.pairing import Exchange, Resume
from hybridkv.peers.ranks import head_share, rank_links
from hybridkv.peers.tables import BlockTables
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec

torch = pytest.importorskip("torch", reason="it makes the tensors of these tests")
interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="vLLM makes the layouts of these tests")
kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
KVCacheLayout = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout

from hybridkv.connectors.vllm.nixl.memory.description import RankPlace, describe  # noqa: E402
from hybridkv.connectors.vllm.nixl.memory.page_parts import PageOrder, page_orders  # noqa: E402

BLOCKS, TOTAL_HEADS, HEAD_SIZE, NUM_TOKENS = 9, 4, 8, 75
LAYERS = ("a", "b")


@dataclass(frozen=True)
class Engine:
    """Layout of one side's cache."""

    block: int = 16
    kernel: int | None = None
    order: str = "LBNHC"
    backend: str = "FLASH_ATTN"
    tp_size: int = 1
    spec: str = "FullAttentionSpec"
    total_heads: int = TOTAL_HEADS
    said_heads: int = TOTAL_HEADS
    """Heads of all layers according to the model's configuration."""
    quantised: str = "NONE"


class Rank:
    """One rank with vLLM's views of its memory and the connector's description of them."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine, self.rank = engine, rank
        share = head_share(engine.total_heads, engine.tp_size, rank)
        assert share is not None
        self.heads = range(share.first, share.first + share.num_heads)
        spec = getattr(interface, engine.spec)(
            block_size=engine.block,
            num_kv_heads=len(self.heads),
            head_size=HEAD_SIZE,
            dtype=torch.bfloat16 if engine.quantised == "NONE" else torch.int8,
            kv_quant_mode=interface.KVQuantMode[engine.quantised],
            # As requested by a backend that stores a scale of K and one of V after them.
            state_content_bytes=None if engine.quantised == "NONE" else 2 * HEAD_SIZE + 8,
        )
        placed, self.views = _views(engine, spec)
        facts, size = spec_facts(spec), compat.unpadded_page_bytes(spec)
        layers = tuple(LayerLayout(name, size, interleaved=engine.order == "BHLNC") for name in LAYERS)
        prints = tuple(LayerFingerprint(name=name, facts=facts, page_bytes=size) for name in LAYERS)
        group = GroupFingerprint(kind=GroupKind.FULL, block_tokens=engine.block, layers=prints)
        spec_of_cache = CacheSpec((GroupSpec(GroupKind.FULL, engine.block),), engine.block)
        layout = CacheLayout(spec_of_cache, (layers,), (group,), engine.block, "sha256", engine.tp_size)
        self.orders = page_orders(_config(engine), placed, layout)
        place = RankPlace(f"engine.{rank}", rank, engine.tp_size)
        described, self.regions = describe(place, {}, layout, self.views, BLOCKS, self.orders)
        found = decode(encode(described))
        assert not isinstance(found, Incompatibility), found
        self.description = found

    def token(self, layer: str, table: tuple[int, ...], token: int) -> Any:
        """Content of a token as attention reads it: [head, element]."""
        view, size = self.views[layer], self.engine.block
        ratio = view.shape[0] // BLOCKS
        part, within = divmod(token % size, size // ratio)
        return view[table[token // size] * ratio + part, :, within]

    def head_of_kernel_block(self, layer: str, table: tuple[int, ...], first_token: int, head: int) -> Any:
        """Content of one head of a kernel block as attention reads it; the byte order belongs to the backend."""
        view, size = self.views[layer], self.engine.block
        ratio = view.shape[0] // BLOCKS
        return view[table[first_token // size] * ratio + first_token % size // (size // ratio), head]


def _views(engine: Engine, spec: Any) -> tuple[Any, dict[str, Any]]:
    layout = KVCacheLayout[engine.order]
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=BLOCKS,
    )
    config = SimpleNamespace(cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None))
    group = interface.KVCacheGroupSpec(list(LAYERS), spec)
    placed = kv_cache_utils.get_kv_cache_config_from_groups(config, [group], 1 << 30)
    views = {}
    memories: dict[int, Any] = {}
    for tensor in placed.kv_cache_tensors:
        memory = memories.setdefault(id(tensor), torch.full((tensor.size,), 1, dtype=torch.int8))
        made = interface.create_kv_cache_views(memory, spec, BLOCKS, layout, tensor, engine.kernel)
        views |= dict(zip(tensor.layers, made, strict=True))
    return placed, views


def _config(engine: Engine) -> Any:
    backend = SimpleNamespace(get_name=lambda: engine.backend)
    return SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: engine.said_heads),
        parallel_config=SimpleNamespace(tensor_parallel_size=engine.tp_size),
        compilation_config=SimpleNamespace(
            static_forward_context={name: SimpleNamespace(attn_backend=backend) for name in LAYERS}
        ),
    )


def ranks(engine: Engine) -> list[Rank]:
    return [Rank(engine, rank) for rank in range(engine.tp_size)]


def table_of(engine: Engine) -> tuple[int, ...]:
    """In descending order of memory."""
    return tuple(range(BLOCKS - 1, BLOCKS - 1 - -(-NUM_TOKENS // engine.block), -1))


def exchanged(ours: Rank, theirs: list[Rank]) -> Incompatibility | None:
    """Read everything that one rank needs, or return why it cannot."""
    totals = ours.description.total_heads
    links = rank_links(totals, ours.engine.tp_size, ours.rank, len(theirs))
    for rank in theirs if links is None else [theirs[link.rank] for link in links if link.reads]:
        agreement = compare(ours.description, rank.description)
        if isinstance(agreement, Incompatibility):
            return agreement
        local = BlockTables.whole(NUM_TOKENS, (table_of(ours.engine),))
        remote = BlockTables.whole(NUM_TOKENS, (table_of(rank.engine),))
        pairing = Exchange(agreement).pair(local, remote, Resume(NUM_TOKENS))
        assert not isinstance(pairing, Incompatibility), pairing
        for to, at, source, where, size in zip(*(c.tolist() for c in pairing.ranges.columns), strict=True):
            assert at + size <= ours.regions[to].num_bytes and where + size <= rank.regions[source].num_bytes
            ctypes.memmove(ours.regions[to].address + at, rank.regions[source].address + where, size)
    return None


def content(layer: str, token: int, heads: Any) -> Any:
    """Content of a token in every head, with different values."""
    numbers = torch.arange(HEAD_SIZE * 2)[None, :] + 17 * torch.tensor(list(heads))[:, None] + 71 * token
    return ((numbers + 3 * LAYERS.index(layer)) % 251).to(torch.bfloat16)


def fill(rank: Rank) -> None:
    for layer, token in itertools.product(LAYERS, range(NUM_TOKENS)):
        rank.token(layer, table_of(rank.engine), token).copy_(content(layer, token, rank.heads))


def wrong(rank: Rank) -> list[tuple[str, int]]:
    table = table_of(rank.engine)
    return [
        (layer, token)
        for layer, token in itertools.product(LAYERS, range(NUM_TOKENS))
        if not torch.equal(rank.token(layer, table, token), content(layer, token, rank.heads))
    ]


ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC")
SIZES = [((16, None), (16, None)), ((16, None), (32, 16)), ((32, 8), (16, None)), ((16, 4), (32, 16))]


def cases() -> Iterator[tuple[Engine, Engine]]:
    for (theirs, ours), tp in itertools.product(SIZES, [(1, 1), (2, 1), (1, 2), (2, 4), (8, 2)]):
        for number, order in enumerate(ORDERS):
            other = ORDERS[(number + 1) % len(ORDERS)]
            sides = ((order, *theirs, tp[0]), (other, *ours, tp[1]))
            # A block that is split for kernels has its own memory, which vLLM ensures.
            if all(kernel is None or way.startswith("LB") for way, _, kernel, _ in sides):
                yield tuple(Engine(block, kernel, way, tp_size=size) for way, block, kernel, size in sides)  # type: ignore[misc]


@pytest.mark.parametrize(("theirs", "ours"), thinned([*cases()], 3))
def test_each_token_arrives_where_attention_reads_it(theirs: Engine, ours: Engine) -> None:
    there, here = ranks(theirs), ranks(ours)
    for rank in there:
        fill(rank)
        assert wrong(rank) == []
    for rank in here:
        assert len(wrong(rank)) == len(LAYERS) * NUM_TOKENS
        assert exchanged(rank, there) is None
        assert wrong(rank) == []


def test_heads_and_tokens_are_described_only_for_known_backends() -> None:
    for backend, named in (("TRITON_ATTN", (4, 16)), ("CPU_ATTN", (4, 1)), ("A_NEW_ONE", (1, 1))):
        (piece,) = Rank(Engine(order="LBHNC", backend=backend), 0).description.groups[0].layers[0].pieces
        assert (piece.heads.count, piece.units.count) == named
        assert piece.page_bytes == 4 * 16 * HEAD_SIZE * 2 * 2


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (Engine(32), Engine(16), "unit_tokens"),
        (Engine(tp_size=2), Engine(), "not split by heads"),
        (Engine(order="LBHNC"), Engine(), "item_format"),
        (Engine(32, 16), Engine(32), "item_format"),
    ],
)
def test_different_layouts_of_an_unknown_backend_are_refused(theirs: Engine, ours: Engine, words: str) -> None:
    def of(backend: str, engine: Engine) -> Engine:
        return Engine(engine.block, engine.kernel, engine.order, backend, engine.tp_size)

    refusal = exchanged(Rank(of("A_NEW_ONE", ours), 0), ranks(of("A_NEW_ONE", theirs)))
    assert refusal is not None and (words in refusal.field or "item_format" in refusal.field), refusal
    # Control: nothing else prevents the exchange.
    assert exchanged(Rank(ours, 0), ranks(theirs)) is None
    same = of("A_NEW_ONE", ours)
    there, here = Rank(same, 0), Rank(same, 0)
    fill(there)
    assert exchanged(here, [there]) is None
    assert wrong(here) == []


def test_on_a_cpu_heads_are_split_and_kernel_blocks_are_not() -> None:
    """A head's kernel block is packed: it moves whole, and no single token of it does."""
    packed = Engine(32, order="LBHNC", backend="CPU_ATTN", tp_size=2)
    there, here = ranks(packed), Rank(Engine(64, 32, order="LBHNC", backend="CPU_ATTN"), 0)
    for rank in there:
        fill(rank)
    assert exchanged(here, there) is None
    for layer, first, head in itertools.product(LAYERS, range(0, NUM_TOKENS, 32), range(TOTAL_HEADS)):
        source = there[head // 2]
        theirs = source.head_of_kernel_block(layer, table_of(packed), first, head % 2)
        assert torch.equal(here.head_of_kernel_block(layer, table_of(here.engine), first, head), theirs)
    refusal = exchanged(Rank(Engine(64, order="LBHNC", backend="CPU_ATTN"), 0), there)
    assert refusal is not None and "unit_tokens" in refusal.field and "32" in refusal.theirs


def test_a_packing_and_a_plain_backend_refuse_each_other() -> None:
    refusal = exchanged(Rank(Engine(order="LBHNC"), 0), ranks(Engine(order="LBHNC", backend="CPU_ATTN")))
    assert refusal is not None and "item_format" in refusal.field
    assert "CPU_ATTN" in refusal.theirs and "one token after another" in refusal.ours


def test_a_layer_without_its_share_of_the_models_heads_is_not_split() -> None:
    covered_facts = {size: Engine(tp_size=size, said_heads=8) for size in (1, 2)}
    refusal = exchanged(Rank(covered_facts[1], 0), ranks(covered_facts[2]))
    assert refusal is not None and "not split by heads" in refusal.field
    there, here = Rank(covered_facts[1], 0), Rank(Engine(32, order="LBHNC", said_heads=8), 0)
    fill(there)
    assert exchanged(here, [there]) is None, "its tokens are described nevertheless"
    assert wrong(here) == []


def test_latents_are_equal_on_all_ranks_and_move_whole() -> None:
    def latent(**changed: Any) -> Engine:
        return Engine(spec="MLAAttentionSpec", backend="TRITON_MLA", total_heads=1, said_heads=1, **changed)

    there, here = ranks(latent(tp_size=2)), ranks(latent(tp_size=4))
    for rank in there:
        for layer in LAYERS:
            rank.views[layer].copy_(torch.arange(rank.views[layer].numel()).reshape(rank.views[layer].shape) % 251)
    for rank in here:
        assert exchanged(rank, there) is None
        for layer, block in itertools.product(LAYERS, table_of(rank.engine)):
            assert torch.equal(rank.views[layer][block], there[0].views[layer][block])
    refusal = exchanged(Rank(latent(block=32), 0), there)
    assert refusal is not None and ("unit_tokens" in refusal.field or "item_format" in refusal.field)


def test_scales_in_a_page_move_with_it() -> None:
    """One per token and head, stored after them, so that no part of such a page is cut."""
    quantised = Engine(quantised="INT8_PER_TOKEN_HEAD")
    there, here = Rank(quantised, 0), Rank(quantised, 0)
    (piece,) = here.description.groups[0].layers[0].pieces
    assert piece.page_bytes > TOTAL_HEADS * quantised.block * HEAD_SIZE * 2, "K, V, and scales"
    assert (piece.heads.count, piece.num_units, piece.total_heads) == (1, 1, 0)
    for layer in LAYERS:
        there.views[layer].copy_(torch.arange(there.views[layer].numel()).reshape(there.views[layer].shape) % 127)
    assert exchanged(here, [there]) is None
    for layer, block in itertools.product(LAYERS, range(BLOCKS)):
        is_read = block in table_of(quantised)
        assert torch.equal(here.views[layer][block], there.views[layer][block]) is is_read
    for other, words in ((Engine(32, quantised="INT8_PER_TOKEN_HEAD"), "unit_tokens"), (Engine(), "item_format")):
        refusal = exchanged(Rank(other, 0), [there])
        assert refusal is not None and (words in refusal.field or "item_format" in refusal.field), refusal


def test_the_page_order_follows_from_spec_and_backend() -> None:
    assert Rank(Engine(tp_size=2), 1).orders["a"] == PageOrder("FLASH_ATTN", True, True, False, 2, 4, 16)
    assert Rank(Engine(backend="ROCM_ATTN"), 0).orders["a"] == PageOrder("ROCM_ATTN", False, False, False, 4, 0, 16)
