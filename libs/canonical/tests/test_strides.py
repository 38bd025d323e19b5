import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.canonical import LayerLayout, LayoutError, PageRegion, Strides, page_regions
from hybridkv.canonical.strides import MAX_REGIONS, TokenRange, first_overlap, merge_adjacent, token_regions


@st.composite
def dense_tensors(draw: st.DrawFn) -> tuple[Strides, int]:
    """A tensor with its dimensions in any order, perhaps with a gap after each step of one of them; and its
    number of blocks."""
    num_blocks = draw(st.integers(1, 4))
    rest = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    shape = [num_blocks * draw(st.integers(1, 3)), *rest]
    strides = [0] * len(shape)
    step = 1
    gap_at = draw(st.integers(0, len(shape)))
    for place, dim in enumerate(draw(st.permutations(range(len(shape))))):
        step += draw(st.integers(0, 5)) if place == gap_at else 0
        strides[dim] = step
        step *= shape[dim]
    return Strides(1000, draw(st.sampled_from([1, 2, 4])), tuple(shape), tuple(strides)), num_blocks


def tensor_bytes(tensor: Strides, num_blocks: int) -> list[list[int]]:
    """The addresses of every byte of every block, found by visiting each element."""
    blocks: list[list[int]] = [[] for _ in range(num_blocks)]
    for index in itertools.product(*map(range, tensor.shape)):
        address = tensor.address + sum(i * s for i, s in zip(index, tensor.strides, strict=True)) * tensor.item_bytes
        block = index[0] // (tensor.shape[0] // num_blocks)
        blocks[block] += range(address, address + tensor.item_bytes)
    return blocks


def region_bytes(region: PageRegion, block: int) -> range:
    start = region.address + block * region.stride_bytes
    return range(start, start + region.page_bytes)


@given(dense_tensors())
def test_the_regions_of_a_block_cover_each_of_its_bytes_once(case: tuple[Strides, int]) -> None:
    tensor, num_blocks = case
    layer = LayerLayout("a", 0, interleaved=True)
    regions = page_regions(layer, tensor, num_blocks)
    for block, expected in enumerate(tensor_bytes(tensor, num_blocks)):
        found = [address for region in regions for address in region_bytes(region, block)]
        assert len(found) == len(set(found))
        assert sorted(found) == sorted(expected)


