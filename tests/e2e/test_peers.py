"""One engine prefills and another decodes: the same tokens and log-probabilities as one engine alone."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
from equality import require_same_written
from harness import make_prompt, scratch_directory
from peers import PeerProcess, transfer_config

LENGTHS = (513, 1025, 1537)
"""One more than whole steps: so the last token is a step of its own, whoever computed the others."""
TRANSPORT = os.environ.get("HYBRIDKV_E2E_TRANSPORT", "tcp")


class Two:
    """A producer and a consumer. `free`: blocks of each while nothing is held."""

    def __init__(self, producer: PeerProcess, consumer: PeerProcess, free: tuple[int, int]) -> None:
        self.producer, self.consumer = producer, consumer
        self.free = free
        self._count = 0

    def name(self, word: str) -> str:
        self._count += 1
        return f"{word}{self._count}"

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        name = self.name("p")
        self.producer.add(name, prompt, max_tokens=1, params={"do_remote_decode": True, "do_remote_prefill": False})
        params: dict[str, Any] = self.producer.result(name)["params"]
        return params

    def decode(self, prompt: list[int], params: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
        name = self.name("d")
        self.consumer.add(name, prompt, params=params)
        return name, self.consumer.result(name)

    def forget(self) -> None:
        """Neither has anything cached, and neither holds a block of anybody."""
        assert (self.producer.ask("idle"), self.consumer.ask("idle")) == self.free
        self.producer.ask("forget")
        self.consumer.ask("forget")


@pytest.fixture(scope="module")
def two(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    directory = scratch_directory(tmp_path_factory.mktemp("peers"))
    extra = {"transport": TRANSPORT}
    producer = PeerProcess(kind, directory / "producer", transfer_config("kv_producer", **extra))
    consumer = PeerProcess(kind, directory / "consumer", transfer_config("kv_consumer", **extra))
    try:
        yield Two(producer, consumer, (producer.wait_until_ready(), consumer.wait_until_ready()))
    finally:
        consumer.end()
        producer.end()


@pytest.fixture
def pair(two: Two) -> Iterator[Two]:
    yield two
    two.forget()


@pytest.fixture
def careless(kind: str, two: Two, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """A second consumer, which compares no digests."""
    directory = scratch_directory(tmp_path_factory.mktemp("careless"))
    consumer = PeerProcess(kind, directory, transfer_config("kv_consumer", transport=TRANSPORT, verify=False))
    try:
        both = Two(two.producer, consumer, (two.free[0], consumer.wait_until_ready()))
        yield both
        both.forget()
    finally:
        consumer.end()


def first_computed(result: dict[str, Any]) -> int:
    """The first token that the consumer computed. (`cached` is what the producer had cached: vLLM passes that on.)"""
    first: int = result["steps"][0][0]
    return first


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_what_one_engine_computed_another_goes_on_with(pair: Two, num_tokens: int) -> None:
    prompt = make_prompt(num_tokens, seed=num_tokens)
    _, cold = pair.decode(prompt, None)
    pair.consumer.ask("forget")
    params = pair.prefill(prompt)
    held = pair.producer.ask(
        "digests", block_ids=params["remote_block_ids"], first_blocks=params["hybridkv"]["first_blocks"]
    )
    name, warm = pair.decode(prompt, params)
    assert first_computed(warm) == num_tokens - 1
    require_same_written([cold], [warm])
    loaded = pair.consumer.ask("loaded", request=name)
    for theirs, ours in zip(held, loaded, strict=True):
        assert theirs and all(ours[place] == digest for place, digest in theirs.items())


def mixed_up(pair: Two, prompt: list[int], other: list[int], group: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of a prompt with one group's blocks of another one's, and those of that."""
    wrong, params = pair.prefill(other), pair.prefill(prompt)
    mixed = copy.deepcopy(params)
    mixed["remote_block_ids"][group] = wrong["remote_block_ids"][group]
    return mixed, wrong


def test_each_group_is_read(careless: Two) -> None:
    """The control of the tests above: another block of one group gives another answer where nobody looks."""
    prompt, other = make_prompt(1025, seed=7), make_prompt(1025, seed=8)
    _, cold = careless.decode(prompt, None)
    params = careless.prefill(prompt)
    careless.consumer.ask("forget")
    careless.decode(prompt, params)
    for group in range(len(params["remote_block_ids"])):
        careless.consumer.ask("forget")
        mixed, wrong = mixed_up(careless, prompt, other, group)
        _, got = careless.decode(prompt, mixed)
        assert first_computed(got) == 1024
        assert (got["tokens"], got["logprobs"]) != (cold["tokens"], cold["logprobs"]), f"group {group}"
        careless.decode(other, wrong)
    careless.consumer.ask("forget")


def test_blocks_that_the_lease_does_not_hold_are_not_taken(pair: Two) -> None:
    """The producer digests the blocks of the lease, whatever a proxy made of the list: the prompt is computed."""
    prompt, other = make_prompt(1025, seed=7), make_prompt(1025, seed=8)
    _, cold = pair.decode(prompt, None)
    params = pair.prefill(prompt)
    pair.decode(prompt, params)
    for group in range(len(params["remote_block_ids"])):
        pair.consumer.ask("forget")
        mixed, wrong = mixed_up(pair, prompt, other, group)
        _, got = pair.decode(prompt, mixed)
        assert first_computed(got) == 0
        require_same_written([cold], [got])
        pair.decode(other, wrong)
    pair.consumer.ask("forget")
