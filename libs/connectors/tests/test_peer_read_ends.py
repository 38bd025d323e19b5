"""Ends of reads: each read ends once, with its reason, and not before its last byte is written."""

from __future__ import annotations

import ctypes
import threading
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

from hybridkv.connectors.vllm.nixl.agent import lease_server
from hybridkv.connectors.vllm.nixl.agent.rank_read import RankRead
from hybridkv.connectors.vllm.nixl.messages import NixlStepPlan, PromptLoad, WaitingRequest
from hybridkv.connectors.vllm.nixl.params import RemotePrompt
from hybridkv.peers.reads import ReadBounds
from hybridkv.peers.tables import offered
from hybridkv.peers.transport import (
    PENDING,
    RemoteId,
    TransferDone,
    TransferFailed,
    TransferFailureReason,
    TransferId,
    TransferState,
)
from kits.peers.in_memory import InMemoryTransport, World

NUM_TOKENS = 23
IMPATIENT = ReadBounds(connect_s=WAIT_S, read_s=0.05, check_s=WAIT_S, end_s=0.05, whole_s=WAIT_S)
THERE, HERE = tables_of(Side(tp_size=2), NUM_TOKENS), tables_of(Side(), NUM_TOKENS)


class Endless(InMemoryTransport):
    """Reads never end, cancelled or not, until their peer is detached."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world)
        self.cut: set[RemoteId] = set()

    def detach(self, remote: RemoteId) -> None:
        self.cut.add(remote)
        super().detach(remote)

    def poll(self, transfer: TransferId) -> TransferState:
        return PENDING if self._is_going_on(transfer) else super().poll(transfer)

    def release(self, transfer: TransferId) -> bool:
        return not self._is_going_on(transfer) and super().release(transfer)

    def _is_going_on(self, transfer: TransferId) -> bool:
        return transfer in self._reads and self._reads[transfer][0] not in self.cut


def pair(
    consumers_transport: type[InMemoryTransport], bounds: ReadBounds, verify: bool = True
) -> tuple[Engine, Engine]:
    world = World()
    producer = Engine.start(Side(tp_size=2), lambda name: InMemoryTransport(name, world))
    consumer = Engine.start(Side(), lambda name: consumers_transport(name, world), verify, bounds)
    write_prompt(producer, THERE, NUM_TOKENS)
    return producer, consumer


def test_a_read_that_does_not_end_is_cut_off_before_it_is_reported() -> None:
    producer, consumer = pair(Endless, IMPATIENT)
    transport = consumer.ranks[0].transport
    assert isinstance(transport, Endless)
    load(consumer, "d", hand_over(producer, "p", THERE, NUM_TOKENS), HERE)
    (failure,) = failures(consumer, "d")
    assert failure is not None and failure.reason == "timeout" and "reading" in failure.detail
    # Of both ranks, or of the one that was read on a busy machine.
    assert transport.cut and not transport._reads
    # A detached peer is connected again.
    transport.cut.clear()
    consumer.close()
    producer.close()


class Breaking(InMemoryTransport):
    """Gives up the peer at its next read if `is_broken`, as NIXL does when the connection to a live peer breaks."""

    is_broken = False

    def poll(self, transfer: TransferId) -> TransferState:
        if self.is_broken and transfer in self._reads and not isinstance(self._states[transfer], TransferDone):
            self.is_broken = False
            self._states[transfer] = TransferFailed(TransferFailureReason.GONE, "the connection broke")
            self.detach(self._reads[transfer][0])
        return super().poll(transfer)


def test_a_connection_that_breaks_costs_one_load() -> None:
    """The control connection stays open, because the producer is alive."""
    world = World()
    producer = Engine.start(Side(), lambda name: InMemoryTransport(name, world))
    consumer = Engine.start(Side(), lambda name: Breaking(name, world))
    transport = consumer.ranks[0].transport
    assert isinstance(transport, Breaking)
    write_prompt(producer, HERE, NUM_TOKENS)
    reasons = []
    for number in range(4):
        transport.is_broken = number == 1
        load(consumer, f"c{number}", hand_over(producer, f"p{number}", HERE, NUM_TOKENS), HERE)
        (failure,) = failures(consumer, f"c{number}")
        reasons.append(failure and failure.reason)
        # The lease of a failed load ends too, over a connection of the consumer.
        producer.ranks[0].until(lambda results, name=f"p{number}": name in results.released)  # type: ignore[misc]
    assert reasons == [None, "gone", None, None]
    assert wrong_tokens(consumer, HERE, NUM_TOKENS) == []
    consumer.close()
    producer.close()


def test_a_producer_given_up_by_the_transport_is_connected_again_before_a_load() -> None:
    """NIXL gives up a peer when it cannot end its reads. The control connection does not notice."""
    world = World()
    producer, consumer = (Engine.start(Side(), lambda name: InMemoryTransport(name, world)) for _ in range(2))
    write_prompt(producer, HERE, NUM_TOKENS)
    load(consumer, "c", hand_over(producer, "o", HERE, NUM_TOKENS), HERE)
    assert failures(consumer, "c") == [None]
    producer.ranks[0].until(lambda results: "o" in results.released)
    (peer,) = consumer.ranks[0].agent._connections._by_address.values()
    assert peer.remote is not None
    consumer.ranks[0].transport.detach(peer.remote)
    load(consumer, "d", hand_over(producer, "p", HERE, NUM_TOKENS), HERE)
    assert failures(consumer, "d") == [None]
    assert wrong_tokens(consumer, HERE, NUM_TOKENS) == []
    consumer.close()
    producer.close()


def test_several_answers_to_one_prompt_share_a_lease_and_the_last_ends_it() -> None:
    """For a request with several answers."""
    producer, consumer = pair(InMemoryTransport, PATIENT)
    prompt = hand_over(producer, "p", THERE, NUM_TOKENS)
    consumer.submit(lambda: NixlStepPlan(waiting=[WaitingRequest("e", prompt), WaitingRequest("f", prompt)]))
    load(consumer, "d", prompt, HERE)
    assert failures(consumer, "d") == [None]
    consumer.submit(lambda: NixlStepPlan(ended=["f"]))
    consumer.submit(lambda: NixlStepPlan(loads=[PromptLoad("e", prompt, NUM_TOKENS, 0, HERE)]))
    assert failures(consumer, "e") == [None]
    for rank in producer.ranks:
        rank.until(lambda results: "p" in results.released)
    consumer.close()
    producer.close()


def test_a_producer_that_closes_while_digests_are_awaited_fails_one_load() -> None:
    producer, consumer = pair(InMemoryTransport, PATIENT)
    # Without a plan there are no digests, so that the read waits.
    load(consumer, "d", hand_over(producer, "p", THERE, NUM_TOKENS, is_planned=False), HERE)
    consumer.ranks[0].until(lambda results: wrong_tokens(consumer, HERE, NUM_TOKENS) == [])
    producer.close()
    (failure,) = failures(consumer, "d")
    # A producer that closes in order may still report that its leases have ended.
    assert failure is not None and failure.reason in ("gone", "lease")
    consumer.close()


def test_a_bug_in_a_check_costs_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = pair(InMemoryTransport, PATIENT)
    check = RankRead.check

    def broken(self: RankRead, timeout_s: float) -> None:
        if self._load.request_id == "d":
            raise RuntimeError("a bug")
        check(self, timeout_s)

    monkeypatch.setattr(RankRead, "check", broken)
    prompt: Any = hand_over(producer, "p", THERE, NUM_TOKENS)
    load(consumer, "d", prompt, HERE)
    (failure,) = failures(consumer, "d")
    assert failure is not None and failure.reason == "other" and "a bug" in failure.detail
    for rank in producer.ranks:
        rank.until(lambda results: "p" in results.released)
    load(consumer, "e", hand_over(producer, "q", THERE, NUM_TOKENS), HERE)
    assert failures(consumer, "e") == [None]
    assert wrong_tokens(consumer, HERE, NUM_TOKENS) == []
    consumer.close()
    producer.close()


class Overtaken(InMemoryTransport):
    """Changes received bytes, and holds back the read of the lease until a test releases it."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world)
        self.goes_on = threading.Event()

    def poll(self, transfer: TransferId) -> TransferState:
        ranges = self._reads[transfer][1]
        if len(ranges) == 1 and not self.goes_on.is_set():
            return PENDING
        state = super().poll(transfer)
        if len(ranges) > 1:
            ctypes.memset(int(self.memory.places(ranges.local_regions, ranges.local_offsets)[0]), 0xFF, 1)
        return state


