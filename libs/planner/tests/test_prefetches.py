"""A prefetch plans the parts that the deepest resume point reads, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, Ranges, Store, any_caches, stores
from test_hit import GPT_OSS, QWEN3_NEXT, everything, resumable

from hybridkv.planner import CacheSpec, GroupKind, LookupResult, last_boundary, resume_start
from hybridkv.planner.hints import Prefetch, plan_prefetch


def plan(spec: CacheSpec, num_tokens: int, store: Store) -> Prefetch:
    return plan_prefetch(spec, num_tokens, lambda group, end: store.get((group, end), LookupResult.MISS))


def read_at(spec: CacheSpec, boundary: int) -> set[tuple[int, int]]:
    """Reference: the chunk, or the tail, of every token that a resume reads, each block whole."""
    return {
        (group, min((token // spec.chunk_tokens + 1) * spec.chunk_tokens, boundary))
        for group in spec.stored_groups
        if (start := resume_start(spec.groups[group], boundary)) < boundary
        for token in range(start // spec.groups[group].block_tokens * spec.groups[group].block_tokens, boundary)
    }


@given(st.data())
def test_a_prefetch_plans_exactly_the_parts_that_the_deepest_boundary_reads(data: st.DataObject) -> None:
    spec = data.draw(any_caches)
    store = data.draw(stores(spec))
    num_tokens = data.draw(st.integers(0, (CHUNKS + 1) * spec.chunk_tokens))
    boundary = last_boundary(spec, num_tokens)
    while boundary and LookupResult.MISS in resumable(spec, boundary, 0, store):
        boundary -= spec.boundary_tokens
    planned = plan(spec, num_tokens, store)
    assert planned.num_tokens == boundary and len(planned.parts) == len(set(planned.parts))
    assert set(planned.parts) == read_at(spec, boundary)
    assert all(store[part] is not LookupResult.MISS for part in planned.parts)
    assert planned.is_whole == (boundary == last_boundary(spec, num_tokens))
    ranges = Ranges(spec, store)
    assert planned == plan_prefetch(spec, num_tokens, lambda g, e: store.get((g, e), LookupResult.MISS), ranges)


@given(st.data())
def test_each_part_comes_after_the_full_prefix_that_it_needs(data: st.DataObject) -> None:
    spec = data.draw(any_caches)
    planned = plan(spec, (CHUNKS + 1) * spec.chunk_tokens, data.draw(stores(spec)))
    ends = [end for _, end in planned.parts]
    assert ends == sorted(ends)
    for place, (group, end) in enumerate(planned.parts):
        if spec.groups[group].kind is not GroupKind.FULL:
            behind = planned.parts[place:]
            assert not any(other == end and spec.groups[index].kind is GroupKind.FULL for index, other in behind)


def test_only_the_last_states_and_windows_are_planned() -> None:
    states = plan(QWEN3_NEXT, 4 * 64 + 1, everything(QWEN3_NEXT, 4)).parts
    assert [end for group, end in states if group != 3] == [256] * 3
    assert [end for group, end in states if group == 3] == [64, 128, 192, 256]
    windows = plan(GPT_OSS, 8 * 64 + 1, everything(GPT_OSS, 8)).parts
    first = resume_start(GPT_OSS.groups[0], 512)
    assert [end for group, end in windows if group == 0] == [end for end in range(64, 513, 64) if end > first]


def test_chunks_after_the_deepest_state_are_not_planned() -> None:
    store = everything(QWEN3_NEXT, 4)
    for group in range(3):
        store[group, 256] = LookupResult.MISS
    planned = plan(QWEN3_NEXT, 4 * 64 + 1, store)
    assert planned.num_tokens == 192 and not planned.is_whole
    assert max(end for _, end in planned.parts) == 192


def test_nothing_is_planned_without_any_state() -> None:
    store = {part: answer for part, answer in everything(QWEN3_NEXT, 4).items() if part[0] == 3}
    assert plan(QWEN3_NEXT, 4 * 64 + 1, store) == Prefetch(0, (), False)
