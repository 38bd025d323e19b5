"""Servers that send anything: every call ends once, memory stays bounded, and invalid answers are refused."""

import contextlib
import errno
import itertools
import os
import random
import resource
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

import msgspec
import patience
import pytest
import zmq
from caches import DEEPSEEK_V4, QWEN3_NEXT, content_of, digests_of

from hybridkv.lmcache.calls import CallAnswer, CallFailure, CallFailureReason, CallResult
from hybridkv.lmcache.channel import Channel
from hybridkv.lmcache.connection import CLOSE_S, Connection, ConnectionOptions, Down, Ready
from hybridkv.lmcache.http import HttpAddress, HttpError, get_json
from hybridkv.lmcache.operations import Pages, PrefixHit
from hybridkv.lmcache.pool import TakenPages
from hybridkv.lmcache.wire import CODEC_0_5_7RC2, MAX_FRAME_BYTES, MalformedError, read_answer
from kits.lmcache.rig import Rig, wait
from kits.lmcache.scripted_server import (
    CONFIG,
    Frames,
    Script,
    ScriptedServer,
    polite,
    silent,
)
from kits.lmcache.server_process import eventually

TIMEOUT_S = patience.seconds(6.0)
QUICK_S = patience.seconds(0.03)
"""For calls that are never answered."""
SOON = ConnectionOptions(call_timeout_s=QUICK_S, beat_s=0.1, retry_s=0.05, retry_max_s=0.1)
NUM_CHANGED = 20_000
CALLS = (
    CODEC_0_5_7RC2.noop(),
    CODEC_0_5_7RC2.ping(7),
    CODEC_0_5_7RC2.found_chunks("session"),
    CODEC_0_5_7RC2.end_session("session"),
    CODEC_0_5_7RC2.chunk_tokens(64),
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def _channel(server: ScriptedServer) -> Channel:
    return Channel(server.address.host, server.address.port)


def _ping(channel: Channel, timeout_s: float = TIMEOUT_S) -> CallResult[bool]:
    return wait(lambda end: channel.call(CODEC_0_5_7RC2.ping(7), timeout_s, end))


def _after(name: str, script: Script) -> Script:
    """Polite, except for calls with this name."""
    return lambda called, frames: script(called, frames) if called == name else polite(called, frames)


def test_a_polite_server_is_used(server: ScriptedServer) -> None:
    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes) as rig:
        assert rig.num_found(digests_of("nothing", 2)) == 0
        assert rig.store(digests_of("nothing", 1), content_of("nothing", rig.geometry, 1)) == CallAnswer(None)


def test_a_server_that_never_answers_is_down_and_costs_no_call_time(server: ScriptedServer) -> None:
    server.script = silent
    rig = Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes, options=SOON)
    try:
        assert eventually(lambda: len(server.calls) >= 2)
        ended = rig.lookup_when_down(digests_of("silence", 1), timeout_s=3600.0)
        assert isinstance(ended, CallFailure) and ended.reason is CallFailureReason.UNSENT
    finally:
        rig.close()


def test_an_unanswered_call_ends_at_its_deadline_and_its_late_answer_is_reported(server: ScriptedServer) -> None:
    held: list[list[bytes]] = []

    def hold(name: str, frames: Frames) -> list[Frames]:
        held.append(list(frames[:3]))
        return [] if len(held) == 1 else [[*each, b"\xc3"] for each in held]

    channel = _channel(server)
    try:
        assert _ping(channel) == CallAnswer(True)
        server.script = hold
        late: list[bool] = []
        first: CallResult[bool] = wait(lambda end: channel.call(CODEC_0_5_7RC2.ping(1), QUICK_S, end, late.append))
        assert isinstance(first, CallFailure) and first.reason is CallFailureReason.TIMEOUT
        assert not late
        assert _ping(channel) == CallAnswer(True)
        assert eventually(lambda: late == [True])
    finally:
        channel.close(TIMEOUT_S)


