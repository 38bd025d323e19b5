from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, any_caches, caches

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    PlanError,
    State,
    StorePlan,
    Transfer,
    TransferRun,
    chunk_blocks,
    chunk_span,
    plan_load,
    plan_load_runs,
    plan_store,
    plan_tail,
    resume_start,
    storable_ends,
)

FULL = GroupSpec(kind=GroupKind.FULL, block_tokens=4)
WINDOW = GroupSpec(kind=GroupKind.WINDOW, block_tokens=4, window_tokens=6)
RECURRENT = GroupSpec(kind=GroupKind.RECURRENT, block_tokens=8)
SPEC = CacheSpec((FULL, WINDOW, RECURRENT), 8)


def everything(group_index: int, ends: Sequence[int]) -> Sequence[int]:
    return ends


def table(spec: CacheSpec, group_index: int, boundary: int, computed: int) -> list[int]:
    """Block table that an engine passes for a load: null where nothing is read."""
    group = spec.groups[group_index]
    first = resume_start(group, boundary) // group.block_tokens
    return [
        1000 * (group_index + 1) + i if i >= first or (i < computed // group.block_tokens and i >= first) else 0
        for i in range(boundary // group.block_tokens)
    ]


def test_a_load_writes_the_blocks_that_each_kind_needs_and_no_more() -> None:
    tables = [[11, 12, 13, 14], [0, 0, 23, 24], [0, 32]]
    assert plan_load(SPEC, 16, 0, tables) == (
        Transfer(0, 8, 0, (11, 12)),
        Transfer(0, 16, 0, (13, 14)),
        Transfer(1, 16, 0, (23, 24)),
        Transfer(2, 16, 0, (32,)),
    )


def test_adjacent_whole_chunks_are_one_run_and_the_ends_are_separate_runs() -> None:
    blocks = list(range(1, 13))
    spec = CacheSpec((FULL, msgspec.structs.replace(WINDOW, window_tokens=13)), 8)
    assert plan_load_runs(spec, 40, 0, [blocks[:10], [0] * 7 + blocks[7:10]]) == (
        TransferRun(0, 8, 5, 0, tuple(blocks[:10])),
        TransferRun(1, 32, 1, 1, (8,)),
        TransferRun(1, 40, 1, 0, (9, 10)),
    )
    tails = CacheSpec((FULL,), 8, 4)
    assert plan_load_runs(tails, 44, 4, [blocks[:11]]) == (
        TransferRun(0, 8, 1, 1, (2,)),
        TransferRun(0, 16, 4, 0, tuple(blocks[2:10])),
        TransferRun(0, 44, 1, 0, (11,)),
    )
    assert plan_load_runs(tails, 4, 0, [[1]]) == (TransferRun(0, 4, 1, 0, (1,)),)


def test_a_load_skips_the_blocks_that_the_engine_holds() -> None:
    tables = [[11, 12, 13, 14], [0, 0, 23, 24], [0, 32]]
    assert plan_load(SPEC, 16, 8, tables) == (
        Transfer(0, 16, 0, (13, 14)),
        Transfer(1, 16, 0, (23, 24)),
        Transfer(2, 16, 0, (32,)),
    )


def test_a_load_may_begin_inside_a_chunk() -> None:
    spec = CacheSpec((FULL,), 16)
    assert plan_load(spec, 16, 8, [[11, 12, 13, 14]]) == (Transfer(0, 16, 2, (13, 14)),)


def test_a_load_without_the_block_it_needs_is_refused() -> None:
    with pytest.raises(PlanError, match=r"group 1 \(WINDOW\) needs blocks 2 to 3"):
        plan_load(SPEC, 16, 0, [[11, 12, 13, 14], [0, 0, 0, 24], [0, 32]])
    with pytest.raises(PlanError, match="group 0"):
        plan_load(SPEC, 16, 0, [[11, 12, 13], [0, 0, 23, 24], [0, 32]])


def test_a_load_that_would_leave_a_block_unwritten_is_refused() -> None:
    with pytest.raises(PlanError, match="unwritten"):
        plan_load(SPEC, 16, 0, [[11, 12, 13, 14], [0, 22, 23, 24], [0, 32]])


@pytest.mark.parametrize("num_tokens", [-8, 12, 15])
def test_a_load_to_a_token_that_is_no_boundary_is_refused_by_name(num_tokens: int) -> None:
    with pytest.raises(PlanError, match="num_tokens must be a multiple of 8 tokens"):
        plan_load(SPEC, num_tokens, 0, [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32]])


def test_a_load_from_negative_tokens_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="computed_tokens must not be negative, got -8"):
        plan_load(SPEC, 16, -8, [[11, 12, 13, 14], [0, 0, 23, 24], [0, 32]])


