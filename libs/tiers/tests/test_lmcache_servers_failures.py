"""Servers that are killed, stopped, silent, brought back, or whose disk lies: every move ends, and no wrong byte is
believed."""

from __future__ import annotations

import http.server
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator

import patience
import pytest
from lmcache_servers import CHUNK_BYTES, TIMEOUT_S, Engine, ServerWithDisk, chunk_bytes, engine_at

from hybridkv.lmcache.connection import ServerAddress
from hybridkv.lmcache.wire import CODECS
from hybridkv.planner import LookupResult
from hybridkv.tiers import Answer, FailureReason, Refusal, Slot, Ticket, TierConfigurationError
from hybridkv.tiers.lmcache import LMCacheOptions
from kits.lmcache.server_process import command, eventually, variable

A, B, C = b"key a", b"key b", b"key c"
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS
SHORT = LMCacheOptions(move_timeout_s=1.0, reach_timeout_s=1.0)
BRIEF = LMCacheOptions(move_timeout_s=patience.seconds(0.5), missing_s=0.01)
"""Enough for what is to be done, on a busy machine too."""


@pytest.fixture(scope="module", params=sorted(CODECS))
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerWithDisk]:
    lmcache = command(request.param)
    if lmcache is None:
        pytest.skip(f"{variable(request.param)} names no lmcache of version {request.param}")
    place = ServerWithDisk(lmcache, tmp_path_factory.mktemp("lmcache"))
    yield place
    place.server.kill()


@pytest.mark.full
def test_what_is_on_a_servers_disk_is_read_from_the_next_one_and_a_changed_byte_is_found(place: ServerWithDisk) -> None:
    engine = engine_at(place.server.address)
    before = set(place.files())
    for number, key in enumerate((A, B)):
        assert engine.put(key, chunk_bytes(number)) is None
    assert eventually(lambda: place.has_written(len(before) + 2)), place.files()
    place.server.kill()
    assert eventually(lambda: engine.index.lookup(A) is MISS), "nobody to read it from"
    place.start()
    assert eventually(engine.is_there)
    assert engine.found(A, B, C) == [HIT, HIT, MISS]
    assert [engine.get(key) for key in (A, B)] == [chunk_bytes(0), chunk_bytes(1)]
    place.server.kill()
    for path in set(place.files()) - before:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    place.start()
    assert eventually(engine.is_there)
    assert engine.found(A, B) == [HIT, HIT], "the server says that all is well"
    assert [engine.get(key) for key in (A, B)] == [FailureReason.CHECKSUM] * 2
    engine.index.invalidate(A, FailureReason.CHECKSUM)
    assert engine.found(A) == [MISS] and engine.index.reserve(A, CHUNK_BYTES) is Refusal.PRESENT
    another = engine_at(place.server.address, namespace=engine.namespace, options=BRIEF)
    assert eventually(lambda: another.found(A, B) == [MISS, MISS]), "the server was told to delete them"
    assert another.put(A, chunk_bytes(0)) is None and another.get(A) == chunk_bytes(0)
    another.close()
    engine.close()


@pytest.mark.full
def test_a_server_that_is_killed_in_mid_load_and_mid_store_costs_those_and_is_used_again(place: ServerWithDisk) -> None:
    engine = engine_at(place.server.address)
    assert engine.put(A, chunk_bytes(1)) is None
    far, new = engine.index.pin(A), engine.index.reserve(B, CHUNK_BYTES)
    assert far is not None and isinstance(new, Slot)
    place.server.signal(signal.SIGSTOP)  # so that both are under way for certain
    destination = bytearray(CHUNK_BYTES)
    engine.medium.load(Ticket(1), A, far, [destination])
    engine.medium.store(Ticket(2), B, new, [chunk_bytes(2)])
    channel = engine.medium._shelves[CHUNK_BYTES].connection.channel
    assert eventually(lambda: channel.num_open >= 2)
    assert engine.medium.poll() == []
    place.server.kill()
    assert engine.medium.drain(TIMEOUT_S)
    completions = engine.medium.poll()
    assert {completion.failure.reason for completion in completions if completion.failure} == {FailureReason.IO}
    assert len(completions) == 2
    engine.index.unpin(A)
    engine.index.abort(B)
    assert eventually(lambda: engine.index.lookup(A) is MISS)
    assert engine.index.reserve(C, CHUNK_BYTES) is Refusal.BUSY, "at once, while it is gone"
    place.start()
    assert eventually(engine.is_there)
    assert engine.put(B, chunk_bytes(2)) is None and engine.get(B) == chunk_bytes(2)
    engine.close()