def test_a_late_call_is_reported_when_its_connection_is_dropped(server: ScriptedServer) -> None:
    channel = _channel(server)
    try:
        assert _ping(channel) == CallAnswer(True)
        server.script = silent
        late: list[bool] = []
        first: CallResult[bool] = wait(lambda end: channel.call(CODEC_0_5_7RC2.ping(1), QUICK_S, end, late.append))
        assert isinstance(first, CallFailure) and first.reason is CallFailureReason.TIMEOUT
        assert not late
        channel.drop()
        assert eventually(lambda: late == [False])
    finally:
        channel.close(TIMEOUT_S)


def test_an_answered_call_keeps_no_timer(server: ScriptedServer) -> None:
    channel = _channel(server)
    try:
        for _ in range(20):
            assert _ping(channel, 3600.0) == CallAnswer(True)
        assert not channel._open_calls and not channel._timers
        server.script = silent
        ended = _ping(channel, QUICK_S)
        assert isinstance(ended, CallFailure) and ended.reason is CallFailureReason.TIMEOUT, (
            "the deadline is earlier than all before it"
        )
    finally:
        channel.close(TIMEOUT_S)


def test_calls_beyond_the_limit_are_busy(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.lmcache.channel.MAX_CALLS", 2)
    server.script = silent
    channel = _channel(server)
    try:
        ended: list[CallResult[bool]] = []
        for _ in range(3):
            channel.call(CODEC_0_5_7RC2.ping(1), TIMEOUT_S, ended.append)
        assert eventually(lambda: len(ended) == 1)
        assert ended == [CallFailure(CallFailureReason.BUSY, "ping")]
    finally:
        channel.close(TIMEOUT_S)
    assert ended[1:] == [CallFailure(CallFailureReason.CLOSED, "ping")] * 2
    assert isinstance(_ping(channel), CallFailure)


def test_a_call_that_is_unsent_at_its_deadline_is_never_sent() -> None:
    with ScriptedServer() as server:
        address = server.address
    channel = Channel(address.host, address.port)
    try:
        ended = _ping(channel, 0.2)
        assert isinstance(ended, CallFailure) and ended.reason is CallFailureReason.UNSENT
    finally:
        channel.close(TIMEOUT_S)


def test_a_dropped_connection_ends_its_calls_and_connects_again(server: ScriptedServer) -> None:
    server.script = silent
    channel = _channel(server)
    try:
        ended: list[CallResult[bool]] = []
        channel.call(CODEC_0_5_7RC2.ping(1), TIMEOUT_S, ended.append)
        assert eventually(lambda: server.calls == ["ping"])
        channel.drop()
        assert eventually(lambda: len(ended) == 1)
        assert ended == [CallFailure(CallFailureReason.LOST, "ping")]
        server.script = polite
        assert _ping(channel) == CallAnswer(True)
    finally:
        channel.close(TIMEOUT_S)


@pytest.mark.parametrize(
    "tail",
    [
        [],
        [b""],
        [b"\xc0"],
        [b"\xa2OK"],
        [b"\x01"],
        [b"\xc3", b"\xc3"],
        [b"\xc3"] * 50,
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x91" * 5000],
    ],
    ids=lambda tail: f"{len(tail)}x{tail[0][:4].hex() if tail else 'none'}",
)
def test_an_invalid_answer_is_malformed_and_the_next_one_is_used(server: ScriptedServer, tail: list[bytes]) -> None:
    server.script = lambda name, frames: [[*frames[:3], *tail]]
    channel = _channel(server)
    try:
        ended = _ping(channel)
        assert isinstance(ended, CallFailure) and ended.reason is CallFailureReason.MALFORMED
        server.script = polite
        assert _ping(channel) == CallAnswer(True)
    finally:
        channel.close(TIMEOUT_S)


def test_unknown_answers_are_ignored(server: ScriptedServer) -> None:
    strange = [[b"who", b"\x16", b"\xc3"], [b""], [b"\x00" * 8, b"\x16", b"\xc2"]]
    server.script = lambda name, frames: [*([frames[0], *each] for each in strange), *polite(name, frames)]
    channel = _channel(server)
    try:
        assert _ping(channel) == CallAnswer(True)
        assert _ping(channel) == CallAnswer(True)
    finally:
        channel.close(TIMEOUT_S)


def test_a_frame_that_is_too_long_ends_the_connection_and_takes_no_memory(server: ScriptedServer) -> None:
    server.script = lambda name, frames: [[*frames[:3], bytes(64 << 20)]]
    channel = _channel(server)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        bytes(64 << 20)  # what the script itself allocates
        ended = _ping(channel)
        assert isinstance(ended, CallFailure) and ended.reason in {CallFailureReason.LOST, CallFailureReason.TIMEOUT}
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    finally:
        channel.close(TIMEOUT_S)


def test_delayed_tasks_run_when_a_channel_closes(server: ScriptedServer) -> None:
    channel = _channel(server)
    done: list[bool] = []
    channel.after(3600.0, lambda: channel.after(3600.0, lambda: done.append(True)))
    assert channel.close(TIMEOUT_S)
    assert done == [True]


def test_a_server_is_pinged_between_tasks(server: ScriptedServer) -> None:
    options = ConnectionOptions(call_timeout_s=TIMEOUT_S)
    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes, options=options) as rig:
        is_posted, num_looks = threading.Event(), list[int]()

        def task(ready: Ready) -> None:
            assert is_posted.wait(TIMEOUT_S)
            num_looks.append(server.calls.count("ping"))

        for _ in range(3):
            rig.connection.post(task)
        is_posted.set()
        assert eventually(lambda: len(num_looks) == 3)
        assert num_looks[0] < num_looks[1] < num_looks[2]


