"""Bugs in a rank's thread cost only the request concerned: others go on, and no blocks are held for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from peer_ranks import (
    PATIENT,
    WAIT_S,
    Engine,
    Side,
    failures,
    hand_over,
    load,
    offer,
    tables_of,
    write_prompt,
    wrong_tokens,
)

from hybridkv.connectors.vllm.nixl.agent.connections import ControlChannel, ProducerConnection, ProducerConnections
from hybridkv.connectors.vllm.nixl.agent.lease_server import LeaseServer
from hybridkv.connectors.vllm.nixl.agent.read_manager import ReadManager
from hybridkv.connectors.vllm.nixl.memory.rank_memory import NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan, OfferedRequest, OpenedLease
from hybridkv.connectors.vllm.nixl.params import RankAddress
from hybridkv.metrics import PEER_FAILURES
from hybridkv.peers.control import LinkId
from hybridkv.peers.leases import Lease
from hybridkv.peers.reads import ReadFailure
from hybridkv.peers.tables import offered
from hybridkv.peers.wire import CloseReason
from hybridkv.tiers.threads import MAX_QUEUED, BackgroundThread
from kits.peers.in_memory import InMemoryTransport, World

NUM_TOKENS = 23
SIDE = Side()
TABLES = tables_of(SIDE, NUM_TOKENS)
KEPT = offered(SIDE.groups, TABLES, NUM_TOKENS)


@contextmanager
def engines() -> Iterator[tuple[Engine, Engine]]:
    world = World()
    both = [Engine.start(SIDE, lambda name: InMemoryTransport(name, world), bounds=PATIENT) for _ in range(2)]
    write_prompt(both[0], TABLES, NUM_TOKENS)
    try:
        yield both[0], both[1]
    finally:
        for engine in reversed(both):
            engine.close()


def require_handed_over(producer: Engine, consumer: Engine, request_id: str) -> None:
    """Check that a request is handed over and both engines go on."""
    load(consumer, request_id, hand_over(producer, request_id, TABLES, NUM_TOKENS), TABLES)
    assert failures(consumer, request_id) == [None]
    assert wrong_tokens(consumer, TABLES, NUM_TOKENS) == []
    producer.ranks[0].until(lambda results: request_id in results.released)


def failing(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: Callable[..., bool]) -> None:
    """Make the method raise for the calls that `when` selects."""
    method = getattr(owner, name)

    def broken(self: Any, *arguments: Any) -> Any:
        if when(*arguments):
            raise RuntimeError("a bug")
        return method(self, *arguments)

    monkeypatch.setattr(owner, name, broken)


def test_blocks_of_a_request_without_a_lease_are_released_at_once() -> None:
    with engines() as (producer, consumer):
        offer(producer, "p", KEPT)
        producer.ranks[0].until(lambda results: results.released == {"p"})
        counted = producer.ranks[0].metrics.take()
        assert counted is not None and "dropped" in str(counted.data)
        require_handed_over(producer, consumer, "q")


def test_a_lease_is_written_before_the_ranks_thread_runs() -> None:
    """A connected consumer reads it without the thread."""
    go_on = threading.Event()
    with engines() as (producer, consumer):
        rank = producer.ranks[0]
        table = rank.agent._server._memory._table
        rank.agent._inbox.put(lambda: go_on.wait(WAIT_S))
        producer.submit(
            lambda: NixlStepPlan(opened=[OpenedLease("p", Lease(3, 77)), OpenedLease("q", Lease(1 << 20, 77))])
        )
        assert tuple(table[3]) == (77, 0)
        go_on.set()
        producer.submit(lambda: NixlStepPlan(dropped=["p"]))
        require_handed_over(producer, consumer, "r")


def test_a_lease_that_cannot_be_opened_is_in_no_slot() -> None:
    with engines() as (producer, _):
        rank = producer.ranks[0]
        twice = [OpenedLease("p", Lease(3, 77)), OpenedLease("p", Lease(4, 78))]
        producer.submit(lambda: NixlStepPlan(opened=twice, offered=[OfferedRequest("q", KEPT)]))
        rank.until(lambda results: results.released == {"q"})
        table = rank.agent._server._memory._table
        assert tuple(table[3]) == (77, 0) and tuple(table[4]) == (0, 0)


def test_a_failed_part_of_a_plan_does_not_affect_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, LeaseServer, "open", lambda opened: opened.request_id == "p")
    with engines() as (producer, consumer):
        leases = [OpenedLease(name, Lease(slot, 7)) for slot, name in enumerate("pq")]
        producer.submit(lambda: NixlStepPlan(opened=leases, offered=[OfferedRequest(name, KEPT) for name in "pq"]))
        producer.ranks[0].until(lambda results: results.released == {"p"})
        require_handed_over(producer, consumer, "r")


def test_a_load_that_cannot_begin_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ReadManager, "_begun", lambda load, links: load.request_id == "p")
    with engines() as (producer, consumer):
        load(consumer, "p", hand_over(producer, "p", TABLES, NUM_TOKENS), TABLES)
        (failure,) = failures(consumer, "p")
        assert failure is not None and failure.reason == "other" and "a bug" in failure.detail
        # Its producer is notified that the lease is done.
        producer.ranks[0].until(lambda results: "p" in results.released)
        require_handed_over(producer, consumer, "q")


def test_a_request_for_digests_that_raises_costs_only_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, LeaseServer, "_begin_digests", lambda question, request_id: request_id == "p")
    with engines() as (producer, consumer):
        load(consumer, "p", hand_over(producer, "p", TABLES, NUM_TOKENS), TABLES)
        (failure,) = failures(consumer, "p")
        assert failure is not None and failure.reason == "other"
        producer.ranks[0].until(lambda results: "p" in results.released)
        require_handed_over(producer, consumer, "q")


def test_an_error_in_every_tick_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, LeaseServer, "tick", lambda: True)
    with engines() as (producer, consumer):
        load(consumer, "p", hand_over(producer, "p", TABLES, NUM_TOKENS), tables_of(SIDE, NUM_TOKENS))
        consumer.submit(lambda: NixlStepPlan(ended=["p"]))
        (failure,) = failures(consumer, "p")
        assert failure is not None and failure.reason == "cancelled"


def test_memory_is_not_closed_during_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    digests = NixlRankMemory.digests

    def slow(self: NixlRankMemory, runs: Any) -> list[bytes]:
        if self is producer.ranks[0].agent._server._memory:
            begun.set()
            assert go_on.wait(WAIT_S)
        return digests(self, runs)

    monkeypatch.setattr(NixlRankMemory, "digests", slow)
    monkeypatch.setattr("hybridkv.connectors.vllm.nixl.memory.rank_memory.INLINE_DIGEST_BYTES", 0)
    monkeypatch.setattr("hybridkv.connectors.vllm.nixl.agent.agent.CLOSE_S", 0.05)
    with engines() as (producer, consumer):
        load(consumer, "p", hand_over(producer, "p", TABLES, NUM_TOKENS), TABLES)
        assert begun.wait(WAIT_S)
        assert not producer.ranks[0].agent.close()
        go_on.set()


def test_a_thread_with_queued_work_ends_after_the_work() -> None:
    begun, go_on = threading.Event(), threading.Event()
    background = BackgroundThread("busy")

    def wait() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    background.submit(wait)
    assert begun.wait(WAIT_S)
    done = [background.submit(lambda: None) for _ in range(MAX_QUEUED + 1)]
    assert done.pop() is None
    background.close()
    assert not background.wait_until_ended(0.0)
    go_on.set()
    assert background.wait_until_ended(WAIT_S)
    assert all(outcome is not None and outcome.is_done for outcome in done)


EXPECTED = {
    "gone": ["done", "ended", "reset", "unreachable", "hung_up", "truncated", "wrong_peer"],
    "timeout": ["too_slow", "silent", "backlog"],
    "refused": ["secret", "no_secret", "version", "self"],
    "protocol": ["malformed", "oversized", "seal", "unexpected"],
    "busy": ["too_many"],
    "other": ["handler"],
}


@pytest.mark.parametrize("reason", list(CloseReason))
def test_reads_fail_with_the_reason_of_the_closed_connection(reason: CloseReason) -> None:
    with engines() as (producer, _):
        rank = producer.ranks[0]
        control = ControlChannel(
            lambda host, port, name: LinkId(1), lambda link, message: False, lambda link, why: None, lambda: None
        )
        peers = ProducerConnections(rank.agent._server._options.description, rank.transport, control)
        peer: ProducerConnection = peers.get("127.0.0.1", RankAddress(1, "somebody"))
        peers.closed(peer.link, reason)
        (word,) = [word for word, reasons in EXPECTED.items() if reason in reasons]
        assert peer.failure is not None and peer.failure.reason == word
        assert word in PEER_FAILURES and ReadFailure(word)
