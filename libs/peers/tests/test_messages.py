"""Messages survive encoding, and any other bytes are refused within bounds."""

from __future__ import annotations

import contextlib
import resource

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.peers.errors import PeersConfigurationError, PeersProtocolError
from hybridkv.peers.leases import Lease
from hybridkv.peers.wire import (
    Accepted,
    Bye,
    CloseReason,
    Describe,
    Digests,
    Hello,
    LeaseDone,
    Message,
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
    WireMessage,
    pack_columns,
    unpack_columns,
)

LIMITS = WireLimits(max_frame_bytes=4096, max_items=64, max_text_bytes=100)
CODEC = MessageCodec(LIMITS)
CALM = settings(deadline=None)
"""No deadline: the machine may be busy."""
LEASE = Lease(3, (1 << 63) - 1)

natural = st.integers(0, (1 << 63) - 1)
text = st.text(max_size=90)
lease = st.builds(Lease, natural, natural)


@st.composite
def asks(draw: st.DrawFn) -> RequestDigests:
    rows = draw(st.lists(st.tuples(natural, natural, st.integers(0, LIMITS.max_items // 8)), max_size=8))
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return RequestDigests(draw(natural), draw(lease), draw(natural), pack_columns(list(table.T)))


messages = st.one_of(
    st.builds(Describe, st.binary(max_size=500), st.binary(max_size=500)),
    st.builds(Accepted),
    st.builds(Refused, text, text, text, text),
    asks(),
    st.builds(Digests, natural, st.binary(max_size=20).map(lambda data: data * 16), text),
    st.builds(Renew, lease),
    st.builds(Renewed, lease, st.floats(0, 1e9)),
    st.integers(1, 1024).flatmap(
        lambda count: st.builds(LeaseDone, lease, st.booleans(), st.integers(0, count - 1), st.just(count))
    ),
    st.builds(RequestMessage, natural, st.binary(max_size=500)),
    st.builds(Reply, natural, st.binary(max_size=500)),
    st.builds(Notice, st.binary(max_size=500)),
    st.builds(Hello, natural, text),
    st.builds(Bye, text),
)


def reason_of(body: bytes) -> CloseReason:
    with pytest.raises(WireError) as caught:
        CODEC.decode(body)
    return caught.value.reason


@CALM
@given(messages)
def test_a_message_survives_encoding(message: WireMessage) -> None:
    assert CODEC.decode(CODEC.encode(message)) == message


@CALM
@given(st.binary(max_size=400))
def test_any_bytes_are_a_message_or_refused(body: bytes) -> None:
    with contextlib.suppress(WireError):
        CODEC.decode(body)


@CALM
@given(messages, st.data())
def test_a_message_with_a_byte_changed_is_a_message_or_refused(message: WireMessage, data: st.DataObject) -> None:
    body = bytearray(CODEC.encode(message))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        CODEC.decode(bytes(body))


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x92\xa4done\xdd\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff\xa4ping" + b"\xdd\xff\xff\xff\xff" * 3000,
        b"\x92\xa4ping" + b"\x91" * 100_000,
    ],
)
def test_a_header_that_announces_billions_of_items_takes_no_memory(body: bytes) -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert reason_of(body) is CloseReason.MALFORMED
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10


def test_a_list_that_is_too_long_is_refused() -> None:
    zeros = [0] * (LIMITS.max_items + 1)
    ask = RequestDigests(1, LEASE, 5, pack_columns([zeros] * 3))
    assert reason_of(msgspec.msgpack.encode(ask)) is CloseReason.OVERSIZED
    for counts in ([LIMITS.max_items, 1], [(1 << 62), (1 << 62)], [(1 << 63) - 1] * 2):
        ask = RequestDigests(1, LEASE, 5, pack_columns([[0, 1], [0, 0], counts]))
        assert reason_of(msgspec.msgpack.encode(ask)) is CloseReason.OVERSIZED
    # A group has one span, whatever the limit of items.
    many = RequestDigests(1, LEASE, 5, pack_columns([[0] * 65] * 3))
    with pytest.raises(WireError, match="oversized"):
        MessageCodec(WireLimits()).decode(msgspec.msgpack.encode(many))
    answer = Digests(1, bytes(16 * len(zeros)))
    assert reason_of(msgspec.msgpack.encode(answer)) is CloseReason.OVERSIZED


def test_a_text_that_is_too_long_is_refused() -> None:
    body = msgspec.msgpack.encode(Refused("f", "x" * (LIMITS.max_text_bytes + 1), ""))
    assert reason_of(body) is CloseReason.OVERSIZED


@pytest.mark.parametrize(
    "message",
    [
        RequestDigests(1, LEASE, 5, pack_columns([[0], [-1], [8]])),
        RequestDigests(1, LEASE, 5, pack_columns([[0], [0], [-1]])),
        RequestDigests(1, LEASE, -1, pack_columns([[0], [0], [8]])),
        RequestDigests(1, LEASE, 5, b"1234567"),
        LeaseDone(LEASE, True, 2, 2),
        LeaseDone(LEASE, True, 0, 0),
        LeaseDone(LEASE, True, 0, 1025),
        LeaseDone(LEASE, True, -1, 1),
        Digests(1, b"123"),
        Renew(Lease(-1, 0)),
        Renew(Lease(0, 1 << 63)),
    ],
)
def test_impossible_numbers_are_refused(message: Message) -> None:
    assert reason_of(msgspec.msgpack.encode(message)) is CloseReason.MALFORMED


def test_a_message_that_the_other_side_would_refuse_is_not_sent() -> None:
    with pytest.raises(PeersProtocolError, match="does not fit"):
        CODEC.encode(Describe(bytes(5000), b""))


@CALM
@given(st.lists(st.tuples(*[st.integers(-(1 << 63), (1 << 63) - 1)] * 3), max_size=20))
def test_columns_survive_encoding(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    columns = unpack_columns(pack_columns(list(table.T)), 3, 20)
    assert [column.tolist() for column in columns] == table.T.tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_frame_bytes", 0),
        ("max_frame_bytes", 1 << 31),
        ("max_queued", 0),
        ("silence_timeout_s", 1.0),
        ("handshake_timeout_s", float("inf")),
        ("max_connections", float("nan")),
    ],
)
def test_limits_that_cannot_work_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(PeersConfigurationError) as caught:
        WireLimits(**{field: value})
    assert caught.value.field == field
