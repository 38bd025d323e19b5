"""Peer tier over loopback: conformance, and reads between two engines, without fakes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

import peer_engines  # noqa: E402
from peer_engines import OPTIONS, SECRET, Engine, fingerprint, found, load, patient  # noqa: E402

from hybridkv.peers.wire import Secret  # noqa: E402
from hybridkv.planner import LookupResult  # noqa: E402
from hybridkv.tiers import (  # noqa: E402
    Completion,
    FailureReason,
    Key,
    Slot,
    Ticket,
    TierConfigurationError,
    TierIndex,
    TierMedium,
)
from hybridkv.tiers.peer import PeerAddresses, open_index, open_medium, reader  # noqa: E402
from hybridkv.tiers.peer.places import to_tier_slot  # noqa: E402
from hybridkv.tiers.ram import RamArena, RamIndex  # noqa: E402
from kits.peers.in_memory import InMemoryTransport  # noqa: E402
from kits.peers.suite import until  # noqa: E402
from kits.tiers.conformance import (  # noqa: E402
    CHUNK_BYTES,
    MediumConformance,
    ReadOnlyConformance,
    Tier,
)
from kits.tiers.conformance.medium import chunk_bytes  # noqa: E402
from kits.tiers.faults import FaultInjectingIndex, FaultInjectingMedium, FaultPlan  # noqa: E402

if TYPE_CHECKING:
    from typing_extensions import Buffer

A, B, C = b"key a", b"key b", b"key c"
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS
FIRST = Ticket(1)


class StoredAtAPeer:
    """Medium of one engine over the memory of another, in which the suite's chunks are stored."""

    def __init__(self, reader: Engine, holder: Engine) -> None:
        self._reader, self._holder = reader, holder
        self._is_closed = False

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        medium: TierMedium = self._reader.medium if self._is_closed else self._holder.copying
        medium.store(ticket, key, slot, source)

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        self._reader.medium.load(ticket, key, to_tier_slot(0, slot), destination)

    def poll(self) -> list[Completion]:
        return [*self._holder.copying.poll(), *self._reader.medium.poll()]

    def drain(self, timeout_s: float) -> bool:
        return self._reader.medium.drain(timeout_s)

    def close(self) -> None:
        self._is_closed = True
        self._reader.medium.close()

    def views(self, slot: Slot) -> list[memoryview]:
        return self._holder.arena.views(slot)


class TestPeerMedium(MediumConformance):
    @pytest.fixture(autouse=True)
    def engines(self) -> Iterator[None]:
        self.made: list[Engine] = []
        yield
        for engine in reversed(self.made):
            engine.close()

    def make_tier(self, capacity_bytes: int) -> Tier:
        holder = Engine(capacity_bytes=capacity_bytes)
        reader = Engine([holder.port])
        self.made += [holder, reader]
        return Tier(RamIndex(capacity_bytes, 1024), StoredAtAPeer(reader, holder))

    def corrupt(self, medium: TierMedium, slot: Slot) -> None:
        self.made[0].arena.views(slot)[-1][-1] ^= 1

    def test_a_store_at_a_peer_fails(self) -> None:
        self.make_tier_of(1)
        medium = self.made[-1].medium
        medium.store(FIRST, A, Slot(((0, 4),)), [b"abcd"])
        [completion] = medium.poll()
        assert completion.failure is not None and completion.failure.reason is FailureReason.IO


class TestPeerMediumInAnIdleFaultInjector(TestPeerMedium):
    def make_tier(self, capacity_bytes: int) -> Tier:
        tier = super().make_tier(capacity_bytes)
        return Tier(tier.index, FaultInjectingMedium(tier.medium, FaultPlan()))


