"""Consumers with more producers than connections: only an unused connection is closed for a new one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from peer_ranks import (
    LEASE_S,
    Engine,
    Rank,
    Side,
    failures,
    hand_over,
    load,
    offer,
    tables_of,
    write_prompt,
    wrong_tokens,
)

from hybridkv.connectors.vllm.nixl.agent.connections import ConnectionState, ProducerConnection
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan, PromptLoad, WaitingRequest
from hybridkv.connectors.vllm.nixl.params import RemotePrompt
from hybridkv.peers.tables import offered
from kits.peers.in_memory import InMemoryTransport, World

NUM_TOKENS = 23
TABLES = tables_of(Side(), NUM_TOKENS)
MAX_LINKS = 2


class Crowd:
    """Consumer with one rank, and more producers than it may be connected to."""

    def __init__(self) -> None:
        world = World()
        self.consumer, *self.producers = (
            Engine.start(Side(), lambda name: InMemoryTransport(name, world)) for _ in range(3 + MAX_LINKS)
        )
        for producer in self.producers:
            write_prompt(producer, TABLES, NUM_TOKENS)

    def prompt(self, number: int, is_planned: bool = True) -> RemotePrompt:
        return hand_over(self.producers[number], "p", TABLES, NUM_TOKENS, is_planned)

    def read_from(self, number: int) -> None:
        """Load a prompt of one producer and wait for the end of its lease."""
        rank, name = self.producers[number].ranks[0], f"d{number}"
        rank.results.released.clear()
        load(self.consumer, name, self.prompt(number), TABLES)
        assert failures(self.consumer, name) == [None] and wrong_tokens(self.consumer, TABLES, NUM_TOKENS) == []
        rank.until(lambda results: "p" in results.released)
        self.consumer.ranks[0].results.finished.discard(name)

    @property
    def peers(self) -> dict[str, ProducerConnection]:
        """By name, the most recently used one last."""
        found = list(self.consumer.ranks[0].agent._connections._by_address.values())
        return {peer.address[2]: peer for peer in found}

    def name(self, number: int) -> str:
        return self.producers[number].addresses[0].name

    def connected(self, number: int) -> ProducerConnection:
        """Connection to a producer, once it is ready."""
        name = self.name(number)
        self.consumer.ranks[0].until(lambda _: name in self.peers and self.peers[name].state is ConnectionState.READY)
        return self.peers[name]

    def begin_waiting(self, number: int) -> ProducerConnection:
        """Start a request that waits in the consumer's queue."""
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


def test_more_producers_than_connections_are_read_in_turn(crowd: Crowd) -> None:
    for number in range(len(crowd.producers)):
        crowd.read_from(number)
        assert list(crowd.peers) == [crowd.name(each) for each in range(number + 1)][-MAX_LINKS:]
    # A closed connection is opened again.
    crowd.read_from(0)


def test_the_most_recently_used_connection_is_kept(crowd: Crowd) -> None:
    for number in (0, 1, 0, 2):
        crowd.read_from(number)
    assert list(crowd.peers) == [crowd.name(0), crowd.name(2)]


def test_a_connection_with_a_held_lease_is_not_closed(crowd: Crowd) -> None:
    peer = crowd.begin_waiting(0)
    for number in range(1, len(crowd.producers)):
        crowd.read_from(number)
    assert crowd.peers[crowd.name(0)] is peer and peer.state is ConnectionState.READY
    assert "p" not in crowd.producers[0].ranks[0].agent.take_results().released
    # After its last use it can be closed like any other.
    crowd.consumer.submit(lambda: NixlStepPlan(ended=["h0"]))
    crowd.producers[0].ranks[0].until(lambda results: "p" in results.released)
    crowd.read_from(1)
    assert crowd.name(0) not in crowd.peers


def test_a_connection_in_use_by_a_read_is_not_closed(crowd: Crowd) -> None:
    """Without a plan there are no digests, so that the read waits. Only the read refers to its producer."""
    prompt = crowd.prompt(0, is_planned=False)
    far = tables_of(Side(), NUM_TOKENS, offset=12)
    crowd.consumer.submit(lambda: NixlStepPlan(loads=[PromptLoad("d", prompt, NUM_TOKENS, 0, far)]))
    peer = crowd.connected(0)
    for number in range(1, len(crowd.producers)):
        crowd.read_from(number)
    assert crowd.peers[crowd.name(0)] is peer and peer.state is ConnectionState.READY
    offer(crowd.producers[0], "p", offered(Side().groups, TABLES, NUM_TOKENS))
    assert failures(crowd.consumer, "d") == [None] and wrong_tokens(crowd.consumer, far, NUM_TOKENS) == []


def test_a_read_fails_as_busy_if_all_connections_are_in_use(crowd: Crowd) -> None:
    used = [crowd.begin_waiting(number) for number in range(MAX_LINKS)]
    load(crowd.consumer, "d", crowd.prompt(MAX_LINKS), TABLES)
    (failure,) = failures(crowd.consumer, "d")
    assert failure is not None and failure.reason == "busy"
    assert [crowd.peers[crowd.name(number)] for number in range(MAX_LINKS)] == used
    assert all(peer.is_open for peer in used)


def test_more_consumers_than_connections_are_served_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that was silent for a lease makes room for another, and connects again for its next load."""
    monkeypatch.setattr(Rank, "max_links", MAX_LINKS)
    passed_s = [0.0]
    world = World()
    with monkeypatch.context() as patched:
        patched.setattr(Rank, "clock", lambda _: time.monotonic() + passed_s[0])
        producer = Engine.start(Side(), lambda name: InMemoryTransport(name, world))
    write_prompt(producer, TABLES, NUM_TOKENS)
    consumers = [Engine.start(Side(), lambda name: InMemoryTransport(name, world)) for _ in range(2 * MAX_LINKS)]
    for turn, consumer in enumerate(consumers * 2):
        name, agent = f"d{turn}", consumer.ranks[0].agent
        # The producer may have ended its connection just now.
        consumer.ranks[0].until(lambda _, agent=agent: not agent._connections._by_address)  # type: ignore[misc]
        load(consumer, name, hand_over(producer, name, TABLES, NUM_TOKENS), TABLES)
        assert failures(consumer, name) == [None] and wrong_tokens(consumer, TABLES, NUM_TOKENS) == []
        producer.ranks[0].until(lambda results, name=name: name in results.released)  # type: ignore[misc]
        passed_s[0] += LEASE_S
    for each in (*consumers, producer):
        each.close()
