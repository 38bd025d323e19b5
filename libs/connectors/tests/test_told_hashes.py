"""A subscriber that keeps a set of blocks is told of each once, and loses none that somebody still holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from hybridkv.connectors.vllm.common.events import AnnouncedBlocks

SIZE = 2


def stored(hashes: list[int], medium: str = "CPU", group: int = 0, parent: int | None = None) -> BlockStored:
    tokens = [token for block in hashes for token in (block, -block)]
    keys: list[Any] = [(block,) for block in hashes]
    return BlockStored(hashes, parent, tokens, SIZE, None, medium, None, extra_keys=keys, group_idx=group)


def removed(hashes: list[int], medium: str = "CPU", group: int = 0) -> BlockRemoved:
    return BlockRemoved(hashes, medium, group_idx=group)


def test_what_two_hold_is_said_once_and_taken_back_by_the_last() -> None:
    told = AnnouncedBlocks()
    assert told.filter_new([stored([1, 2]), stored([1, 2])]) == [stored([1, 2])]
    assert told.filter_new([removed([1, 2])]) == []
    assert told.filter_new([removed([1, 2])]) == [removed([1, 2])]
    assert len(told) == 0


def test_of_two_chunks_that_begin_alike_the_second_says_what_is_new() -> None:
    told = AnnouncedBlocks()
    told.filter_new([stored([1, 2, 3])])
    (said,) = told.filter_new([stored([1, 4, 5])])
    assert said == stored([4, 5], parent=1)
    assert told.filter_new([removed([1, 2, 3])]) == [removed([2, 3])]
    assert told.filter_new([removed([1, 4, 5])]) == [removed([1, 4, 5])]


def test_the_same_block_elsewhere_is_another() -> None:
    told = AnnouncedBlocks()
    events = [stored([1]), stored([1], medium="STORAGE"), stored([1], group=1)]
    assert told.filter_new(events) == events
    assert told.filter_new([removed([1], medium="STORAGE")]) == [removed([1], medium="STORAGE")]


def test_what_is_taken_back_and_given_in_one_step_is_said_again() -> None:
    told = AnnouncedBlocks()
    told.filter_new([stored([1])])
    told.filter_new([stored([1])])
    both = [removed([1]), stored([1])] * 2
    assert told.filter_new(both) == [removed([1]), stored([1])]
    assert told.filter_new([removed([1])]) == []
    assert told.filter_new([removed([1])]) == [removed([1])]


def test_events_that_say_nothing_of_tokens_pass_whole() -> None:
    told = AnnouncedBlocks()
    placeholder = BlockStored([1, 2], None, [], 0, None, "CPU", None, group_idx=0)
    told.filter_new([stored([1])])
    assert told.filter_new([placeholder, AllBlocksCleared()]) == [placeholder, AllBlocksCleared()]
    assert told.filter_new([removed([7])]) == [removed([7])]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 3)), max_size=30))
def test_a_set_follows_what_anybody_holds(changes: list[tuple[int, int, int]]) -> None:
    """Three holders each take and give back runs of blocks."""
    told, heard = AnnouncedBlocks(), set[int]()
    holders: list[set[tuple[int, ...]]] = [set(), set(), set()]
    for holder, first, length in changes:
        run = tuple(range(first, first + length + 1))
        events: list[Any] = [removed(list(run))] if run in holders[holder] else [stored(list(run))]
        holders[holder] ^= {run}
        for event in told.filter_new(events):
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == SIZE * len(event.block_hashes)
                assert heard.isdisjoint(event.block_hashes)
                heard |= set(event.block_hashes)
            else:
                heard -= set(event.block_hashes)
        held = Counter(block for of_holder in holders for run in of_holder for block in run)
        assert heard == set(held)
