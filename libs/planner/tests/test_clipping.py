import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import groups

from hybridkv.planner import GroupKind, GroupSpec, clip_blocks, read_blocks, resume_start

FULL = GroupSpec(GroupKind.FULL, 16)
WINDOW = GroupSpec(GroupKind.WINDOW, 16, window_tokens=24)
STATE = GroupSpec(GroupKind.RECURRENT, 16)
SCRATCH = GroupSpec(GroupKind.SCRATCH, 16)


def test_every_group_is_clipped_to_the_blocks_its_kind_reads() -> None:
    ids = [1, 2, 3, 4]
    clipped = clip_blocks((FULL, WINDOW, STATE, SCRATCH), [ids, ids, ids, ids])
    assert clipped.block_ids == ((1, 2, 3, 4), (3, 4), (4,), ())
    assert clipped.first_blocks == (0, 2, 3, 0)


def test_a_window_that_ends_inside_a_block_may_read_one_block_more() -> None:
    assert clip_blocks((WINDOW,), [[1, 2, 3, 4]], 64).block_ids == ((3, 4),)
    assert clip_blocks((WINDOW,), [[1, 2, 3, 4]], 50).block_ids == ((2, 3, 4),)


def test_an_empty_prompt_moves_nothing() -> None:
    assert clip_blocks((FULL, WINDOW), [[], []]).block_ids == ((), ())
    assert clip_blocks((FULL, WINDOW), [[1], [2]], 0).block_ids == ((), ())


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("block_ids must have one list", ((FULL, FULL), [[1]])),
        ("num_tokens", ((FULL,), [[1]], -1)),
        (r"block_ids\[0\]", ((FULL,), [[1]], 17)),
    ],
)
def test_blocks_that_do_not_fit_are_refused(field: str, arguments: tuple) -> None:
    with pytest.raises(ValueError, match=field):
        clip_blocks(*arguments)


@given(groups(), st.integers(0, 200))
def test_clipping_keeps_exactly_the_blocks_that_are_read(group: GroupSpec, num_tokens: int) -> None:
    table = list(range(100, 100 + -(-num_tokens // group.block_tokens)))
    read = {100 + token // group.block_tokens for token in range(resume_start(group, num_tokens), num_tokens)}
    clipped = clip_blocks((group,), [table], num_tokens)
    assert set(clipped.block_ids[0]) == read and len(clipped.block_ids[0]) == len(read)
    assert table[clipped.first_blocks[0] :][: len(read)] == list(clipped.block_ids[0])


@given(st.integers(1, 100), st.integers(1, 20), st.integers(0, 30))
def test_a_window_that_ends_with_a_block_never_reads_more_than_its_blocks(window: int, block: int, blocks: int) -> None:
    group = GroupSpec(GroupKind.WINDOW, block, window_tokens=window)
    assert len(read_blocks(group, blocks * block)) <= -(-window // block)
