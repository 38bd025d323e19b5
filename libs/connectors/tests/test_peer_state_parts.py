"""States as vLLM lays them out, described, paired and moved: each element arrives where its layer reads it.

The memory is vLLM's own view of it, for each layout of convolutions and number of ranks on either side.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.identity.configuration import spec_facts
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.hashing import GroupFingerprint, LayerFingerprint
from hybridkv.peers.comparison import compare
from hybridkv.peers.description import decode, encode
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.pairing import Exchange, Resume
from hybridkv.peers.ranks import rank_links
from hybridkv.peers.tables import BlockTables
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec

torch = pytest.importorskip("torch", reason="it makes the tensors of these tests")
interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="vLLM makes the layouts of these tests")
mamba_utils = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils")
MambaBase = pytest.importorskip("vllm.model_executor.layers.mamba.abstract").MambaBase
MambaType = pytest.importorskip("vllm.v1.attention.backends.registry").MambaAttentionBackendEnum

from hybridkv.connectors.vllm.nixl.memory import description  # noqa: E402
from hybridkv.connectors.vllm.nixl.memory.description import RankPlace, describe  # noqa: E402
from hybridkv.connectors.vllm.nixl.memory.page_parts import page_orders  # noqa: E402

BLOCKS, STEPS, PADDING_BYTES = 5, 3, 24
LAYERS = ("a", "b")
Shapes = mamba_utils.MambaStateShapeCalculator
KINDS = {
    "GDN_ATTN": lambda tp: Shapes.gated_delta_net_state_shape(tp, 4, 8, 6, 4, STEPS + 1),
    "MAMBA1": lambda tp: Shapes.mamba1_state_shape(tp, 32, 4, STEPS + 1),
    "MAMBA2": lambda tp: Shapes.mamba2_state_shape(tp, 32, 4, 8, 4, 6, STEPS + 1),
    "SHORT_CONV": lambda tp: Shapes.short_conv_state_shape(tp, 32, STEPS + 1),
    "LINEAR": lambda tp: Shapes.linear_attention_state_shape(8, tp, 4),
}
RUNS = {"GDN_ATTN": (24, 24, 32), "MAMBA1": (32,), "MAMBA2": (32, 24, 24), "SHORT_CONV": (32,)}
"""Channels of the whole model's convolution that are divided among the ranks, each run by itself."""


@dataclass(frozen=True)
class Engine:
    """Layout of one side's states."""

    kind: str = "GDN_ATTN"
    layout: str = "SD"
    tp_size: int = 1
    dtypes: tuple[Any, ...] = (torch.bfloat16, torch.float32)
    changed: tuple[tuple[str, Any], ...] = ()
    """Fields of the spec."""


class Rank:
    """One rank with vLLM's views of its states and the connector's description of them."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine, self.rank = engine, rank
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mamba_utils, "get_conv_state_layout", lambda: engine.layout)
            shapes = KINDS[engine.kind](engine.tp_size)
            dtypes = engine.dtypes[-len(shapes) :] if engine.kind == "LINEAR" else engine.dtypes[: len(shapes)]
            spec = interface.MambaSpec(
                block_size=16, shapes=shapes, dtypes=dtypes, mamba_type=MambaType[engine.kind], mamba_cache_mode="align"
            )
            spec = replace(spec, page_size_padded=spec.page_size_bytes + PADDING_BYTES, **dict(engine.changed))
            self.description, self.regions = self._described(spec, shapes, dtypes)

    def _described(self, spec: Any, shapes: Any, dtypes: Any) -> Any:
        page, size = spec.page_size_bytes, spec.state_content_size_bytes
        memory = torch.zeros(len(LAYERS) * BLOCKS * page, dtype=torch.int8)
        pages = memory.view(len(LAYERS), BLOCKS, 1, 1, page)[..., :size]
        caches = {name: pages[i] for i, name in enumerate(LAYERS)}
        self.states = {}
        for name, cache in caches.items():
            layer = SimpleNamespace(get_state_shape=lambda: shapes, get_state_dtype=lambda: dtypes)
            MambaBase.bind_kv_cache(layer, cache)
            self.states[name] = layer.kv_cache
        layers = tuple(LayerLayout(name, size) for name in LAYERS)
        prints = tuple(LayerFingerprint(name=name, facts=spec_facts(spec), page_bytes=size) for name in LAYERS)
        group = GroupFingerprint(kind=GroupKind.RECURRENT, block_tokens=16, layers=prints)
        cache_spec = CacheSpec((GroupSpec(GroupKind.RECURRENT, 16),), 16)
        layout = CacheLayout(cache_spec, (layers,), (group,), 16, "sha256", self.engine.tp_size)
        config = SimpleNamespace(
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4),
            parallel_config=SimpleNamespace(tensor_parallel_size=self.engine.tp_size),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        placed = SimpleNamespace(kv_cache_groups=[interface.KVCacheGroupSpec(list(LAYERS), spec)])
        place = RankPlace(f"engine.{self.rank}", self.rank, self.engine.tp_size)
        described, regions = describe(place, {}, layout, caches, BLOCKS, page_orders(config, placed, layout))
        found = decode(encode(described))
        assert not isinstance(found, Incompatibility), found
        return found, regions

    def contents(self, layer: str, block: int) -> list[Any]:
        """Arrays as the layer sees them; convolutions as [step, channel]."""
        arrays = [array[block] for array in self.states[layer]]
        if self.engine.kind != "LINEAR" and self.engine.layout == "DS":
            arrays[0] = arrays[0].T
        return arrays


def whole(kind: str, layer: str, rank: Rank | None) -> list[Any]:
    """State of the whole model, or a rank's part of it."""
    arrays = []
    for number, shape in enumerate(KINDS[kind](1)):
        values = (torch.arange(torch.Size(shape).numel()).reshape(shape) + 31 * number + LAYERS.index(layer)) % 251
        if rank is not None:
            values = part(kind, number, values, rank)
        arrays.append(values.to(torch.float32))
    return arrays


