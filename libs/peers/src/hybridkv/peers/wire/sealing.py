"""Seals: every frame behind the handshake carries a proof of who sent it, and as which one.

HMAC-SHA256 over the number of the frame and its body, with a key of this session and this direction. A frame that was
changed, repeated, left out or reordered has no right seal. Nothing is encrypted: who can listen on the network reads
what is said; run it in a network of your own, or in a tunnel.
"""

from __future__ import annotations

import hmac

import msgspec

from hybridkv.peers.wire.closing import CloseReason, WireError

SEAL_BYTES = 32


class SessionKeys(msgspec.Struct, frozen=True):
    """Of one connection, one a direction. Made by the handshake from the nonces of both sides."""

    from_client: bytes
    from_server: bytes

    def __repr__(self) -> str:
        return "SessionKeys(...)"


def _seal(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")


class Sealer:
    """The sending end of one direction."""

    __slots__ = ("_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, body: bytes) -> bytes:
        """`body` with its seal, as the next frame of this direction: send them in this order, each once."""
        sealed = body + _seal(self._key, self._number, body)
        self._number += 1
        return sealed


class Opener:
    """The receiving end of one direction."""

    __slots__ = ("_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def open(self, sealed: bytes) -> bytes:
        """The body of the next frame. `WireError` SEAL when it is not that."""
        body, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if len(seal) < SEAL_BYTES or not hmac.compare_digest(seal, _seal(self._key, self._number, body)):
            raise WireError(CloseReason.SEAL, f"frame {self._number} of this direction has no right seal")
        self._number += 1
        return body
