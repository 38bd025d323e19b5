"""What goes over a data connection behind the handshake, and what tells a peer where to connect.

client: sealed Read(request, columns)        regions, offsets and sizes of this side's memory
server: sealed Answer(request, num_bytes)    and so many bytes, in the order of the ranges; or why not
"""

from __future__ import annotations

import hmac
from typing import Annotated, TypeAlias

import msgspec

from hybridkv.peers.transport.contract import FailureReason
from hybridkv.peers.wire import CloseReason, Secret, WireError

FORMAT_VERSION = 1
TOKEN_BYTES = 32
MAX_CAPABILITY_BYTES = 1 << 20

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Capability(msgspec.Struct, frozen=True, array_like=True):
    """Where to connect and what to show. Not where memory lies: a region is known by its number and size."""

    version: int
    name: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: bytes
    region_bytes: bytes
    """One column: the size of each region; 0 of one that is no more."""

    def __repr__(self) -> str:
        return f"Capability({self.name!r}, {self.host!r}, {self.port})"


class Read(msgspec.Struct, frozen=True, array_like=True):
    request: Natural
    columns: bytes
    """Three: region, offset, num_bytes."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    request: Natural
    num_bytes: Natural
    refusal: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Why no bytes follow."""


MAX_ANSWER_BYTES = 1024

_capability = msgspec.msgpack.Decoder(Capability)
_read = msgspec.msgpack.Decoder(Read)
_answer = msgspec.msgpack.Decoder(Answer)
encode = msgspec.msgpack.Encoder().encode


def decode_capability(data: bytes) -> Capability | str:
    """The value, or why it is none."""
    if len(data) > MAX_CAPABILITY_BYTES:
        return f"a capability of {len(data)} bytes"
    try:
        capability = _capability.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        return f"no capability of this transport: {type(error).__name__}"
    if capability.version != FORMAT_VERSION:
        return f"a capability of version {capability.version}; this side knows {FORMAT_VERSION}"
    if len(capability.token) != TOKEN_BYTES or len(capability.region_bytes) % 8:
        return "no capability of this transport: its sizes are wrong"
    return capability


def decode_read(body: bytes) -> Read:
    try:
        return _read.decode(body)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise WireError(CloseReason.MALFORMED, f"no request: {type(error).__name__}") from None


def decode_answer(body: bytes) -> Answer:
    try:
        return _answer.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise WireError(CloseReason.MALFORMED, f"no answer: {type(error).__name__}") from None


def data_key(secret: Secret, token: bytes) -> bytes:
    """What both sides of a data connection prove that they know: the secret, and the capability of this process."""
    return hmac.digest(secret.derive(b"data"), token, "sha256")


_REASONS = {
    CloseReason.VERSION: FailureReason.REFUSED,
    CloseReason.SECRET: FailureReason.REFUSED,
    CloseReason.WRONG_PEER: FailureReason.GONE,
    CloseReason.SELF: FailureReason.REFUSED,
    CloseReason.NO_SECRET: FailureReason.REFUSED,
    CloseReason.UNEXPECTED: FailureReason.BROKEN,
    CloseReason.MALFORMED: FailureReason.BROKEN,
    CloseReason.OVERSIZED: FailureReason.BROKEN,
    CloseReason.SEAL: FailureReason.BROKEN,
}


def failure_of(reason: CloseReason) -> FailureReason:
    """What a read says whose connection ended so."""
    return _REASONS.get(reason, FailureReason.GONE)
