"""CURVE keys derived from the shared secret, and the ZAP handler that admits the one client key.

Both key pairs are derived, so all processes with the same secret have the same keys, and no key is distributed. A
client without the secret does not have the server's public key and fails at the first CURVE command. Messages are
encrypted with keys of their connection. Without a secret the keys are derived from the empty secret and protect
nothing.
"""

from __future__ import annotations

import hmac

import msgspec
import zmq
from zmq.utils import z85

from hybridkv.peers.wire import Secret

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"hybridkv"
_CURVE_KEY_AT = 6


class CurveKeys(msgspec.Struct, frozen=True):
    """CURVE keys of both sides of every connection, in Z85."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    has_secret: bool
    """False if the keys are derived from the empty secret; such keys are public."""

    @classmethod
    def of(cls, secret: Secret) -> CurveKeys:
        server, client = (z85.encode(secret.derive(b"curve " + side)) for side in (b"server", b"client"))
        return cls(zmq.curve_public(server), server, zmq.curve_public(client), client, bool(secret))

    def __repr__(self) -> str:
        return "CurveKeys(...)"

    def as_server(self, sock: zmq.Socket[bytes]) -> None:
        """Configures a listening socket. It admits only clients that `ZapHandler` admits; without a handler, none."""
        sock.curve_server = True
        sock.curve_secretkey = self.server_secret
        sock.zap_domain = ZAP_DOMAIN
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def as_client(self, sock: zmq.Socket[bytes]) -> None:
        """Configures a connecting socket to prove the secret and to require the same proof from the server."""
        sock.curve_serverkey = self.server_public
        sock.curve_publickey = self.client_public
        sock.curve_secretkey = self.client_secret


class ZapHandler:
    """ZAP handler (https://rfc.zeromq.org/spec/27) that admits one client key. Only for the loop's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        self._admitted = z85.decode(keys.client_public)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answers one pending ZAP request, if any."""
        try:
            request = self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        client_key = request[_CURVE_KEY_AT] if len(request) > _CURVE_KEY_AT else b""
        status = b"200" if hmac.compare_digest(client_key, self._admitted) else b"400"
        self.socket.send_multipart([request[0], request[1], status, b"", b"", b""], zmq.DONTWAIT)
