"""Who is let in: CURVE keys that the shared secret gives, and the one client key that a listener admits.

Both key pairs are derived, so all who know the secret have the same, and nothing has to be handed out. A stranger does
not know the server's public key either, and gets no further than the first command. What is said is encrypted with
keys of the connection alone. Without a secret the keys are those of the empty one: they keep nobody out.
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
    """Of both sides of every connection, in Z85."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    has_secret: bool
    """False: everybody knows these keys."""

    @classmethod
    def of(cls, secret: Secret) -> CurveKeys:
        server, client = (z85.encode(secret.derive(b"curve " + side)) for side in (b"server", b"client"))
        return cls(zmq.curve_public(server), server, zmq.curve_public(client), client, bool(secret))

    def __repr__(self) -> str:
        return "CurveKeys(...)"

    def serve(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket that will listen admit whom `Doorkeeper` admits, and nobody where there is none."""
        sock.curve_server = True
        sock.curve_secretkey = self.server_secret
        sock.zap_domain = ZAP_DOMAIN
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def ask(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket that will connect prove the secret, and demand that the other side does."""
        sock.curve_serverkey = self.server_public
        sock.curve_publickey = self.client_public
        sock.curve_secretkey = self.client_secret


class Doorkeeper:
    """Answers ZeroMQ's questions about who may come in (ZAP, https://rfc.zeromq.org/spec/27). For the loop's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        self._admitted = z85.decode(keys.client_public)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """One question, if there is one."""
        try:
            question = self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        shown = question[_CURVE_KEY_AT] if len(question) > _CURVE_KEY_AT else b""
        status = b"200" if hmac.compare_digest(shown, self._admitted) else b"400"
        self.socket.send_multipart([question[0], question[1], status, b"", b"", b""], zmq.DONTWAIT)