def test_a_server_that_finds_more_than_was_looked_up_is_malformed(server: ScriptedServer) -> None:
    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes) as rig:
        server.script = _after("query_prefetch_status", lambda name, frames: [[*frames[:3], b"\x05"]])
        ended = rig.lookup(digests_of("more", 4))
        assert isinstance(ended, CallFailure) and ended.reason is CallFailureReason.MALFORMED
        assert rig.operations.counts().failures == {"lookup malformed": 1}


def test_a_lookup_that_never_ends_ends_at_its_deadline(server: ScriptedServer) -> None:
    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes) as rig:
        server.script = _after("query_prefetch_status", lambda name, frames: [frames[:3]])
        ended = rig.lookup(digests_of("endless", 4), timeout_s=QUICK_S)
        assert isinstance(ended, CallFailure) and ended.reason is CallFailureReason.TIMEOUT
        assert eventually(lambda: "free_lookup_locks" in server.calls and "end_session" in server.calls)


def test_void_pages_are_not_written_and_the_locks_are_released(server: ScriptedServer) -> None:
    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes) as rig:
        server.script = _after("query_prefetch_status", lambda name, frames: [[*frames[:3], b"\x01"]])
        found = rig.lookup(digests_of("void", 1))
        assert isinstance(found, CallAnswer)
        rig.pool.recreate()
        settled: list[bool] = []
        pages = Pages(TakenPages(0, {}), [])
        ended: CallResult[None] = wait(
            lambda end: rig.operations.retrieve(found.value, 0, pages, TIMEOUT_S, end, lambda: settled.append(True))
        )
        assert isinstance(ended, CallFailure) and ended.reason is CallFailureReason.UNSENT
        assert eventually(lambda: settled == [True] and {"free_lookup_locks", "end_session"} <= set(server.calls))
        assert "retrieve" not in server.calls


