"""A NIXL transport for tests, and for the processes that they start."""

from __future__ import annotations

import uuid

from hybridkv.peers.transport import Transport


def fresh_name() -> str:
    return f"peer-{uuid.uuid4()}"


def nixl(max_transfers: int = 64) -> Transport:
    """Posts are small, so reads are several of them."""
    from hybridkv.peers.transport.nixl import NixlOptions, NixlTransport

    options = NixlOptions(post_bytes=1 << 16, max_transfers=max_transfers, abandon_s=0.5)
    return NixlTransport(fresh_name(), options)