class TestPeerIndexOverLoopback(ReadOnlyConformance):
    """Answers are held back at the peer until the suite releases them."""

    time_s = 0.0

    @pytest.fixture(autouse=True)
    def engines(self) -> Iterator[None]:
        self.made: list[Engine] = []
        self.gates: list[threading.Event] = []
        yield
        for gate in self.gates:
            gate.set()
        for engine in reversed(self.made):
            engine.close()

    def make_late(self) -> TierIndex:
        holder = Engine()
        for key in (A, B):
            holder.put(key, chunk_bytes(1, CHUNK_BYTES))
        asker = Engine([holder.port], clock=self.now_s)
        self.made += [holder, asker]
        gate, holding, reading = threading.Event(), holder.client, asker.client
        self.gates.append(gate)
        grant, send, on_reply = holding.leases.grant, reading.send_lookup, reading.on_reply  # type: ignore[attr-defined]
        self.num_sent = self.num_answered = 0

        def gated(*arguments: object) -> object:
            gate.wait()
            return grant(*arguments)

        def counted_send(*arguments: object) -> object:
            self.num_sent += 1
            return send(*arguments)  # type: ignore[arg-type]

        def counted_reply(*arguments: object) -> None:
            on_reply(*arguments)
            self.num_answered += 1

        holding.leases.grant = gated  # type: ignore[attr-defined]
        reading.send_lookup, reading.on_reply = counted_send, counted_reply  # type: ignore[attr-defined, method-assign, assignment]
        until(reading.ready)
        return asker.index

    def now_s(self) -> float:
        return self.time_s

    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds

    def answer_all(self) -> None:
        self.gates[-1].set()
        # A closed index gets no answer.
        until(lambda: self.num_answered == self.num_sent or self.made[-1].index._ledger.is_closed)
        self.gates[-1].clear()


class TestPeerIndexOverLoopbackInAnIdleFaultInjector(TestPeerIndexOverLoopback):
    def make_late(self) -> TierIndex:
        return FaultInjectingIndex(super().make_late(), FaultPlan())


MakeEngine = type[Engine]


