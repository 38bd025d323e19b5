"""Both sides prove that they know the secret before either says anything else. Values in, values out.

    client: Hello      version, channel, name, nonce
    server: Challenge  version, name, nonce
    client: Proof      HMAC(key, "client", transcript)
    server: Proof      HMAC(key, "server", transcript)

The transcript is the bytes of the first two frames, so a proof is good for these nonces, names, version and channel and
for nothing else: it cannot be replayed, and the words keep a side from being shown its own proof. The client proves
first, so a stranger who connects gets nothing that was made with the secret. Frames behind this are sealed with keys
that are derived from the same transcript.
"""

from __future__ import annotations

import enum
import hmac
from typing import TypeVar

import msgspec

from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.wire.closing import CloseReason, WireError
from hybridkv.peers.wire.limits import MAX_NAME_BYTES
from hybridkv.peers.wire.sealing import SessionKeys

PROTOCOL_VERSION = 1
NONCE_BYTES = 32
MAGIC = "hybridkv.peers"


class Channel(enum.StrEnum):
    """What a connection is for. A proof for one is none for the other."""

    CONTROL = "control"
    DATA = "data"


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    pass


class Hello(_Frame, frozen=True, tag="hello"):
    magic: str
    version: int
    channel: str
    name: str
    nonce: bytes


class Challenge(_Frame, frozen=True, tag="challenge"):
    version: int
    name: str
    nonce: bytes


class Proof(_Frame, frozen=True, tag="proof"):
    mac: bytes


class Goodbye(_Frame, frozen=True, tag="goodbye"):
    """Why this side ends the handshake. Nobody vouches for it: good for a log line, never for a decision."""

    reason: str
    version: int


_decoder = msgspec.msgpack.Decoder(Hello | Challenge | Proof | Goodbye)
_encoder = msgspec.msgpack.Encoder()

_Kind = TypeVar("_Kind", Hello, Challenge, Proof)


def _decode(body: bytes, kind: type[_Kind]) -> _Kind:
    try:
        message = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(CloseReason.MALFORMED, f"no handshake frame: {type(error).__name__}") from None
    if isinstance(message, Goodbye):
        known = {reason.value: reason for reason in CloseReason}
        raise WireError(known.get(message.reason, CloseReason.ENDED), "said by the other side of the handshake")
    if not isinstance(message, kind):
        raise WireError(CloseReason.UNEXPECTED, f"{type(message).__name__} in place of {kind.__name__}")
    return message


def goodbye(reason: CloseReason) -> bytes:
    """The frame that tells the other side why its handshake fails: nothing that it did not know."""
    return _encoder.encode(Goodbye(reason.value, PROTOCOL_VERSION))


class Identity(msgspec.Struct, frozen=True):
    """This side of every handshake. `key` is `Secret.derive` of the purpose that both sides mean."""

    name: str
    key: bytes

    def __post_init__(self) -> None:
        if not 0 < len(self.name.encode()) <= MAX_NAME_BYTES:
            raise PeersConfigurationError("name", f"a name of 1 to {MAX_NAME_BYTES} bytes", self.name)

    def __repr__(self) -> str:
        return f"Identity({self.name!r})"


class Established(msgspec.Struct, frozen=True):
    """Both sides have proven the secret."""

    peer_name: str
    keys: SessionKeys


def _check(name: str, nonce: bytes, version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise WireError(CloseReason.VERSION, f"version {version}; this side speaks {PROTOCOL_VERSION}")
    if len(nonce) != NONCE_BYTES:
        raise WireError(CloseReason.MALFORMED, f"a nonce of {len(nonce)} bytes")
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise WireError(CloseReason.OVERSIZED, f"a name of {len(name)} characters")


class _Transcript:
    """The first two frames, and what is made of them."""

    def __init__(self, key: bytes, hello: bytes, challenge: bytes) -> None:
        self._key = key
        self._said = b"".join(len(body).to_bytes(4, "big") + body for body in (hello, challenge))

    def of(self, word: bytes) -> bytes:
        return hmac.digest(self._key, word + b"\0" + self._said, "sha256")

    def keys(self) -> SessionKeys:
        return SessionKeys(self.of(b"key from client"), self.of(b"key from server"))


def _prove(transcript: _Transcript, word: bytes) -> bytes:
    return _encoder.encode(Proof(transcript.of(word)))


def _check_proof(transcript: _Transcript, word: bytes, proof: Proof) -> None:
    if not hmac.compare_digest(proof.mac, transcript.of(word)):
        raise WireError(CloseReason.SECRET, "the other side's proof is wrong")


class ClientHandshake:
    """The side that connects. Send `first`, then what `receive` answers, until it says `Established`.

    `expected_peer` is who must answer; None: anybody who knows the secret. `nonce` is 32 random bytes, for this once.
    """

    def __init__(self, identity: Identity, channel: Channel, nonce: bytes, expected_peer: str | None = None) -> None:
        self._identity = identity
        self._expected_peer = expected_peer
        self._transcript: _Transcript | None = None
        self._peer_name = ""
        self.first = _encoder.encode(Hello(MAGIC, PROTOCOL_VERSION, channel.value, identity.name, nonce))

    def receive(self, body: bytes) -> tuple[bytes | None, Established | None]:
        """The frame to send now, and the result when this was the last one. `WireError` ends it."""
        if self._transcript is None:
            challenge = _decode(body, Challenge)
            _check(challenge.name, challenge.nonce, challenge.version)
            if challenge.name == self._identity.name:
                raise WireError(CloseReason.SELF, "this side answers itself")
            if self._expected_peer not in (None, challenge.name):
                raise WireError(CloseReason.WRONG_PEER, f"{challenge.name!r} answers for {self._expected_peer!r}")
            self._peer_name = challenge.name
            self._transcript = _Transcript(self._identity.key, self.first, body)
            return _prove(self._transcript, b"client"), None
        _check_proof(self._transcript, b"server", _decode(body, Proof))
        return None, Established(self._peer_name, self._transcript.keys())


class ServerHandshake:
    """The side that is connected to. Answers with what `receive` says; the last answer comes with `Established`."""

    def __init__(self, identity: Identity, channel: Channel, nonce: bytes) -> None:
        self._identity = identity
        self._channel = channel
        self._nonce = nonce
        self._transcript: _Transcript | None = None
        self._peer_name = ""

    def receive(self, body: bytes) -> tuple[bytes | None, Established | None]:
        """The frame to send now, and the result when this was the last one. `WireError` ends it."""
        if self._transcript is None:
            hello = _decode(body, Hello)
            if hello.magic != MAGIC:
                raise WireError(CloseReason.MALFORMED, "another protocol")
            _check(hello.name, hello.nonce, hello.version)
            if hello.channel != self._channel:
                raise WireError(CloseReason.UNEXPECTED, f"this listener is for {self._channel} connections")
            if hello.name == self._identity.name:
                raise WireError(CloseReason.SELF, "this side connects to itself")
            self._peer_name = hello.name
            challenge = _encoder.encode(Challenge(PROTOCOL_VERSION, self._identity.name, self._nonce))
            self._transcript = _Transcript(self._identity.key, body, challenge)
            return challenge, None
        _check_proof(self._transcript, b"client", _decode(body, Proof))
        return _prove(self._transcript, b"server"), Established(self._peer_name, self._transcript.keys())
