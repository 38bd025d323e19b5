import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, caches

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    PlanError,
    State,
    Transfer,
    chunk_blocks,
    chunk_span,
    coverage,
    plan_load,
    plan_store,
)

FULL = GroupSpec(kind=GroupKind.FULL, block_tokens=4)
WINDOW = GroupSpec(kind=GroupKind.WINDOW, block_tokens=4, window_tokens=6)
RECURRENT = GroupSpec(kind=GroupKind.RECURRENT, block_tokens=8)
SPEC = CacheSpec((FULL, WINDOW, RECURRENT), 8)


def everything(group_index: int, end_token: int) -> bool:
    return True


def table(spec: CacheSpec, group_index: int, boundary: int, computed: int) -> list[int]:
    """The block table that an engine hands over for a load: null where nothing is read."""
    group = spec.groups[group_index]
    spans = coverage(spec, group_index, boundary)
    first = spans[0].start // group.block_tokens if spans else boundary // group.block_tokens
    return [
        1000 * (group_index + 1) + i if i >= first or (i < computed // group.block_tokens and i >= first) else 0
        for i in range(boundary // group.block_tokens)
    ]


def test_a_load_writes_what_each_kind_needs_and_no_more() -> None:
    tables = [[11, 12, 13, 14], [0, 0, 23, 24], [0, 32]]
    assert plan_load(SPEC, 16, 0, tables) == (
        Transfer(0, 8, 0, (11, 12)),
        Transfer(0, 16, 0, (13, 14)),
        Transfer(1, 16, 0, (23, 24)),
        Transfer(2, 16, 0, (32,)),
    )


def test_a_load_leaves_alone_what_the_engine_holds() -> None:
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


def test_a_store_takes_whole_chunks_of_attention_and_only_states_handed_over() -> None:
    tables = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25], [31, 32, 33]]
    plan = plan_store(SPEC, 0, 19, tables, [State(2, 32, 16)], everything)
    assert plan.transfers == (
        Transfer(0, 8, 0, (11, 12)),
        Transfer(0, 16, 0, (13, 14)),
        Transfer(1, 8, 0, (21, 22)),
        Transfer(1, 16, 0, (23, 24)),
        Transfer(2, 16, 0, (32,)),
    )


def test_a_chunk_whose_blocks_are_gone_is_left_out() -> None:
    plan = plan_store(SPEC, 0, 16, [[11, 12, 13, 14], [0, 22, 23, 24], [0, 0]], [], everything)
    assert [t for t in plan.transfers if t.group_index == 1] == [Transfer(1, 16, 0, (23, 24))]


def test_a_state_off_the_chunk_grid_is_counted_and_left_out() -> None:
    plan = plan_store(SPEC, 16, 16, [[], [], []], [State(2, 31, 12), State(2, 0, 16)], everything)
    assert plan.transfers == () and plan.unaligned_states == 2


def test_what_is_stored_already_is_left_out() -> None:
    tables = [[11, 12], [21, 22], [31]]
    plan = plan_store(SPEC, 0, 8, tables, [State(2, 31, 8)], lambda group, end: group == 1)
    assert plan.transfers == (Transfer(1, 8, 0, (21, 22)),)


def test_a_drafter_chunk_waits_for_the_tokens_that_it_depends_on() -> None:
    spec = CacheSpec((GroupSpec(kind=GroupKind.FULL, block_tokens=4, lookahead_tokens=4),), 8)
    assert plan_store(spec, 0, 11, [[1, 2, 3]], [], everything).transfers == ()
    assert plan_store(spec, 0, 12, [[1, 2, 3]], [], everything).transfers == (Transfer(0, 8, 0, (1, 2)),)


@given(caches(), st.data())
def test_every_token_that_a_boundary_needs_is_loaded_from_where_it_was_stored(
    spec: CacheSpec, data: st.DataObject
) -> None:
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
        for span in coverage(spec, group_index, boundary):
            needed = {t for t in range(span.start, span.end) if t >= computed or group.kind is GroupKind.RECURRENT}
            assert needed <= loaded[group_index]


@given(caches(), st.data())
def test_stores_in_several_steps_cover_the_same_chunks_as_one(spec: CacheSpec, data: st.DataObject) -> None:
    total = CHUNKS * spec.chunk_tokens
    tables = [[1 + i for i in range(total // group.block_tokens)] for group in spec.groups]
    at_once = plan_store(spec, 0, total, tables, [], everything).transfers
    cuts = [*sorted(data.draw(st.sets(st.integers(0, total), max_size=4))), total]
    stepwise: list[Transfer] = []
    lookahead = max(group.lookahead_tokens for group in spec.groups)
    seen = 0

    def not_yet(group_index: int, end_token: int) -> bool:
        return all((group_index, end_token) != (t.group_index, t.end_token) for t in stepwise)

    for cut in cuts:
        stepwise += plan_store(spec, seen, cut, tables, [], not_yet).transfers
        seen = max(seen, max(0, cut - lookahead) // spec.chunk_tokens * spec.chunk_tokens)
    assert len(stepwise) == len(at_once)
    assert set(stepwise) == set(at_once)
    for transfer in at_once:
        assert chunk_span(spec, transfer.group_index, transfer.end_token).num_tokens > 0