def part(kind: str, number: int, values: Any, rank: Rank) -> Any:
    size, mine = rank.engine.tp_size, rank.rank
    if kind == "LINEAR" or number:
        return values.chunk(size)[mine]
    return torch.cat([run.chunk(size, 1)[mine] for run in values.split(RUNS[kind], 1)], 1)


def fill(rank: Rank, block: int) -> None:
    for layer in LAYERS:
        for array, values in zip(rank.contents(layer, block), whole(rank.engine.kind, layer, rank), strict=True):
            array.copy_(values)


def is_right(rank: Rank, block: int) -> bool:
    return all(
        torch.equal(array.to(torch.float32), values)
        for layer in LAYERS
        for array, values in zip(rank.contents(layer, block), whole(rank.engine.kind, layer, rank), strict=True)
    )


def exchanged(ours: Rank, theirs: list[Rank]) -> Incompatibility | None:
    """Copy block 3 of theirs into block 1 of ours, or return why it cannot be copied."""
    links = rank_links(ours.description.total_heads, ours.engine.tp_size, ours.rank, len(theirs))
    for rank in theirs if links is None else [theirs[link.rank] for link in links if link.reads]:
        agreement = compare(ours.description, rank.description)
        if isinstance(agreement, Incompatibility):
            return agreement
        pairing = Exchange(agreement).pair(BlockTables.whole(10, ((1,),)), BlockTables.whole(10, ((3,),)), Resume(10))
        assert not isinstance(pairing, Incompatibility), pairing
        for to, at, source, where, size in zip(*(c.tolist() for c in pairing.ranges.columns), strict=True):
            ctypes.memmove(ours.regions[to].address + at, rank.regions[source].address + where, size)
        ours.num_descriptors = len(pairing.ranges)  # type: ignore[attr-defined]
    return None


SPLIT = ("GDN_ATTN", "MAMBA1", "SHORT_CONV", "LINEAR")
SIZES = ((1, 1), (2, 2), (2, 1), (1, 2), (4, 2))
CASES = [
    (kind, tp, layouts)
    for kind, tp, layouts in itertools.product(KINDS, SIZES, itertools.product(("SD", "DS"), repeat=2))
    if kind in SPLIT or tp[0] == tp[1]
]


@pytest.mark.parametrize(("kind", "tp", "layouts"), CASES)
def test_each_element_of_a_state_arrives_where_its_layer_reads_it(
    kind: str, tp: tuple[int, int], layouts: tuple[str, str]
) -> None:
    there = [Rank(Engine(kind, layouts[0], tp[0]), rank) for rank in range(tp[0])]
    for rank in there:
        fill(rank, 3)
    for number in range(tp[1]):
        here = Rank(Engine(kind, layouts[1], tp[1]), number)
        fill(here, 4)
        assert not is_right(here, 1)
        assert exchanged(here, there) is None
        assert is_right(here, 1)
        assert is_right(here, 4), "no other block is written"
        assert not is_right(here, 0) and not is_right(here, 2)


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_states_with_equal_layouts_move_in_one_run_per_layer(layout: str) -> None:
    there, here = Rank(Engine(layout=layout), 0), Rank(Engine(layout=layout), 0)
    fill(there, 3)
    assert exchanged(here, [there]) is None
    assert here.num_descriptors == len(LAYERS)  # type: ignore[attr-defined]
    other = Rank(Engine(layout="DS" if layout == "SD" else "SD"), 0)
    assert exchanged(other, [there]) is None
    assert other.num_descriptors > 100  # type: ignore[attr-defined]


def test_channel_groups_shared_by_several_ranks_are_not_split() -> None:
    refusal = exchanged(Rank(Engine("MAMBA2"), 0), [Rank(Engine("MAMBA2", tp_size=2), rank) for rank in range(2)])
    assert refusal is not None and "not split by heads, tp_size" in refusal.field


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtypes": (torch.bfloat16, torch.bfloat16)}, "bfloat16"),
        ({"changed": (("num_speculative_blocks", 2),)}, "num_speculative_blocks"),
        ({"kind": "MAMBA1"}, "MAMBA1"),
    ],
)
def test_states_of_another_kind_are_refused_by_name(changed: dict[str, Any], words: str) -> None:
    refusal = exchanged(Rank(Engine(**changed), 0), [Rank(Engine(), 0)])
    assert refusal is not None and "item_format" in refusal.field and words in refusal.ours


def test_states_with_unknown_parts_move_whole_between_equal_layouts_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = Engine(changed=(("tp_replicated", True),))
    assert {p.total_heads for g in Rank(more, 0).description.groups for x in g.layers for p in x.pieces} == {0}
    monkeypatch.setattr(description, "MAX_ITEMS", 100)
    there, here = Rank(Engine(), 0), Rank(Engine(), 0)
    assert [len(layer.pieces) for layer in here.description.groups[0].layers] == [1, 1]
    fill(there, 3)
    assert exchanged(here, [there]) is None and is_right(here, 1)
    refusal = exchanged(Rank(Engine(layout="DS"), 0), [there])
    assert refusal is not None and "item_format" in refusal.field
    assert "convolutions DS" in refusal.ours and "convolutions SD" in refusal.theirs