@pytest.mark.parametrize(("has_ended", "reason"), [(True, "lease"), (False, "digest")])
def test_different_bytes_count_as_an_ended_lease_if_the_lease_has_ended(has_ended: bool, reason: str) -> None:
    producer, consumer = pair(Overtaken, PATIENT)
    rank = consumer.ranks[0]
    assert isinstance(rank.transport, Overtaken)
    load(consumer, "d", hand_over(producer, "p", THERE, NUM_TOKENS), HERE)

    def are_compared() -> bool:
        return any(each.detail for read in list(rank.agent._reads._reads.values()) for each in read.ranks)

    rank.until(lambda results: are_compared() or "d" in results.finished)
    if has_ended:
        for each in producer.ranks:
            each.agent._server._memory.write_slot(3, 0)
    rank.transport.goes_on.set()
    (failure,) = failures(consumer, "d")
    assert failure is not None and failure.reason == reason
    consumer.close()
    producer.close()


class Slow(InMemoryTransport):
    """Each read ends at its third poll. At most two reads are unreleased."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world, max_transfers=2)
        self._polls: dict[TransferId, int] = {}

    def poll(self, transfer: TransferId) -> TransferState:
        polls = self._polls[transfer] = self._polls.get(transfer, 0) + 1
        return PENDING if polls < 3 and self._states[transfer] is PENDING else super().poll(transfer)


def load_burst(consumer: Engine, prompt: RemotePrompt) -> list[str]:
    """Loads one prompt for many requests in one step."""
    names = [f"d{number}" for number in range(12)]
    loads = [PromptLoad(name, prompt, NUM_TOKENS, 0, HERE) for name in names]
    waiting = [WaitingRequest(name, prompt) for name in names]
    consumer.submit(lambda: NixlStepPlan(waiting=waiting, loads=loads))
    return names


def test_reads_beyond_the_limit_of_the_transport_wait_for_earlier_reads() -> None:
    producer, consumer = pair(Slow, PATIENT)
    names = load_burst(consumer, hand_over(producer, "p", THERE, NUM_TOKENS))
    assert [failures(consumer, name) for name in names] == [[None]] * len(names)
    assert wrong_tokens(consumer, HERE, NUM_TOKENS) == []
    consumer.close()
    producer.close()


def test_requests_for_digests_are_sent_again_to_a_busy_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_server, "MAX_DIGEST_REQUESTS_PER_LINK", 4)
    producer, consumer = pair(InMemoryTransport, PATIENT)
    # Its plan does not arrive, so that requests wait for it.
    names = load_burst(consumer, hand_over(producer, "p", THERE, NUM_TOKENS, is_planned=False))
    manager = consumer.ranks[0].agent._reads

    def are_refused() -> bool:
        requested = [rank._requested for read in list(manager._reads.values()) for rank in read.ranks]
        return any(each is not None and each.busy for each in requested)

    consumer.ranks[0].until(lambda results: are_refused() or bool(results.finished))
    offer(producer, "p", offered(producer.side.groups, THERE, NUM_TOKENS))
    assert [failures(consumer, name) for name in names] == [[None]] * len(names)
    assert not manager._rank_by_request
    consumer.close()
    producer.close()
