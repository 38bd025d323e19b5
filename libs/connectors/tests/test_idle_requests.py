"""Idle requests: a step that adds nothing to store may skip a request, and no other step may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from test_lookups import BLOCK, DRAFTER, FULL, STATE, make_layout
from test_prefix_chain import CHUNK, MIXES, MOST_CHUNKS, StoreBench

from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.checkpoints import CheckpointOptions, Checkpoints
from hybridkv.planner import GroupKind, GroupSpec

STEPS = st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=30)


@given(st.sampled_from(MIXES), st.integers(0, 3), STEPS)
def test_a_skipped_step_stores_nothing(groups: list[GroupSpec], resumed: int, steps: list[int]) -> None:
    bench = StoreBench(groups, 60, 0, looks_at_each=True)
    bench.begin(0, 0, resumed)
    tracked = bench.tracked[0]
    request = cast(Any, tracked.request)
    for num_tokens in steps:
        computed = request.num_computed_tokens
        end = min(computed + num_tokens, MOST_CHUNKS * CHUNK + 1)
        has_state = any(group.kind is GroupKind.RECURRENT for group in groups) and end // CHUNK > computed // CHUNK
        is_idle = end < tracked.idle_below_tokens and not has_state
        planned, stored_tokens, keys = tracked.planned_chunks, tracked.stored_tokens, dict(tracked.chain.keys)
        bench.compute(0, num_tokens)
        if is_idle:
            assert bench.outputs[-1] is None
            assert (tracked.planned_chunks, tracked.stored_tokens, tracked.chain.keys) == (planned, stored_tokens, keys)


def test_a_request_is_idle_until_its_next_chunk_is_complete() -> None:
    bench = StoreBench([FULL, DRAFTER], 60, 0, looks_at_each=True)
    bench.begin(0, 0, 0)
    tracked = bench.tracked[0]
    assert tracked.idle_below_tokens == 0
    bench.compute(0, CHUNK)
    # The drafter's part of the first chunk needs one more token.
    assert tracked.idle_below_tokens == CHUNK + DRAFTER.lookahead_tokens
    bench.compute(0, DRAFTER.lookahead_tokens)
    assert tracked.idle_below_tokens == 2 * CHUNK


def test_a_restarted_request_is_not_idle() -> None:
    bench = StoreBench([FULL], 60, 0, looks_at_each=True)
    bench.begin(0, 0, 0)
    bench.compute(0, CHUNK + 1)
    tracked = bench.tracked[0]
    assert tracked.idle_below_tokens == 2 * CHUNK
    tracked.forget_progress()
    assert tracked.idle_below_tokens == 0


def test_a_request_with_withdrawn_tokens_is_not_idle() -> None:
    bench = StoreBench([FULL], 60, 0, looks_at_each=True)
    bench.begin(0, 0, 0)
    bench.compute(0, CHUNK + 1)
    tracked = bench.tracked[0]
    cast(Any, tracked.request).block_hashes = [b"other" * 6]
    tracked.follow()
    assert tracked.idle_below_tokens == 0


def checkpoints(*, has_answers: bool) -> Checkpoints:
    made = make_layout([FULL, STATE])
    bench = StoreBench([FULL, STATE], 60, 0, looks_at_each=True)
    options = CheckpointOptions(1, has_answers, CHUNK, cut_tokens=CHUNK, has_drafts=False)
    prefill_stops = cast(Any, SimpleNamespace())
    return Checkpoints(made.layout, bench.stack, (), options, prefill_stops, ConnectorMetrics(), is_alone=False)


@given(st.integers(0, 5 * CHUNK), st.integers(0, 2 * CHUNK), st.integers(0, 2 * CHUNK))
def test_no_state_of_an_answer_ends_while_the_request_is_idle(computed: int, more: int, num_scheduled: int) -> None:
    each = checkpoints(has_answers=True)
    step = each._step_tokens
    bound, start = each.idle_below_tokens(computed), computed + more
    if start + num_scheduled < bound:
        assert start % step and (start + num_scheduled) % step
    if computed % step:
        assert bound > computed and bound % step == 0


def test_without_states_of_answers_only_chunks_end_the_idle_time() -> None:
    assert checkpoints(has_answers=False).idle_below_tokens(CHUNK) > 1 << 40


def test_a_new_request_is_not_idle() -> None:
    assert TrackedRequest(cast(Any, None), None, None).idle_below_tokens == 0
