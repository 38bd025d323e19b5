"""What of this library takes bytes that others wrote, each with bytes that it takes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from plain_worlds import group, world
from wire_pair import LIMITS, identity

from hybridkv.peers.cells import Side
from hybridkv.peers.comparison import compare
from hybridkv.peers.description import Description, decode, encode
from hybridkv.peers.digests import DigestRequest, digest_request, digest_runs
from hybridkv.peers.leases import Lease
from hybridkv.peers.pairing import Exchange, Resume
from hybridkv.peers.ranges import Ranges
from hybridkv.peers.refusal import Refusal
from hybridkv.peers.tables import BlockTables
from hybridkv.peers.testing.fuzzing import Target
from hybridkv.peers.transport.contract import Region
from hybridkv.peers.transport.memory import Pieces, RegisteredMemory
from hybridkv.peers.transport.nixl_capability import decode_capability as decode_nixl
from hybridkv.peers.transport.nixl_capability import encode_capability as encode_nixl
from hybridkv.peers.transport.tcp import protocol
from hybridkv.peers.wire import (
    Accepted,
    AskDigests,
    Channel,
    ClientHandshake,
    Describe,
    Digests,
    Done,
    MessageCodec,
    Notice,
    Opener,
    Ping,
    Question,
    Refused,
    Renew,
    Renewed,
    Reply,
    Sealer,
    ServerHandshake,
    Session,
    WireError,
    frame,
    pack_columns,
    unpack_columns,
)
from hybridkv.planner import GroupKind

CODEC = MessageCodec(LIMITS)
KEY = b"k" * 32
LEASE = Lease(3, 77)
MEMORY = RegisteredMemory((Region(1 << 20, 4096), None, Region(1 << 30, 64 << 10)))

# The handshake. Both sides draw the same nonces each time, so what one of them says is always the same.


def _client() -> Session:
    return Session(ClientHandshake(identity("client"), Channel.CONTROL, b"\1" * 32), LIMITS)


def _server() -> Session:
    return Session(ServerHandshake(identity("server"), Channel.CONTROL, b"\2" * 32), LIMITS)


def _spoken() -> tuple[bytes, bytes]:
    """All that the client says, and all that the server does."""
    client, server = _client(), _server()
    said = [b"", b""]
    while client.established is None:
        for number, speaker, listener in ((0, client, server), (1, server, client)):
            said[number] += bytes(speaker.output)
            listener.feed(bytes(speaker.output))
            speaker.output.clear()
            assert listener.next() is None
    return said[0], said[1]


FROM_CLIENT, FROM_SERVER = _spoken()


def _handshake(make: Callable[[], Session], spoken: bytes) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        session = make()
        said = len(session.output)
        try:
            session.feed(data)
            assert session.next() is None
        finally:
            assert session.established is None or data.startswith(spoken)
            assert len(session.output) - said <= 2 * LIMITS.max_handshake_frame_bytes

    return run


# Sealed frames.

BODIES = [CODEC.encode(Ping()), CODEC.encode(Renew(LEASE)), CODEC.encode(Accepted())]


def _sealed() -> bytes:
    sealer = Sealer(KEY)
    return b"".join(frame(sealer.seal(body)) for body in BODIES)


def _open(data: bytes) -> None:
    session = _client()
    session.feed(FROM_SERVER)
    assert session.next() is None and session.established is not None
    session._opener = Opener(KEY)
    opened: list[bytes] = []
    session.feed(data)
    while (body := session.next()) is not None:
        opened.append(body)
        assert opened == BODIES[: len(opened)]


# Messages.

MESSAGES = (
    *(Describe(b"a description", "tcp", b"a capability"), Accepted(), Refused("field", "ours", "theirs", "hint")),
    AskDigests(1, LEASE, 20, pack_columns([[0, 1], [0, 2], [3, 1]])),
    *(Digests(1, bytes(32)), Digests(2, b"", "busy"), Renew(LEASE), Renewed(LEASE, 3.5), Done(LEASE, True, 1, 2)),
    *(Question(1, b"body"), Reply(1, b"body"), Notice(b"body"), Ping()),
)


def _message(data: bytes) -> None:
    message = CODEC.decode(data)
    if not isinstance(message, Renewed) or message.remaining_s == message.remaining_s:
        assert CODEC.decode(CODEC.encode(message)) == message
    if isinstance(message, AskDigests):
        _digested(message)


# Descriptions, and all that is made of one that fits.

WORLD = world(
    (
        group(GroupKind.FULL, (4, 2)),
        group(GroupKind.WINDOW, (2, 4), window_tokens=5),
        group(GroupKind.RECURRENT, (4, 4), token_bytes=24),
    ),
    19,
)
OURS, THEIRS = WORLD.ours[0], WORLD.theirs[0]
LOCAL, REMOTE = (BlockTables.whole(19, tables) for tables in WORLD.tables)


def _within(ranges: Ranges, ours: Description, theirs: Description) -> None:
    for regions, offsets, sizes in (
        (ranges.local_regions, ranges.local_offsets, ours.region_bytes),
        (ranges.remote_regions, ranges.remote_offsets, theirs.region_bytes),
    ):
        ends = offsets + ranges.num_bytes
        assert bool((offsets >= 0).all()) and bool((ends <= np.array(sizes, dtype=np.int64)[regions]).all())


def _description(data: bytes) -> None:
    found = decode(data)
    if isinstance(found, Refusal):
        return
    assert decode(encode(found)) == found
    for ours, theirs, side in ((OURS, found, Side.OURS), (found, THEIRS, Side.THEIRS)):
        agreement = compare(ours, theirs)
        if isinstance(agreement, Refusal):
            continue
        exchange = Exchange(agreement)
        pairing = exchange.pair(LOCAL, REMOTE, Resume(19))
        if not isinstance(pairing, Refusal):
            _within(pairing.ranges, ours, theirs)
            digest_runs(exchange, side, LOCAL if side is Side.OURS else REMOTE, digest_request(pairing))


def _digested(message: AskDigests) -> None:
    agreement = compare(OURS, THEIRS)
    assert not isinstance(agreement, Refusal)
    request = DigestRequest.of(message.num_tokens, unpack_columns(message.spans, 3, LIMITS.max_items))
    runs = digest_runs(Exchange(agreement), Side.THEIRS, REMOTE, request)
    if not isinstance(runs, Refusal) and len(runs.regions):
        ends = runs.offsets + runs.num_bytes
        assert bool((runs.offsets >= 0).all())
        assert bool((ends <= np.array(THEIRS.region_bytes, dtype=np.int64)[runs.regions]).all())


# Transports.

TCP_CAPABILITY = protocol.Capability(1, "name", "127.0.0.1", 80, bytes(32), pack_columns([[4096, 0, 65536]]))


def _read(data: bytes) -> None:
    columns = unpack_columns(protocol.decode_read(data).columns, 3, 64)
    if MEMORY.why_not("remote", *columns) is None and len(columns[0]):
        pieces = Pieces.of(*columns)
        assert int(pieces.num_bytes.sum()) == int(columns[2].sum()) > 0
        for region, offset, num_bytes in zip(pieces.regions, pieces.offsets, pieces.num_bytes, strict=True):
            assert 0 <= offset < offset + num_bytes <= MEMORY.num_bytes[region]


def _nixl(data: bytes) -> None:
    found = decode_nixl(data)
    if not isinstance(found, str):
        agent, metadata, memory = found
        assert isinstance(agent, str) and isinstance(metadata, bytes)
        memory.why_not("remote", *(np.array([each], dtype=np.int64) for each in (0, 0, 64)))


TARGETS = (
    Target("server handshake", (FROM_CLIENT,), _handshake(_server, FROM_CLIENT), (WireError,)),
    Target("client handshake", (FROM_SERVER,), _handshake(_client, FROM_SERVER), (WireError,)),
    Target("sealed frames", (_sealed(),), _open, (WireError,)),
    Target("messages", tuple(map(CODEC.encode, MESSAGES)), _message, (WireError,)),
    Target("descriptions", (encode(OURS), encode(THEIRS)), _description),
    Target("tcp capability", (protocol.encode(TCP_CAPABILITY),), protocol.decode_capability),
    Target(
        "tcp request",
        (
            protocol.encode(protocol.Read(1, pack_columns([[0, 2], [0, 64], [4096, 128]]))),
            protocol.encode(protocol.Read(2, pack_columns([[2, 2, 2], [0, 64, 0], [64, 64, 65536]]))),
        ),
        _read,
        (WireError,),
    ),
    Target(
        "tcp answer",
        (protocol.encode(protocol.Answer(1, 4096)), protocol.encode(protocol.Answer(2, 0, "why not"))),
        protocol.decode_answer,
        (WireError,),
    ),
    Target("nixl capability", (encode_nixl("agent", msgspec.msgpack.encode(["metadata"]), MEMORY),), _nixl),
)
