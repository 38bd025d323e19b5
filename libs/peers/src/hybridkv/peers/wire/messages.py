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
from hybridkv.peers.leases import Lease, Natural
from hybridkv.peers.wire.closing import CloseReason, WireError
from hybridkv.peers.wire.limits import WireLimits

Integers: TypeAlias = npt.NDArray[np.int64]

PROTOCOL_VERSION = 2
DIGEST_BYTES = 16
MAX_SPANS = 64
"""Of one question for digests: a group has one, and this is how many groups there may be."""
MAX_READERS = 1024
"""Ranks of one engine that read from one rank."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    pass


class Describe(_Message, frozen=True, tag="describe"):
    """What this side is, said once by either. `capability` is what its memory is read with."""

    description: bytes
    """`hybridkv.peers.description`, encoded."""
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
    """What are the digests of these cells of what the lease holds? `request` comes back with the answer.

    See `hybridkv.peers.digests.DigestRequest`. Nothing but what the lease holds is digested, whatever is asked for.
    """

    request: Natural
    lease: Lease
    num_tokens: Natural
    spans: bytes
    """Three columns: group_index, first_cell, num_cells."""


class Digests(_Message, frozen=True, tag="digests"):
    """16 bytes each, in order; none where `failure` says why."""

    request: Natural
    digests: bytes
    failure: str = ""


class Renew(_Message, frozen=True, tag="renew"):
    """This lease is still needed."""

    lease: Lease


class Renewed(_Message, frozen=True, tag="renewed"):
    """For how long it holds from now on; 0 when it does not."""

    lease: Lease
    remaining_s: Annotated[float, msgspec.Meta(ge=0)]


class Done(_Message, frozen=True, tag="done"):
    """A reader needs this lease no more. `is_read`: it has read the blocks, and checked them.

    The lease ends when all of its `num_readers` have said so; `reader` counts them from 0.
    """

    lease: Lease
    is_read: bool
    reader: Natural = 0
    num_readers: Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)] = 1


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


class Hello(_Message, frozen=True, tag="hello"):
    """The first word of either side, which both sides must understand in every version: what follows may only grow."""

    version: int
    name: str


class Bye(_Message, frozen=True, tag="bye"):
    """The last word: why this side ends the connection, in the words of `CloseReason`."""

    reason: str


Message: TypeAlias = (
    Describe | Accepted | Refused | AskDigests | Digests | Renew | Renewed | Done | Question | Reply | Notice
)
"""What owners of connections say to each other."""

Word: TypeAlias = Message | Hello | Bye


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
        self._decoder = msgspec.msgpack.Decoder(Word)

    def encode(self, message: Word) -> bytes:
        """`PeersProtocolError` for what the other side would refuse: the caller has to cut it."""
        body = self._encoder.encode(message)
        if len(body) > self._limits.max_frame_bytes:
            raise PeersProtocolError(f"a {type(message).__name__} of {len(body)} bytes does not fit into a frame")
        return body

    def decode(self, body: bytes) -> Word:
        """`WireError` for anything that is no message, or one that is larger than it may be."""
        try:
            message: Word = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise WireError(CloseReason.MALFORMED, f"no message: {type(error).__name__}") from None
        self._check(message)
        return message

    def _check(self, message: Word) -> None:
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if isinstance(value, str) and len(value) > self._limits.max_text_bytes:
                raise WireError(CloseReason.OVERSIZED, f"{name}: a text of {len(value)} characters")
        if isinstance(message, AskDigests):
            _check_digest_spans(message, self._limits.max_items)
        elif isinstance(message, Done):
            if message.reader >= message.num_readers:
                raise WireError(CloseReason.MALFORMED, f"reader {message.reader} of {message.num_readers}")
        elif isinstance(message, Digests):
            if len(message.digests) % DIGEST_BYTES:
                raise WireError(CloseReason.MALFORMED, f"digests: {len(message.digests)} bytes")
            if len(message.digests) > DIGEST_BYTES * self._limits.max_items:
                raise WireError(CloseReason.OVERSIZED, f"digests: {len(message.digests)} bytes")


def _check_digest_spans(message: AskDigests, max_items: int) -> None:
    columns = unpack_columns(message.spans, 3, MAX_SPANS)
    if any(len(column) and int(column.min()) < 0 for column in columns):
        raise WireError(CloseReason.MALFORMED, "spans: a number below 0")
    counts = columns[2]
    # One that is too large by itself is found before their sum could turn around.
    if len(counts) and (int(counts.max()) > max_items or int(counts.sum()) > max_items):
        raise WireError(CloseReason.OVERSIZED, f"spans: more than {max_items} cells")
