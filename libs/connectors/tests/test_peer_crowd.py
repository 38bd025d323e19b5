"""A consumer of more producers than it may have connections: those that nobody uses make room, and no other does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from peer_ranks import Engine, Rank, Side, failures, hand_over, load, offer, tables_of, write_prompt, wrong_tokens

from hybridkv.connectors.vllm.nixl.agent.connections import ConnectionState, ProducerConnection
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan, PromptLoad, WaitingRequest
from hybridkv.connectors.vllm.nixl.params import RemotePrompt
from hybridkv.peers.tables import offered
from kits.peers.in_memory import InMemoryTransport, World

NUM_TOKENS = 23
TABLES = tables_of(Side(), NUM_TOKENS)
MAX_LINKS = 2


class Crowd:
    """A consumer of one rank, and more producers than it may be connected to."""

    def __init__(self) -> None:
        world = World()
        self.consumer, *self.producers = (
            Engine.start(Side(), lambda name: InMemoryTransport(name, world)) for _ in range(3 + MAX_LINKS)
        )
        for producer in self.producers:
            write_prompt(producer, TABLES, NUM_TOKENS)

    def prompt(self, number: int, is_planned: bool = True) -> RemotePrompt:
        return hand_over(self.producers[number], "p", TABLES, NUM_TOKENS, is_planned)

    def reads(self, number: int) -> None:
        """A prompt of one producer arrives, and its lease has ended."""
        rank, name = self.producers[number].ranks[0], f"d{number}"
        rank.results.released.clear()
        load(self.consumer, name, self.prompt(number), TABLES)
        assert failures(self.consumer, name) == [None] and wrong_tokens(self.consumer, TABLES, NUM_TOKENS) == []
        rank.until(lambda results: "p" in results.released)
        self.consumer.ranks[0].results.finished.discard(name)

    @property
    def peers(self) -> dict[str, ProducerConnection]:
        """By their names, the one that was asked for last as the last."""
        found = list(self.consumer.ranks[0].agent._connections._by_address.values())
        return {peer.address[2]: peer for peer in found}

    def name(self, number: int) -> str:
        return self.producers[number].addresses[0].name

    def connected(self, number: int) -> ProducerConnection:
        """The connection to a producer, once it is made."""
        name = self.name(number)
        self.consumer.ranks[0].until(lambda _: name in self.peers and self.peers[name].state is ConnectionState.READY)
        return self.peers[name]

    def hold(self, number: int) -> ProducerConnection:
        """A request that waits for its turn."""
        prompt = self.prompt(number)
        self.consumer.submit(lambda: NixlStepPlan(waiting=[WaitingRequest(f"h{number}", prompt)]))
        return self.connected(number)


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    monkeypatch.setattr(Rank, "max_links", MAX_LINKS)
    crowd = Crowd()
    yield crowd
    for engine in (crowd.consumer, *crowd.producers):
        engine.close()


def test_more_producers_than_connections_are_read_from_one_after_the_other(crowd: Crowd) -> None:
    for number in range(len(crowd.producers)):
        crowd.reads(number)
        assert list(crowd.peers) == [crowd.name(each) for each in range(number + 1)][-MAX_LINKS:]
    # One that was given up is connected to again.
    crowd.reads(0)


def test_who_was_asked_last_is_kept(crowd: Crowd) -> None:
    for number in (0, 1, 0, 2):
        crowd.reads(number)
    assert list(crowd.peers) == [crowd.name(0), crowd.name(2)]


def test_a_producer_whose_lease_is_held_is_not_given_up(crowd: Crowd) -> None:
    peer = crowd.hold(0)
    for number in range(1, len(crowd.producers)):
        crowd.reads(number)
    assert crowd.peers[crowd.name(0)] is peer and peer.state is ConnectionState.READY
    assert "p" not in crowd.producers[0].ranks[0].agent.take_results().released
    # Once it is needed no more, it makes room like any other.
    crowd.consumer.submit(lambda: NixlStepPlan(ended=["h0"]))
    crowd.producers[0].ranks[0].until(lambda results: "p" in results.released)
    crowd.reads(1)
    assert crowd.name(0) not in crowd.peers


def test_a_producer_that_is_read_from_is_not_given_up(crowd: Crowd) -> None:
    """Without a plan there are no digests, so the read waits. Nothing but the read knows of its producer."""
    prompt = crowd.prompt(0, is_planned=False)
    far = tables_of(Side(), NUM_TOKENS, offset=12)
    crowd.consumer.submit(lambda: NixlStepPlan(loads=[PromptLoad("d", prompt, NUM_TOKENS, 0, far)]))
    peer = crowd.connected(0)
    for number in range(1, len(crowd.producers)):
        crowd.reads(number)
    assert crowd.peers[crowd.name(0)] is peer and peer.state is ConnectionState.READY
    offer(crowd.producers[0], "p", offered(Side().groups, TABLES, NUM_TOKENS))
    assert failures(crowd.consumer, "d") == [None] and wrong_tokens(crowd.consumer, far, NUM_TOKENS) == []


def test_where_all_connections_are_used_one_more_producer_is_not_read_from(crowd: Crowd) -> None:
    used = [crowd.hold(number) for number in range(MAX_LINKS)]
    load(crowd.consumer, "d", crowd.prompt(MAX_LINKS), TABLES)
    (failure,) = failures(crowd.consumer, "d")
    assert failure is not None and failure.reason == "busy"
    assert [crowd.peers[crowd.name(number)] for number in range(MAX_LINKS)] == used
    assert all(peer.is_open for peer in used)
