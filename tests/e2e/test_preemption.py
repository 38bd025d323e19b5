"""A pool too small for all requests: some are preempted, lose their blocks, and are restored from the tier."""

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
"""Blocks, including the null block: enough to admit all requests, but not to finish all of them."""


@pytest.fixture(scope="module")
def engine_arguments(kind: str) -> dict[str, Any]:
    pool = {"num_gpu_blocks_override": POOLS[kind], "max_model_len": 1024}
    # All prompts are computed concurrently, so that all are admitted before the pool is full.
    if kind == "qwen3-next":
        return pool | {"max_num_batched_tokens": 2048}
    return pool | {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 64}


def alone(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    return [engine.generate([prompt], max_tokens=ANSWER_TOKENS)[0] for prompt in prompts]


def test_preempted_requests_are_restored_and_answer_as_if_run_alone(engine: Engine, audit: Audit, noise: Noise) -> None:
    prompts = [make_prompt(PROMPT_TOKENS, seed=i) for i in range(NUM_REQUESTS)]
    expected = alone(engine, prompts)
    engine.reset_prefix_cache()
    engine.connector.reset_cache()
    audit.forget()
    together, preemptions = run_together(engine, prompts, max_tokens=ANSWER_TOKENS)
    assert preemptions > 0
    assert audit.restored_tokens > 0, "no preempted request was restored"
    require_close(audit, expected, together, noise)


def test_requests_are_restored_under_memory_pressure_from_the_start(engine: Engine, audit: Audit, noise: Noise) -> None:
    prompts = [make_prompt(PROMPT_TOKENS, seed=100 + i) for i in range(NUM_REQUESTS)]
    expected = alone(engine, prompts)
    engine.reset_prefix_cache()
    audit.forget()
    together, _ = run_together(engine, prompts, max_tokens=ANSWER_TOKENS)
    assert audit.restored_tokens >= NUM_REQUESTS * 512
    require_close(audit, expected, together, noise)


def test_zeroed_pages_deviate_more_than_the_noise(engine: Engine, audit: Audit, noise: Noise) -> None:
    """Control of the comparison of answers; the bytes alone would also show it."""
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
