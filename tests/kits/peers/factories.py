"""NIXL transports for tests, and for the processes that they start."""

from __future__ import annotations

import uuid

import patience

from hybridkv.peers.transport import Transport


def fresh_name() -> str:
    return f"peer-{uuid.uuid4()}"


def nixl(max_transfers: int = 64) -> Transport:
    """Makes posts small in this process from now on, so that a read takes several."""
    from hybridkv.peers.transport import nixl_reads
    from hybridkv.peers.transport.nixl import NixlTransport

    nixl_reads.POST_BYTES, nixl_reads.ABANDON_S = 1 << 16, patience.seconds(0.2)
    return NixlTransport(fresh_name(), max_transfers)
