"""Builds both halves of a peer tier from addresses, a secret and an engine's memory."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from hybridkv.hashing import Fingerprint
from hybridkv.peers.control import ControlLoop
from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport import Region, Transport
from hybridkv.peers.wire import Secret, WireLimits
from hybridkv.tiers.contract import SealedMemory, Slot
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.peer import messages
from hybridkv.tiers.peer.client import CLOSE_S, PeerLookupClient
from hybridkv.tiers.peer.index import PeerIndex
from hybridkv.tiers.peer.leases import PeerLeases
from hybridkv.tiers.peer.medium import PeerMedium, RankSeals
from hybridkv.tiers.peer.node import NodeCallbacks, NodeIdentity, PeerNode
from hybridkv.tiers.peer.options import PeerOptions
from hybridkv.tiers.peer.places import Address
from hybridkv.tiers.peer.reader import PeerReader
from hybridkv.tiers.ram import RamIndex

SCHEDULER = -1
"""Rank number of a scheduler."""


@dataclass(frozen=True, slots=True)
class PeerAddresses:
    """Addresses of an engine and its peers.

    Args:
        secret: secret that all engines share.
        listen: address of this engine's scheduler. Rank n listens on port + 1 + n. Port 0: any port, for tests.
        peers: addresses of the schedulers of other engines. This engine's own address is ignored. Hints of requests may
            name further schedulers.
        make_transport: builds the transport, from the name of this process.
    """

    secret: Secret
    listen: Address
    peers: tuple[Address, ...]
    make_transport: Callable[[str], Transport]

    def of_rank(self, rank: int) -> tuple[Address, tuple[Address, ...]]:
        """Address of this rank, and addresses of the same rank of each peer."""
        host, port = self.listen
        peers = tuple((peer_host, peer_port + 1 + rank) for peer_host, peer_port in self.peers)
        return (host, port + 1 + rank if port else 0), peers


def open_index(
    addresses: PeerAddresses,
    ram: RamIndex,
    fingerprint: Fingerprint,
    options: PeerOptions,
    clock: Callable[[], float],
) -> PeerIndex:
    """Build the scheduler's index. Peers may look up chunks of `ram`, and lease them.

    Raises:
        TierConfigurationError: the address is not free, or it is reachable by other hosts and there is no secret.
    """
    description = messages.PeerDescription(messages.PROTOCOL, SCHEDULER, fingerprint.digest(), fingerprint.encode())
    leases = PeerLeases(ram, options, clock)
    loop = ControlLoop(f"hybridkv-{uuid.uuid4()}", addresses.secret, WireLimits())
    try:
        client = PeerLookupClient(loop, description, addresses.peers, leases, options, clock)
        _listen(client.listen, addresses.listen)
    except BaseException:
        loop.close(CLOSE_S)
        raise
    ram.before_reserving = leases.apply
    return PeerIndex(client, options, clock)


def open_medium(
    addresses: PeerAddresses,
    memory: SealedMemory,
    namespace: bytes,
    rank: int,
    options: PeerOptions,
    clock: Callable[[], float],
) -> PeerMedium:
    """Build a rank's medium. Peers may read `memory`. Loads may write to it.

    Raises:
        TierConfigurationError: as in `open_index`, or the transport cannot be built.
    """
    address, peers = addresses.of_rank(rank)
    name = f"hybridkv-{uuid.uuid4()}"
    description = messages.PeerDescription(messages.PROTOCOL, rank, namespace)
    [view] = memory.views(Slot(((0, memory.capacity_bytes),)))
    with ExitStack() as undo:
        loop = ControlLoop(name, addresses.secret, WireLimits())
        undo.callback(loop.close, CLOSE_S)
        try:
            transport = addresses.make_transport(name)
        except PeersConfigurationError as error:
            raise TierConfigurationError("type", error.expected, error.got, error.hint) from None
        reader = PeerReader(transport, view, options, clock)
        undo.callback(reader.close, has_thread_ended=True)
        capability = transport.register([Region(memory.base_address, memory.capacity_bytes)])
        identity, callbacks = NodeIdentity(description, capability), NodeCallbacks(RankSeals(memory), reader)
        reader.node = PeerNode(loop, identity, callbacks, peers, options, clock, port_offset=1 + rank)
        _listen(reader.node.listen, address)
        medium = PeerMedium(reader, options, clock)
        undo.pop_all()
        return medium


def _listen(listen: Callable[[str, int], Address], address: Address) -> None:
    try:
        listen(*address)
    except PeersConfigurationError as error:
        raise TierConfigurationError("listen", error.expected, error.got, error.hint) from None
    except OSError as error:
        got = f"{address[0]}:{address[1]}: {error.strerror or error}"
        hint = "each engine on a host needs ports of its own: one, and one more for each rank"
        raise TierConfigurationError("listen", "an address that is free", got, hint) from None