def test_a_group_without_a_table_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="block_ids must have a table for each of 3 groups, got 1"):
        plan_load(SPEC, 8, 0, [[11, 12]])
    with pytest.raises(PlanError, match="block_ids must have a table for each of 3 groups, got 1"):
        plan_store(SPEC, 0, 8, [[11, 12]], [], everything)
    tails = CacheSpec((FULL, WINDOW, RECURRENT), 8, tail_tokens=4)
    with pytest.raises(PlanError, match="block_ids must have a table for each of 3 groups, got 0"):
        plan_store(tails, 0, 4, [], [State(2, 31, 4)], everything)


def test_a_store_of_states_alone_needs_no_table() -> None:
    assert plan_store(SPEC, 8, 8, [], [State(2, 31, 8)], everything).transfers(SPEC.chunk_tokens) == (
        Transfer(2, 8, 0, (31,)),
    )


def test_a_store_takes_whole_attention_chunks_and_the_given_states() -> None:
    tables = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25], [31, 32, 33]]
    plan = plan_store(SPEC, 0, 19, tables, [State(2, 32, 16)], everything)
    assert plan.transfers(SPEC.chunk_tokens) == (
        Transfer(0, 8, 0, (11, 12)),
        Transfer(0, 16, 0, (13, 14)),
        Transfer(1, 8, 0, (21, 22)),
        Transfer(1, 16, 0, (23, 24)),
        Transfer(2, 16, 0, (32,)),
    )


def test_a_chunk_with_freed_blocks_is_left_out() -> None:
    plan = plan_store(SPEC, 0, 16, [[11, 12, 13, 14], [0, 22, 23, 24], [0, 0]], [], everything)
    assert [t for t in plan.transfers(SPEC.chunk_tokens) if t.group_index == 1] == [Transfer(1, 16, 0, (23, 24))]


def test_a_state_off_the_chunk_grid_is_counted_and_left_out() -> None:
    plan = plan_store(SPEC, 16, 16, [[], [], []], [State(2, 31, 12), State(2, 0, 16)], everything)
    assert plan.transfers(SPEC.chunk_tokens) == () and plan.unaligned_states == 2


@pytest.mark.parametrize(
    ("field", "state"),
    [
        ("num_tokens", State(2, 31, 0)),
        ("num_tokens", State(2, 31, -8)),
        ("group_index", State(0, 31, 8)),
        ("group_index", State(1, 31, 8)),
        ("group_index", State(3, 31, 8)),
        ("group_index", State(4, 31, 8)),
        ("group_index", State(-1, 31, 8)),
        ("group_index", State(-2, 31, 8)),
    ],
)
def test_an_invalid_state_is_refused_by_name(field: str, state: State) -> None:
    spec = CacheSpec((FULL, WINDOW, RECURRENT, GroupSpec(GroupKind.SCRATCH, 4)), 8)
    with pytest.raises(PlanError, match=rf"^states\[1\]\.{field} must be"):
        plan_store(spec, 8, 8, [[], [], [], []], [State(2, 31, 8), state], everything)


@pytest.mark.parametrize("first_token", [-8, 4, 9])
def test_a_store_from_inside_a_chunk_is_refused_by_name(first_token: int) -> None:
    with pytest.raises(PlanError, match="first_token must be a multiple of 8 tokens"):
        plan_store(SPEC, first_token, 32, [[1] * 8, [1] * 8, [1] * 4], [], everything)


def test_a_store_of_negative_tokens_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="num_tokens must not be negative, got -1"):
        plan_store(SPEC, 0, -1, [[], [], []], [], everything)


