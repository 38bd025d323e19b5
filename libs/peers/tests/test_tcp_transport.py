"""What is of the TCP transport alone: who may connect, what a request may say, and ranges of gigabytes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import patience
import pytest
from control_pair import TIMEOUT_S, Stranger
from hypothesis import given
from hypothesis import strategies as st
from large_memory import PIECE_BYTES, LargeMemory

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.testing.factories import fresh_name
from hybridkv.peers.testing.memory import pattern
from hybridkv.peers.testing.suite import Reader, reason_of, until, whole
from hybridkv.peers.transport import Done, FailureReason, Ranges, Region
from hybridkv.peers.transport.memory import Pieces, RegisteredMemory
from hybridkv.peers.transport.tcp import TcpOptions, TcpTransport
from hybridkv.peers.transport.tcp.parts import Transfer, parts_of
from hybridkv.peers.transport.tcp.protocol import Read, data_key, decode_capability, encode
from hybridkv.peers.wire import (
    NO_SECRET,
    Channel,
    ClientHandshake,
    CloseReason,
    Identity,
    Secret,
    Session,
    frame,
    pack_columns,
    unpack_columns,
)

SECRET = Secret(b"a secret that both sides know")
SIZE = 4096
CALM = {
    "connect_timeout_s": TIMEOUT_S,
    "limits": msgspec.structs.replace(TcpOptions().limits, handshake_timeout_s=TIMEOUT_S),
}
"""Of connections that shall be made."""


class Pair:
    def __init__(self) -> None:
        self.made: list[TcpTransport] = []
        self.owner = self.reader()
        self.owner.regions[0][:] = pattern(0, SIZE)

    def reader(self, secret: Secret = SECRET, **options: object) -> Reader:
        self.made.append(TcpTransport(fresh_name(), secret, TcpOptions(**CALM | options)))  # type: ignore[arg-type]
        return Reader(self.made[-1], [SIZE])

    def until_closed(self, reason: CloseReason, times: int = 1) -> None:
        """The owner counts a connection when it has ended, which its reader may have heard of before."""
        until(lambda: self.made[0].closed_connections().get(reason, 0) == times)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for transport in made.made:
        assert transport.close(TIMEOUT_S)


def test_who_has_the_capability_and_not_the_secret_reads_nothing(pair: Pair) -> None:
    for secret in (Secret(b"another secret altogether"), NO_SECRET):
        stranger = pair.reader(secret)
        remote = stranger.attach(pair.owner.capability)
        assert reason_of(stranger.finish(remote, whole(64))) is FailureReason.REFUSED
        assert not (stranger.regions[0][:64] == pair.owner.regions[0][:64]).all()
    pair.until_closed(CloseReason.SECRET, 2)
    friend = pair.reader()
    assert isinstance(friend.finish(friend.attach(pair.owner.capability), whole(64)), Done)


def test_who_has_the_secret_and_not_the_capability_reads_nothing(pair: Pair) -> None:
    capability = decode_capability(pair.owner.capability)
    assert not isinstance(capability, str)
    guessed = encode(type(capability)(1, capability.name, capability.host, capability.port, b"\0" * 32, b""))
    stranger = pair.reader()
    assert reason_of(stranger.finish(stranger.attach(guessed), whole(64))) is FailureReason.REFUSED


def test_a_stranger_receives_no_byte_of_memory(pair: Pair) -> None:
    capability = decode_capability(pair.owner.capability)
    assert not isinstance(capability, str)
    request = frame(encode(Read(0, pack_columns([[0], [0], [SIZE]]))))
    hello = frame(ClientHandshake(Identity("x", b"no key"), Channel.DATA, b"n" * 32).first)
    secret_bytes = pair.owner.regions[0].tobytes()
    for said in (request * 3, hello + request, hello + hello):
        stranger = Stranger((capability.host, capability.port))
        stranger.say(said)
        heard = stranger.hear_all()
        stranger.close()
        assert len(heard) < 512
        assert secret_bytes[:16] not in heard


def test_a_request_for_other_memory_is_refused_by_the_owner_itself(pair: Pair) -> None:
    """Whoever may connect says what it wants: nothing that a well-behaved reader would have checked counts."""
    capability = decode_capability(pair.owner.capability)
    assert not isinstance(capability, str)
    key = data_key(SECRET, capability.token)
    for columns, ends in [
        ([[0], [SIZE - 7], [8]], False),
        ([[0], [-8], [16]], False),
        ([[7], [0], [8]], False),
        ([[0], [(1 << 63) - 1], [(1 << 63) - 1]], False),
        ([[0] * 40_000, [0] * 40_000, [1] * 40_000], True),
    ]:
        rogue = Stranger((capability.host, capability.port))
        session = Session(ClientHandshake(Identity("rogue", key), Channel.DATA, b"n" * 32), TcpOptions().limits)
        while session.established is None:
            rogue.say(bytes(session.output))
            session.output.clear()
            session.feed(rogue.sock.recv(4096))
            session.next()
        assert session.seal(encode(Read(5, pack_columns(columns))))
        rogue.say(bytes(session.output))
        if ends:
            assert rogue.hear_all() == b""
        else:
            size = rogue.hear(4)
            session.feed(size + rogue.hear(int.from_bytes(size, "big")))
            assert b"does not lie in registered memory" in (session.next() or b"")
        rogue.close()


def test_a_reader_that_takes_nothing_is_left() -> None:
    owner = TcpTransport(fresh_name(), SECRET, TcpOptions(send_timeout_s=0.1, limits=CALM["limits"]))
    large = pattern(0, 32 << 20)
    capability = decode_capability(owner.register([Region(large.ctypes.data, large.nbytes)]))
    assert not isinstance(capability, str)
    rogue = Stranger((capability.host, capability.port))
    identity = Identity("rogue", data_key(SECRET, capability.token))
    session = Session(ClientHandshake(identity, Channel.DATA, b"n" * 32), TcpOptions().limits)
    while session.established is None:
        rogue.say(bytes(session.output))
        session.output.clear()
        session.feed(rogue.sock.recv(4096))
        session.next()
    assert session.seal(encode(Read(5, pack_columns([[0], [0], [large.nbytes]]))))
    rogue.say(bytes(session.output))
    until(lambda: owner.closed_connections().get(CloseReason.BACKLOG))
    rogue.close()
    assert owner.close(TIMEOUT_S)


@pytest.mark.full
def test_a_range_of_more_than_two_gibibytes_is_read() -> None:
    pieces = (2 << 30) // PIECE_BYTES + 1
    source, target = LargeMemory(pieces), LargeMemory(pieces)
    owner, reader = TcpTransport(fresh_name(), SECRET), TcpTransport(fresh_name(), SECRET)
    try:
        source.piece[:] = pattern(0, PIECE_BYTES).tobytes()
        capability = owner.register([Region(source.address, source.num_bytes)])
        reader.register([Region(target.address, target.num_bytes)])
        remote = reader.attach(capability)
        transfer = reader.read(remote, whole(source.num_bytes), patience.seconds(60.0))  # type: ignore[arg-type]
        while not isinstance(state := reader.poll(transfer), Done):
            assert reason_of(state) is None, state
            reader.wait(1.0)
        assert state.num_bytes == source.num_bytes > 1 << 31
        assert target.piece == source.piece
    finally:
        assert reader.close(TIMEOUT_S)
        assert owner.close(TIMEOUT_S)
        source.close()
        target.close()


rows = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 500), st.integers(0, 2), st.integers(0, 500), st.integers(1, 200)),
    min_size=1,
    max_size=40,
)


@given(rows, st.integers(1, 300), st.integers(1, 5))
def test_parts_hold_every_byte_once_and_in_order(
    found: list[tuple[int, int, int, int, int]], share_bytes: int, max_ranges: int
) -> None:
    transfer = Transfer(1, 1, 0.0, 0.0)  # type: ignore[arg-type]
    parts = parts_of(transfer, Ranges.of(found), share_bytes, max_ranges)
    ours = [(region, offset + at) for region, offset, _, _, size in found for at in range(size)]
    theirs = [(region, offset + at) for _, _, region, offset, size in found for at in range(size)]
    got_ours: list[tuple[int, int]] = []
    got_theirs: list[tuple[int, int]] = []
    for part in parts:
        got_ours += spread(part.local)
        remote = Pieces(*unpack_columns(part.columns, 3, 10_000))
        assert len(remote) <= max_ranges
        got_theirs += spread(remote)
        assert int(remote.num_bytes.sum()) == part.num_bytes < 2 * share_bytes
    assert got_ours == ours
    assert got_theirs == theirs
    assert transfer.num_bytes == len(ours)
    assert transfer.parts_left == len(parts)


def spread(pieces: Pieces) -> list[tuple[int, int]]:
    table = zip(pieces.regions.tolist(), pieces.offsets.tolist(), pieces.num_bytes.tolist(), strict=True)
    return [(region, offset + at) for region, offset, size in table for at in range(size)]


wide = st.integers(-(1 << 63), (1 << 63) - 1)


@given(
    st.lists(st.tuples(wide | st.integers(-1, 3), wide | st.integers(-2, 70), wide | st.integers(-1, 70)), max_size=9)
)
def test_whatever_numbers_a_peer_sends_only_registered_memory_passes(found: list[tuple[int, int, int]]) -> None:
    sizes = [64, 0, 32]
    memory = RegisteredMemory((Region(4096, 64), None, Region(8192, 32)))
    columns = np.array(found, dtype=np.int64).reshape(-1, 3).T
    is_inside = all(
        0 <= region < 3 and size > 0 and offset >= 0 and offset + size <= sizes[region]
        for region, offset, size in found
    )
    assert (memory.why_not("remote", *columns) is None) is is_inside


@given(st.binary(max_size=300))
def test_any_bytes_are_a_capability_or_none(data: bytes) -> None:
    decode_capability(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [("connections", 0), ("share_bytes", 0), ("port", 70_000), ("send_timeout_s", 0.0), ("max_ranges", 1 << 20)],
)
def test_options_that_cannot_work_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(PeersConfigurationError) as caught:
        TcpOptions(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_name_is_not_advertised() -> None:
    with pytest.raises(PeersConfigurationError, match="advertised_host"):
        TcpTransport("name", SECRET, TcpOptions(advertised_host="host.example"))