def test_a_server_that_falsely_reports_a_write_is_noticed(server: ScriptedServer) -> None:
    with Rig(server.address, DEEPSEEK_V4, uuid.uuid4().bytes) as rig:
        server.script = _after("query_prefetch_status", lambda name, frames: [[*frames[:3], b"\x02"]])
        ended, found, states = rig.retrieve(digests_of("nothing was written", 2))
        assert ended == CallAnswer(None)
        assert set(states) == {"absent"}
        assert not any(found.values())


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ({"/lmc_version": b'"0.6.0"'}, "LMCache server of version 0.5.6 or 0.5.7rc2"),
        ({"/lmc_version": b'"0.5.7"'}, "got '0.5.7'"),
        ({"/config": msgspec.json.encode({"mp": {**CONFIG, "transport": "grpc"}})}, "--transport"),
        ({"/config": msgspec.json.encode({"mp": {**CONFIG, "null_block_id": 3}})}, "--null-block-id"),
        (
            {"/config": msgspec.json.encode({"mp": {**CONFIG, "separate_object_groups": False}})},
            "--separate-object-groups",
        ),
    ],
)
def test_an_unusable_server_is_refused_by_name(pages: dict[str, bytes], expected: str) -> None:
    with ScriptedServer(pages=pages) as server:
        rig = Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes, options=SOON)
        try:
            state = rig.connection.wait_ready(TIMEOUT_S)
            assert isinstance(state, Down) and state.refusal is not None
            assert expected in str(state.refusal)
        finally:
            rig.close()


@pytest.mark.parametrize(
    "pages",
    [
        {"/lmc_version": b"5"},
        {"/lmc_version": b"not json"},
        {"/lmc_version": b"[" * 100_000},
        {"/lmc_version": b'"' + b"x" * (2 << 20) + b'"'},
        {"/config": b"{}"},
        {"/config": msgspec.json.encode({"mp": {**CONFIG, "chunk_size": 0}})},
        {"/config": msgspec.json.encode({"mp": {**CONFIG, "chunk_size": "256"}})},
        {"/config": msgspec.json.encode({"mp": {**CONFIG, "instance_id": "x" * 1000}})},
    ],
    ids=itertools.count(),
)
def test_a_server_with_an_invalid_configuration_is_down(pages: dict[str, bytes]) -> None:
    with ScriptedServer(pages=pages) as server:
        rig = Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes, options=SOON)
        try:
            assert eventually(lambda: rig.connection.state != Down("not tried yet"))
            state = rig.connection.state
            assert isinstance(state, Down) and state.refusal is None and "GET" in state.reason
            server.pages.update({"/lmc_version": b'"0.5.7rc2"', "/config": msgspec.json.encode({"mp": CONFIG})})
            rig.ready()
        finally:
            rig.close()


@pytest.mark.parametrize("said", [b"HTTP/1.0 200 OK\r\nX: ", b"HTTP/1.0 200 OK\r\n\r\n"], ids=["headers", "body"])
def test_a_slow_http_answer_ends_at_its_deadline(said: bytes) -> None:
    ended: list[str] = []

    def ask(address: HttpAddress) -> None:
        try:
            get_json(address, "/config", 0.3)
        except HttpError as error:
            ended.append(str(error))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        asker = threading.Thread(target=ask, args=(HttpAddress(*listening.getsockname()),), daemon=True)
        asker.start()
        client, _ = listening.accept()
        with client:
            client.sendall(said)
            until_s = time.monotonic() + TIMEOUT_S
            while asker.is_alive() and time.monotonic() < until_s:
                with contextlib.suppress(OSError):
                    client.sendall(b"1")
                asker.join(0.05)
            assert not asker.is_alive(), "the deadline counts for the whole answer, not per byte"
    assert len(ended) == 1 and ended[0].startswith("GET /config")


def test_a_server_that_returns_with_another_chunk_is_refused(server: ScriptedServer) -> None:
    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes, options=SOON) as rig:
        server.script = _after(
            "negotiate_chunk_size", lambda name, frames: [[*frames[:3], msgspec.msgpack.encode(512)]]
        )
        rig.connection.channel.drop()
        rig.connection.reconnect()

        def is_refused() -> bool:
            state = rig.connection.state
            return (
                isinstance(state, Down)
                and state.refusal is not None
                and "that this engine started with" in str(state.refusal)
            )

        assert eventually(is_refused)


def test_a_server_with_a_chunk_settled_by_another_engine_is_refused(server: ScriptedServer) -> None:
    """Such a server does not answer an alignment that its chunk lacks, and its configuration shows the chunk it was
    started with."""

    def settled(name: str, frames: Frames) -> list[Frames]:
        if name == "negotiate_chunk_size":
            return []
        return [[*frames[:3], msgspec.msgpack.encode(640)]] if name == "get_chunk_size" else polite(name, frames)

    server.script = settled
    rig = Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes, options=SOON)
    try:
        state = rig.connection.wait_ready(TIMEOUT_S)
        assert isinstance(state, Down) and state.refusal is not None, state
        assert (state.refusal.field, state.refusal.got) == ("chunk_size", 640)
    finally:
        rig.close()


