"""One engine prefills and another decodes: the same tokens and log-probabilities as one engine alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from equality import require_same_written
from harness import make_prompt
from peers import Two, require_same_pages

LENGTHS = (385, 641, pytest.param(1153, marks=pytest.mark.full))
"""One more than a number of whole steps and one block: so that the last token is a step of its own, and the last block
before it, whether one engine computes all of them or two."""

PROMPT_TOKENS = 385


@pytest.fixture
def pair(two: Two) -> Iterator[Two]:
    """Nothing is left behind."""
    yield two
    two.require_rest()


@pytest.fixture
def careless(pair: Two) -> Iterator[Two]:
    """The consumer compares no digests."""
    pair.consumer.ask("verify", is_on=False)
    yield pair
    pair.consumer.ask("verify", is_on=True)


def first_computed(result: dict[str, Any]) -> int:
    """The token at which the request began to compute here. What it reports as cached, its producer counted."""
    return int(result["steps"][0][0])


def parts(*results: dict[str, Any]) -> list[list[int]]:
    """First token and number of tokens of each step."""
    return [step[:2] for result in results for step in result["steps"]]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_what_one_engine_computed_another_goes_on_with(pair: Two, num_tokens: int) -> None:
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
    """The parameters of a prompt with one group's blocks of another one's, and those of that."""
    wrong, params = pair.prefill(other)["params"], pair.prefill(prompt)["params"]
    mixed = copy.deepcopy(params)
    mixed["remote_block_ids"][group] = wrong["remote_block_ids"][group]
    return mixed, wrong


def test_each_group_is_read(careless: Two) -> None:
    """The control of the tests above: another block of one group gives another answer where nobody looks."""
    prompt, other = make_prompt(PROMPT_TOKENS, seed=7), make_prompt(PROMPT_TOKENS, seed=8)
    cold = careless.decode(prompt, None)
    careless.consumer.ask("forget")
    prefilled = careless.prefill(prompt)
    careless.decode(prompt, prefilled["params"])
    for group in range(len(prefilled["handed_over"])):
        careless.consumer.ask("forget")
        mixed, wrong = mixed_up(careless, prompt, other, group)
        got = careless.decode(prompt, mixed)
        assert first_computed(got) == PROMPT_TOKENS - 1
        assert (got["tokens"], got["logprobs"]) != (cold["tokens"], cold["logprobs"]), f"group {group}"
        with pytest.raises(AssertionError, match=f"group {group}"):
            require_same_pages(prefilled, got)
        careless.decode(other, wrong)


def test_blocks_that_the_lease_does_not_hold_are_not_taken(pair: Two) -> None:
    """The producer digests the blocks of the lease, whatever a proxy made of the list: the prompt is computed."""
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
