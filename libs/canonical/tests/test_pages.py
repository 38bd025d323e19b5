from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.canonical import GroupPages, PageRegion


def test_pages_come_region_by_region() -> None:
    pages = GroupPages([PageRegion(1000, 100, 60), PageRegion(5000, 100, 40)], 8)
    addresses, sizes = pages.addresses([2, 0])
    assert addresses.tolist() == [1200, 1000, 5200, 5000]
    assert sizes.tolist() == [60, 60, 40, 40]
    assert pages.block_bytes == 100


def test_a_part_of_a_chunk_lies_where_the_whole_chunk_put_it() -> None:
    pages = GroupPages([PageRegion(0, 100, 60), PageRegion(1000, 100, 40)], 8)
    assert pages.chunk_offsets(0, 3, 3).tolist() == [0, 60, 120, 180, 220, 260]
    assert pages.chunk_offsets(1, 2, 3).tolist() == [60, 120, 220, 260]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 6), st.data())
def test_the_pages_of_a_chunk_fill_it_without_gap_or_overlap(
    sizes: list[int], stored: int, data: st.DataObject
) -> None:
    pages = GroupPages([PageRegion(i * 10_000, 100, size) for i, size in enumerate(sizes)], 10)
    offsets = pages.chunk_offsets(0, stored, stored)
    _, page_sizes = pages.addresses(range(stored))
    filled = np.zeros(stored * pages.block_bytes, dtype=int)
    for offset, size in zip(offsets, page_sizes, strict=True):
        filled[offset : offset + size] += 1
    assert (filled == 1).all()
    first = data.draw(st.integers(0, stored))
    part = pages.chunk_offsets(first, stored - first, stored)
    assert set(part.tolist()) <= set(offsets.tolist())


@pytest.mark.parametrize("block_ids", [[-1], [8], [0, 9]])
def test_a_block_outside_the_pool_is_refused(block_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="block ids"):
        GroupPages([PageRegion(0, 10, 10)], 8).addresses(block_ids)


@pytest.mark.parametrize("block_ids", [[1.5], [1.0], [0, 1.5], [True], ["1"], [None], [[0, 1]], 3, [2**64]])
def test_a_block_id_that_is_no_integer_is_refused(block_ids: Any) -> None:
    with pytest.raises(ValueError, match="block ids"):
        GroupPages([PageRegion(0, 10, 10)], 8).addresses(block_ids)


@pytest.mark.parametrize("block_ids", [(), [], range(0), np.zeros(0, np.int32)])
def test_no_blocks_have_no_pages(block_ids: Any) -> None:
    addresses, sizes = GroupPages([PageRegion(0, 10, 10)], 8).addresses(block_ids)
    assert (addresses.tolist(), sizes.tolist()) == ([], [])


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint64])
def test_block_ids_come_in_any_kind_of_integer(kind: type) -> None:
    pages = GroupPages([PageRegion(2**40, 2**32, 10)], 8)
    assert pages.addresses(np.array([7], dtype=kind))[0].tolist() == [2**40 + 7 * 2**32]


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 4), (3, 1)])
def test_blocks_outside_a_chunk_are_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="chunk"):
        GroupPages([PageRegion(0, 10, 10)], 8).chunk_offsets(first, count, 3)


@pytest.mark.parametrize("regions", [[], [PageRegion(0, 10, 11)], [PageRegion(0, 10, 0)]])
def test_pages_that_do_not_fit_are_refused(regions: list[PageRegion]) -> None:
    with pytest.raises(ValueError, match=r"page_bytes|regions"):
        GroupPages(regions, 8)
