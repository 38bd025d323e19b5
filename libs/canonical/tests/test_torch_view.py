import subprocess
import sys
from typing import Any

import pytest
import torch

from hybridkv import canonical
from hybridkv.canonical import CanonicalKVCaches, LayerLayout, canonical_kv_caches, torch_view
from hybridkv.canonical.torch_view import KVCache, LayoutError

BLOCKS = 6
VIEWS = {"CanonicalKVCacheRef", "CanonicalKVCacheTensor", "CanonicalKVCaches", "canonical_kv_caches"}


def build(caches: dict[str, KVCache], *groups: list[tuple[str, int]], blocks: int = BLOCKS) -> CanonicalKVCaches:
    return canonical_kv_caches(caches, [[LayerLayout(*layer) for layer in group] for group in groups], blocks)


def block_bytes(caches: CanonicalKVCaches, group: int, block: int) -> torch.Tensor:
    parts = [caches.tensors[r.tensor_idx].tensor[block, : r.page_size_bytes] for r in caches.group_data_refs[group]]
    return torch.cat(parts)


def fill(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.randint(-100, 100, tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))


def test_attention_pages_are_the_bytes_of_their_block() -> None:
    cache = torch.zeros(BLOCKS, 2, 16, 8, dtype=torch.bfloat16)
    fill(cache)
    caches = build({"a": cache}, [("a", 512)])
    for block in range(BLOCKS):
        assert torch.equal(block_bytes(caches, 0, block), cache[block].contiguous().view(torch.int8).flatten())


def test_writing_through_a_view_writes_the_engine_tensor() -> None:
    cache = torch.zeros(BLOCKS, 2, 16, 8, dtype=torch.float32)
    build({"a": cache}, [("a", 1024)]).tensors[0].tensor[3].fill_(1)
    assert (cache[3] != 0).all() and (cache[2] == 0).all() and (cache[4] == 0).all()


def test_padding_is_left_out_of_recurrent_pages() -> None:
    storage = torch.zeros(BLOCKS * 1024, dtype=torch.int8)
    state = storage.as_strided((BLOCKS, 1, 1, 700), (1024, 700, 700, 1))
    fill(state)
    caches = build({"s": state}, [("s", 700)])
    assert torch.equal(block_bytes(caches, 0, 4), state[4].flatten())
    assert caches.tensors[0].tensor.stride(0) == 1024


def test_groups_that_overlay_the_same_bytes_share_one_region() -> None:
    storage = torch.zeros(BLOCKS * 1024, dtype=torch.int8)
    attention = storage.view(torch.float16).view(BLOCKS, 2, 16, 16)
    state = storage.as_strided((BLOCKS, 1, 1, 700), (1024, 700, 700, 1))
    caches = build({"a": attention, "s": state}, [("a", 1024)], [("s", 700)])
    assert len(caches.tensors) == 1 and caches.tensors[0].page_size_bytes == 1024
    assert [[ref.page_size_bytes for ref in refs] for refs in caches.group_data_refs] == [[1024], [700]]


def test_a_block_of_several_kernel_blocks_is_one_page() -> None:
    cache = torch.zeros(BLOCKS * 4, 2, 4, 8, dtype=torch.bfloat16)
    fill(cache)
    caches = build({"a": cache}, [("a", 512)])
    assert torch.equal(block_bytes(caches, 0, 2), cache[8:12].contiguous().view(torch.int8).flatten())


def test_layers_packed_into_one_block_have_a_region_each() -> None:
    storage = torch.zeros(BLOCKS * 640, dtype=torch.int8)
    wide = storage.as_strided((BLOCKS, 1, 1, 512), (640, 512, 512, 1))
    narrow = storage.as_strided((BLOCKS, 1, 1, 128), (640, 128, 128, 1), 512)
    fill(storage)
    caches = build({"w": wide, "n": narrow}, [("w", 512), ("n", 128)])
    assert len(caches.tensors) == 2
    assert torch.equal(block_bytes(caches, 0, 5), storage[5 * 640 :])


def test_heads_outside_of_blocks_have_a_region_each() -> None:
    cache = torch.zeros(2, BLOCKS, 16, 8, dtype=torch.float16).permute(1, 0, 2, 3)
    fill(cache)
    caches = build({"a": cache}, [("a", 512)])
    assert len(caches.tensors) == 2
    assert torch.equal(block_bytes(caches, 0, 3), cache[3].contiguous().view(torch.int8).flatten())


def test_regions_of_one_layer_are_one_page_of_a_chunk() -> None:
    heads = torch.zeros(2, BLOCKS, 5, 7, dtype=torch.int8).permute(1, 0, 2, 3)
    caches = build({"a": heads, "b": torch.zeros(BLOCKS, 40, dtype=torch.int8)}, [("a", 70), ("b", 40)])
    assert [ref.layer_idx for ref in caches.group_data_refs[0]] == [0, 0, 1]
    assert caches.pages(0).chunk_offsets(0, 1, 1).tolist() == [0, 35, 80]
    assert caches.pages(0).block_bytes == 80 + 48


