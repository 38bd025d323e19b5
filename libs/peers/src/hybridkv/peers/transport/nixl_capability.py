"""Capability to read the memory of a process over NIXL. Decoding any bytes gives a capability or an error text."""

from __future__ import annotations

import msgspec

from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.transport.contract import Region
from hybridkv.peers.transport.memory import MAX_REGIONS, RegisteredMemory
from hybridkv.peers.wire import WireError, pack_columns, unpack_columns

FORMAT_VERSION = 2
MAX_CAPABILITY_BYTES = 8 << 20


class _Capability(msgspec.Struct, frozen=True, array_like=True):
    version: int
    agent: str
    metadata: bytes
    regions: bytes
    """Two columns: address, num_bytes (0 for a deregistered region)."""


def encode_capability(agent: str, metadata: bytes, memory: RegisteredMemory) -> bytes:
    """Encodes a capability. `metadata` comes from NIXL and lets its holder read this memory."""
    regions = pack_columns((memory.addresses, memory.num_bytes))
    return msgspec.msgpack.encode(_Capability(FORMAT_VERSION, agent, metadata, regions))


def decode_capability(data: bytes) -> tuple[str, bytes, RegisteredMemory] | str:
    """(agent, metadata, regions), or an error text for an invalid capability."""
    if len(data) > MAX_CAPABILITY_BYTES:
        return f"a capability of {len(data)} bytes"
    try:
        capability = msgspec.msgpack.decode(data, type=_Capability)
        if capability.version != FORMAT_VERSION:
            return f"a capability of version {capability.version}; this side supports {FORMAT_VERSION}"
        columns = unpack_columns(capability.regions, 2, MAX_REGIONS)
        rows = [Region(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        RegisteredMemory().with_regions([row for row in rows if row.num_bytes])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        return f"invalid capability: {type(error).__name__}"
    except (WireError, PeersProtocolError) as error:
        return f"invalid capability: {error}"
    memory = RegisteredMemory(tuple(row if row.num_bytes else None for row in rows))
    return capability.agent, capability.metadata, memory
