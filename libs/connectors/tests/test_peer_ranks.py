"""Engines with several ranks: each rank reads its heads from the ranks that hold them, and each lease ends once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from peer_ranks import Engine, Side, failures, hand_over, load, offer, tables_of, write_prompt, wrong_tokens

from hybridkv.connectors.vllm.nixl.memory.rank_memory import NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan
from hybridkv.metrics import PEER_FAILURES
from hybridkv.peers.ranges import Ranges
from hybridkv.peers.reads import ReadFailure
from hybridkv.peers.tables import offered
from hybridkv.peers.transport import TransferId, Transport
from hybridkv.peers.transport.nixl import NixlTransport
from kits.peers.in_memory import InMemoryTransport, World

Opener = Callable[[str], Transport]
NUM_TOKENS = 23
SIZES = [(2, 1), (1, 2), (2, 2), (4, 2), (1, 4), (8, 2), (2, 8)]


@pytest.fixture(params=["in_memory", "nixl"])
def opener(request: pytest.FixtureRequest) -> Opener:
    world = World()
    if request.param == "nixl":
        return NixlTransport
    return lambda name: InMemoryTransport(name, world)


@contextmanager
def engines(theirs: Side, ours: Side, opener: Opener, verify: bool = True) -> Iterator[tuple[Engine, Engine]]:
    producer, consumer = Engine.start(theirs, opener), Engine.start(ours, opener, verify)
    try:
        yield producer, consumer
    finally:
        consumer.close()
        producer.close()


def require_released(producer: Engine, request_id: str) -> None:
    for rank in producer.ranks:
        rank.until(lambda results: request_id in results.released)


@pytest.mark.parametrize(("their_size", "our_size"), SIZES)
def test_each_rank_gets_each_token_of_its_heads(opener: Opener, their_size: int, our_size: int) -> None:
    theirs, ours = Side(4, their_size), Side(8, our_size, heads_first=False)
    with engines(theirs, ours, opener) as (producer, consumer):
        there, here = tables_of(theirs, NUM_TOKENS), tables_of(ours, NUM_TOKENS)
        write_prompt(producer, there, NUM_TOKENS)
        assert wrong_tokens(consumer, here, NUM_TOKENS), "the blocks are wrong before the load"
        load(consumer, "d", hand_over(producer, "p", there, NUM_TOKENS), here)
        assert failures(consumer, "d") == [None] * our_size
        assert wrong_tokens(consumer, here, NUM_TOKENS) == []
        # The leases are too long to expire during the test.
        require_released(producer, "p")


def test_a_window_is_read_into_larger_blocks_at_each_prompt_length() -> None:
    """The window's first block begins before the producer's first block with tokens of the window."""
    world = World()
    theirs, ours = Side(2), Side(8)
    with engines(theirs, ours, lambda name: InMemoryTransport(name, world)) as (producer, consumer):
        for num_tokens in range(14, 23):
            there, here = tables_of(theirs, num_tokens), tables_of(ours, num_tokens)
            write_prompt(producer, there, num_tokens)
            load(consumer, f"d{num_tokens}", hand_over(producer, f"p{num_tokens}", there, num_tokens), here)
            assert failures(consumer, f"d{num_tokens}") == [None], num_tokens
            assert wrong_tokens(consumer, here, num_tokens) == []
            require_released(producer, f"p{num_tokens}")


def test_a_lease_is_held_until_all_readers_are_done() -> None:
    world = World()
    theirs, ours = Side(tp_size=1), Side(tp_size=2)
    with engines(theirs, ours, lambda name: InMemoryTransport(name, world)) as (producer, consumer):
        there, here = tables_of(theirs, NUM_TOKENS), tables_of(ours, NUM_TOKENS)
        write_prompt(producer, there, NUM_TOKENS)
        prompt = hand_over(producer, "p", there, NUM_TOKENS)
        first, second = (Engine(ours, [rank]) for rank in consumer.ranks)
        load(first, "d", prompt, here)
        assert failures(first, "d") == [None]
        # With an ended lease this load would fail.
        load(second, "d", prompt, here)
        assert failures(second, "d") == [None]
        assert wrong_tokens(consumer, here, NUM_TOKENS) == []
        require_released(producer, "p")


def test_a_consumer_faster_than_the_plan_waits_for_its_digests(opener: Opener) -> None:
    side = Side(tp_size=2)
    with engines(side, Side(), opener) as (producer, consumer):
        there, here = tables_of(side, NUM_TOKENS), tables_of(Side(), NUM_TOKENS)
        write_prompt(producer, there, NUM_TOKENS)
        load(consumer, "d", hand_over(producer, "p", there, NUM_TOKENS, is_planned=False), here)
        consumer.ranks[0].until(lambda results: not np.all(consumer.ranks[0].pages[0] == 0xEE))
        assert not consumer.ranks[0].results.finished
        offer(producer, "p", offered(side.groups, there, NUM_TOKENS))
        assert failures(consumer, "d") == [None]
        require_released(producer, "p")


class Damaging(InMemoryTransport):
    """Changes the first byte of everything read in several ranges."""

    def release(self, transfer: TransferId) -> bool:
        ranges = self._reads[transfer][1] if transfer in self._reads else Ranges.of([])
        if len(ranges) > 1:
            ctypes.memset(int(self.memory.places(ranges.local_regions, ranges.local_offsets)[0]), 0xFF, 1)
        return super().release(transfer)


@pytest.mark.parametrize("verify", [True, False])
def test_a_byte_changed_in_transfer_is_detected_by_the_digests(verify: bool) -> None:
    world = World()
    side = Side(tp_size=2)
    opened = iter([InMemoryTransport, InMemoryTransport, Damaging])
    with engines(side, Side(), lambda name: next(opened)(name, world), verify) as (producer, consumer):
        there, here = tables_of(side, NUM_TOKENS), tables_of(Side(), NUM_TOKENS)
        write_prompt(producer, there, NUM_TOKENS)
        load(consumer, "d", hand_over(producer, "p", there, NUM_TOKENS), here)
        (failure,) = failures(consumer, "d")
        assert wrong_tokens(consumer, here, NUM_TOKENS)
        assert (failure is None) is not verify
        if failure is not None:
            assert failure.reason == "digest" and "of group" in failure.detail
        require_released(producer, "p")


def test_a_lease_that_ended_on_one_rank_fails_the_whole_request(opener: Opener) -> None:
    side = Side(tp_size=2)
    with engines(side, Side(), opener, verify=False) as (producer, consumer):
        there, here = tables_of(side, NUM_TOKENS), tables_of(Side(), NUM_TOKENS)
        write_prompt(producer, there, NUM_TOKENS)
        prompt = hand_over(producer, "p", there, NUM_TOKENS)
        producer.ranks[1].agent.submit(NixlStepPlan(dropped=["p"]))
        load(consumer, "d", prompt, here)
        (failure,) = failures(consumer, "d")
        assert failure is not None and failure.reason == "lease"
        producer.ranks[0].until(lambda results: "p" in results.released)


def test_without_the_nonce_check_an_ended_lease_would_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control for the test above."""
    monkeypatch.setattr(NixlRankMemory, "has_nonce", lambda self, place, nonce: True)
    world = World()
    side = Side(tp_size=2)
    opener = lambda name: InMemoryTransport(name, world)  # noqa: E731
    with engines(side, Side(), opener, verify=False) as (producer, consumer):
        there, here = tables_of(side, NUM_TOKENS), tables_of(Side(), NUM_TOKENS)
        write_prompt(producer, there, NUM_TOKENS)
        prompt = hand_over(producer, "p", there, NUM_TOKENS)
        producer.ranks[1].agent.submit(NixlStepPlan(dropped=["p"]))
        load(consumer, "d", prompt, here)
        assert failures(consumer, "d") == [None]


