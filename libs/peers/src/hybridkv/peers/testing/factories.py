"""Transports by name, for tests and for the processes that they start."""

from __future__ import annotations

import uuid

from hybridkv.peers.testing.suite import TIMEOUT_S
from hybridkv.peers.transport import Transport
from hybridkv.peers.transport.tcp import TcpOptions, TcpTransport
from hybridkv.peers.wire import NO_SECRET, Secret, WireLimits

SECRET = Secret(b"what tests share, which is no secret")


def fresh_name() -> str:
    return f"peer-{uuid.uuid4()}"


def tcp(max_transfers: int = 64) -> Transport:
    # Small shares and requests, so that reads are several of either.
    limits = WireLimits(max_frame_bytes=4 << 20, max_buffered_bytes=8 << 20, handshake_timeout_s=TIMEOUT_S)
    options = TcpOptions(
        share_bytes=1 << 16,
        max_ranges=512,
        max_transfers=max_transfers,
        connect_timeout_s=TIMEOUT_S,
        limits=limits,
    )
    return TcpTransport(fresh_name(), SECRET, options)


def tcp_without_a_secret(max_transfers: int = 64) -> Transport:
    limits = WireLimits(max_frame_bytes=1 << 20, max_buffered_bytes=2 << 20, handshake_timeout_s=TIMEOUT_S)
    options = TcpOptions(
        connections=1,
        max_ranges=4096,
        max_transfers=max_transfers,
        connect_timeout_s=TIMEOUT_S,
        limits=limits,
    )
    return TcpTransport(fresh_name(), NO_SECRET, options)


def nixl(max_transfers: int = 64) -> Transport:
    from hybridkv.peers.transport.nixl import NixlOptions, NixlTransport

    options = NixlOptions(post_bytes=1 << 16, max_transfers=max_transfers, abandon_s=0.5)
    return NixlTransport(fresh_name(), options)


FACTORIES = {"tcp": tcp, "tcp_without_a_secret": tcp_without_a_secret, "nixl": nixl}
