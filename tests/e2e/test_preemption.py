"""A pool too small for all requests: some are preempted, lose their blocks, and go on from what was stored."""

from __future__ import annotations

from typing import Any

import pytest
from audit import Audit, stored_views
from equality import require_close
from harness import Engine, make_prompt
from noise import Noise, own_cache_only
from preempting import run_together

NUM_REQUESTS = 6
PROMPT_TOKENS = 552
ANSWER_TOKENS = 160
CONTROL_TOKENS = 16
POOLS = {"qwen3-next": 60, "gemma3": 96, "gpt-oss": 60}
"""Blocks, the null block included: enough to admit all requests, too few to let all of them finish."""


@pytest.fixture(scope="module")
def engine_arguments(kind: str) -> dict[str, Any]:
    pool = {"num_gpu_blocks_override": POOLS[kind], "max_model_len": 1024}
    # All prompts are computed side by side, so that all are admitted before the pool is full.
    if kind == "qwen3-next":
        return pool | {"max_num_batched_tokens": 2048}
    return pool | {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 64}


def alone(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    return [engine.generate([prompt], max_tokens=ANSWER_TOKENS)[0] for prompt in prompts]


def test_preempted_requests_are_restored_and_answer_as_if_they_had_run_alone(
    engine: Engine, audit: Audit, noise: Noise
) -> None:
    prompts = [make_prompt(PROMPT_TOKENS, seed=i) for i in range(NUM_REQUESTS)]
    expected = alone(engine, prompts)
    engine.reset_prefix_cache()
    engine.connector.reset_cache()
    audit.forget()
    together, preemptions = run_together(engine, prompts, max_tokens=ANSWER_TOKENS)
    assert preemptions > 0
    assert audit.restored_tokens > 0, "no preempted request was restored"
    require_close(audit, expected, together, noise)


def test_restored_from_the_start_under_the_same_pressure(engine: Engine, audit: Audit, noise: Noise) -> None:
    prompts = [make_prompt(PROMPT_TOKENS, seed=100 + i) for i in range(NUM_REQUESTS)]
    expected = alone(engine, prompts)
    engine.reset_prefix_cache()
    audit.forget()
    together, _ = run_together(engine, prompts, max_tokens=ANSWER_TOKENS)
    assert audit.restored_tokens >= NUM_REQUESTS * 512
    require_close(audit, expected, together, noise)


def test_a_group_whose_stored_pages_are_zeroed_is_further_off_than_the_noise(
    engine: Engine, audit: Audit, noise: Noise
) -> None:
    """The control: of the comparison, since the bytes alone would show it too."""
    prompts = [make_prompt(PROMPT_TOKENS, seed=200 + i) for i in range(NUM_REQUESTS)]
    with own_cache_only(engine):
        expected = [engine.generate([prompt], max_tokens=CONTROL_TOKENS)[0] for prompt in prompts]
    for group_index in engine.connector._scheduler._layout.spec.stored_groups:
        engine.connector.reset_cache()
        engine.reset_prefix_cache()
        audit.stored.clear()
        with own_cache_only(engine):
            for prompt in prompts:
                engine.generate([prompt], max_tokens=1)
        engine.reset_prefix_cache()
        for key in audit.keys_of(group_index):
            for view in stored_views(engine, key):
                view[:] = bytes(len(view))
        audit.forget()
        together = engine.generate(prompts, max_tokens=CONTROL_TOKENS)
        assert audit.restored_tokens >= NUM_REQUESTS * 512
        audit.mismatches.clear()
        with pytest.raises(AssertionError):
            require_close(audit, expected, together, noise)