def test_locks_of_a_lookup_during_a_close_are_released(server: ScriptedServer) -> None:
    """Between two polls of the lookup no call is open, and the lookup continues all the same."""
    looks, is_done = [0], threading.Event()

    def slow(name: str, frames: Frames) -> list[Frames]:
        if name != "query_prefetch_status":
            return polite(name, frames)
        looks[0] += 1
        return [[*frames[:3], msgspec.msgpack.encode(1 if is_done.is_set() else None)]]

    server.script = slow
    rig = Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes)
    assert isinstance(rig.connection.wait_ready(TIMEOUT_S), Ready)
    ended: list[CallResult[PrefixHit]] = []

    def end(answer: CallResult[PrefixHit]) -> None:
        ended.append(answer)
        if isinstance(answer, CallAnswer):
            rig.operations.release(answer.value)

    rig.operations.lookup(rig.prefix(digests_of("slow", 1)), 0, TIMEOUT_S, end)
    assert eventually(lambda: looks[0] > 8), "by now it is polled every 50 ms"
    closing = threading.Thread(target=rig.connection.close, args=(TIMEOUT_S,))
    closing.start()
    before = looks[0]
    assert eventually(lambda: looks[0] > before + 1 or not closing.is_alive())
    is_done.set()
    closing.join()
    rig.close()
    assert len(ended) == 1 and isinstance(ended[0], CallAnswer)
    assert server.calls.index("unregister_kv_cache") > server.calls.index("end_session")
    assert "free_lookup_locks" in server.calls[server.calls.index("lookup") :]


def test_a_lost_server_is_tried_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    has_tried_often = threading.Event()

    def pause(connection: Connection, pause_s: float, is_over: object = None) -> None:
        pauses.append(pause_s)
        if len(pauses) >= 20:
            has_tried_often.set()

    with ScriptedServer() as server:
        address = server.address
    monkeypatch.setattr(Connection, "_pause", pause)
    rig = Rig(address, QWEN3_NEXT, uuid.uuid4().bytes)
    try:
        assert has_tried_often.wait(TIMEOUT_S)
    finally:
        rig.close()
    assert max(pauses) <= 2.0 and pauses[0] < pauses[2]


