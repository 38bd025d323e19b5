"""A pool too small for all requests: some are preempted, lose their blocks, and go on from what was stored."""

from __future__ import annotations

from typing import Any

import pytest
from audit import Audit
from equality import BATCH_TOLERANCE, require_close
from harness import Engine, make_prompt

NUM_REQUESTS = 6
PROMPT_TOKENS = 552
ANSWER_TOKENS = 160
POOLS = {"qwen3-next": 60, "gemma3": 96, "gpt-oss": 60}
"""Blocks, the null block included: enough to admit all requests, too few to let all of them finish."""


@pytest.fixture(scope="module")
def engine_arguments(kind: str) -> dict[str, Any]:
    return {"num_gpu_blocks_override": POOLS[kind], "max_model_len": 1024}


def run_together(engine: Engine, prompts: list[list[int]]) -> tuple[list[Any], int]:
    """Results, and how many preemptions it took to get them."""
    preemptions = 0
    preempt = engine.scheduler._preempt_request

    def counting(*arguments: Any, **options: Any) -> None:
        nonlocal preemptions
        preemptions += 1
        preempt(*arguments, **options)

    engine.scheduler._preempt_request = counting
    try:
        return engine.generate(prompts, max_tokens=ANSWER_TOKENS), preemptions
    finally:
        engine.scheduler._preempt_request = preempt


def test_preempted_requests_are_restored_and_answer_as_if_they_had_run_alone(
    engine: Engine, audit: Audit, kind: str
) -> None:
    prompts = [make_prompt(PROMPT_TOKENS, seed=i) for i in range(NUM_REQUESTS)]
    alone = [engine.generate([prompt], max_tokens=ANSWER_TOKENS)[0] for prompt in prompts]
    engine.reset_prefix_cache()
    engine.connector.reset_cache()
    audit.forget()
    together, preemptions = run_together(engine, prompts)
    assert preemptions > 0
    assert audit.restored_tokens > 0, "no preempted request was restored"
    require_close(audit, alone, together, BATCH_TOLERANCE[kind])


def test_restored_from_the_start_under_the_same_pressure(engine: Engine, audit: Audit, kind: str) -> None:
    prompts = [make_prompt(PROMPT_TOKENS, seed=100 + i) for i in range(NUM_REQUESTS)]
    alone = [engine.generate([prompt], max_tokens=ANSWER_TOKENS)[0] for prompt in prompts]
    engine.reset_prefix_cache()
    audit.forget()
    together, _ = run_together(engine, prompts)
    assert audit.restored_tokens >= NUM_REQUESTS * 512
    require_close(audit, alone, together, BATCH_TOLERANCE[kind])
