import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.planner import common_block_count, slice_group_blocks

sizes = st.sampled_from([1, 3, 4, 8, 16, 64, 256, 544])


def test_a_prompt_on_a_grid_of_four_tokens_is_cut_into_blocks_of_every_group() -> None:
    blocks = list(range(4096))
    held = [len(blocks[slice_group_blocks(0, 4096 // 4, 4, group)]) for group in (256, 64, 64, 4, 8)]
    assert held == [16, 64, 64, 1024, 512]


def test_larger_blocks_divide_and_smaller_ones_multiply() -> None:
    assert slice_group_blocks(64, 128, 4, 256) == slice(1, 2)
    assert slice_group_blocks(1, 3, 64, 4) == slice(16, 48)


def test_a_block_belongs_to_the_slice_in_which_it_ends() -> None:
    assert slice_group_blocks(0, 3, 4, 16) == slice(0, 0)
    assert slice_group_blocks(3, 4, 4, 16) == slice(0, 1)


@given(sizes, sizes, st.lists(st.integers(0, 150), min_size=2, max_size=6))
def test_slices_that_follow_each_other_take_every_block_once(base: int, group: int, cuts: list[int]) -> None:
    cuts.sort()
    taken = [
        block
        for start, end in itertools.pairwise(cuts)
        for block in range(160_000)[slice_group_blocks(start, end, base, group)]
    ]
    assert taken == [b for b in range(160_000 // group) if cuts[0] * base < (b + 1) * group <= cuts[-1] * base]


def test_a_group_without_blocks_makes_the_common_count_zero() -> None:
    assert common_block_count({0: 16, 1: 64}, {0: 256, 1: 64}, 4) == 1024
    assert common_block_count({0: 16}, {0: 256, 1: 64}, 4) == 0
    assert common_block_count({}, {}, 4) == 0


def test_the_common_count_is_that_of_the_shortest_group_rounded_down() -> None:
    assert common_block_count({0: 16, 1: 63, 2: 1023, 9: 1}, {0: 256, 1: 64, 2: 4}, 16) == 4032 // 16
    assert common_block_count({0: 3}, {0: 5}, 4) == 3


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("base_block_tokens", lambda: slice_group_blocks(0, 1, 0, 4)),
        ("group_block_tokens", lambda: slice_group_blocks(0, 1, 4, -4)),
        ("start", lambda: slice_group_blocks(2, 1, 4, 4)),
        ("base_block_tokens", lambda: common_block_count({}, {0: 4}, 0)),
        (r"block_tokens\[0\]", lambda: common_block_count({0: 1}, {0: 0}, 4)),
        (r"lengths\[0\]", lambda: common_block_count({0: -1}, {0: 4}, 4)),
    ],
)
def test_bad_numbers_are_refused_by_name(field: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=field):
        call()
