"""One engine of the fleet guide, run as its own process: runs prompts, and writes how many tokens were cached.

The settings are those of the guide, with defaults for all others.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import patience
from harness import Engine, make_prompt, running_engine

LENGTHS = (1500, 4000)
"""Lengths of the prompts that both engines run."""
SYSTEM_TOKENS, QUESTION_TOKENS = 4000, 300
NUM_QUESTIONS = 6
"""Number of questions after the system prompt on the first engine."""
BATCH_TOKENS = 2048


def prompts() -> list[list[int]]:
    return [make_prompt(length, seed=length) for length in LENGTHS]


def question(number: int) -> list[int]:
    """The system prompt followed by its own question."""
    system = make_prompt(SYSTEM_TOKENS, seed=7)
    return make_prompt(SYSTEM_TOKENS + QUESTION_TOKENS, seed=100 + number, prefix=system)


def run(engine: Engine, prompt: Sequence[int]) -> dict[str, Any]:
    """Run a prompt whose lookups are answered while it waits in the engine's queue, as on a busy engine; so a slow
    machine does not change the result.
    """
    index = engine.connector._scheduler._stack.secondary["object"]
    request_id = engine.add(prompt)
    patience.wait_until(lambda: not index.generation or not index._tracker.num_open_keys, "an answer of the store")
    engine.run()
    result = engine.result(request_id)
    engine.drain()
    return result.as_json()


def first(engine: Engine) -> list[dict[str, Any]]:
    """Each prompt twice, then all questions."""
    results = [run(engine, prompt) for prompt in prompts() for _ in range(2)]
    return results + [run(engine, question(number)) for number in range(NUM_QUESTIONS)]


def second(engine: Engine) -> list[dict[str, Any]]:
    """Each prompt and another question from the store; then the same from this engine's host memory."""
    asked = [*prompts(), question(NUM_QUESTIONS)]
    results = [run(engine, prompt) for prompt in asked]
    engine.reset_prefix_cache()
    return results + [run(engine, prompt) for prompt in asked]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--config", type=json.loads, required=True)
    parser.add_argument("--engine", choices=["first", "second"], required=True)
    chosen = parser.parse_args(arguments)
    logging.getLogger("vllm.hybridkv").setLevel(logging.INFO)
    options = {"kv_transfer_config": chosen.config, "max_num_batched_tokens": BATCH_TOKENS}
    with running_engine(chosen.kind, chosen.directory, **options) as engine:
        results = (first if chosen.engine == "first" else second)(engine)
        chosen.output.write_text(json.dumps(results))
