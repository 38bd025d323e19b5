"""What established peers say to each other, and the limits on it.

No message holds a list: a header of five bytes could ask for the memory of four billion of them before the first is
read. Many numbers travel as columns of eight bytes, whose size is that of the bytes that carry them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.wire.closing import CloseReason, WireError
from hybridkv.peers.wire.limits import WireLimits
from hybridkv.peers.wire.sealing import SEAL_BYTES

Integers: TypeAlias = npt.NDArray[np.int64]

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

DIGEST_BYTES = 16


class _Message(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    pass


class LeaseId(msgspec.Struct, frozen=True, array_like=True):
    """One lease of the side that is read from: its slot in the table, and the number that is there while it holds."""

    slot: Natural
    nonce: Natural


class Describe(_Message, frozen=True, tag="describe"):
    """What this side is, said once by either. `capability` is what its memory is read with."""

    description: bytes
    """`hybridkv.peers.description`, encoded."""
    transport: str
    capability: bytes


class Accepted(_Message, frozen=True, tag="accepted"):
    """The two descriptions fit."""


class Refused(_Message, frozen=True, tag="refused"):
    """They do not: the field that differs, what this side has, and what the other has."""

    field: str
    ours: str
    theirs: str
    hint: str = ""


class AskDigests(_Message, frozen=True, tag="ask_digests"):
    """What are the digests of these ranges of your memory? `request` comes back with the answer."""

    request: Natural
    lease: LeaseId
    ranges: bytes
    """Three columns: region, offset, num_bytes."""
    ends: bytes
    """One column: digest i is of the ranges from `ends[i - 1]` to `ends[i]`."""


class Digests(_Message, frozen=True, tag="digests"):
    """16 bytes each, in order; none where `failure` says why."""

    request: Natural
    digests: bytes
    failure: str = ""


class Renew(_Message, frozen=True, tag="renew"):
    """This lease is still needed."""

    lease: LeaseId


class Renewed(_Message, frozen=True, tag="renewed"):
    """For how long it holds from now on; 0 when it does not."""

    lease: LeaseId
    remaining_s: Annotated[float, msgspec.Meta(ge=0)]


class Done(_Message, frozen=True, tag="done"):
    """This lease is needed no more. `is_read`: its blocks were read, and checked."""

    lease: LeaseId
    is_read: bool


class Question(_Message, frozen=True, tag="question"):
    """What `body` asks is for the two owners of the connection to know, and so is what the answer says."""

    request: Natural
    body: bytes


class Reply(_Message, frozen=True, tag="reply"):
    """To one question; its `request` comes back."""

    request: Natural
    body: bytes


class Notice(_Message, frozen=True, tag="notice"):
    """As a question to which nobody replies."""

    body: bytes


class Ping(_Message, frozen=True, tag="ping"):
    """Still here. Not handed to anybody."""


Message: TypeAlias = (
    Describe | Accepted | Refused | AskDigests | Digests | Renew | Renewed | Done | Question | Reply | Notice | Ping
)


def pack_columns(columns: Sequence[npt.ArrayLike]) -> bytes:
    """Columns of one length, one behind the other, eight bytes a number."""
    return b"".join(np.ascontiguousarray(column, dtype="<i8").tobytes() for column in columns)


def unpack_columns(data: bytes, num_columns: int, max_items: int) -> tuple[Integers, ...]:
    """The columns again, read-only. `WireError` when these are not so many columns of one length within the limit."""
    rows, rest = divmod(len(data), 8 * num_columns)
    if rest:
        raise WireError(CloseReason.MALFORMED, f"{len(data)} bytes are not {num_columns} columns")
    if rows > max_items:
        raise WireError(CloseReason.OVERSIZED, f"columns of {rows} numbers; at most {max_items}")
    table = np.frombuffer(data, dtype="<i8").reshape(num_columns, rows)
    return tuple(table)


class MessageCodec:
    """Between messages and the bodies of frames, within limits on both ways."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)

    def encode(self, message: Message) -> bytes:
        """`PeersProtocolError` for what the other side would refuse: the caller has to cut it."""
        body = self._encoder.encode(message)
        if len(body) + SEAL_BYTES > self._limits.max_frame_bytes:
            raise PeersProtocolError(f"a {type(message).__name__} of {len(body)} bytes does not fit into a frame")
        return body

    def decode(self, body: bytes) -> Message:
        """`WireError` for anything that is no message, or one that is larger than it may be."""
        try:
            message: Message = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise WireError(CloseReason.MALFORMED, f"no message: {type(error).__name__}") from None
        self._check(message)
        return message

    def _check(self, message: Message) -> None:
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if isinstance(value, str) and len(value) > self._limits.max_text_bytes:
                raise WireError(CloseReason.OVERSIZED, f"{name}: a text of {len(value)} characters")
        if isinstance(message, AskDigests):
            _check_digest_ranges(message, self._limits.max_items)
        elif isinstance(message, Digests):
            if len(message.digests) % DIGEST_BYTES:
                raise WireError(CloseReason.MALFORMED, f"digests: {len(message.digests)} bytes")
            if len(message.digests) > DIGEST_BYTES * self._limits.max_items:
                raise WireError(CloseReason.OVERSIZED, f"digests: {len(message.digests)} bytes")


def _check_digest_ranges(message: AskDigests, max_items: int) -> None:
    columns = unpack_columns(message.ranges, 3, max_items)
    (ends,) = unpack_columns(message.ends, 1, max_items)
    if any(len(column) and int(column.min()) < 0 for column in columns):
        raise WireError(CloseReason.MALFORMED, "ranges: a number below 0")
    rises = len(ends) == 0 or (int(ends[0]) >= 0 and bool((ends[1:] >= ends[:-1]).all()))
    last = int(ends[-1]) if len(ends) else 0
    if not rises or last != len(columns[0]):
        raise WireError(CloseReason.MALFORMED, "ends: not rising to the number of ranges")
