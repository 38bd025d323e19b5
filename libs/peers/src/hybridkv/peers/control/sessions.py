"""Makes the sessions of a process's control connections: with one identity, and a fresh nonce each."""

from __future__ import annotations

from collections.abc import Callable

from hybridkv.peers.wire import Channel, ClientHandshake, Identity, ServerHandshake, Session, WireLimits

NONCE_BYTES = 32


class Sessions:
    """`identity` is this side's in every handshake."""

    def __init__(self, identity: Identity, limits: WireLimits, random_bytes: Callable[[int], bytes]) -> None:
        self._identity = identity
        self._limits = limits
        self._random_bytes = random_bytes

    def server(self) -> Session:
        """For somebody who connected here."""
        handshake = ServerHandshake(self._identity, Channel.CONTROL, self._random_bytes(NONCE_BYTES))
        return Session(handshake, self._limits)

    def client(self, expected_peer: str | None) -> Session:
        """For who is connected to. None: anybody who knows the secret."""
        nonce = self._random_bytes(NONCE_BYTES)
        return Session(ClientHandshake(self._identity, Channel.CONTROL, nonce, expected_peer), self._limits)
