"""What two engines say to each other: messages, frames, and the proof that both know the same secret.

Holds no socket, no thread and no clock. `hybridkv.peers.control` and the data connections of
`hybridkv.peers.transport.tcp` speak it. FORMAT.md describes every byte.
"""

from hybridkv.peers.wire.addresses import demand_secret, is_loopback
from hybridkv.peers.wire.closing import CloseReason, WireError
from hybridkv.peers.wire.crowding import who_gives_way
from hybridkv.peers.wire.framing import FrameReader, frame
from hybridkv.peers.wire.handshake import Channel, ClientHandshake, Established, Identity, ServerHandshake
from hybridkv.peers.wire.limits import MAX_NAME_BYTES, WireLimits
from hybridkv.peers.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    AskDigests,
    Bye,
    Describe,
    Digests,
    Done,
    Heard,
    Hello,
    Message,
    MessageCodec,
    Notice,
    Ping,
    Question,
    Refused,
    Renew,
    Renewed,
    Reply,
    Word,
    pack_columns,
    unpack_columns,
)
from hybridkv.peers.wire.sealing import Opener, Sealer, SessionKeys
from hybridkv.peers.wire.secret import NO_SECRET, Secret, read_secret
from hybridkv.peers.wire.session import Session

__all__ = [
    "MAX_NAME_BYTES",
    "NO_SECRET",
    "PROTOCOL_VERSION",
    "Accepted",
    "AskDigests",
    "Bye",
    "Channel",
    "ClientHandshake",
    "CloseReason",
    "Describe",
    "Digests",
    "Done",
    "Established",
    "FrameReader",
    "Heard",
    "Hello",
    "Identity",
    "Message",
    "MessageCodec",
    "Notice",
    "Opener",
    "Ping",
    "Question",
    "Refused",
    "Renew",
    "Renewed",
    "Reply",
    "Sealer",
    "Secret",
    "ServerHandshake",
    "Session",
    "SessionKeys",
    "WireError",
    "WireLimits",
    "Word",
    "demand_secret",
    "frame",
    "is_loopback",
    "pack_columns",
    "read_secret",
    "unpack_columns",
    "who_gives_way",
]
