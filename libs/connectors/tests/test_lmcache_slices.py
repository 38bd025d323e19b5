"""Slices of requests into pages of a server: whole objects of whole chunks, as the planner would store and load
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm.lmcache.load_tracker import load_copies
from hybridkv.connectors.vllm.lmcache.messages import PageCopy
from hybridkv.connectors.vllm.lmcache.session_spec import plain_spec
from hybridkv.connectors.vllm.lmcache.store_tracker import attention_tables, state_copies, store_copies
from hybridkv.lmcache.geometry import Geometry, PageGroup, storable
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, State, TokenSpan, plan_load, plan_store

CHUNK = 64
NUM_CHUNKS = 5
FULL, WINDOW, RECURRENT, SCRATCH = GroupKind.FULL, GroupKind.WINDOW, GroupKind.RECURRENT, GroupKind.SCRATCH


@st.composite
def groups(draw: st.DrawFn) -> GroupSpec:
    block = draw(st.sampled_from([4, 8, 16, 64]))
    kind = draw(st.sampled_from([FULL, FULL, WINDOW, WINDOW, RECURRENT, GroupKind.CHUNKED, SCRATCH]))
    window = draw(st.integers(2, 200)) if kind is WINDOW else None
    align = draw(st.sampled_from([16, 64, 100, 200])) if kind is GroupKind.CHUNKED else None
    return GroupSpec(kind, block, window_tokens=window, align_tokens=align)


specs = (
    st.lists(groups(), min_size=1, max_size=5)
    .filter(lambda made: any(group.kind is not SCRATCH for group in made))
    .map(lambda made: CacheSpec(tuple(made), CHUNK))
)


def geometry_of(spec: CacheSpec) -> Geometry:
    return Geometry(tuple(PageGroup(plain_spec(spec.groups[index]), 8) for index in spec.stored_groups), CHUNK)


def block_tables(spec: CacheSpec, num_tokens: int) -> list[list[int]]:
    numbers = itertools.count(1)
    return [[next(numbers) for _ in range(-(-num_tokens // group.block_tokens))] for group in spec.groups]


def places(spec: CacheSpec, copies: Sequence[PageCopy]) -> dict[tuple[int, int], int]:
    """Block of each group and position in its table."""
    found: dict[tuple[int, int], int] = {}
    for copy in copies:
        begins = copy.chunk * CHUNK // spec.groups[copy.group_index].block_tokens + copy.first_block
        for at, block_id in enumerate(copy.block_ids, begins):
            assert (copy.group_index, at) not in found
            found[copy.group_index, at] = block_id
    return found


@given(specs, st.data())
def test_stored_copies_equal_the_planner_for_whole_objects(spec: CacheSpec, data: st.DataObject) -> None:
    geometry, tables = geometry_of(spec), block_tables(spec, NUM_CHUNKS * CHUNK)
    for index in spec.stored_groups:
        for at in data.draw(st.sets(st.integers(0, len(tables[index]) - 1), max_size=3)):
            tables[index][at] = 0
    stored_tokens = data.draw(st.integers(0, NUM_CHUNKS)) * CHUNK
    final = data.draw(st.integers(stored_tokens, NUM_CHUNKS * CHUNK))
    separate = data.draw(st.booleans())
    blocks = attention_tables(spec, tables, final)
    span = storable(geometry, blocks, stored_tokens, final)
    assert span == TokenSpan(stored_tokens, max(stored_tokens, final // CHUNK * CHUNK))
    copies = store_copies(geometry, spec.stored_groups, blocks, span, separate=separate)
    planned = plan_store(spec, stored_tokens, final, tables, (), lambda _, ends: ends)
    by_planner = {
        (part.group_index, part.end_token // CHUNK - 1): part.block_ids for part in planned.transfers(spec.chunk_tokens)
    }
    together = geometry.objects(separate=separate)
    for chunk in range(stored_tokens // CHUNK, span.end // CHUNK):
        for each in together:
            members = [spec.stored_groups[place] for place in each]
            mine = {copy.group_index: copy.block_ids for copy in copies if copy.chunk == chunk}
            is_whole = all(0 not in kept(geometry, place, blocks[place], chunk) for place in each)
            assert [member in mine for member in members] == [is_whole] * len(members)
            for member in members if is_whole else ():
                # A resume at the chunk's end or later reads the kept blocks that the planner would store.
                read = by_planner.get((member, chunk), ())
                assert mine[member][len(mine[member]) - len(read) :] == read


def kept(geometry: Geometry, place: int, table: Sequence[int], chunk: int) -> Sequence[int]:
    end = (chunk + 1) * geometry.blocks_per_chunk[place]
    return table[end - geometry.kept_per_chunk[place] : end]


@given(specs, st.integers(1, NUM_CHUNKS), st.integers(0, NUM_CHUNKS * CHUNK - 1))
def test_loaded_copies_equal_the_planner_and_are_pages_of_the_server(
    spec: CacheSpec, num_chunks: int, computed: int
) -> None:
    geometry, tables, boundary = geometry_of(spec), block_tables(spec, NUM_CHUNKS * CHUNK), num_chunks * CHUNK
    largest = max(group.block_tokens for group in spec.groups)
    computed = min(computed, boundary - 1) // largest * largest
    needed = plan_load(spec, boundary, computed, _as_allocated(spec, tables, boundary, computed))
    copies = load_copies(spec, needed)
    found = places(spec, copies)
    assert all(tables[index][at] == block_id for (index, at), block_id in found.items())
    assert sorted(found.values()) == sorted(block_id for part in needed for block_id in part.block_ids)
    for copy in copies:
        place = spec.stored_groups.index(copy.group_index)
        blocks, kept = geometry.blocks_per_chunk[place], geometry.kept_per_chunk[place]
        assert computed // CHUNK <= copy.chunk < num_chunks
        assert blocks - kept <= copy.first_block and copy.first_block + len(copy.block_ids) <= blocks


def _as_allocated(spec: CacheSpec, tables: list[list[int]], boundary: int, computed: int) -> list[list[int]]:
    """Block table as the engine allocates it: null blocks before a window."""
    given = [list(table) for table in tables]
    for index in spec.stored_groups:
        group, table = spec.groups[index], given[index]
        window = {WINDOW: (group.window_tokens or 1) - 1, RECURRENT: 1}.get(group.kind)
        start = 0 if window is None else max(0, boundary - window)
        if group.kind is GroupKind.CHUNKED:
            assert group.align_tokens is not None
            start = boundary // group.align_tokens * group.align_tokens
        for at in range(computed // group.block_tokens, min(len(table), start // group.block_tokens)):
            table[at] = 0
    return given


STATES = CacheSpec((GroupSpec(FULL, 16), GroupSpec(RECURRENT, 64), GroupSpec(RECURRENT, 64)), CHUNK)


def test_states_are_stored_if_each_state_group_has_one_at_the_chunk_end() -> None:
    both = [State(1, 7, 128), State(2, 8, 128)]
    assert state_copies(STATES, both, 128) == [PageCopy(1, 1, 0, (7,)), PageCopy(2, 1, 0, (8,))]
    assert state_copies(STATES, both, 127) == []
    assert state_copies(STATES, both[:1], 128) == []
    assert state_copies(STATES, [State(1, 7, 100), State(2, 8, 100)], 128) == []
    assert state_copies(STATES, [State(1, 0, 128), State(2, 8, 128)], 128) == []


def test_a_group_without_blocks_stores_nothing() -> None:
    geometry = geometry_of(STATES)
    blocks = attention_tables(STATES, [[], [], []], 0)
    assert storable(geometry, blocks, 0, 300) == TokenSpan(0, 0)
    assert store_copies(geometry, STATES.stored_groups, blocks, TokenSpan(0, 0), separate=True) == []


@pytest.mark.parametrize("separate", [True, False])
def test_a_running_state_is_never_stored_from_its_table(separate: bool) -> None:
    geometry = geometry_of(STATES)
    blocks = attention_tables(STATES, [[1, 2, 3, 4], [5], [6]], 64)
    span = storable(geometry, blocks, 0, 64)
    copies = store_copies(geometry, STATES.stored_groups, blocks, span, separate=separate)
    assert copies == ([PageCopy(0, 0, 0, (1, 2, 3, 4))] if separate else [])
