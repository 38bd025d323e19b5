"""Announced blocks: a subscriber gets each block once, and loses none that is still held."""

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


def test_a_block_held_twice_is_announced_once_and_removed_last() -> None:
    announced = AnnouncedBlocks()
    assert announced.count_and_filter([stored([1, 2]), stored([1, 2])]) == [stored([1, 2])]
    assert announced.count_and_filter([removed([1, 2])]) == []
    assert announced.count_and_filter([removed([1, 2])]) == [removed([1, 2])]
    assert len(announced) == 0


def test_a_chunk_with_an_announced_beginning_announces_its_new_blocks() -> None:
    announced = AnnouncedBlocks()
    announced.count_and_filter([stored([1, 2, 3])])
    (event_sent,) = announced.count_and_filter([stored([1, 4, 5])])
    assert event_sent == stored([4, 5], parent=1)
    assert announced.count_and_filter([removed([1, 2, 3])]) == [removed([2, 3])]
    assert announced.count_and_filter([removed([1, 4, 5])]) == [removed([1, 4, 5])]


def test_a_block_in_another_medium_or_group_is_announced_too() -> None:
    announced = AnnouncedBlocks()
    events = [stored([1]), stored([1], medium="STORAGE"), stored([1], group=1)]
    assert announced.count_and_filter(events) == events
    assert announced.count_and_filter([removed([1], medium="STORAGE")]) == [removed([1], medium="STORAGE")]


def test_a_block_removed_and_stored_in_one_step_is_announced_again() -> None:
    announced = AnnouncedBlocks()
    announced.count_and_filter([stored([1])])
    announced.count_and_filter([stored([1])])
    both = [removed([1]), stored([1])] * 2
    assert announced.count_and_filter(both) == [removed([1]), stored([1])]
    assert announced.count_and_filter([removed([1])]) == []
    assert announced.count_and_filter([removed([1])]) == [removed([1])]


def test_events_without_tokens_pass_unchanged() -> None:
    announced = AnnouncedBlocks()
    placeholder = BlockStored([1, 2], None, [], 0, None, "CPU", None, group_idx=0)
    announced.count_and_filter([stored([1])])
    assert announced.count_and_filter([placeholder, AllBlocksCleared()]) == [placeholder, AllBlocksCleared()]
    assert announced.count_and_filter([removed([7])]) == [removed([7])]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 3)), max_size=30))
def test_announcements_equal_the_set_of_held_blocks(changes: list[tuple[int, int, int]]) -> None:
    """Three holders each take and return runs of blocks."""
    announced, known = AnnouncedBlocks(), set[int]()
    holders: list[set[tuple[int, ...]]] = [set(), set(), set()]
    for holder, first, length in changes:
        run = tuple(range(first, first + length + 1))
        events: list[Any] = [removed(list(run))] if run in holders[holder] else [stored(list(run))]
        holders[holder] ^= {run}
        for event in announced.count_and_filter(events):
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == SIZE * len(event.block_hashes)
                assert known.isdisjoint(event.block_hashes)
                known |= set(event.block_hashes)
            else:
                known -= set(event.block_hashes)
        held = Counter(block for of_holder in holders for run in of_holder for block in run)
        assert known == set(held)
