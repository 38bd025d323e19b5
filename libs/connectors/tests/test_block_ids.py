"""Lazy tables of block IDs equal the lists that they replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm.common.blocks.blocks import BlockIds, lazy_resolver

NULL = 0


@dataclass
class Block:
    block_id: int


class Manager:
    """Both ways in which vLLM's manager returns the blocks of a request."""

    def __init__(self, tables: Sequence[list[Block]]) -> None:
        self.blocks = tuple(tables)
        self.num_read = 0

    def get_blocks(self, request_id: str) -> Manager:
        return self

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        self.num_read += 1
        return tuple([block.block_id for block in table] for table in self.blocks)


def table_of(ids: Sequence[int]) -> tuple[list[int], BlockIds]:
    """One table as a list and as BlockIds. All null entries are one block, as in the engine's pool."""
    null = Block(NULL)
    return list(ids), BlockIds(cast(Any, [Block(each) if each else null for each in ids]))


IDS = st.one_of(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 12).map(lambda size: [NULL] * size))


@given(IDS, st.integers(-14, 14), st.integers(-14, 14), st.sampled_from([1, -1]), st.integers(0, 4))
def test_a_lazy_table_equals_the_list_of_its_ids(ids: list[int], a: int, b: int, step: int, sought: int) -> None:
    expected, table = table_of(ids)
    for read, unread in ((expected, table), (expected[a:b], table[a:b]), (expected[::step], table[::step])):
        assert list(unread) == read
        assert len(unread) == len(read)
        assert bool(unread) == bool(read)
        assert tuple(unread) == tuple(read)
        assert (sought in unread) == (sought in read)
        assert unread.count(sought) == read.count(sought)
        assert [unread[place] for place in range(-len(read), len(read))] == [*read, *read]
        if sought in read:
            assert unread.index(sought) == read.index(sought)
        else:
            with pytest.raises(ValueError, match="is not in the table"):
                unread.index(sought)


def test_an_index_beyond_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        BlockIds([])[0]


def test_a_lazy_table_shows_later_changes_of_its_blocks() -> None:
    blocks = [Block(5), Block(6)]
    table = BlockIds(cast(Any, blocks))
    blocks[0] = Block(NULL)
    assert list(table) == [NULL, 6]


def test_a_table_is_not_read_if_the_engine_gives_its_blocks() -> None:
    manager = Manager([[Block(5)], [Block(NULL), Block(6)]])
    tables = lazy_resolver(manager.get_block_ids)("a")
    assert [list(table) for table in tables] == [[5], [NULL, 6]]
    assert manager.num_read == 0


def test_a_table_is_read_if_the_engine_gives_only_ids() -> None:
    assert lazy_resolver(lambda request_id: [[5]])("a") == [[5]]