def test_a_channel_without_a_socket_makes_one_when_it_can(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = _channel(server)
    connect, num_failures, may_connect = Channel._connect, [0], threading.Event()

    def fail_at_first(self: Channel) -> object:
        if not may_connect.is_set():
            num_failures[0] += 1
            raise zmq.ZMQError(errno.EMFILE)
        return connect(self)

    monkeypatch.setattr(Channel, "_connect", fail_at_first)
    try:
        channel.drop()
        assert eventually(lambda: num_failures[0] >= 1)
        unsent = _ping(channel, 0.1)
        assert isinstance(unsent, CallFailure) and unsent.reason is CallFailureReason.UNSENT
        assert eventually(lambda: num_failures[0] >= 2)
        may_connect.set()
        assert _ping(channel) == CallAnswer(True)
    finally:
        assert channel.close(TIMEOUT_S)


def test_a_channel_without_a_socket_closes(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = _channel(server)
    has_failed = threading.Event()

    def fail(self: Channel) -> object:
        has_failed.set()
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(Channel, "_connect", fail)
    channel.drop()
    assert has_failed.wait(TIMEOUT_S)
    ended: list[CallResult[bool]] = []
    channel.call(CODEC_0_5_7RC2.ping(1), TIMEOUT_S, ended.append)
    assert channel.close(TIMEOUT_S)
    assert ended == [CallFailure(CallFailureReason.CLOSED, "ping")]


def test_a_call_ends_if_its_send_raises(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    is_cut = threading.Event()
    channel = Channel(server.address.host, server.address.port, on_cut=is_cut.set)

    def fail(sock: object, parts: object, flags: int = 0) -> None:
        raise zmq.ZMQError(errno.ENOMEM)

    monkeypatch.setattr(zmq.Socket, "send_multipart", fail)
    found = wait(lambda end: channel.call(CODEC_0_5_7RC2.ping(1), TIMEOUT_S, end), 2 * TIMEOUT_S)
    assert found == CallFailure(CallFailureReason.LOST, "ping"), "the server may have the call"
    assert is_cut.wait(TIMEOUT_S)
    assert eventually(lambda: not channel.num_open)
    assert channel.close(TIMEOUT_S)


@pytest.mark.parametrize("leaves", [False, True], ids=["half-open", "silent"])
def test_a_close_with_open_calls_takes_one_bounded_time(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    waited: list[float] = []
    drain = Channel.drain

    def note(channel: Channel, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return drain(channel, timeout_s)

    monkeypatch.setattr(Channel, "drain", note)
    rig = Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes)
    rig.ready()
    server.script = _after("unregister_kv_cache", silent) if leaves else silent
    ended: list[CallResult[bool]] = []
    for _ in range(142):
        rig.connection.channel.call(CODEC_0_5_7RC2.ping(1), 3600.0, ended.append)
    if not leaves:
        assert eventually(lambda: server.calls.count("ping") > 142)
    began_s = time.monotonic()
    rig.close()
    # Half of it is for calls; the other half for a server that does not confirm the unregistration.
    assert time.monotonic() - began_s < patience.seconds(CLOSE_S)
    assert waited == [CLOSE_S / 2]
    assert len(ended) == 142


def test_changed_bytes_of_answers_are_values_or_malformed() -> None:
    """Only the decoder, without a network, as fast as possible."""
    chance = random.Random(int(os.environ.get("FUZZ_SEED", "0")))
    until_s = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "0"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    number = 0
    while number < NUM_CHANGED or time.monotonic() < until_s:
        call, number = CALLS[number % len(CALLS)], number + 1
        value = bytearray(
            msgspec.msgpack.encode(chance.choice([True, "OK", 256, [b"x", True], None, [], {"a": 1}, -5, 1e9]))
        )
        for _ in range(chance.randrange(4)):
            value[chance.randrange(len(value))] = chance.randrange(256)
        value += chance.randbytes(chance.choice([0, 0, 1, 7, 200]))
        frames: list[Sequence[bytes]] = [[call.operation, bytes(value)], [call.operation], [bytes(value)], []]
        try:
            read = read_answer(call, chance.choice(frames))
        except MalformedError:
            continue
        assert read is None or isinstance(read, bool | str) or 0 <= read < 1 << 48
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert MAX_FRAME_BYTES < 1 << 20


def test_changed_bytes_on_the_wire_end_every_call(server: ScriptedServer) -> None:
    chance = random.Random(int(os.environ.get("FUZZ_SEED", "0")))

    def garble(name: str, frames: Frames) -> list[Frames]:
        answer = [bytearray(frame) for frame in polite(name, frames)[0]]
        for _ in range(chance.randrange(3)):
            at = chance.randrange(1, len(answer))
            if answer[at]:
                answer[at][chance.randrange(len(answer[at]))] = chance.randrange(256)
        if chance.random() < 0.2:
            answer.append(bytearray(chance.randbytes(20)))
        return [[bytes(frame) for frame in answer]] * chance.choice([1, 1, 1, 2])

    with Rig(server.address, QWEN3_NEXT, uuid.uuid4().bytes) as rig:
        content = content_of("garbled", rig.geometry, 1)
        server.script = garble
        for number in range(60):
            digests = digests_of(("garbled", number), 1)
            ended = rig.lookup(digests, timeout_s=0.2)
            if isinstance(ended, CallAnswer):
                rig.operations.release(ended.value)
            rig.store(digests, content, timeout_s=0.2)
            if rig.pool.num_taken > 16:
                break
        server.script = polite
        assert eventually(lambda: isinstance(rig.lookup(digests_of("polite", 1)), CallAnswer))