def test_a_server_that_answers_no_more_costs_the_time_that_was_given(place: ServerWithDisk) -> None:
    engine = engine_at(place.server.address, options=BRIEF)
    assert engine.put(A, chunk_bytes(1)) is None
    far, new = engine.index.pin(A), engine.index.reserve(B, CHUNK_BYTES)
    assert far is not None and isinstance(new, Slot)
    place.server.signal(signal.SIGSTOP)
    engine.index.ask([C], time.monotonic() + patience.seconds(0.1))
    assert engine.index.lookup(C) is PENDING
    engine.medium.load(Ticket(1), A, far, [bytearray(CHUNK_BYTES)])
    engine.medium.store(Ticket(2), B, new, [chunk_bytes(2)])
    assert engine.medium.drain(TIMEOUT_S), "though the server is stopped still"
    assert all(each.failure and each.failure.reason is FailureReason.IO for each in engine.medium.poll())
    assert eventually(lambda: engine.index.lookup(C) is MISS)
    assert engine.index.take_counts().answers == {Answer.LATE: 1} and engine.index.heard.not_in_time == 1
    engine.index.abort(B)
    assert eventually(lambda: not engine.is_there())
    place.server.signal(signal.SIGCONT)
    assert eventually(engine.is_there)
    assert engine.put(C, chunk_bytes(3)) is None and engine.get(C) == chunk_bytes(3)
    engine.close()


def test_an_end_waits_for_no_server_that_is_stopped(place: ServerWithDisk) -> None:
    engine = engine_at(place.server.address)
    assert engine.put(A, chunk_bytes(1)) is None
    far = engine.index.pin(A)
    assert far is not None
    place.server.signal(signal.SIGSTOP)
    try:
        engine.medium.load(Ticket(1), A, far, [bytearray(CHUNK_BYTES)])
        engine.close()
        assert engine.medium.drain(0.0)
        [completion] = engine.medium.poll()
        assert completion.failure is not None
        assert completion.failure.reason in (FailureReason.CLOSED, FailureReason.IO)
    finally:
        place.server.signal(signal.SIGCONT)


@pytest.fixture
def silent() -> Iterator[ServerAddress]:
    """Both sides listen, and nobody ever answers."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    yield ServerAddress("127.0.0.1", sockets[0].getsockname()[1], sockets[1].getsockname()[1])
    for each in sockets:
        each.close()


def test_a_server_that_never_answers_costs_an_opening_its_time_and_then_nothing(silent: ServerAddress) -> None:
    engine = Engine(silent, options=SHORT)
    engine.index.ask([A], time.monotonic() + TIMEOUT_S)
    assert engine.index.lookup(A) is MISS and engine.index.heard == (0, 0), "nobody was asked"
    assert engine.index.reserve(A, CHUNK_BYTES) is Refusal.BUSY
    slot = Slot(((0, CHUNK_BYTES),))
    engine.medium.load(Ticket(1), A, slot, [bytearray(CHUNK_BYTES)])
    engine.medium.store(Ticket(2), B, slot, [chunk_bytes(2)])
    assert engine.medium.drain(TIMEOUT_S)
    reasons = {each.ticket: each.failure.reason for each in engine.medium.poll() if each.failure is not None}
    assert reasons == {1: FailureReason.IO, 2: FailureReason.BUSY}, "a store is made again and blames nobody"
    engine.close()


@pytest.fixture
def unknown() -> Iterator[ServerAddress]:
    """A server of a version that nobody speaks with."""

    class Says(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps("9.9.9").encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Says) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield ServerAddress("127.0.0.1", 1, server.server_address[1])
        server.shutdown()


def test_a_server_that_cannot_be_used_is_refused_with_what_would_do(unknown: ServerAddress) -> None:
    with pytest.raises(TierConfigurationError) as caught:
        Engine(unknown)
    assert caught.value.field == "url" and caught.value.got == "9.9.9"
    assert "0.5.6" in str(caught.value)


@pytest.mark.parametrize("sizes", [(), tuple(range(1, 18))])
def test_a_cache_of_no_sizes_or_too_many_is_refused(silent: ServerAddress, sizes: tuple[int, ...]) -> None:
    with pytest.raises(TierConfigurationError) as caught:
        Engine(silent, sizes=sizes)
    assert caught.value.field == "chunk_tokens"