def test_blocks_outside_the_lease_are_not_accepted(opener: Opener) -> None:
    """A proxy's list may name any block; the producer digests the blocks of the lease."""
    side = Side(tp_size=2)
    with engines(side, Side(), opener) as (producer, consumer):
        there, here = tables_of(side, NUM_TOKENS), tables_of(Side(), NUM_TOKENS)
        write_prompt(producer, there, NUM_TOKENS)
        prompt = hand_over(producer, "p", there, NUM_TOKENS)
        ids = list(prompt.block_ids)
        ids[0] = (*ids[0][1:], ids[0][0])
        load(consumer, "d", msgspec.structs.replace(prompt, block_ids=tuple(ids)), here)
        (failure,) = failures(consumer, "d")
        assert failure is not None and failure.reason == "digest"
        require_released(producer, "p")


@pytest.mark.parametrize("our_size", [1, 2])
@pytest.mark.parametrize("order", [(0,), (1,), (1, 0), (0, 0)])
def test_a_list_of_ranks_other_than_the_producers_is_not_read(order: tuple[int, ...], our_size: int) -> None:
    """A proxy carries the list. Without the check both sides would digest the same bytes, with missing heads."""
    world = World()
    side, ours = Side(tp_size=2), Side(tp_size=our_size)
    with engines(side, ours, lambda name: InMemoryTransport(name, world)) as (producer, consumer):
        there, here = tables_of(side, NUM_TOKENS), tables_of(ours, NUM_TOKENS)
        write_prompt(producer, there, NUM_TOKENS)
        prompt = hand_over(producer, "p", there, NUM_TOKENS)
        ranks = tuple(prompt.ranks[rank] for rank in order)
        load(consumer, "d", msgspec.structs.replace(prompt, ranks=ranks), here)
        # One failed rank is enough: the request is computed.
        details = [each.detail for each in failures(consumer, "d") if each is not None and each.reason == "pairing"]
        assert details and all("expected rank" in detail for detail in details)


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (Side(tp_size=2, total_heads=0), Side(tp_size=1, total_heads=0), "tp_size"),
        (Side(tp_size=1, total_heads=6), Side(tp_size=2, total_heads=4), "total_heads"),
        (Side(tp_size=1, total_heads=0), Side(tp_size=1, total_heads=4), "total_heads"),
        (Side(block_tokens=6), Side(block_tokens=4), "block_tokens"),
    ],
)
def test_an_incompatible_engine_is_refused_and_the_blocks_are_released(theirs: Side, ours: Side, words: str) -> None:
    world = World()
    with engines(theirs, ours, lambda name: InMemoryTransport(name, world)) as (producer, consumer):
        there, here = tables_of(theirs, NUM_TOKENS), tables_of(ours, NUM_TOKENS)
        load(consumer, "d", hand_over(producer, "p", there, NUM_TOKENS), here)
        for failure in failures(consumer, "d"):
            assert failure is not None and failure.reason == "refused" and words in failure.detail
        require_released(producer, "p")


def test_a_request_that_ends_first_ends_its_read_and_frees_all_ranks(opener: Opener) -> None:
    side = Side(tp_size=2)
    with engines(side, Side(), opener) as (producer, consumer):
        there, here = tables_of(side, NUM_TOKENS), tables_of(Side(), NUM_TOKENS)
        # Without a plan there are no digests, so that the read cannot end by itself.
        prompt = hand_over(producer, "p", there, NUM_TOKENS, is_planned=False)
        load(consumer, "d", prompt, here)
        consumer.submit(lambda: NixlStepPlan(ended=["d"]))
        (failure,) = failures(consumer, "d")
        assert failure is not None and failure.reason == "cancelled"
        offer(producer, "p", offered(side.groups, there, NUM_TOKENS))
        require_released(producer, "p")


def test_each_failure_reason_is_a_metric_label() -> None:
    assert {str(reason) for reason in ReadFailure} == set(PEER_FAILURES)
