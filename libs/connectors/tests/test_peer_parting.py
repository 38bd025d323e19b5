"""Ends of leases reach a producer after a lost connection, within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import patience
import pytest
from peer_ranks import Engine, Rank, Side, failures, hand_over, load, tables_of, write_prompt, wrong_tokens

from hybridkv.connectors.vllm.nixl.agent import remote_leases
from hybridkv.connectors.vllm.nixl.agent.connections import ConnectionState, ControlChannel, ProducerConnection
from hybridkv.connectors.vllm.nixl.agent.remote_leases import (
    MAX_RECONNECTS,
    RECONNECT_S,
    RENEWALS_PER_LEASE,
    RemoteLeases,
)
from hybridkv.connectors.vllm.nixl.messages import NixlLoadFailure, NixlStepPlan, WaitingRequest
from hybridkv.connectors.vllm.nixl.params import RankAddress, RemotePrompt
from hybridkv.peers.control import LinkId
from hybridkv.peers.leases import Lease
from hybridkv.peers.ranks import RankLink
from hybridkv.peers.wire import LeaseDone, Message, Renew
from kits.peers.in_memory import InMemoryTransport, World

NUM_TOKENS = 23
TABLES = tables_of(Side(), NUM_TOKENS)
LEASE_S = 20.0
PROMPT = RemotePrompt(
    engine_id="producer",
    request_id="p",
    host="h",
    ranks=(RankAddress(1, "n"),),
    num_tokens=NUM_TOKENS,
    block_ids=((1,), (2,)),
    first_blocks=(0, 0),
    block_tokens=(4, 4),
    lease=Lease(3, 5),
    lease_seconds=LEASE_S,
    prefix_tokens=NUM_TOKENS,
    prefix="prefix",
)
GONE = NixlLoadFailure("gone", "the connection ended")


# With real connections. Leases are so long that only a message ends them.


@pytest.fixture
def pair() -> Iterator[tuple[Engine, Engine]]:
    world = World()
    producer, consumer = (Engine.start(Side(), lambda name: InMemoryTransport(name, world)) for _ in range(2))
    write_prompt(producer, TABLES, NUM_TOKENS)
    yield producer, consumer
    consumer.close()
    producer.close()


def peers_of(rank: Rank) -> list[ProducerConnection]:
    return list(rank.agent._connections._by_address.values())


def connect(rank: Rank) -> ProducerConnection:
    """The only connection of a consumer's rank, once it is ready."""
    patience.wait_until(
        lambda: any(peer.state is ConnectionState.READY for peer in peers_of(rank)), "the consumer is connected"
    )
    (peer,) = peers_of(rank)
    return peer


def cut_off(rank: Rank) -> None:
    """End the connection; the consumer's rank has noticed."""
    peer = connect(rank)
    rank.agent._loop.end(peer.link)
    patience.wait_until(lambda: peer.state is ConnectionState.OVER, "the connection has ended")