@pytest.mark.parametrize("widest", [0, 1])
def test_layers_that_share_a_tensor_have_one_page_at_the_place_of_the_first(widest: int) -> None:
    storage = torch.zeros(BLOCKS * 128, dtype=torch.int8)
    sizes = (70, 50) if widest == 0 else (50, 70)
    first, second = (storage.as_strided((BLOCKS, size), (128, 1)) for size in sizes)
    other = torch.zeros(BLOCKS, 40, dtype=torch.int8)
    layers = [("first", sizes[0]), ("other", 40), ("second", sizes[1])]
    pages = build({"first": first, "other": other, "second": second}, layers).pages(0)
    assert [region.address for region in pages.regions] == [storage.data_ptr(), other.data_ptr()]
    assert pages.chunk_offsets(0, 1, 1).tolist() == [0, 80]
    assert pages.block_bytes == 80 + 48


def test_a_permuted_dense_page_is_its_bytes_in_memory_order() -> None:
    cache = torch.zeros(BLOCKS, 16, 2, 8, dtype=torch.float16).permute(0, 2, 1, 3)
    fill(cache)
    caches = build({"a": cache}, [("a", 512)])
    in_memory = cache.permute(0, 2, 1, 3)[1].contiguous().view(torch.int8).flatten()
    assert torch.equal(block_bytes(caches, 0, 1), in_memory)


def test_states_in_several_tensors_are_one_page_in_order() -> None:
    storage = torch.zeros(BLOCKS * 300, dtype=torch.int8)
    first = storage.as_strided((BLOCKS, 1, 100), (300, 100, 1))
    second = storage.as_strided((BLOCKS, 1, 150), (300, 150, 1), 100)
    fill(storage)
    caches = build({"s": [first, second]}, [("s", 250)])
    assert torch.equal(block_bytes(caches, 0, 1), storage[300:550])


def test_page_addresses_agree_with_the_views() -> None:
    cache = torch.zeros(BLOCKS, 2, 16, 8, dtype=torch.bfloat16)
    pages = build({"a": cache}, [("a", 512)]).pages(0)
    assert pages.regions[0].address == cache.data_ptr()
    assert (pages.num_blocks, pages.block_bytes, pages.regions[0].stride_bytes) == (BLOCKS, 512, 512)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (3, "a tensor or a list of them, got int"),
        ("abc", "a tensor or a list of them, got str"),
        ([], "a tensor or a list of them, got an empty list"),
        ({"a": 1}, "a tensor or a list of them, got dict"),
        ([torch.zeros(BLOCKS, 8), None], "tensors, got NoneType"),
        (torch.zeros(BLOCKS, 8).to_sparse(), "a strided tensor, got a torch.sparse_coo one"),
        ([torch.eye(BLOCKS).to_sparse_csr()], "a strided tensor, got a torch.sparse_csr one"),
        (torch.nested.nested_tensor([torch.zeros(8)] * BLOCKS), "a strided tensor, got a nested one"),
    ],
)
def test_a_value_that_is_no_plain_tensor_is_refused(cache: Any, words: str) -> None:
    for page_bytes in (0, 32):
        with pytest.raises(LayoutError, match=f"a: expected .*{words}"):
            build({"a": cache}, [("a", page_bytes)])


def test_a_group_without_layers_has_no_pages() -> None:
    caches = build({"a": torch.zeros(BLOCKS, 8)}, [], [("a", 32)])
    assert caches.group_data_refs[0] == ()
    with pytest.raises(LayoutError, match="group 0 has no layers"):
        caches.pages(0)
    assert caches.pages(1).block_bytes == 32


def loads_torch(program: str) -> str:
    """Runs a program in a fresh interpreter; returns "True" if it has loaded torch."""
    program = f"import sys; {program}; print('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_only_importing_the_views_loads_torch() -> None:
    assert loads_torch("import hybridkv.canonical as c; dir(c); c.GroupPages; hasattr(c, 'CanonicalKVCach')") == "False"
    for name in VIEWS:
        assert loads_torch(f"from hybridkv.canonical import {name}") == "True"


def test_the_views_are_names_of_the_library_itself() -> None:
    assert VIEWS <= set(canonical.__all__) <= set(dir(canonical))
    for name in VIEWS:
        assert getattr(canonical, name) is getattr(torch_view, name)
    with pytest.raises(AttributeError, match=r"hybridkv\.canonical.*Nothing"):
        canonical.Nothing  # noqa: B018


@pytest.mark.parametrize(
    ("cache", "page_bytes", "words"),
    [
        (None, 512, "registered no KV cache"),
        (torch.zeros(BLOCKS, 2, 16, 8, dtype=torch.int8), 512, "expected pages of 512 bytes, got 256"),
        (torch.zeros(BLOCKS + 1, 2, 16, 8, dtype=torch.int8), 256, "blocks or a multiple"),
        (torch.zeros(BLOCKS, 2, 16, 16, dtype=torch.int8)[..., :8], 256, "not contiguous"),
    ],
)
def test_a_tensor_that_cannot_be_addressed_by_block_is_refused(
    cache: torch.Tensor | None, page_bytes: int, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        build({} if cache is None else {"a": cache}, [("a", page_bytes)])
