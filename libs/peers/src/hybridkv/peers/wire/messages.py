"""Messages of established control connections, with their limits.

No message contains a list: a list header of five bytes could make the decoder allocate memory for four billion items
before the first item. Long lists of numbers are sent as columns of eight bytes per number, inside a byte string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.leases import Lease, Natural
from hybridkv.peers.wire.closing import CloseReason, WireError
from hybridkv.peers.wire.limits import WireLimits

Integers: TypeAlias = npt.NDArray[np.int64]

PROTOCOL_VERSION = 2
DIGEST_BYTES = 16
MAX_SPANS = 64
"""Maximum spans in one digest request: one span per group, for the maximum number of groups."""
MAX_READERS = 1024
"""Maximum ranks of one engine that read from one rank."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    pass


class Describe(_Message, frozen=True, tag="describe"):
    """Description of the sender, sent once by each side. `capability` lets the peer read the memory of the sender."""

    description: bytes
    """Encoded by `hybridkv.peers.description`."""
    capability: bytes


class Accepted(_Message, frozen=True, tag="accepted"):
    """The two descriptions are compatible."""


class Refused(_Message, frozen=True, tag="refused"):
    """The descriptions are incompatible. Names the field that differs, with the sender's and the receiver's value."""

    field: str
    ours: str
    theirs: str
    hint: str = ""


class RequestDigests(_Message, frozen=True, tag="request_digests"):
    """Request for the digests of some cells of a lease. The answer is `Digests` with the same `request`.

    A cell is a block of the side with the smaller blocks, or a state. See `hybridkv.peers.digests.DigestRequest`. Only
    blocks that the lease holds are digested.
    """

    request: Natural
    lease: Lease
    num_tokens: Natural
    spans: bytes
    """Three columns: group_index, first_cell, num_cells."""


class Digests(_Message, frozen=True, tag="digests"):
    """Digests of 16 bytes each, in the order of the request. Empty if `failure` is set."""

    request: Natural
    digests: bytes
    failure: str = ""


class Renew(_Message, frozen=True, tag="renew"):
    """Request to extend a lease."""

    lease: Lease


class Renewed(_Message, frozen=True, tag="renewed"):
    """Answer to `Renew`: remaining time of the lease; 0 if the lease has ended."""

    lease: Lease
    remaining_s: Annotated[float, msgspec.Meta(ge=0)]


class LeaseDone(_Message, frozen=True, tag="done"):
    """A reader no longer needs the lease. `is_read`: the reader has read and checked the blocks.

    The lease ends when all `num_readers` readers have sent this message. `reader` is the index of the sender, from 0.
    """

    lease: Lease
    is_read: bool
    reader: Natural = 0
    num_readers: Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)] = 1


class RequestMessage(_Message, frozen=True, tag="question"):
    """Request of the code that uses the connection. This layer does not interpret `body`."""

    request: Natural
    body: bytes


class Reply(_Message, frozen=True, tag="reply"):
    """Answer to a `RequestMessage` with the same `request`."""

    request: Natural
    body: bytes


class Notice(_Message, frozen=True, tag="notice"):
    """One-way message of the code that uses the connection. It has no reply."""

    body: bytes


class Hello(_Message, frozen=True, tag="hello"):
    """First message of each side. Every version must decode this message; fields may only be added at the end."""

    version: int
    name: str


class Bye(_Message, frozen=True, tag="bye"):
    """Last message, with the reason why the sender closes the connection: a `CloseReason`."""

    reason: str


Message: TypeAlias = (
    Describe
    | Accepted
    | Refused
    | RequestDigests
    | Digests
    | Renew
    | Renewed
    | LeaseDone
    | RequestMessage
    | Reply
    | Notice
)
"""Messages of the code that uses a connection. The connection itself sends `Hello` and `Bye`."""

WireMessage: TypeAlias = Message | Hello | Bye


def pack_columns(columns: Sequence[npt.ArrayLike]) -> bytes:
    """Encodes columns of equal length, one after the other, as little-endian int64."""
    return b"".join(np.ascontiguousarray(column, dtype="<i8").tobytes() for column in columns)


def unpack_columns(data: bytes, num_columns: int, max_items: int) -> tuple[Integers, ...]:
    """Decodes `pack_columns` as read-only arrays. Raises `WireError` for a wrong size or more than `max_items` rows."""
    rows, rest = divmod(len(data), 8 * num_columns)
    if rest:
        raise WireError(CloseReason.MALFORMED, f"{len(data)} bytes are not {num_columns} columns")
    if rows > max_items:
        raise WireError(CloseReason.OVERSIZED, f"columns of {rows} numbers; at most {max_items}")
    table = np.frombuffer(data, dtype="<i8").reshape(num_columns, rows)
    return tuple(table)


class MessageCodec:
    """Encoder and decoder of messages, with limits in both directions."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(WireMessage)

    def encode(self, message: WireMessage) -> bytes:
        """Encodes a message. Raises `PeersProtocolError` above `max_frame_bytes`: the caller must split the message."""
        body = self._encoder.encode(message)
        if len(body) > self._limits.max_frame_bytes:
            raise PeersProtocolError(f"a {type(message).__name__} of {len(body)} bytes does not fit into a frame")
        return body

    def decode(self, body: bytes) -> WireMessage:
        """Decodes a message. Raises `WireError` for bytes that are not a message, and for a message above a limit."""
        try:
            message: WireMessage = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise WireError(CloseReason.MALFORMED, f"not a message: {type(error).__name__}") from None
        self._check(message)
        return message

    def _check(self, message: WireMessage) -> None:
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if isinstance(value, str) and len(value) > self._limits.max_text_bytes:
                raise WireError(CloseReason.OVERSIZED, f"{name}: a text of {len(value)} characters")
        if isinstance(message, RequestDigests):
            _check_digest_spans(message, self._limits.max_items)
        elif isinstance(message, LeaseDone):
            if message.reader >= message.num_readers:
                raise WireError(CloseReason.MALFORMED, f"reader {message.reader} of {message.num_readers}")
        elif isinstance(message, Digests):
            if len(message.digests) % DIGEST_BYTES:
                raise WireError(CloseReason.MALFORMED, f"digests: {len(message.digests)} bytes")
            if len(message.digests) > DIGEST_BYTES * self._limits.max_items:
                raise WireError(CloseReason.OVERSIZED, f"digests: {len(message.digests)} bytes")


def _check_digest_spans(message: RequestDigests, max_items: int) -> None:
    columns = unpack_columns(message.spans, 3, MAX_SPANS)
    if any(len(column) and int(column.min()) < 0 for column in columns):
        raise WireError(CloseReason.MALFORMED, "spans: a number below 0")
    counts = columns[2]
    # Check the maximum first, so that the sum cannot overflow.
    if len(counts) and (int(counts.max()) > max_items or int(counts.sum()) > max_items):
        raise WireError(CloseReason.OVERSIZED, f"spans: more than {max_items} cells")
