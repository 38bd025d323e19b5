"""Peer tier, opened from its configuration: addresses and a secret. NIXL moves the bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hybridkv.connectors.config import PeerTierConfig, parse_address
from hybridkv.hashing import Fingerprint
from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport import Transport
from hybridkv.peers.transport.nixl_library import require_nixl
from hybridkv.peers.wire import NO_SECRET, read_secret
from hybridkv.tiers import SealedMemory, TierConfigurationError
from hybridkv.tiers.peer import Neighbourhood, PeerIndex, PeerMedium, PeerOptions, open_index, open_medium
from hybridkv.tiers.ram import RamIndex

logger = logging.getLogger("vllm.hybridkv")


def peer_index(
    config: PeerTierConfig, ram: RamIndex, fingerprint: Fingerprint, load_timeout_s: float, clock: Callable[[], float]
) -> PeerIndex:
    """Index of the peer tier. Peers can look up keys of `ram`.

    Raises:
        TierConfigurationError: NIXL is not installed, the secret cannot be read, or the address cannot be bound.
    """
    try:
        require_nixl()
    except PeersConfigurationError as error:
        raise TierConfigurationError("type", error.expected, error.got, error.hint) from None
    return open_index(_neighbourhood(config), ram, fingerprint, _options(load_timeout_s), clock)


def peer_medium(
    config: PeerTierConfig,
    memory: SealedMemory,
    namespace: bytes,
    rank: int,
    load_timeout_s: float,
    clock: Callable[[], float],
) -> PeerMedium:
    """Medium of the peer tier for one rank. Peers read `memory`.

    Raises:
        TierConfigurationError: as in `peer_index`.
    """
    return open_medium(_neighbourhood(config), memory, namespace, rank, _options(load_timeout_s), clock)


def _options(load_timeout_s: float) -> PeerOptions:
    # A chunk is offered for the first half of its lease, so that a load has the second half.
    return PeerOptions(load_timeout_s=load_timeout_s, lease_s=max(PeerOptions().lease_s, 2 * load_timeout_s))


def _neighbourhood(config: PeerTierConfig) -> Neighbourhood:
    try:
        secret = read_secret(config.secret_file) if config.secret_file is not None else NO_SECRET
    except PeersConfigurationError as error:
        raise TierConfigurationError("secret_file", error.expected, error.got, error.hint) from None
    listen, peers = parse_address(config.listen), tuple(map(parse_address, config.peers))
    assert listen is not None
    known = tuple(peer for peer in peers if peer is not None)
    return Neighbourhood(secret, listen, known, _transport)


def _transport(name: str) -> Transport:
    # Imported here, because it loads libraries that a process without this tier does not need.
    from hybridkv.peers.transport.nixl import NixlTransport

    return NixlTransport(name)
