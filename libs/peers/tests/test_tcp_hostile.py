"""Data connections where a capability leads astray, where there are too many of them, and where one meets a bug."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import msgspec
import pytest
from control_pair import TIMEOUT_S
from test_tcp_transport import SECRET, SIZE, Pair

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.testing.factories import fresh_name
from hybridkv.peers.testing.suite import Reader, reason_of, until, whole
from hybridkv.peers.transport import Done, Failed, FailureReason
from hybridkv.peers.transport.tcp import TcpOptions, TcpTransport, server
from hybridkv.peers.transport.tcp.channel import Channel
from hybridkv.peers.transport.tcp.protocol import Answer, Capability, data_key, decode_capability, encode
from hybridkv.peers.wire import Channel as Purpose
from hybridkv.peers.wire import CloseReason, Identity, ServerHandshake, Session, WireLimits, pack_columns


@pytest.fixture
def pair() -> Any:
    made = Pair()
    yield made
    for transport in made.made:
        assert transport.close(TIMEOUT_S)


def leading_to(pair: Pair, host: str) -> bytes:
    capability = decode_capability(pair.owner.capability)
    assert isinstance(capability, Capability)
    return encode(msgspec.structs.replace(capability, host=host))


def test_nothing_is_connected_to_that_may_not_be_reached(pair: Pair) -> None:
    reader = pair.reader()
    asked: list[str] = []

    def may_reach(host: str) -> bool:
        asked.append(host)
        return host == "127.0.0.1"

    for host in ("127.0.0.2", "::1"):
        found = reader.transport.attach(leading_to(pair, host), may_reach)
        assert isinstance(found, Failed) and found.reason is FailureReason.REFUSED and host in found.detail
    remote = reader.transport.attach(leading_to(pair, "localhost"), may_reach)
    assert asked == ["127.0.0.2", "::1", "127.0.0.1"]
    assert not isinstance(remote, Failed)
    assert isinstance(reader.finish(remote, whole(SIZE)), Done)


@pytest.mark.parametrize("host", ["", "a\0b", "no.address.invalid", "x" * 100_000, "::1%\0"])
def test_what_is_no_address_is_refused(pair: Pair, host: str) -> None:
    found = pair.reader().transport.attach(leading_to(pair, host))
    assert isinstance(found, Failed) and found.reason is FailureReason.REFUSED
    assert len(found.detail) < 400


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"host": "::"}, {"advertised_host": "0.0.0.0"}])
def test_every_address_is_none_at_which_a_host_is_found(options: dict[str, str]) -> None:
    with pytest.raises(PeersConfigurationError) as caught:
        TcpTransport(fresh_name(), SECRET, TcpOptions(**options))  # type: ignore[arg-type]
    assert caught.value.field == "advertised_host"


def answer_once(listener: socket.socket, key: bytes, answer: Answer | None) -> None:
    """Somebody who knows secret and capability, and answers what he wants. None: a head that never ends."""
    sock, _ = listener.accept()
    with sock:
        session = Session(ServerHandshake(Identity("rogue", key), Purpose.DATA, b"n" * 32), TcpOptions().limits)
        while True:
            session.feed(sock.recv(1 << 16))
            asked = session.next()
            if asked is not None:
                break
            sock.sendall(bytes(session.output))
            session.output.clear()
        if answer is None:
            sock.sendall((1 << 20).to_bytes(4, "big"))
        else:
            session.seal(encode(answer))
            sock.sendall(bytes(session.output) + b"\xaa" * (0 if answer.refusal else SIZE))
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1 << 16):
                pass


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(0, SIZE), None),
        (Answer(0, SIZE - 1), FailureReason.BROKEN),
        (Answer(0, SIZE + 1), FailureReason.BROKEN),
        (Answer(1, SIZE), FailureReason.BROKEN),
        (Answer(0, 0, "no"), FailureReason.REFUSED),
        (None, FailureReason.BROKEN),
    ],
)
def test_an_answer_to_another_question_is_none(pair: Pair, answer: Answer | None, reason: FailureReason | None) -> None:
    reader = pair.reader(connections=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        key, port = data_key(SECRET, bytes(32)), listener.getsockname()[1]
        rogue = threading.Thread(target=answer_once, args=(listener, key, answer))
        rogue.start()
        capability = encode(Capability(1, "rogue", "127.0.0.1", port, bytes(32), pack_columns([[SIZE]])))
        remote = reader.attach(capability)
        assert reason_of(reader.finish(remote, whole(SIZE))) is reason
        assert (reader.regions[0] == 0xAA).all() == (reason is None)
        reader.transport.detach(remote)
        rogue.join(TIMEOUT_S)
        assert not rogue.is_alive()


def test_who_asks_for_nothing_makes_room_and_may_come_back() -> None:
    limits = WireLimits(
        max_frame_bytes=4 << 20, max_buffered_bytes=8 << 20, max_connections=1, handshake_timeout_s=TIMEOUT_S
    )
    owner = Reader(TcpTransport(fresh_name(), SECRET, TcpOptions(limits=limits)), [SIZE])
    readers = [Reader(TcpTransport(fresh_name(), SECRET, TcpOptions(connections=1)), [SIZE]) for _ in range(2)]
    remotes = [reader.attach(owner.capability) for reader in readers]
    try:
        for turn in (0, 1, 0):
            assert isinstance(readers[turn].finish(remotes[turn], whole(SIZE)), Done)
        assert isinstance(owner.transport, TcpTransport)
        transport = owner.transport
        until(lambda: transport.closed_connections().get(CloseReason.TOO_MANY, 0) == 2)
    finally:
        for each in (owner, *readers):
            assert each.transport.close(TIMEOUT_S)


def test_a_bug_over_a_request_costs_its_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pair.reader()
    remote = reader.attach(pair.owner.capability)

    def fail(body: bytes) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(server, "decode_read", fail)
        assert reason_of(reader.finish(remote, whole(SIZE))) is FailureReason.GONE
    pair.until_closed(CloseReason.HANDLER)
    assert isinstance(reader.finish(remote, whole(SIZE)), Done)


def test_a_bug_over_an_answer_costs_the_reads_of_its_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pair.reader()
    remote = reader.attach(pair.owner.capability)

    def fail(channel: Channel, memory: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(Channel, "receive", fail)
        assert isinstance(reader.finish(remote, whole(SIZE)), Failed)
    assert isinstance(reader.finish(remote, whole(SIZE)), Done)


@pytest.mark.parametrize(("side", "call"), [("client", "_serve"), ("client", "_share_out"), ("server", "_accept")])
def test_a_bug_over_no_connection_costs_reads_of_its_time(
    pair: Pair, side: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its thread no read would end any more, and the blocks that it writes to would never be free."""
    reader = pair.reader()
    remote = reader.attach(pair.owner.capability)
    transport = (reader if side == "client" else pair.owner).transport
    assert isinstance(transport, TcpTransport)

    def fail(*arguments: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(transport._client if side == "client" else transport._server, call, fail)
        assert isinstance(reader.finish(remote, whole(SIZE), timeout_s=0.3), Failed)
    assert isinstance(reader.finish(remote, whole(SIZE)), Done)
