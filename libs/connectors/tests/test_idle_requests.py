"""A step that leaves a request as it was need not look at it, and no other step is passed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from test_lookups import BLOCK, DRAFTER, FULL, STATE, make_layout
from test_prefix_chain import CHUNK, MIXES, MOST_CHUNKS, World

from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.checkpoints import CheckpointOptions, Checkpoints
from hybridkv.planner import GroupKind, GroupSpec

STEPS = st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=30)


@given(st.sampled_from(MIXES), st.integers(0, 3), STEPS)
def test_of_a_step_that_ends_before_a_request_need_be_looked_at_nothing_is_stored(
    groups: list[GroupSpec], resumed: int, steps: list[int]
) -> None:
    world = World(groups, 60, 0, looks_at_each=True)
    world.begin(0, 0, resumed)
    tracked = world.tracked[0]
    request = cast(Any, tracked.request)
    for num_tokens in steps:
        computed = request.num_computed_tokens
        end = min(computed + num_tokens, MOST_CHUNKS * CHUNK + 1)
        has_state = any(group.kind is GroupKind.RECURRENT for group in groups) and end // CHUNK > computed // CHUNK
        is_idle = end < tracked.idle_below_tokens and not has_state
        seen, stored_tokens, path = tracked.seen, tracked.stored_tokens, dict(tracked.path.keys)
        world.compute(0, num_tokens)
        if is_idle:
            assert world.said[-1] is None
            assert (tracked.seen, tracked.stored_tokens, tracked.path.keys) == (seen, stored_tokens, path)


def test_a_request_is_looked_at_again_when_its_next_chunk_is_whole() -> None:
    world = World([FULL, DRAFTER], 60, 0, looks_at_each=True)
    world.begin(0, 0, 0)
    tracked = world.tracked[0]
    assert tracked.idle_below_tokens == 0
    world.compute(0, CHUNK)
    # The drafter's part of the first chunk needs one more token.
    assert tracked.idle_below_tokens == CHUNK + DRAFTER.lookahead_tokens
    world.compute(0, DRAFTER.lookahead_tokens)
    assert tracked.idle_below_tokens == 2 * CHUNK


def test_a_request_that_starts_over_is_looked_at() -> None:
    world = World([FULL], 60, 0, looks_at_each=True)
    world.begin(0, 0, 0)
    world.compute(0, CHUNK + 1)
    tracked = world.tracked[0]
    assert tracked.idle_below_tokens == 2 * CHUNK
    tracked.forget_progress()
    assert tracked.idle_below_tokens == 0


def test_a_request_whose_tokens_were_taken_back_is_looked_at() -> None:
    world = World([FULL], 60, 0, looks_at_each=True)
    world.begin(0, 0, 0)
    world.compute(0, CHUNK + 1)
    tracked = world.tracked[0]
    cast(Any, tracked.request).block_hashes = [b"other" * 6]
    tracked.follow()
    assert tracked.idle_below_tokens == 0


def checkpoints(*, has_answers: bool) -> Checkpoints:
    made = make_layout([FULL, STATE])
    world = World([FULL, STATE], 60, 0, looks_at_each=True)
    options = CheckpointOptions(1, has_answers, CHUNK, cut_tokens=CHUNK, has_drafts=False)
    prefill_stops = cast(Any, SimpleNamespace())
    return Checkpoints(made.layout, world.stack, (), options, prefill_stops, ConnectorMetrics(), is_alone=False)


@given(st.integers(0, 5 * CHUNK), st.integers(0, 2 * CHUNK), st.integers(0, 2 * CHUNK))
def test_no_answer_has_a_state_before_it_need_be_looked_at(computed: int, more: int, num_scheduled: int) -> None:
    each = checkpoints(has_answers=True)
    step = each._step_tokens
    bound, start = each.idle_below_tokens(computed), computed + more
    if start + num_scheduled < bound:
        assert start % step and (start + num_scheduled) % step
    if computed % step:
        assert bound > computed and bound % step == 0


def test_without_states_of_answers_requests_are_looked_at_for_their_chunks_alone() -> None:
    assert checkpoints(has_answers=False).idle_below_tokens(CHUNK) > 1 << 40


def test_a_new_request_is_looked_at() -> None:
    assert TrackedRequest(cast(Any, None), None, None).idle_below_tokens == 0
