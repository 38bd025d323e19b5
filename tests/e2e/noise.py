"""Measures how far an engine's answers deviate on this machine if the same tokens are computed in steps of other
shapes.

Sums are then rounded in another order, and a recurrent layer uses other algorithms for prompts and answers. The effect
on log-probabilities depends on the processor: from none to several tenths. So it is measured with requests that
continue from the engine's own cache in the middle of an answer, as after a preemption, without restored tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Final

import torch
from harness import Engine, Result, make_prompt

WINDOW: Final = 8
"""Tokens over which deviations are averaged. A wrong state shows in the first few tokens, and a single token is too
noisy.
"""
FACTOR: Final = 4.0
"""Tolerance relative to the median deviation. Of 72 bfloat16 runs on AVX2 and AVX-512 the largest deviation was 2.2
times the median; a zeroed recurrent group, the mildest damage, gave 8 times.
"""
FLOOR: Final = 128 * torch.finfo(torch.float32).eps
"""Minimal tolerance: a few hundred roundings of a sum, for machines without noise."""
PROMPTS: Final = 4
PROMPT_TOKENS: Final = 552
CUTS: Final = (20, 47, 74)
"""Positions in its answer at which a request continues."""
ANSWER_TOKENS: Final = 24


def deviation(before: Result, after: Result) -> float:
    """The largest mean difference of log-probabilities over `WINDOW` tokens while both answer the same prompt.

    That is up to the first different token. A token that one answer does not list among its candidates is at most as
    likely there as its least likely candidate.
    """
    differences: list[float] = []
    for token, other, mine, theirs in zip(
        before.token_ids, after.token_ids, before.logprobs, after.logprobs, strict=True
    ):
        least = min(mine.values()), min(theirs.values())
        candidates = mine.keys() & theirs.keys() | {token, other}
        moved = [abs(mine.get(each, least[0]) - theirs.get(each, least[1])) for each in candidates]
        differences.append(sum(moved) / len(moved))
        if token != other:
            break
    windows = range(max(len(differences) - WINDOW, 0) + 1)
    return max(sum(differences[i : i + WINDOW]) / len(differences[i : i + WINDOW]) for i in windows)


@contextlib.contextmanager
def own_cache_only(engine: Engine) -> Iterator[None]:
    """The connector offers no tokens: cached tokens come only from the engine's own blocks."""
    ask = engine.connector.get_num_new_matched_tokens
    engine.connector.get_num_new_matched_tokens = lambda *arguments: (0, False)
    try:
        yield
    finally:
        engine.connector.get_num_new_matched_tokens = ask


@dataclass(frozen=True)
class Noise:
    """The noise of an engine with a connector. Measured on first use, which leaves the engine's cache empty."""

    engine: Engine

    @cached_property
    def deviations(self) -> list[float]:
        """For each prompt and cut, the deviation of the continued answer from the complete one."""
        self.engine.reset_prefix_cache()
        with own_cache_only(self.engine):
            found = [each for seed in range(PROMPTS) for each in self._of_prompt(make_prompt(PROMPT_TOKENS, seed=seed))]
        self.engine.reset_prefix_cache()
        return found

    @cached_property
    def tolerance(self) -> float:
        """The largest allowed deviation of a run with other step shapes."""
        return max(FACTOR * median(self.deviations), FLOOR)

    def _of_prompt(self, prompt: list[int]) -> Iterator[float]:
        [whole] = self.engine.generate([prompt], max_tokens=max(CUTS) + ANSWER_TOKENS)
        for cut in CUTS:
            [rest] = self.engine.generate([[*prompt, *whole.token_ids[:cut]]], max_tokens=ANSWER_TOKENS)
            assert 0 < rest.num_cached_tokens <= len(prompt) + cut - 1
            yield deviation(whole.part(cut, ANSWER_TOKENS), rest)