def test_a_request_that_ends_after_a_cut_releases_the_blocks(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    prompt = hand_over(producer, "p", TABLES, NUM_TOKENS)
    consumer.submit(lambda: NixlStepPlan(waiting=[WaitingRequest("d", prompt)]))
    cut_off(consumer.ranks[0])
    assert producer.ranks[0].agent.take_results().released == set(), "the consumer may come back"
    consumer.submit(lambda: NixlStepPlan(ended=["d"]))
    producer.ranks[0].until(lambda results: "p" in results.released)


def test_a_read_after_a_cut_releases_the_blocks(pair: tuple[Engine, Engine]) -> None:
    """The read connects again, and later messages use that connection."""
    producer, consumer = pair
    prompt = hand_over(producer, "p", TABLES, NUM_TOKENS)
    consumer.submit(lambda: NixlStepPlan(waiting=[WaitingRequest("e", prompt)]))
    cut_off(consumer.ranks[0])
    load(consumer, "d", prompt, TABLES)
    assert failures(consumer, "d") == [None] and wrong_tokens(consumer, TABLES, NUM_TOKENS) == []
    assert producer.ranks[0].agent.take_results().released == set(), "another request has the same lease"
    consumer.submit(lambda: NixlStepPlan(ended=["e"]))
    producer.ranks[0].until(lambda results: "p" in results.released)


# Step by step.


@dataclass
class Producer:
    """Stands in for the one producer of `RemoteLeases`. `failure`: why it cannot be connected."""

    failure: NixlLoadFailure | None = None
    now_s: float = 100.0
    said: list[Message] = field(default_factory=list)
    dials: int = 0
    peer: ProducerConnection = field(init=False)

    def __post_init__(self) -> None:
        self.peer = ProducerConnection(("h", 1, "n"), LinkId(1), ConnectionState.READY, is_open=True)
        control = ControlChannel(lambda host, port, name: LinkId(1), self._send, lambda link, why: None, lambda: None)
        self.remote_leases = RemoteLeases(cast(Any, self), control, lambda: self.now_s)

    def rank_links_for_done(self, num_ranks: int) -> tuple[RankLink, ...]:
        return (RankLink(0, True, 0, 1),)

    def get(self, host: str, rank: RankAddress) -> ProducerConnection:
        if self.peer.state is ConnectionState.OVER:
            self.dials += 1
            self.peer = ProducerConnection(self.peer.address, LinkId(1 + self.dials))
            if self.failure is not None:
                self.cut(self.failure)
        return self.peer

    def cut(self, failure: NixlLoadFailure = GONE) -> None:
        self.peer.state, self.peer.is_open, self.peer.failure = ConnectionState.OVER, False, failure

    def answer(self) -> None:
        self.peer.state, self.peer.is_open = ConnectionState.READY, True

    def _send(self, link: LinkId, message: Message) -> bool:
        if link != self.peer.link or not self.peer.is_open:
            return False
        self.said.append(message)
        return True

    def hold(self, *names: str) -> None:
        for name in names:
            self.remote_leases.begin(name, PROMPT)

    def run_for(self, seconds: float, count: int = 100) -> None:
        for _ in range(count):
            self.now_s += seconds / count
            self.remote_leases.tick()

    @property
    def done(self) -> list[Message]:
        return [message for message in self.said if isinstance(message, LeaseDone)]

    @property
    def num_done(self) -> int:
        return len(self.done)


def test_a_request_that_waits_renews_its_lease_at_once() -> None:
    """A producer may end a connection that was silent, so it needs to know that the connection is used again."""
    producer = Producer()
    producer.hold("d")
    assert producer.said == [Renew(PROMPT.lease)]
    producer.cut()
    producer.hold("e")
    assert producer.said == [Renew(PROMPT.lease)]


def test_a_lost_producer_is_connected_again_and_notified_once() -> None:
    producer = Producer()
    producer.hold("r")
    producer.cut()
    producer.remote_leases.end("r", True)
    producer.run_for(1.0)
    assert (producer.dials, producer.num_done, producer.remote_leases.num_leases) == (1, 0, 1), (
        "the connection is not open yet"
    )
    producer.answer()
    producer.run_for(1.0)
    assert (producer.dials, producer.num_done, producer.remote_leases.num_leases) == (1, 1, 0)


def test_a_message_that_cannot_be_sent_is_sent_on_the_next_connection() -> None:
    """The connection has ended, which is not noticed yet."""
    producer = Producer()
    producer.hold("r")
    producer.remote_leases.tick()
    stale, producer.peer = (
        producer.peer,
        ProducerConnection(producer.peer.address, LinkId(9), ConnectionState.READY, is_open=True),
    )
    producer.remote_leases.end("r", True)
    assert (producer.num_done, producer.remote_leases.num_leases) == (0, 1)
    stale.state, stale.is_open = ConnectionState.OVER, False
    producer.run_for(1.0)
    assert (producer.dials, producer.num_done, producer.remote_leases.num_leases) == (0, 1, 0)


def test_requests_with_one_lease_send_its_end_once() -> None:
    producer = Producer()
    producer.hold("r", "s")
    producer.cut()
    producer.remote_leases.end("r", True)
    producer.answer()
    producer.run_for(1.0)
    assert producer.num_done == 0, "the other request needs the lease"
    producer.remote_leases.end("s", True)
    producer.run_for(1.0)
    assert (producer.num_done, producer.remote_leases.num_leases) == (1, 0)


def test_a_request_with_the_id_of_an_ended_one_does_not_replace_its_lease() -> None:
    producer = Producer()
    producer.hold("r")
    producer.cut()
    producer.remote_leases.end("r", True)
    producer.remote_leases.begin("r", msgspec.structs.replace(PROMPT, lease=Lease(4, 6)))
    producer.answer()
    producer.run_for(1.0)
    assert producer.done == [LeaseDone(PROMPT.lease, True, 0, 1)] and producer.remote_leases.num_leases == 1


@pytest.mark.parametrize("is_same", [False, True], ids=["other lease", "same lease"])
def test_a_request_with_the_id_of_a_waiting_one_ends_its_lease(is_same: bool) -> None:
    producer = Producer()
    producer.hold("r")
    later = PROMPT if is_same else msgspec.structs.replace(PROMPT, lease=Lease(4, 6))
    producer.remote_leases.begin("r", later)
    assert producer.done == ([] if is_same else [LeaseDone(PROMPT.lease, False, 0, 1)])
    producer.run_for(1.0)
    assert producer.remote_leases.num_leases == 1
    producer.remote_leases.end("r", True)
    assert producer.said[-1] == LeaseDone(later.lease, True, 0, 1)
    assert (producer.num_done, producer.remote_leases.num_leases) == (1 if is_same else 2, 0)


def test_an_unreachable_producer_is_dialled_a_few_times_with_pauses() -> None:
    producer = Producer(GONE)
    producer.hold("r", "s")
    producer.cut()
    for name in ("r", "s"):
        producer.remote_leases.end(name, True)
    producer.run_for(RECONNECT_S / 2)
    assert producer.dials <= 2, "for both requests"
    producer.run_for(MAX_RECONNECTS * RECONNECT_S)
    assert MAX_RECONNECTS <= producer.dials <= 2 * MAX_RECONNECTS and producer.num_done == 0
    assert producer.remote_leases.num_leases == 0


@pytest.mark.parametrize("lateness_s", [-0.1, 0.0])
def test_a_producer_is_not_dialled_after_the_lease_has_ended(lateness_s: float) -> None:
    producer = Producer()
    producer.hold("r")
    producer.cut()
    producer.now_s += LEASE_S + lateness_s
    producer.remote_leases.end("r", True)
    producer.run_for(LEASE_S)
    assert producer.dials == (1 if lateness_s < 0 else 0) and producer.num_done == 0
    assert producer.remote_leases.num_leases == 0


@pytest.mark.parametrize("reason", ["refused", "protocol"])
def test_a_producer_that_refuses_connections_is_not_dialled_again(reason: str) -> None:
    producer = Producer()
    producer.hold("r")
    producer.cut(NixlLoadFailure(reason, "the other side knows another secret"))
    producer.remote_leases.end("r", True)
    assert (producer.dials, producer.remote_leases.num_leases) == (0, 0)


def test_leases_waiting_for_a_reconnect_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_leases, "MAX_LEASES_TO_RECONNECT", 2)
    producer = Producer(GONE)
    producer.hold("r", "s", "t", "u")
    producer.cut()
    for name in ("r", "s", "t", "u"):
        producer.remote_leases.end(name, True)
    assert producer.remote_leases.num_leases == 2


def test_a_lease_is_renewed_after_a_cut_while_its_request_waits() -> None:
    producer = Producer()
    producer.hold("r")
    # More cuts than attempts: each success restores all attempts.
    for number in range(1, MAX_RECONNECTS + 3):
        producer.cut()
        while producer.dials < number:
            producer.run_for(LEASE_S / RENEWALS_PER_LEASE)
        producer.answer()
        producer.run_for(LEASE_S / RENEWALS_PER_LEASE)
        assert sum(isinstance(message, Renew) for message in producer.said) >= number
    assert producer.num_done == 0
