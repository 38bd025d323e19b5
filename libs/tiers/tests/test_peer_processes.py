"""Peers in another process can be read; a killed, stopped or lying peer costs bounded time and no wrong bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import patience
import pytest
from peer_engine_process import EngineProcess
from peer_engines import CHUNK_BYTES, OPTIONS, TIMEOUT_S, Engine, chunk_bytes, found, load, patient

from hybridkv.peers.transport.nixl import NixlTransport
from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason, LookupAnswer, Ticket
from hybridkv.tiers.peer import PeerOptions
from kits.peers.suite import until

A, B = b"key a", b"key b"
HIT, MISS = LookupResult.HIT, LookupResult.MISS
QUICK = patient(load_timeout_s=patience.seconds(0.1), reach_timeout_s=patience.seconds(0.02))
"""For operations that are expected to fail. Those expected to succeed are repeated until they do."""


@pytest.fixture
def peer() -> Iterator[EngineProcess]:
    with EngineProcess() as process:
        process.tell("put", A, 1)
        yield process


def asking(peer: EngineProcess, options: PeerOptions | None = None) -> Engine:
    return Engine([peer.port], options=options or OPTIONS, make_transport=NixlTransport)


def test_another_process_gives_its_chunks(peer: EngineProcess) -> None:
    asker = asking(peer)
    try:
        assert found(asker, A, B) == [HIT, MISS]
        assert load(asker, A) == chunk_bytes(1, CHUNK_BYTES) != chunk_bytes(2, CHUNK_BYTES)
        peer.tell("put", B, 2)
        until(lambda: found(asker, B) == [HIT])
        assert load(asker, B) == chunk_bytes(2, CHUNK_BYTES)
    finally:
        asker.close()


def test_a_killed_peer_fails_a_load_and_then_misses(peer: EngineProcess) -> None:
    asker = asking(peer, QUICK)
    try:
        assert found(asker, A) == [HIT]
        far = asker.index.pin(A)
        assert far is not None
        peer.kill()
        asker.medium.load(Ticket(1), A, far, [bytearray(CHUNK_BYTES)])
        assert asker.medium.drain(TIMEOUT_S)
        [completion] = asker.medium.poll()
        assert completion.failure is not None and completion.failure.reason is FailureReason.IO
        until(lambda: asker.index.lookup(A) is MISS)
        asker.index.unpin(A)
        asker.index.start_lookup([B], time.monotonic() + TIMEOUT_S)
        assert asker.index.lookup(B) is MISS, "no peer is left to wait for"
    finally:
        asker.close()


def test_a_stopped_peer_costs_only_the_timeouts(peer: EngineProcess) -> None:
    asker = asking(peer, QUICK)
    try:
        assert found(asker, A) == [HIT]
        peer.stop()
        asker.index.start_lookup([B], time.monotonic() + patience.seconds(0.05))
        until(lambda: asker.index.lookup(B) is MISS)
        assert asker.index.take_counts().answers == {LookupAnswer.FOUND: 1, LookupAnswer.TIMED_OUT: 1}
        assert load(asker, A) is FailureReason.IO
        peer.go_on()
        until(lambda: found(asker, A) == [HIT] and load(asker, A) == chunk_bytes(1, CHUNK_BYTES))
    finally:
        asker.close()


def test_a_lying_peer_fails_loads_and_gives_no_wrong_bytes(peer: EngineProcess) -> None:
    asker = asking(peer)
    try:
        peer.tell("lie")
        assert found(asker, B) == [HIT]
        assert load(asker, B) is FailureReason.WRONG_KEY
        asker.index.invalidate(B)
        peer.tell("forge")
        assert found(asker, B) == [HIT]
        assert load(asker, B) is FailureReason.CHECKSUM
    finally:
        asker.close()


def test_close_does_not_wait_for_a_stopped_peer(peer: EngineProcess) -> None:
    asker = asking(peer)
    assert found(asker, A) == [HIT]
    far = asker.index.pin(A)
    assert far is not None
    peer.stop()
    asker.medium.load(Ticket(1), A, far, [bytearray(CHUNK_BYTES)])
    asker.close()
    [completion] = asker.medium.poll()
    assert completion.failure is not None and completion.failure.reason in (FailureReason.CLOSED, FailureReason.IO)
