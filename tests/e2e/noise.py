"""How far an engine's own answers lie apart, on the machine at hand, when the same tokens meet other step shapes.

Sums are rounded in another order then, and a recurrent layer computes a prompt by another algorithm than an answer. How
much that moves a log-probability depends on the processor: nothing at all to several tenths. So it is measured, from
requests that go on from the engine's own cache in the middle of an answer, as after a preemption, with the connector
offering nothing.
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
"""Tokens over which a deviation is averaged: a wrong state shows in the first few, and one token alone is all noise."""
FACTOR: Final = 4.0
"""Tolerance over the median deviation. Of 72 bfloat16 runs on AVX2 and AVX-512 the farthest lay at 2.2 times the
median, and a zeroed recurrent group, the mildest damage there is, at 8 times."""
FLOOR: Final = 128 * torch.finfo(torch.float32).eps
"""Of the tolerance: what a few hundred roundings of a sum amount to, where a machine shows no noise at all."""
PROMPTS: Final = 4
PROMPT_TOKENS: Final = 552
CUTS: Final = (20, 47, 74)
"""Where in its answer a request goes on."""
ANSWER_TOKENS: Final = 24


def deviation(before: Result, after: Result) -> float:
    """The largest mean difference of log-probabilities over `WINDOW` tokens, as far as both answer the same prompt.

    That is up to the first token that differs. A token that one of them does not name among its candidates is as likely
    there as the least of those, at most.
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
    """The connector offers nothing: what is not computed comes from the engine's own blocks."""
    ask = engine.connector.get_num_new_matched_tokens
    engine.connector.get_num_new_matched_tokens = lambda *arguments: (0, False)
    try:
        yield
    finally:
        engine.connector.get_num_new_matched_tokens = ask


@dataclass(frozen=True)
class Noise:
    """Of an engine that has a connector. Measured when first asked for, which leaves the engine's cache empty."""

    engine: Engine

    @cached_property
    def deviations(self) -> list[float]:
        """One for each prompt and cut, of an answer from where it was cut against the whole one."""
        self.engine.reset_prefix_cache()
        with own_cache_only(self.engine):
            found = [each for seed in range(PROMPTS) for each in self._of_prompt(make_prompt(PROMPT_TOKENS, seed=seed))]
        self.engine.reset_prefix_cache()
        return found

    @cached_property
    def tolerance(self) -> float:
        """How far a run of other step shapes may deviate."""
        return max(FACTOR * median(self.deviations), FLOOR)

    def _of_prompt(self, prompt: list[int]) -> Iterator[float]:
        [whole] = self.engine.generate([prompt], max_tokens=max(CUTS) + ANSWER_TOKENS)
        for cut in CUTS:
            [rest] = self.engine.generate([[*prompt, *whole.token_ids[:cut]]], max_tokens=ANSWER_TOKENS)
            assert 0 < rest.num_cached_tokens <= len(prompt) + cut - 1
            yield deviation(whole.part(cut, ANSWER_TOKENS), rest)
