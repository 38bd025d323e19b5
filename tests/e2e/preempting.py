"""Requests in a pool that is too small for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness import Engine, Result


def run_together(engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> tuple[list[Result], int]:
    """Results, and the number of preemptions."""
    preemptions = 0
    preempt = engine.scheduler._preempt_request

    def counting(*arguments: Any, **options: Any) -> None:
        nonlocal preemptions
        preemptions += 1
        preempt(*arguments, **options)

    engine.scheduler._preempt_request = counting
    try:
        return engine.generate(prompts, max_tokens=max_tokens), preemptions
    finally:
        engine.scheduler._preempt_request = preempt
