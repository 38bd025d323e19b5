"""Fuzz targets: every decoder of this library that takes bytes from others, with valid inputs."""

from __future__ import annotations

import msgspec
import numpy as np
from plain_worlds import group, world

from hybridkv.peers.cells import Side
from hybridkv.peers.comparison import compare
from hybridkv.peers.description import Description, decode, encode
from hybridkv.peers.digests import DigestRequest, digest_request, digest_runs
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.leases import Lease
from hybridkv.peers.pairing import Exchange, Resume
from hybridkv.peers.ranges import Ranges
from hybridkv.peers.tables import BlockTables
from hybridkv.peers.transport.contract import Region
from hybridkv.peers.transport.memory import RegisteredMemory
from hybridkv.peers.transport.nixl import decode_capability as decode_nixl
from hybridkv.peers.transport.nixl import encode_capability as encode_nixl
from hybridkv.peers.wire import (
    Accepted,
    Describe,
    Digests,
    LeaseDone,
    MessageCodec,
    Notice,
    Refused,
    Renew,
    Renewed,
    Reply,
    RequestDigests,
    RequestMessage,
    WireError,
    WireLimits,
    pack_columns,
    unpack_columns,
)
from hybridkv.planner import GroupKind
from kits.peers.fuzzing import Target

LIMITS = WireLimits(max_frame_bytes=4096, max_items=64, max_text_bytes=100)
CODEC = MessageCodec(LIMITS)
LEASE = Lease(3, 77)
MEMORY = RegisteredMemory((Region(1 << 20, 4096), None, Region(1 << 30, 64 << 10)))

# Messages.

MESSAGES = (
    *(Describe(b"a description", b"a capability"), Accepted(), Refused("field", "ours", "theirs", "hint")),
    RequestDigests(1, LEASE, 20, pack_columns([[0, 1], [0, 2], [3, 1]])),
    *(Digests(1, bytes(32)), Digests(2, b"", "busy"), Renew(LEASE), Renewed(LEASE, 3.5), LeaseDone(LEASE, True, 1, 2)),
    *(RequestMessage(1, b"body"), Reply(1, b"body"), Notice(b"body")),
)


def _message(data: bytes) -> None:
    message = CODEC.decode(data)
    if not isinstance(message, Renewed) or message.remaining_s == message.remaining_s:
        assert CODEC.decode(CODEC.encode(message)) == message
    if isinstance(message, RequestDigests):
        _digested(message)


# Descriptions, and everything that is computed from one that fits.

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
    if isinstance(found, Incompatibility):
        return
    assert decode(encode(found)) == found
    for ours, theirs, side in ((OURS, found, Side.OURS), (found, THEIRS, Side.THEIRS)):
        agreement = compare(ours, theirs)
        if isinstance(agreement, Incompatibility):
            continue
        exchange = Exchange(agreement)
        pairing = exchange.pair(LOCAL, REMOTE, Resume(19))
        if not isinstance(pairing, Incompatibility):
            _within(pairing.ranges, ours, theirs)
            digest_runs(exchange, side, LOCAL if side is Side.OURS else REMOTE, digest_request(pairing))


def _digested(message: RequestDigests) -> None:
    agreement = compare(OURS, THEIRS)
    assert not isinstance(agreement, Incompatibility)
    request = DigestRequest.of(message.num_tokens, unpack_columns(message.spans, 3, LIMITS.max_items))
    runs = digest_runs(Exchange(agreement), Side.THEIRS, REMOTE, request)
    if not isinstance(runs, Incompatibility) and len(runs.regions):
        ends = runs.offsets + runs.num_bytes
        assert bool((runs.offsets >= 0).all())
        assert bool((ends <= np.array(THEIRS.region_bytes, dtype=np.int64)[runs.regions]).all())


# Transports.


def _nixl(data: bytes) -> None:
    found = decode_nixl(data)
    if not isinstance(found, str):
        agent, metadata, memory = found
        assert isinstance(agent, str) and isinstance(metadata, bytes)
        memory.bounds_error("remote", *(np.array([each], dtype=np.int64) for each in (0, 0, 64)))


TARGETS = (
    Target("messages", tuple(map(CODEC.encode, MESSAGES)), _message, (WireError,)),
    Target("descriptions", (encode(OURS), encode(THEIRS)), _description),
    Target("nixl capability", (encode_nixl("agent", msgspec.msgpack.encode(["metadata"]), MEMORY),), _nixl),
)
