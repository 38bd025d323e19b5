"""Hostile peers that know the secret cost only their own connection, and no load of another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from peer_ranks import (
    PATIENT,
    WAIT_S,
    Engine,
    Side,
    failures,
    hand_over,
    load,
    tables_of,
    write_prompt,
    wrong_tokens,
)

from hybridkv.connectors.vllm.nixl.agent import lease_server, remote_leases
from hybridkv.connectors.vllm.nixl.agent.agent import MESSAGE_OVERHEAD_BYTES, Backlog, message_bytes
from hybridkv.connectors.vllm.nixl.agent.connections import ControlChannel
from hybridkv.connectors.vllm.nixl.params import RankAddress
from hybridkv.peers.control import ControlLoop, Handlers, LinkId
from hybridkv.peers.description import encode
from hybridkv.peers.ranks import RankLink
from hybridkv.peers.transport import Transport
from hybridkv.peers.wire import (
    NO_SECRET,
    Accepted,
    Describe,
    Digests,
    Message,
    Renew,
    RequestDigests,
    RequestMessage,
    WireLimits,
    pack_columns,
)
from kits.peers.in_memory import InMemoryTransport, World

NUM_TOKENS = 23
SIDE = Side()
TABLES = tables_of(SIDE, NUM_TOKENS)


@contextmanager
def engines(open_transport: Callable[[str], Transport]) -> Iterator[tuple[Engine, Engine]]:
    both = [Engine.start(SIDE, open_transport, bounds=PATIENT) for _ in range(2)]
    write_prompt(both[0], TABLES, NUM_TOKENS)
    try:
        yield both[0], both[1]
    finally:
        for engine in reversed(both):
            engine.close()


@pytest.fixture
def pair() -> Iterator[tuple[Engine, Engine]]:
    world = World()
    with engines(lambda name: InMemoryTransport(name, world)) as both:
        yield both


def require_loads(pair: tuple[Engine, Engine], request_id: str) -> None:
    """Check that an honest consumer is served."""
    producer, consumer = pair
    load(consumer, request_id, hand_over(producer, request_id, TABLES, NUM_TOKENS), TABLES)
    assert failures(consumer, request_id) == [None]
    assert wrong_tokens(consumer, TABLES, NUM_TOKENS) == []
    producer.ranks[0].until(lambda results: request_id in results.released)


class Rogue:
    """Consumer that sends what a test says."""

    def __init__(self, producer: Engine) -> None:
        limits = WireLimits(handshake_timeout_s=WAIT_S, silence_timeout_s=WAIT_S)
        self._changed = threading.Condition()
        self.received: list[Message] = []
        self.is_open, self.is_closed = False, False
        self._loop = ControlLoop("rogue", NO_SECRET, limits)
        handlers = Handlers(
            lambda link, name: self._is("is_open"), self._receive, lambda link, why: self._is("is_closed")
        )
        address = producer.addresses[0]
        self._link = self._loop.connect("127.0.0.1", address.port, address.name, handlers)
        self.until(lambda: self.is_open)

    def _is(self, name: str) -> None:
        with self._changed:
            setattr(self, name, True)
            self._changed.notify_all()

    def _receive(self, link: LinkId, message: Message) -> None:
        with self._changed:
            self.received.append(message)
            self._changed.notify_all()

    def until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, WAIT_S), self.received

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._loop.send(self._link, message)

    def close(self) -> None:
        assert self._loop.close(WAIT_S)


@pytest.fixture
def rogue(pair: tuple[Engine, Engine]) -> Iterator[Rogue]:
    made = Rogue(pair[0])
    yield made
    made.close()


def describe_rank(engine: Engine, **changes: Any) -> Describe:
    """Description of a rank of this engine, with changes."""
    rank = engine.ranks[0]
    description = msgspec.structs.replace(rank.agent._server._options.description, **changes)
    return Describe(encode(description), b"")


def test_a_peer_that_describes_itself_twice_is_disconnected(pair: tuple[Engine, Engine], rogue: Rogue) -> None:
    rogue.say(describe_rank(pair[1]))
    rogue.until(lambda: Accepted() in rogue.received)
    assert not rogue.is_closed
    rogue.say(describe_rank(pair[1]))
    rogue.until(lambda: rogue.is_closed)
    require_loads(pair, "p")


@pytest.mark.parametrize(
    "message",
    [RequestMessage(1, b"x"), Accepted(), Digests(1, b""), RequestDigests(1, None, 1, b"")],  # type: ignore[arg-type]
)
def test_an_unexpected_message_ends_its_connection(pair: tuple[Engine, Engine], rogue: Rogue, message: Message) -> None:
    if isinstance(message, RequestDigests):
        lease = hand_over(pair[0], "other", TABLES, NUM_TOKENS).lease
        message = RequestDigests(1, lease, NUM_TOKENS, pack_columns([[0], [0], [1]]))
    rogue.say(message)
    rogue.until(lambda: rogue.is_closed)


def test_a_description_of_a_consumer_is_shortened_in_the_log(
    pair: tuple[Engine, Engine], rogue: Rogue, caplog: pytest.LogCaptureFixture
) -> None:
    rogue.say(describe_rank(pair[1], facts={"model\n" + "x" * 4000: "y" * 4000}))
    rogue.until(lambda: bool(rogue.received))
    [said] = [record.getMessage() for record in caplog.records if "is incompatible" in record.getMessage()]
    assert "model" in said and "\n" not in said and len(said) < 1000


def test_requests_beyond_the_limit_are_answered_as_busy_at_once(
    pair: tuple[Engine, Engine], rogue: Rogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_server, "MAX_DIGEST_REQUESTS_PER_LINK", 4)
    rogue.say(describe_rank(pair[1]))
    # Its plan does not arrive, so that requests wait for it.
    lease = hand_over(pair[0], "late", TABLES, NUM_TOKENS, is_planned=False).lease
    rogue.say(Renew(lease))
    spans = pack_columns([[0], [0], [1]])
    rogue.say(*(RequestDigests(number, lease, NUM_TOKENS, spans) for number in range(6)))
    rogue.until(lambda: sum(isinstance(each, Digests) for each in rogue.received) == 2)
    assert [each for each in rogue.received if isinstance(each, Digests)] == [
        Digests(number, b"", lease_server.BUSY) for number in (4, 5)
    ]


def test_a_peer_with_too_many_waiting_bytes_is_disconnected_alone(
    pair: tuple[Engine, Engine], rogue: Rogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridkv.connectors.vllm.nixl.agent.agent.MAX_LINK_BYTES", 1 << 20)
    agent = pair[0].ranks[0].agent
    begun, go_on = threading.Event(), threading.Event()

    def occupied() -> None:
        begun.set()
        go_on.wait(WAIT_S)

    agent._inbox.put(occupied)
    assert begun.wait(WAIT_S)
    rogue.say(*(Describe(bytes(1 << 18), b"") for _ in range(8)))
    rogue.until(lambda: rogue.is_closed)
    assert agent._backlog.num_bytes <= 1 << 20
    go_on.set()
    require_loads(pair, "p")
    assert agent._backlog.num_bytes == 0


def test_waiting_bytes_are_limited_per_peer_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.connectors.vllm.nixl.agent.agent.MAX_LINK_BYTES", 100)
    monkeypatch.setattr("hybridkv.connectors.vllm.nixl.agent.agent.MAX_BYTES", 150)
    backlog, (one, other) = Backlog(), (LinkId(1), LinkId(2))
    assert backlog.add(one, 100) and not backlog.add(one, 1)
    assert backlog.add(other, 50) and not backlog.add(other, 1)
    backlog.remove(one, 100)
    assert backlog.add(other, 50) and not backlog.add(other, 1) and backlog.add(one, 50)
    for link, num_bytes in ((one, 50), (other, 50), (other, 50)):
        backlog.remove(link, num_bytes)
    assert backlog.num_bytes == 0 and not backlog._by_link
    assert message_bytes(Describe(b"12345", b"67")) == MESSAGE_OVERHEAD_BYTES + 7
    assert message_bytes(Accepted()) == MESSAGE_OVERHEAD_BYTES


def test_a_very_short_lease_is_renewed_with_a_pause() -> None:
    now_s, said = 100.0, list[Message]()

    def send(link: LinkId, message: Message) -> bool:
        said.append(message)
        return True

    peer = SimpleNamespace(link=LinkId(1), is_open=True)
    links = (RankLink(0, True, 0, 1),)
    peers: Any = SimpleNamespace(rank_links_for_done=lambda count: links, get=lambda host, rank: peer)
    control = ControlChannel(lambda host, port, name: LinkId(1), send, lambda link, why: None, lambda: None)
    kept = remote_leases.RemoteLeases(peers, control, lambda: now_s)
    prompt: Any = SimpleNamespace(host="h", ranks=(RankAddress(1, "n"),), lease="lease", lease_seconds=1e-9)
    kept.begin("r", prompt)
    for _ in range(1000):
        now_s += remote_leases.MIN_RENEWAL_S / 100
        kept.tick()
    # One when it begins, and one after each pause.
    assert 9 <= len(said) <= 11
