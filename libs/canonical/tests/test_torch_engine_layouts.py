"""Layouts from vLLM's own placement of layers and its own views, in every memory order: an independent source."""

from types import SimpleNamespace

import pytest
import torch

from hybridkv.canonical import LayerLayout
from hybridkv.canonical.torch_view import CanonicalKVCaches, LayoutError, canonical_kv_caches

kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils", reason="vLLM makes the layouts of these tests")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
KVCacheLayout = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout

BLOCKS = 5
BF16, F32, U8, FP8 = torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn
ORDERS = [layout.name for layout in KVCacheLayout]


def attention(dtype: torch.dtype = BF16, **kwargs: object) -> object:
    return interface.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=dtype, **kwargs)


def window() -> object:
    return interface.SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=BF16, sliding_window=32)


def latent(head_size: int = 72, dtype: torch.dtype = BF16, block_size: int = 16) -> object:
    return interface.MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=head_size, dtype=dtype)


def recurrent(page_bytes: int | None = None) -> object:
    return interface.MambaSpec(
        block_size=16,
        shapes=((3, 16), (2, 8, 8)),
        dtypes=(BF16, F32),
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
    )


def group(specs: dict[str, object]) -> object:
    merged = next(iter(specs.values()))
    if len(set(specs.values())) > 1:
        merged = interface.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    return interface.KVCacheGroupSpec(list(specs), merged)


MODELS = {
    "attention": [{"a0": attention(), "a1": attention(), "a2": attention()}],
    "fp8 attention": [{"a0": attention(FP8), "a1": attention(FP8)}],
    "sliding window and full attention": [{"w0": window()}, {"w1": window()}, {"a0": attention()}],
    "latent attention": [{"m0": latent(), "m1": latent()}],
    "one layer": [{"a0": attention()}],
}
PADDED = {
    "recurrent state, padded to attention's page": [
        {"s0": recurrent(1024), "s1": recurrent(1024)},
        {"s2": recurrent(1024), "s3": recurrent(1024)},
        {"a0": attention(), "a1": attention()},
    ],
    "attention padded to the state's page": [
        {"s0": recurrent(2048)},
        {"a0": attention(page_size_padded=2048)},
    ],
}
PACKED = {
    "pages of different sizes, packed (DeepSeek-V4)": [
        {"c0": latent(584, U8), "i0": latent(132, U8), "c1": latent(584, U8)},
        {"w0": latent(584, U8), "w1": latent(584, U8)},
        {"s0": latent(32, F32)},
    ],
}
CASES = [
    *[(model, order) for model in MODELS for order in ORDERS],
    *[(model, order) for model in PADDED for order in ("LBHNC", "LBNHC", "BLHNC", "BLNHC")],
    *[(model, order) for model in PACKED for order in ("BLHNC", "BLNHC")],
]
every_layout = pytest.mark.parametrize(("model", "order"), CASES)


def spec_of(kv_group: object, name: str) -> object:
    return getattr(kv_group.kv_cache_spec, "kv_cache_specs", {}).get(name, kv_group.kv_cache_spec)


def content_bytes(spec: object) -> int:
    if isinstance(spec, interface.MambaSpec):
        return spec.state_content_size_bytes
    return spec.unpadded_page_size_bytes


