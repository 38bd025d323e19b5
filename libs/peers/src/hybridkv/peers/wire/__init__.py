"""Messages between two engines, their limits, and the shared secret.

This package has no socket, thread or clock: `hybridkv.peers.control` sends and receives. FORMAT.md describes the bytes.
"""

from hybridkv.peers.wire.closing import CloseReason, WireError
from hybridkv.peers.wire.limits import MAX_NAME_BYTES, WireLimits
from hybridkv.peers.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Bye,
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
    WireMessage,
    pack_columns,
    unpack_columns,
)
from hybridkv.peers.wire.secret import NO_SECRET, Secret, is_loopback, read_secret, require_secret

__all__ = [
    "MAX_NAME_BYTES",
    "NO_SECRET",
    "PROTOCOL_VERSION",
    "Accepted",
    "Bye",
    "CloseReason",
    "Describe",
    "Digests",
    "Hello",
    "LeaseDone",
    "Message",
    "MessageCodec",
    "Notice",
    "Refused",
    "Renew",
    "Renewed",
    "Reply",
    "RequestDigests",
    "RequestMessage",
    "Secret",
    "WireError",
    "WireLimits",
    "WireMessage",
    "is_loopback",
    "pack_columns",
    "read_secret",
    "require_secret",
    "unpack_columns",
]