@given(dense_tensors())
def test_only_interleaved_layers_may_have_gaps_in_a_block(case: tuple[Strides, int]) -> None:
    tensor, num_blocks = case
    try:
        regions = page_regions(LayerLayout("a", 0), tensor, num_blocks)
    except LayoutError:
        return
    assert regions == page_regions(LayerLayout("a", 0, interleaved=True), tensor, num_blocks)
    addresses = [region.address for region in regions]
    assert num_blocks == 1 or all(abs(a - b) >= regions[0].stride_bytes for a, b in itertools.pairwise(addresses))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (Strides(0, 1, (6,), (1,)), "expected 6 blocks"),
        (Strides(0, 1, (0, 4), (4, 1)), "expected 6 blocks"),
        (Strides(0, 1, (2, 6, 8), (48, 8, 1)), "expected 6 blocks"),
        (Strides(0, 1, (6, 4), (0, 1)), "share bytes"),
        (Strides(0, 1, (6, 4), (2, 1)), "share bytes"),
        (Strides(0, 1, (6, 2, 4), (8, 0, 1)), "same bytes twice"),
        (Strides(0, 1, (6, 2, 4), (16, 2, 1)), "same bytes twice"),
        (Strides(0, 1, (6, MAX_REGIONS + 1, 2), (3 * (MAX_REGIONS + 1), 3, 1)), "a page consists of more than"),
    ],
)
def test_a_tensor_without_separate_pages_is_refused(tensor: Strides, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        page_regions(LayerLayout("a", 4, interleaved=True), tensor, 6)


def test_the_stride_of_a_single_block_is_ignored() -> None:
    [region] = page_regions(LayerLayout("a", 8), Strides(0, 1, (1, 2, 4), (1, 4, 1)), 1)
    assert (region.address, region.page_bytes) == (0, 8)


REGIONS = st.builds(
    lambda address, stride, page: PageRegion(address, stride, min(page, stride)),
    st.integers(0, 60),
    st.integers(1, 20),
    st.integers(1, 20),
)


@given(st.lists(REGIONS, max_size=4), st.integers(1, 5))
def test_an_overlap_is_found_exactly_where_there_is_one(regions: list[PageRegion], num_blocks: int) -> None:
    held = [{byte for block in range(num_blocks) for byte in region_bytes(region, block)} for region in regions]
    shared = {(i, j) for i, j in itertools.combinations(range(len(regions)), 2) if held[i] & held[j]}
    found = first_overlap(regions, num_blocks)
    assert found in shared if shared else found is None


@given(st.lists(REGIONS, max_size=6))
def test_merging_keeps_the_bytes_of_a_block_and_their_order(regions: list[PageRegion]) -> None:
    def in_order(pages: list[PageRegion]) -> list[int]:
        return [byte for page in pages for byte in region_bytes(page, 0)]

    merged = merge_adjacent(regions)
    assert in_order(merged) == in_order(regions)
    assert all(region.page_bytes <= region.stride_bytes for region in merged)
    assert len(merged) <= len(regions)


def test_states_that_are_adjacent_in_every_block_are_one_region() -> None:
    pages = [PageRegion(0, 300, 100), PageRegion(100, 300, 150), PageRegion(260, 300, 40)]
    assert merge_adjacent(pages) == [PageRegion(0, 300, 250), PageRegion(260, 300, 40)]


KERNEL_BLOCKS = MAX_REGIONS + 4
"""Per block; there are two blocks. A kernel block has two tokens, each with two heads of three bytes."""
BLOCK_TOKENS, BLOCK_BYTES = 2 * KERNEL_BLOCKS, 12 * KERNEL_BLOCKS
BY_TOKENS = Strides(1000, 1, (2 * KERNEL_BLOCKS, 2, 2, 3), (12, 3, 6, 1))
BY_HEADS = Strides(1000, 1, (2 * KERNEL_BLOCKS, 2, 2, 3), (12, 6, 3, 1))
SPLIT = LayerLayout("a", BLOCK_BYTES, token_dim=2)


@pytest.mark.parametrize(("start", "end"), [(0, 2), (1, BLOCK_TOKENS), (3, 8), (5, BLOCK_TOKENS - 3)])
def test_tokens_of_adjacent_kernel_blocks_are_one_region(start: int, end: int) -> None:
    [region] = token_regions(SPLIT, BY_TOKENS, 2, TokenRange(start, end, BLOCK_TOKENS))
    assert region == PageRegion(1000 + 6 * start, BLOCK_BYTES, 6 * (end - start))
    assert page_regions(SPLIT, BY_TOKENS, 2) == [PageRegion(1000, BLOCK_BYTES, BLOCK_BYTES)]


def test_the_number_of_kernel_blocks_is_not_limited() -> None:
    """Heads are inside each kernel block: the runs of one are not adjacent to those of the next."""
    pages = page_regions(SPLIT, BY_HEADS, 2)
    assert [page.address - 1000 for page in pages] == [
        12 * k + 6 * head for head in (0, 1) for k in range(KERNEL_BLOCKS)
    ]
    assert {page.page_bytes for page in pages} == {6}
    some = token_regions(SPLIT, BY_HEADS, 2, TokenRange(1, BLOCK_TOKENS, BLOCK_TOKENS))
    assert some == [
        PageRegion(page.address + 3, BLOCK_BYTES, 3) if number % KERNEL_BLOCKS == 0 else page
        for number, page in enumerate(pages)
    ]


@pytest.mark.parametrize(("start", "end"), [(0, 2), (0, 16)])
def test_too_many_regions_in_a_kernel_block_are_refused_for_any_tokens(start: int, end: int) -> None:
    """A caller that may split tokens at the start may split them always."""
    heads = MAX_REGIONS // 8 + 1
    strides = Strides(0, 1, (4, heads, 8, 1), (16 * heads, 16, 2, 1))
    with pytest.raises(LayoutError, match="tokens consist of more than"):
        token_regions(LayerLayout("a", 16 * heads, token_dim=2), strides, 2, TokenRange(start, end, 16))
