"""Prompts with a common prefix in a pool too small for all: some lose their blocks during their answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import prefix_site
import pytest
from equality import require_close, require_same, require_same_output
from harness import Result
from noise import own_cache_only
from preempting import run_together
from prefix_site import in_turn
from shared_prefixes import Tokens, Workloads, resumable
from trial import Trial, engine_keeps_every_state, hits

REQUESTS = 6
ASKED_TOKENS = 8
"""The default length of an answer."""
POOLS = {"qwen3-next": 50}
"""Blocks, including the null block: enough to admit all requests, but not to finish all of them.

LFM2 is left out: vLLM's CPU build computes answers differently from prompts (log-probabilities differ by several units,
even without a connector), so recomputation after a preemption changes the answer.
"""


@pytest.fixture(scope="module")
def watched(zoo_directory: Path) -> Iterator[Trial]:
    pool = {"num_gpu_blocks_override": POOLS[prefix_site.MODEL], "max_num_batched_tokens": 1024}
    with prefix_site.running(zoo_directory, **pool) as running:
        yield running


@pytest.fixture
def trial(watched: Trial) -> Iterator[Trial]:
    with watched.for_one_test() as trial:
        yield trial


@pytest.fixture(scope="module")
def words() -> Workloads:
    return prefix_site.workloads()


def answer_tokens(words: Workloads) -> int:
    return 9 * words.block_tokens // 4


def alone(trial: Trial, prompts: Sequence[Tokens], max_tokens: int) -> list[Result]:
    """Answers without competing requests and without restored tokens."""
    with own_cache_only(trial.engine):
        return [trial.engine.generate([prompt], max_tokens=max_tokens)[0] for prompt in prompts]


def test_preempted_siblings_answer_as_if_run_alone(trial: Trial, words: Workloads) -> None:
    prompts = words.siblings(REQUESTS)
    expected = alone(trial, prompts, answer_tokens(words))
    trial.forget()
    in_turn(trial.engine, prompts[:2], trial.engine.reset_prefix_cache)
    trial.lose_cache()
    together, preemptions = run_together(trial.engine, prompts, max_tokens=answer_tokens(words))
    assert preemptions > 0
    assert trial.audit.restored_tokens >= words.branch, "no request was restored"
    require_close(trial.audit, expected, together, trial.noise)


def test_after_preemptions_each_turn_resumes_at_the_last_boundary_of_its_answer(trial: Trial, words: Workloads) -> None:
    prompts = words.siblings(REQUESTS, seed=1)
    with engine_keeps_every_state(trial.engine):
        answers, preemptions = run_together(trial.engine, prompts, max_tokens=answer_tokens(words))
    assert preemptions > 0
    turns = [
        words.next_turn(prompt, answer.token_ids, seed=number)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    boundaries = [
        resumable(len(prompt) + len(answer.token_ids), words.block_tokens)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    # The computed part of a turn ends no block, so it stores nothing that its next run would find.
    assert boundaries == [resumable(len(turn) + ASKED_TOKENS, words.block_tokens) for turn in turns]
    # The engine still holds everything of the last requests.
    with own_cache_only(trial.engine):
        own = {number: trial.engine.generate([turns[number]])[0] for number in (REQUESTS - 1, REQUESTS - 2)}
    trial.lose_cache()
    restored = in_turn(trial.engine, turns, trial.engine.reset_prefix_cache)
    assert hits(restored) == boundaries
    assert trial.audit.mismatches == []
    same = [number for number, result in own.items() if result.num_cached_tokens == boundaries[number]]
    assert same, "the engine kept no state of any answer"
    require_same(trial.audit, [own[number] for number in same], [restored[number] for number in same])


def test_a_request_repeated_after_the_pressure_equals_the_engines_own_hit(trial: Trial, words: Workloads) -> None:
    """Exactly, because it runs alone."""
    prompts = words.siblings(REQUESTS, seed=2)
    run_together(trial.engine, prompts, max_tokens=answer_tokens(words))
    trial.lose_cache()
    [restored] = trial.engine.generate([prompts[-1]])
    with own_cache_only(trial.engine):
        [own] = trial.engine.generate([prompts[-1]])
    assert hits([restored, own]) == [resumable(len(prompts[-1]), words.block_tokens)] * 2
    require_same_output([own], [restored])
    assert trial.audit.mismatches == []
