"""One engine prefills and another decodes, with the tokens and log-probabilities of a single engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from equality import require_same_written
from harness import make_prompt
from peers import Two, require_same_pages

LENGTHS = (385, 641, pytest.param(1153, marks=pytest.mark.full))
"""A number of whole steps, plus one block and one token. So the last token, and the last block before it, are steps of
their own, whether one engine computes all steps or two engines share them.
"""

PROMPT_TOKENS = 385


@pytest.fixture
def pair(two: Two) -> Iterator[Two]:
    """Both engines. Requires that nothing stays allocated after the test."""
    yield two
    two.require_rest()


@pytest.fixture
def unverified(pair: Two) -> Iterator[Two]:
    """The consumer does not compare digests."""
    pair.consumer.ask("verify", is_on=False)
    yield pair
    pair.consumer.ask("verify", is_on=True)


def first_computed(result: dict[str, Any]) -> int:
    """The first token that the request computed here. The number of cached tokens includes those of the producer."""
    return int(result["steps"][0][0])


def parts(*results: dict[str, Any]) -> list[list[int]]:
    """First token and number of tokens of each step."""
    return [step[:2] for result in results for step in result["steps"]]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_an_engine_continues_what_another_prefilled(pair: Two, num_tokens: int) -> None:
    prompt = make_prompt(num_tokens, seed=num_tokens)
    cold = pair.decode(prompt, None)
    pair.consumer.ask("forget")
    prefilled = pair.prefill(prompt)
    warm = pair.decode(prompt, prefilled["params"])
    assert first_computed(warm) == num_tokens - 1
    assert parts(prefilled, warm) == parts(cold)
    require_same_written([cold], [warm])
    require_same_pages(prefilled, warm)


def mixed_up(pair: Two, prompt: list[int], other: list[int], group: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of `prompt` with one group's blocks replaced by those of `other`, and the parameters of
    `other`.
    """
    wrong, params = pair.prefill(other)["params"], pair.prefill(prompt)["params"]
    mixed = copy.deepcopy(params)
    mixed["remote_block_ids"][group] = wrong["remote_block_ids"][group]
    return mixed, wrong


def test_each_group_is_read(unverified: Two) -> None:
    """Control of the tests above: without verification, wrong blocks of one group change the answer."""
    prompt, other = make_prompt(PROMPT_TOKENS, seed=7), make_prompt(PROMPT_TOKENS, seed=8)
    cold = unverified.decode(prompt, None)
    unverified.consumer.ask("forget")
    prefilled = unverified.prefill(prompt)
    unverified.decode(prompt, prefilled["params"])
    for group in range(len(prefilled["handed_over"])):
        unverified.consumer.ask("forget")
        mixed, wrong = mixed_up(unverified, prompt, other, group)
        got = unverified.decode(prompt, mixed)
        assert first_computed(got) == PROMPT_TOKENS - 1
        assert (got["tokens"], got["logprobs"]) != (cold["tokens"], cold["logprobs"]), f"group {group}"
        with pytest.raises(AssertionError, match=f"group {group}"):
            require_same_pages(prefilled, got)
        unverified.decode(other, wrong)


def test_blocks_outside_the_lease_are_not_accepted(pair: Two) -> None:
    """The producer's digests cover the blocks of the lease, even if a proxy changed the list; the prompt is
    computed.
    """
    prompt, other = make_prompt(PROMPT_TOKENS, seed=7), make_prompt(PROMPT_TOKENS, seed=8)
    cold = pair.decode(prompt, None)
    params = pair.prefill(prompt)["params"]
    pair.decode(prompt, params)
    for group in range(len(params["remote_block_ids"])):
        pair.consumer.ask("forget")
        mixed, wrong = mixed_up(pair, prompt, other, group)
        got = pair.decode(prompt, mixed)
        assert first_computed(got) == 0
        require_same_written([cold], [got])
        pair.decode(other, wrong)