@pytest.fixture
def engine() -> Iterator[object]:
    made: list[Engine] = []

    def make(*arguments: object, **options: object) -> Engine:
        made.append(Engine(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


def test_engines_read_chunks_of_each_other(engine: MakeEngine) -> None:
    first = engine()
    second = engine([first.port])
    third = engine([first.port, second.port])
    first.put(A, chunk_bytes(1, CHUNK_BYTES))
    second.put(B, chunk_bytes(2, CHUNK_BYTES))
    until(lambda: len(third.client.ready()) == 2)
    assert found(third, A, B, C) == [HIT, HIT, MISS]
    assert [load(third, key) for key in (A, B)] == [chunk_bytes(1, CHUNK_BYTES), chunk_bytes(2, CHUNK_BYTES)]
    assert found(second, A, B) == [HIT, MISS], "its own chunks are in its host memory"
    assert load(second, A) == chunk_bytes(1, CHUNK_BYTES)


def test_a_scattered_chunk_is_read_whole_into_scattered_memory(engine: MakeEngine) -> None:
    holder = engine(capacity_bytes=16 * 1024, options=patient(leased_share=1.0))
    asker = engine([holder.port], capacity_bytes=16 * 1024)
    for made in (holder, asker):
        for number in range(16):
            made.put(b"%d" % number, bytes(1024))
        for number in range(0, 16, 2 if made is holder else 3):
            made.ram.invalidate(b"%d" % number)
    slot = holder.put(A, chunk_bytes(3, 5000))
    assert len(slot.extents) > 2
    assert found(asker, A) == [HIT] and load(asker, A, 5000) == chunk_bytes(3, 5000)


def test_a_chunk_being_read_is_evicted_only_afterwards(engine: MakeEngine) -> None:
    holder = engine()
    asker = engine([holder.port])
    holder.put(A, chunk_bytes(1, CHUNK_BYTES))
    assert found(asker, A) == [HIT]

    def churn() -> bool:
        for number in range(20):
            holder.put(b"%d %d" % (number, holder.ram.generation), bytes(CHUNK_BYTES))
        return holder.ram.lookup(A) is MISS

    assert not churn()
    assert load(asker, A) == chunk_bytes(1, CHUNK_BYTES)
    until(churn)


def test_a_withdrawn_or_overwritten_chunk_fails_its_load(engine: MakeEngine) -> None:
    holder = engine(capacity_bytes=CHUNK_BYTES, options=patient(leased_share=1.0))
    asker = engine([holder.port])
    for change in ("withdrawn", "another", "torn"):
        asker.index.clear()
        until(lambda: not len(holder.client.leases))
        holder.ram.clear()
        slot = holder.put(A, chunk_bytes(1, CHUNK_BYTES))
        assert found(asker, A) == [HIT]
        if change == "withdrawn":
            holder.arena.discard(slot)
        elif change == "another":
            holder.copying.store(FIRST, B, slot, [chunk_bytes(2, CHUNK_BYTES)])
            assert holder.copying.poll() == [Completion(FIRST)]
        else:
            holder.arena.views(slot)[0][7] ^= 1
        expected = {"withdrawn": "MISSING", "another": "WRONG_KEY", "torn": "CHECKSUM"}[change]
        assert load(asker, A) is FailureReason[expected]


def test_an_engine_with_another_model_is_refused_and_the_difference_logged(
    engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    holder = engine()
    holder.put(A, chunk_bytes(1, CHUNK_BYTES))
    other, like = engine([holder.port], model="another"), engine([holder.port])
    assert found(like, A) == [HIT]
    until(lambda: caplog.text.count("model.name") >= 2)
    assert "model.name is" in caplog.text and other.client.ready() == []
    for _ in range(20):
        other.client.ready()
        time.sleep(0.01)
    said = [record.message for record in caplog.records if "model.name" in record.message]
    assert len(said) <= 3, "not at each attempt"
    other.index.start_lookup([A], 1e12)
    assert other.index.lookup(A) is MISS


def test_an_engine_logs_its_own_address_among_its_peers(engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    port = peer_engines.free_port()
    own = engine([port], port=port)
    until(lambda: own.client.ready() == [] and "is this engine itself: skipped" in caplog.text)
    assert "ended: self" not in caplog.text


def test_a_peer_without_the_secret_gets_no_answer(engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    holder = engine()
    stranger = engine([holder.port], secret=Secret(b"a secret that nobody else knows"))
    until(lambda: "secret" in caplog.text)
    stranger.index.start_lookup([A], 1e12)
    assert stranger.index.lookup(A) is MISS and stranger.client.ready() == []


def test_an_engine_does_not_connect_to_its_own_address(engine: MakeEngine) -> None:
    holder, other, port = engine(), engine(), peer_engines.free_port()
    everybody = [port, holder.port, other.port]
    asker = engine(everybody, port=port)
    holder.put(A, chunk_bytes(1, CHUNK_BYTES))
    asker.put(B, chunk_bytes(2, CHUNK_BYTES))
    until(lambda: len(asker.client.ready()) >= 2)
    for _ in range(20):
        assert asker.client.ready() == [1, 2]
        time.sleep(0.01)
    assert found(asker, A, B) == [HIT, MISS], "its own chunks are in its host memory"
    assert load(asker, A) == chunk_bytes(1, CHUNK_BYTES)


def test_a_closed_peer_is_a_miss_and_is_found_again_after_a_restart(engine: MakeEngine) -> None:
    holder = engine()
    asker = engine([holder.port], options=patient(reach_timeout_s=0.05))
    holder.put(A, chunk_bytes(1, CHUNK_BYTES))
    assert found(asker, A) == [HIT]
    far = asker.index.pin(A)
    assert far is not None
    holder.close()
    until(lambda: asker.index.lookup(A) is MISS)
    asker.medium.load(FIRST, A, far, [bytearray(CHUNK_BYTES)])
    assert asker.medium.drain(peer_engines.TIMEOUT_S)
    [completion] = asker.medium.poll()
    assert completion.failure is not None and completion.failure.reason is FailureReason.IO
    asker.index.unpin(A)
    until(lambda: not asker.client.ready())
    again = engine(port=holder.port)
    again.put(A, chunk_bytes(4, CHUNK_BYTES))
    until(lambda: found(asker, A) == [HIT] and load(asker, A) == chunk_bytes(4, CHUNK_BYTES))


def test_a_peer_given_up_by_the_transport_is_connected_again_before_a_load(engine: MakeEngine) -> None:
    """NIXL gives up a peer when it cannot end its reads. The control connection does not notice."""
    holder = engine()
    asker = engine([holder.port])
    holder.put(A, chunk_bytes(1, CHUNK_BYTES))
    assert found(asker, A) == [HIT] and load(asker, A) == chunk_bytes(1, CHUNK_BYTES)
    inner = asker.medium._reader
    [source] = inner._sources.values()
    inner._transport.detach(source.remote)
    assert found(asker, A) == [HIT] and load(asker, A) == chunk_bytes(1, CHUNK_BYTES)


def test_queued_loads_are_read_and_more_are_busy(engine: MakeEngine) -> None:
    holder = engine(capacity_bytes=1 << 20)
    options = patient(reading_bytes=2 * CHUNK_BYTES, max_reads=3, max_waiting=200)
    asker = engine([holder.port], options=options)
    keys = [b"%d" % number for number in range(100)]
    for number, key in enumerate(keys):
        holder.put(key, chunk_bytes(number, CHUNK_BYTES))
    places = {key: to_tier_slot(0, slot) for key in keys if (slot := holder.ram.find(key))}
    buffers = {number: bytearray(CHUNK_BYTES) for number in range(300)}
    for number, buffer in buffers.items():
        asker.medium.load(Ticket(number), keys[number % 100], places[keys[number % 100]], [buffer])
    assert asker.medium.drain(peer_engines.TIMEOUT_S)
    done = {completion.ticket: completion.failure for completion in asker.medium.poll()}
    assert len(done) == 300
    right = [number for number, failure in done.items() if failure is None]
    assert len(right) >= 200 and all(buffers[number] == chunk_bytes(number % 100, CHUNK_BYTES) for number in right)
    assert {failure.reason for failure in done.values() if failure} <= {FailureReason.BUSY}


@pytest.mark.parametrize("call", ["read", "poll", "view_digest", "wait"])
def test_a_bug_during_one_load_costs_only_that_load(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    holder = engine()
    asker = engine([holder.port])
    for number, key in enumerate((A, B)):
        holder.put(key, chunk_bytes(number, CHUNK_BYTES))
    assert found(asker, A, B) == [HIT, HIT]
    assert load(asker, B) == chunk_bytes(1, CHUNK_BYTES)
    owner = reader if call == "view_digest" else asker.medium._reader._transport

    def fail(*arguments: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(owner, call, fail)
        assert load(asker, A) is FailureReason.IO or call == "wait"
    assert found(asker, B) == [HIT] and load(asker, B) == chunk_bytes(1, CHUNK_BYTES)


@pytest.mark.parametrize("call", ["reach", "ready", "progress"])
def test_a_lasting_bug_ends_every_load(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    holder = engine()
    asker = engine([holder.port], options=patient(reach_timeout_s=0.05, load_timeout_s=0.05))
    holder.put(A, chunk_bytes(0, CHUNK_BYTES))
    slot = holder.ram.find(A)
    assert slot is not None
    until(asker.client.ready)
    near = asker.medium._reader
    owner = near._transport if call == "progress" else near.node

    def fail(*arguments: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(owner, call, fail)
    for number in range(3):
        asker.medium.load(Ticket(number), A, to_tier_slot(0, slot), [bytearray(CHUNK_BYTES)])
    assert asker.medium.drain(peer_engines.TIMEOUT_S)
    assert sorted(completion.ticket for completion in asker.medium.poll()) == [0, 1, 2]


def test_a_load_from_a_slot_without_a_peer_fails(engine: MakeEngine) -> None:
    asker = engine()
    asker.medium.load(FIRST, A, Slot(((0x7FFF << 48, 8),)), [bytearray(8)])
    assert asker.medium.drain(0.0)
    [completion] = asker.medium.poll()
    assert completion.failure is not None and completion.failure.reason is FailureReason.IO


def test_close_ends_every_load(engine: MakeEngine) -> None:
    asker = engine([1])
    for number in range(5):
        asker.medium.load(Ticket(number), A, to_tier_slot(0, Slot(((0, CHUNK_BYTES),))), [bytearray(CHUNK_BYTES)])
    asker.medium.close()
    assert asker.medium.drain(0.0)
    reasons = {completion.failure.reason for completion in asker.medium.poll() if completion.failure}
    assert reasons <= {FailureReason.CLOSED, FailureReason.IO} and reasons


def test_a_load_from_an_unknown_peer_ends(engine: MakeEngine) -> None:
    asker = engine(options=patient(reach_timeout_s=0.05))
    asker.medium.load(FIRST, A, to_tier_slot(5, Slot(((0, 8),))), [bytearray(8)])
    assert asker.medium.drain(peer_engines.TIMEOUT_S)
    [completion] = asker.medium.poll()
    assert completion.failure is not None and completion.failure.reason is FailureReason.IO


def test_an_address_in_use_is_refused(engine: MakeEngine) -> None:
    taken = engine()
    near = PeerAddresses(SECRET, ("127.0.0.1", taken.port), (), lambda name: pytest.fail("no transport is opened"))
    with pytest.raises(TierConfigurationError) as caught:
        open_index(near, RamIndex(1024, 1024), fingerprint(), OPTIONS, lambda: 0.0)
    assert caught.value.field == "listen"


def test_a_medium_without_an_address_closes_its_transport(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = engine()
    closed: list[InMemoryTransport] = []
    close = InMemoryTransport.close

    def recorded(self: InMemoryTransport, timeout_s: float) -> bool:
        closed.append(self)
        return close(self, timeout_s)

    monkeypatch.setattr(InMemoryTransport, "close", recorded)
    near = PeerAddresses(SECRET, ("127.0.0.1", taken.port), (), peer_engines.in_memory)
    with pytest.raises(TierConfigurationError):
        open_medium(near, RamArena(1024, 1024), fingerprint().digest(), 0, OPTIONS, lambda: 0.0)
    assert len(closed) == 1
