"""Bytes written through the engine's tensors are read through the views, and the reverse, in every layout."""

from collections.abc import Callable

import pytest
import torch
from torch_layouts import (
    BLOCKS,
    CASES,
    I8,
    Case,
    heads_before_layers,
    padded,
    shared_tensor,
    state_tensors,
    tensor,
)

from hybridkv.canonical import LayerLayout
from hybridkv.canonical.torch_view import CanonicalKVCaches, LayoutError

every_layout = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())


def block_bytes(caches: CanonicalKVCaches, group: int, block: int) -> torch.Tensor:
    return torch.cat(
        [
            caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes].view(torch.uint8)
            for ref in caches.group_data_refs[group]
        ]
    )


def group_blocks(case: Case) -> list[tuple[int, int]]:
    return [(group, block) for group in range(len(case.groups)) for block in range(case.num_blocks)]


@every_layout
def test_the_view_reads_what_the_engine_writes(make: Callable[[], Case]) -> None:
    case = make()
    caches = case.build()
    random = torch.Generator().manual_seed(1)
    for group, block in group_blocks(case):
        for layer in case.groups[group]:
            for part in case.slices(layer, block):
                part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=random))
        written = torch.cat([case.engine_bytes(layer, block) for layer in case.layers(group)])
        assert torch.equal(block_bytes(caches, group, block), written)


@every_layout
def test_the_engine_reads_what_the_view_writes_in_that_block_alone(make: Callable[[], Case]) -> None:
    case = make()
    caches = case.build()
    random = torch.Generator().manual_seed(2)
    for group, block in group_blocks(case):
        before = {other: block_bytes(caches, group, other).clone() for other in range(case.num_blocks)}
        for ref in caches.group_data_refs[group]:
            page = torch.randint(-128, 128, (ref.page_size_bytes,), dtype=I8, generator=random)
            caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes] = page
        read = torch.cat([case.engine_bytes(layer, block) for layer in case.layers(group)])
        assert torch.equal(block_bytes(caches, group, block), read)
        assert not torch.equal(read, before[block])
        for other in set(before) - {block}:
            assert torch.equal(block_bytes(caches, group, other), before[other])


@every_layout
def test_a_group_covers_every_byte_of_its_tensors_once_and_no_other(make: Callable[[], Case]) -> None:
    case = make()
    caches = case.build()
    for group, layers in enumerate(case.groups):
        counts = {
            part.untyped_storage().data_ptr(): torch.zeros(part.untyped_storage().nbytes(), dtype=torch.int32)
            for layer in layers
            for part in case.caches[layer.name]
        }
        expected = {base: count.clone() for base, count in counts.items()}
        for ref in caches.group_data_refs[group]:
            view = caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes]
            counts[view.untyped_storage().data_ptr()].as_strided(view.shape, view.stride(), view.storage_offset()).add_(
                1
            )
        for layer in layers:
            for part in case.caches[layer.name]:
                width = part.element_size()
                expected[part.untyped_storage().data_ptr()].as_strided(
                    (*part.shape, width), (*(step * width for step in part.stride()), 1), part.storage_offset() * width
                ).fill_(1)
        for base, count in counts.items():
            assert torch.equal(count, expected[base])


@every_layout
def test_views_copy_nothing_and_stay_inside_the_storage(make: Callable[[], Case]) -> None:
    case = make()
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for parts in case.caches.values()
        for part in parts
    }
    for cache in case.build().tensors:
        assert cache.tensor.dtype is torch.int8
        assert cache.tensor.shape == (case.num_blocks, cache.page_size_bytes)
        base = cache.tensor.untyped_storage().data_ptr()
        last = cache.tensor.data_ptr() + (case.num_blocks - 1) * cache.tensor.stride(0) + cache.page_size_bytes
        assert base <= cache.tensor.data_ptr() < last <= base + storages[base]


def test_layers_that_share_a_tensor_count_once() -> None:
    caches = shared_tensor().build()
    assert len(caches.tensors) == 1
    assert [ref.page_size_bytes for ref in caches.group_data_refs[0]] == [512]


@pytest.mark.parametrize("narrow_first", [True, False])
def test_the_wider_page_counts_for_layers_in_one_place(narrow_first: bool) -> None:
    wide = padded((1, 1, 900), 1024, I8)
    narrow = wide[..., :700]
    layers = [LayerLayout("n", 700), LayerLayout("w", 900)]
    caches = Case({"w": [wide], "n": [narrow]}, [layers if narrow_first else layers[::-1]]).build()
    assert [ref.page_size_bytes for ref in caches.group_data_refs[0]] == [900]


def test_a_state_in_two_tensors_has_the_region_of_one_packed_tensor() -> None:
    case = state_tensors()
    case.caches["p"] = [case.caches["s"][0].view(I8).as_strided((BLOCKS, 1, 1, 704), (1024, 704, 704, 1))]
    case.groups.append([LayerLayout("p", 704)])
    caches = case.build()
    assert len(caches.tensors) == 1
    assert caches.group_data_refs[0] == caches.group_data_refs[1]


def test_kernel_blocks_and_whole_blocks_have_the_same_pages() -> None:
    whole = tensor((BLOCKS, 16, 72))
    split = whole.view(BLOCKS * 4, 4, 72)
    case = Case({"w": [whole], "s": [split]}, [[LayerLayout("w", 2304)], [LayerLayout("s", 2304)]])
    assert len(case.build().tensors) == 1


def refusals() -> dict[str, tuple[Case, str]]:
    storage = torch.zeros(BLOCKS * 1024, dtype=I8)
    low = storage.as_strided((BLOCKS, 1, 600), (1024, 600, 1))
    high = storage.as_strided((BLOCKS, 1, 600), (1024, 600, 1), 424)
    dense = storage.view(BLOCKS * 8, 1, 128)[:BLOCKS]
    layers = [LayerLayout("a", 600), LayerLayout("b", 600)]
    short = tensor((BLOCKS, 16, 72))
    short.untyped_storage().resize_(short.untyped_storage().nbytes() - 2)
    gaps = heads_before_layers()
    gaps.groups = [[layer._replace(interleaved=False) for layer in gaps.groups[0]]]
    return {
        "layers that overlap": (Case({"a": [low], "b": [high]}, [layers]), "a and b: a block of one group"),
        "layers of other strides that overlap": (
            Case({"a": [low], "b": [dense]}, [[layers[0], LayerLayout("b", 128)]]),
            "a and b: a block of one group",
        ),
        "tensors of a layer that overlap": (Case({"a": [low, high]}, [[LayerLayout("a", 1200)]]), "same bytes twice"),
        "a tensor given twice": (Case({"a": [low, low]}, [[LayerLayout("a", 1200)]]), "same bytes twice"),
        "a storage that is too short": (Case({"a": [short]}, [[LayerLayout("a", 2304)]]), "exceed the storage"),
        "undeclared gaps": (gaps, "not contiguous"),
        "no blocks": (Case({"a": [low]}, [layers[:1]], 0), "num_blocks"),
    }


@pytest.mark.parametrize("name", refusals())
def test_bytes_that_a_group_does_not_own_are_refused(name: str) -> None:
    case, words = refusals()[name]
    with pytest.raises(LayoutError, match=words):
        case.build()
