from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.canonical import PAGE_ALIGN_BYTES, GroupPages, PageRegion, aligned_page_bytes

ONE = [[PageRegion(0, 10, 10)]]
TWO_LAYERS = [[PageRegion(1000, 100, 60)], [PageRegion(5000, 100, 40)]]


def test_all_pages_of_a_block_come_before_those_of_the_next() -> None:
    pages = GroupPages(TWO_LAYERS, 8)
    addresses, sizes = pages.addresses([2, 0])
    assert addresses.tolist() == [1200, 5200, 1000, 5000]
    assert sizes.tolist() == [60, 40, 60, 40]


def test_every_page_begins_at_a_multiple_of_16_with_zeros_between() -> None:
    pages = GroupPages(TWO_LAYERS, 8)
    assert pages.block_bytes == 64 + 48
    assert pages.chunk_offsets(0, 3, 3).tolist() == [0, 64, 112, 176, 224, 288]


def test_pages_of_whole_words_have_no_padding() -> None:
    pages = GroupPages([[PageRegion(0, 64, 64)], [PageRegion(64, 64, 48)]], 8)
    assert pages.block_bytes == 112
    assert pages.chunk_offsets(0, 3, 3).tolist() == [0, 64, 112, 176, 224, 288]


def test_a_page_in_several_regions_equals_a_page_in_one() -> None:
    """Stored bytes do not depend on whether K and V, or heads, are separate in memory."""
    apart = GroupPages([[PageRegion(1000, 100, 37), PageRegion(3000, 100, 23)], [PageRegion(5000, 100, 40)]], 8)
    assert apart.block_bytes == GroupPages(TWO_LAYERS, 8).block_bytes
    assert apart.chunk_offsets(0, 2, 2).tolist() == [0, 37, 64, 112, 149, 176]


def test_a_part_of_a_chunk_is_one_range_of_it() -> None:
    pages = GroupPages(TWO_LAYERS, 8)
    assert pages.chunk_offsets(1, 2, 3).tolist() == pages.chunk_offsets(0, 3, 3).tolist()[2:]


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=1, max_size=5), st.integers(1, 6), st.data()
)
def test_gaps_of_a_chunk_are_shorter_than_a_word_and_only_after_pages(
    sizes: list[list[int]], stored: int, data: st.DataObject
) -> None:
    layers = [
        [PageRegion(1000 * i + 100 * j, 100, size) for j, size in enumerate(page)] for i, page in enumerate(sizes)
    ]
    pages = GroupPages(layers, 10)
    assert pages.block_bytes == sum(aligned_page_bytes(sum(page)) for page in sizes)
    offsets = pages.chunk_offsets(0, stored, stored)
    _, page_sizes = pages.addresses(range(stored))
    filled = np.zeros(stored * pages.block_bytes, dtype=int)
    for offset, size in zip(offsets, page_sizes, strict=True):
        filled[offset : offset + size] += 1
    assert (filled <= 1).all()
    ends = np.append(offsets[1:], filled.size)
    gaps = (ends - offsets - page_sizes).reshape(stored, -1)
    last_regions = np.cumsum([len(page) for page in sizes]) - 1
    assert (gaps >= 0).all() and (gaps < PAGE_ALIGN_BYTES).all()
    assert not np.delete(gaps, last_regions, axis=1).any(), "regions of one page are adjacent"
    of_layers = offsets.reshape(stored, -1)[:, np.cumsum([0, *map(len, sizes[:-1])])]
    assert not (of_layers % PAGE_ALIGN_BYTES).any()
    first = data.draw(st.integers(0, stored))
    part = pages.chunk_offsets(first, stored - first, stored)
    assert part.tolist() == offsets.tolist()[first * len(pages.regions) :]


@pytest.mark.parametrize(("page_bytes", "taken"), [(1, 16), (15, 16), (16, 16), (17, 32), (32768, 32768)])
def test_a_page_is_rounded_up_to_whole_words(page_bytes: int, taken: int) -> None:
    assert aligned_page_bytes(page_bytes) == taken


@pytest.mark.parametrize("block_ids", [[-1], [8], [0, 9]])
def test_a_block_outside_the_pool_is_refused(block_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="block ids"):
        GroupPages(ONE, 8).addresses(block_ids)


@pytest.mark.parametrize("block_ids", [[1.5], [1.0], [0, 1.5], [True], ["1"], [None], [[0, 1]], 3, [2**64]])
def test_a_block_id_that_is_no_integer_is_refused(block_ids: Any) -> None:
    with pytest.raises(ValueError, match="block ids"):
        GroupPages(ONE, 8).addresses(block_ids)


@pytest.mark.parametrize("block_ids", [(), [], range(0), np.zeros(0, np.int32)])
def test_no_blocks_give_no_pages(block_ids: Any) -> None:
    addresses, sizes = GroupPages(ONE, 8).addresses(block_ids)
    assert (addresses.tolist(), sizes.tolist()) == ([], [])


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint64])
def test_block_ids_may_have_any_integer_type(kind: type) -> None:
    pages = GroupPages([[PageRegion(2**40, 2**32, 10)]], 8)
    assert pages.addresses(np.array([7], dtype=kind))[0].tolist() == [2**40 + 7 * 2**32]


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 4), (3, 1)])
def test_blocks_outside_a_chunk_are_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="chunk"):
        GroupPages(ONE, 8).chunk_offsets(first, count, 3)


@pytest.mark.parametrize("pages", [[], [[]], [*ONE, []], [[PageRegion(0, 10, 11)]], [[PageRegion(0, 10, 0)]]])
def test_pages_that_do_not_fit_are_refused(pages: list[list[PageRegion]]) -> None:
    with pytest.raises(ValueError, match=r"page_bytes|regions"):
        GroupPages(pages, 8)