class Engine:
    """KV memory as vLLM's model runner allocates it."""

    def __init__(self, model: str, order: str, kernel_block_size: int | None = None) -> None:
        layout = KVCacheLayout[order]
        groups = [group(specs) for specs in {**MODELS, **PADDED, **PACKED}[model]]
        cache_config = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=BLOCKS,
        )
        config = SimpleNamespace(cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None))
        placed = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 1 << 30)
        assert placed.num_blocks == BLOCKS
        self.memory = torch.zeros(placed.kv_cache_tensors[0].size, dtype=torch.int8)
        self.views: dict[str, torch.Tensor] = {}
        specs = {name: spec_of(g, name) for g in groups for name in g.layer_names}
        for tensor in placed.kv_cache_tensors:
            made = interface.create_kv_cache_views(
                self.memory, specs[tensor.layers[0]], BLOCKS, layout, tensor, kernel_block_size
            )
            self.views.update(zip(tensor.layers, made, strict=True))
        interleaved = order == "BHLNC"
        self.groups = [
            [LayerLayout(name, content_bytes(specs[name]), interleaved=interleaved) for name in g.layer_names]
            for g in groups
        ]
        self.caches: CanonicalKVCaches = canonical_kv_caches(self.views, self.groups, BLOCKS)

    def block(self, name: str, block: int) -> torch.Tensor:
        """The part of a block that a layer holds, as bytes in memory order; a view."""
        part = interface.group_kernel_blocks(self.views[name], BLOCKS)[block]
        return part.permute(sorted(range(part.dim()), key=lambda dim: -part.stride(dim))).view(U8)

    def group_bytes(self, group_index: int, block: int) -> torch.Tensor:
        return torch.cat([self.block(layer.name, block).flatten() for layer in self.groups[group_index]])

    def view_bytes(self, group_index: int, block: int) -> torch.Tensor:
        refs = self.caches.group_data_refs[group_index]
        pages = [self.caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes] for ref in refs]
        return torch.cat(pages).view(U8)


def check_both_directions(engine: Engine) -> None:
    random = torch.Generator().manual_seed(1)
    for index, layers in enumerate(engine.groups):
        for block in range(BLOCKS):
            for layer in layers:
                part = engine.block(layer.name, block)
                part.copy_(torch.randint(0, 256, part.shape, dtype=U8, generator=random))
            assert torch.equal(engine.view_bytes(index, block), engine.group_bytes(index, block))
            others = [engine.group_bytes(index, other) for other in range(BLOCKS) if other != block]
            for ref in engine.caches.group_data_refs[index]:
                page = torch.randint(-128, 128, (ref.page_size_bytes,), dtype=torch.int8, generator=random)
                engine.caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes] = page
            assert torch.equal(engine.view_bytes(index, block), engine.group_bytes(index, block))
            for before, other in zip(others, (o for o in range(BLOCKS) if o != block), strict=True):
                assert torch.equal(before, engine.group_bytes(index, other))


@every_layout
def test_engine_and_views_read_what_the_other_wrote(model: str, order: str) -> None:
    check_both_directions(Engine(model, order))


@every_layout
def test_every_byte_of_a_layer_is_covered_once_by_its_group(model: str, order: str) -> None:
    engine = Engine(model, order)
    for index, layers in enumerate(engine.groups):
        expected = torch.zeros(engine.memory.numel(), dtype=torch.int32)
        for layer in layers:
            view = engine.views[layer.name]
            width = view.element_size()
            expected.as_strided(
                (*view.shape, width), (*(step * width for step in view.stride()), 1), view.storage_offset() * width
            ).add_(1)
        assert expected.max() == 1
        counts = torch.zeros_like(expected)
        for ref in engine.caches.group_data_refs[index]:
            pages = engine.caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes]
            counts.as_strided(pages.shape, pages.stride(), pages.storage_offset()).add_(1)
        assert torch.equal(counts, expected)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("model", ["attention", "latent attention", "sliding window and full attention"])
def test_kernel_blocks_are_joined_to_the_blocks_of_the_manager(model: str, order: str) -> None:
    engine = Engine(model, order, kernel_block_size=4)
    assert next(iter(engine.views.values())).shape[0] == 4 * BLOCKS
    check_both_directions(engine)


def test_groups_with_one_page_size_share_their_regions() -> None:
    engine = Engine("recurrent state, padded to attention's page", "LBHNC")
    assert len(engine.caches.tensors) == 2
    assert [[ref.page_size_bytes for ref in refs] for refs in engine.caches.group_data_refs] == [
        [608, 608],
        [608, 608],
        [1024, 1024],
    ]


def test_heads_before_layers_are_refused_unless_marked_interleaved() -> None:
    engine = Engine("attention", "BHLNC")
    groups = [[layer._replace(interleaved=False) for layer in layers] for layers in engine.groups]
    with pytest.raises(LayoutError, match="not contiguous"):
        canonical_kv_caches(engine.views, groups, BLOCKS)