def test_a_state_with_content_that_is_not_final_is_left_out() -> None:
    early = State(2, 31, 16)
    assert plan_store(SPEC, 8, 15, [[], [], []], [early], everything) == StorePlan(())
    assert plan_store(SPEC, 16, 16, [[], [], []], [early], everything).transfers(SPEC.chunk_tokens) == (
        Transfer(2, 16, 0, (31,)),
    )


@pytest.mark.parametrize("end_token", [8, 12])
def test_a_state_is_stored_once_its_lookahead_tokens_are_known(end_token: int) -> None:
    spec = CacheSpec((GroupSpec(GroupKind.RECURRENT, 8, lookahead_tokens=4),), 8, tail_tokens=4)
    state = State(0, 31, end_token)
    assert plan_store(spec, 0, end_token + 3, [[]], [state], everything) == StorePlan(())
    assert plan_store(spec, 0, end_token + 4, [[]], [state], everything).transfers(spec.chunk_tokens) == (
        Transfer(0, end_token, 0, (31,)),
    )


def test_a_tail_is_stored_once_the_lookahead_tokens_of_its_state_are_known() -> None:
    spec = CacheSpec((GroupSpec(GroupKind.RECURRENT, 8, lookahead_tokens=4),), 8, tail_tokens=4)
    state = State(0, 31, 12)
    assert plan_tail(spec, 12, 15, [[]], [state], everything) == StorePlan((), incomplete_tails=1)
    assert plan_tail(spec, 12, 16, [[]], [state], everything).transfers(spec.chunk_tokens) == (
        Transfer(0, 12, 0, (31,)),
    )


def test_chunks_that_are_stored_already_are_left_out() -> None:
    tables = [[11, 12], [21, 22], [31]]
    plan = plan_store(SPEC, 0, 8, tables, [State(2, 31, 8)], lambda group, ends: ends if group == 1 else ())
    assert plan.transfers(SPEC.chunk_tokens) == (Transfer(1, 8, 0, (21, 22)),)


def test_a_drafter_chunk_is_stored_once_its_lookahead_tokens_are_known() -> None:
    spec = CacheSpec((GroupSpec(kind=GroupKind.FULL, block_tokens=4, lookahead_tokens=4),), 8)
    assert plan_store(spec, 0, 11, [[1, 2, 3]], [], everything).transfers(spec.chunk_tokens) == ()
    assert plan_store(spec, 0, 12, [[1, 2, 3]], [], everything).transfers(spec.chunk_tokens) == (
        Transfer(0, 8, 0, (1, 2)),
    )


