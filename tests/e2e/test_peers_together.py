"""Sixteen concurrent requests move from one engine to another, some are aborted on the way, and nothing stays
allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from equality import require_close_written
from harness import make_prompt
from peers import Two, require_same_pages

Written = dict[str, Any]
PREFIX_TOKENS = 384
LENGTHS = (513, 600, 641, 769)
"""Lengths of four prompts with one prefix. All but the second end with whole blocks, which the next turn finds at the
consumer.
"""
BLOCK_TOKENS = 128
"""A multiple of every block size."""
TURN_TOKENS = 256
ABORTS = ("WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING")
"""The status of requests when the consumer aborts them: not admitted, loading, answering."""


def prompts_of(seed: int) -> list[list[int]]:
    """Sixteen prompts: four groups of four that share a prefix."""
    prefixes = [make_prompt(PREFIX_TOKENS, seed=seed + 100 + i) for i in range(4)]
    return [
        make_prompt(length, seed=seed + 10 * i + j, prefix=prefix)
        for i, prefix in enumerate(prefixes)
        for j, length in enumerate(LENGTHS)
    ]


def computed_here(two: Two, prompts: Sequence[Sequence[int]]) -> list[Written]:
    """The consumer's own answers. Its cache is empty before and after."""
    two.consumer.ask("forget")
    names = [two.ask_to_decode(prompt, None) for prompt in prompts]
    results = [two.consumer.result(name) for name in names]
    two.consumer.ask("forget")
    return results


def handed_over(two: Two, prompts: Sequence[Sequence[int]]) -> tuple[list[Written], list[Written]]:
    """Send all prompts to the producer at once, and each to the consumer as soon as it is prefilled."""
    asked = [two.ask_to_prefill(prompt) for prompt in prompts]
    prefilled, names = [], []
    for prompt, name in zip(prompts, asked, strict=True):
        prefilled.append(two.producer.result(name))
        names.append(two.ask_to_decode(prompt, prefilled[-1]["params"]))
    return prefilled, [two.consumer.result(name) for name in names]


def require_same_answers(two: Two, cold: list[Written], prefilled: list[Written], warm: list[Written]) -> None:
    assert len(warm) == len(cold) > 0
    for each, result in zip(prefilled, warm, strict=True):
        assert result["steps"][0][0] == each["params"]["remote_num_tokens"], "the consumer computed the prompt"
        require_same_pages(each, result)
    require_close_written(cold, warm, two.tolerance)


def test_sixteen_concurrent_requests_and_their_second_turns(two: Two) -> None:
    prompts = prompts_of(1000)
    first = handed_over(two, prompts)
    goes_on = [i for i, prompt in enumerate(prompts) if (len(prompt) - 1) % BLOCK_TOKENS == 0]
    turns = [
        make_prompt(len(prompts[i]) + TURN_TOKENS, seed=i, prefix=[*prompts[i], *first[1][i]["tokens"]])
        for i in goes_on
    ]
    second = handed_over(two, turns)
    # Tokens that it held from the first turn were not read again.
    assert [each["local"] for each in second[1]] == [len(prompts[i]) - 1 for i in goes_on]
    two.require_rest()
    require_same_answers(two, computed_here(two, prompts), *first)
    require_same_answers(two, computed_here(two, turns), *second)


@pytest.mark.parametrize("when", ABORTS)
def test_aborts_leave_nothing_allocated(two: Two, when: str) -> None:
    """Every second of sixteen requests is aborted at the consumer, and one more while the producer computes it."""
    prompts = prompts_of(2000)
    cold = computed_here(two, prompts)
    dropped = two.ask_to_prefill(make_prompt(1500, seed=3), abort_when="RUNNING")
    asked = [two.ask_to_prefill(prompt) for prompt in prompts]
    prefilled, names = [], []
    for i, name in enumerate(asked):
        prefilled.append(two.producer.result(name))
        end = {"max_tokens": 64, "abort_when": when} if i % 2 else {}
        names.append(two.ask_to_decode(prompts[i], prefilled[i]["params"], **end))
    results = [two.consumer.result(name) for name in names]
    assert two.producer.result(dropped) == {"aborted": "RUNNING"}
    assert results[1::2] == [{"aborted": when}] * 8
    require_same_answers(two, cold[::2], prefilled[::2], results[::2])
    two.require_rest()


def test_blocks_of_another_prompt_are_detected(two: Two) -> None:
    """Control of the answers: they differ if digests are not compared."""
    prompts = prompts_of(3000)[:: len(LENGTHS)]
    cold = computed_here(two, prompts)
    prefilled = [two.prefill(prompt) for prompt in prompts]
    blocks = [each["params"]["remote_block_ids"] for each in prefilled]
    others = [each["params"] | {"remote_block_ids": ids} for each, ids in zip(prefilled, blocks[::-1], strict=True)]
    two.consumer.ask("verify", is_on=False)
    try:
        warm = [two.decode(prompt, params) for prompt, params in zip(prompts, others, strict=True)]
    finally:
        two.consumer.ask("verify", is_on=True)
    for ours, theirs, got in zip(cold, prefilled, warm, strict=True):
        with pytest.raises(AssertionError, match="other pages"):
            require_same_pages(theirs, got)
        with pytest.raises(AssertionError):
            require_close_written([ours], [got], two.tolerance_so_far)
    two.require_rest()


def test_a_lease_that_does_not_end_is_detected(two: Two) -> None:
    """Control of the leftover checks, at a producer."""
    prompt = make_prompt(641, seed=4)
    prefilled = two.prefill(prompt)
    assert {"free blocks", "requests", "leases", "offered", "slots with a nonce"} <= two.left_behind()["producer"]
    assert two.left_behind()["consumer"] == set()
    two.decode(prompt, prefilled["params"])
    two.require_rest()


def test_a_read_that_does_not_end_is_detected(two: Two) -> None:
    """Control of the leftover checks, at a consumer: its producer is silent."""
    prompt = make_prompt(641, seed=5)
    prefilled = two.prefill(prompt)
    with two.producer.stopped():
        name = two.ask_to_decode(prompt, prefilled["params"])
        two.consumer.wait_until_held("reads")
        left = two.consumer.left_behind()
    assert {"free blocks", "requests", "reads", "leases of others", "requests with a producer"} <= left
    two.consumer.result(name)
    two.require_rest()