@given(any_caches, st.data())
def test_storable_chunks_are_those_with_every_block_present(spec: CacheSpec, data: st.DataObject) -> None:
    groups = [index for index in spec.stored_groups if spec.groups[index].kind is not GroupKind.RECURRENT]
    group_index = data.draw(st.sampled_from(groups or [0]))
    chunk, size = spec.chunk_tokens, spec.groups[group_index].block_tokens
    first, last = data.draw(st.integers(0, CHUNKS)) * chunk, data.draw(st.integers(0, CHUNKS * chunk))
    num_blocks = data.draw(st.integers(0, -(-CHUNKS * chunk // size)))
    # As an engine leaves it, null at the beginning; or any holes.
    num_null = data.draw(st.integers(0, num_blocks))
    holes = data.draw(st.sets(st.integers(0, num_blocks), max_size=2))
    blocks = [0 if place < num_null or place in holes else 1 + place for place in range(num_blocks)]
    tables = [blocks if index == group_index else [] for index in range(len(spec.groups))]
    expected = []
    for end in range(first + chunk, last + 1, chunk):
        stored = chunk_blocks(spec, group_index, end)
        if stored and stored.stop <= num_blocks and all(blocks[place] for place in stored):
            expected.append(end)
    assert list(storable_ends(spec, group_index, first, last, tables)) == expected


def test_chunks_after_the_start_of_a_moved_window_are_a_range() -> None:
    tables = [[], [0, 0, 0, 0, 25, 26, 27, 28], []]
    assert storable_ends(SPEC, 1, 0, 32, tables) == range(24, 33, 8)


@given(caches(), st.data())
def test_every_token_that_a_boundary_needs_is_loaded_from_its_chunk(spec: CacheSpec, data: st.DataObject) -> None:
    boundary = data.draw(st.integers(1, CHUNKS)) * spec.chunk_tokens
    computed = data.draw(st.integers(0, boundary // spec.chunk_tokens - 1)) * spec.chunk_tokens
    tables = [table(spec, i, boundary, computed) for i in range(len(spec.groups))]
    loaded: dict[int, set[int]] = {i: set() for i in range(len(spec.groups))}
    for transfer in plan_load(spec, boundary, computed, tables):
        group = spec.groups[transfer.group_index]
        stored = chunk_blocks(spec, transfer.group_index, transfer.end_token)
        for i, block_id in enumerate(transfer.block_ids):
            index = stored[transfer.first_block + i]
            assert tables[transfer.group_index][index] == block_id
            span = range(index * group.block_tokens, (index + 1) * group.block_tokens)
            assert not loaded[transfer.group_index] & set(span)
            loaded[transfer.group_index] |= set(span)
    for group_index, group in enumerate(spec.groups):
        recurrent, needed = group.kind is GroupKind.RECURRENT, range(resume_start(group, boundary), boundary)
        assert {t for t in needed if t >= computed or recurrent} <= loaded[group_index]


@given(any_caches, st.data())
def test_a_store_moves_the_blocks_of_each_wanted_chunk(spec: CacheSpec, data: st.DataObject) -> None:
    total = CHUNKS * spec.chunk_tokens
    tables = [[1 + i for i in range(-(-total // group.block_tokens))] for group in spec.groups]
    ends = range(spec.chunk_tokens, total + 1, spec.chunk_tokens)
    parts = [(index, end) for index in spec.stored_groups for end in ends]
    unwanted = data.draw(st.sets(st.sampled_from(parts), max_size=len(parts) // 2)) if parts else set()

    def wanted(group_index: int, of_group: Sequence[int]) -> Sequence[int]:
        return [end for end in of_group if (group_index, end) not in unwanted]

    plan = plan_store(spec, 0, total, tables, [], wanted if unwanted else everything)
    expected = []
    for index, end in parts:
        group, stored = spec.groups[index], chunk_blocks(spec, index, end)
        if group.kind is GroupKind.RECURRENT or not stored or end > total - group.lookahead_tokens:
            continue
        if (index, end) not in unwanted:
            expected.append(Transfer(index, end, 0, tuple(tables[index][stored.start : stored.stop])))
    assert plan.transfers(spec.chunk_tokens) == tuple(expected)
    if not unwanted:
        # Chunks with the same layout need one run, not one transfer each.
        alike = [index for index in spec.stored_groups if spec.uniform_chunk_blocks[index] is not None]
        assert all(sum(run.group_index == index for run in plan.runs) <= 1 for index in alike)


@given(caches(), st.data())
def test_stores_in_several_steps_cover_the_same_chunks_as_one(spec: CacheSpec, data: st.DataObject) -> None:
    total = CHUNKS * spec.chunk_tokens
    tables = [[1 + i for i in range(total // group.block_tokens)] for group in spec.groups]
    at_once = plan_store(spec, 0, total, tables, [], everything).transfers(spec.chunk_tokens)
    cuts = [*sorted(data.draw(st.sets(st.integers(0, total), max_size=4))), total]
    stepwise: list[Transfer] = []
    lookahead = max(group.lookahead_tokens for group in spec.groups)
    seen = 0

    def not_yet(group_index: int, ends: Sequence[int]) -> Sequence[int]:
        stored = {t.end_token for t in stepwise if t.group_index == group_index}
        return [end for end in ends if end not in stored]

    for cut in cuts:
        stepwise += plan_store(spec, seen, cut, tables, [], not_yet).transfers(spec.chunk_tokens)
        seen = max(seen, max(0, cut - lookahead) // spec.chunk_tokens * spec.chunk_tokens)
    assert len(stepwise) == len(at_once)
    assert set(stepwise) == set(at_once)
    for transfer in at_once:
        assert chunk_span(spec, transfer.group_index, transfer.end_token).num_tokens > 0
