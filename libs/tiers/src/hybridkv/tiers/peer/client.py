"""Lookup client of a scheduler: sends lookups to other schedulers, and answers their lookups, over one `PeerNode`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hybridkv.peers.control import ControlLoop, LinkId
from hybridkv.peers.wire import CloseReason, Describe, WireError
from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.peer import messages
from hybridkv.tiers.peer.leases import PeerLeases
from hybridkv.tiers.peer.node import NodeCallbacks, NodeIdentity, PeerNode
from hybridkv.tiers.peer.options import MAX_KEYS, PeerOptions
from hybridkv.tiers.peer.places import Address, PeerId

CLOSE_S = 2.0


class PeerAnswer(NamedTuple):
    """One peer's answer to one lookup."""

    peer: PeerId
    request: int
    slots: tuple[Slot | None, ...]
    """Slot of each key in the peer's memory, in the order of the lookup; None if the peer lacks it."""
    lease_s: float
    """Seconds for which the peer keeps these chunks."""
    answered_s: float
    """Time of arrival, by the index's clock."""


class ConnectionLost(NamedTuple):
    """The connection to a peer ended, or could not be established for a waiting lookup. Open lookups get no answer from
    this peer, and all leases of this peer have ended."""

    peer: PeerId
    answered_s: float
    was_ready: bool = True
    """False if the connection was never established; then the peer has granted no lease."""


class PeerLookupClient:
    """`LookupClient` of a `PeerIndex` that also answers lookups of peers. Callbacks run on the loop's thread; those of
    outgoing connections append to `events`. All other calls are on the index's thread.

    Args:
        loop: control connections. Closed by `close`.
        description: description of this scheduler.
        peers: addresses of other schedulers.
        leases: chunks leased to peers.
        options: limits.
        clock: clock of the index, in seconds.
    """

    def __init__(
        self,
        loop: ControlLoop,
        description: messages.PeerDescription,
        peers: Sequence[Address],
        leases: PeerLeases,
        options: PeerOptions,
        clock: Callable[[], float],
    ) -> None:
        self.events: deque[PeerAnswer | ConnectionLost] = deque()
        self.leases = leases
        self._clock = clock
        self._numbers = {address: number for number, address in enumerate(peers)}
        self._node = PeerNode(loop, NodeIdentity(description), NodeCallbacks(self, self), peers, options, clock)
        # Connect now, so that the first lookup finds peers.
        self._node.ready()

    def listen(self, host: str, port: int) -> Address:
        """Accept connections of other engines. `OSError` if the address is not available."""
        return self._node.listen(host, port)

    # Lookups of this engine.

    def ready(self) -> list[int]:
        """Listed peers to which a lookup can be sent now. Starts the connections that are due."""
        return self._node.ready()

    def peer_at(self, address: Address) -> PeerId:
        """Id of the peer at this address: its number if it is listed, else the address itself."""
        return self._numbers.get(address, address)

    def send_lookup(self, peer: PeerId, request: int, keys: Sequence[Key]) -> bool:
        """Send a lookup to one peer. False if it cannot be sent; then no answer comes."""
        return self._send(peer, request, keys, may_wait=False)

    def send_hinted_lookup(
        self, peer: PeerId, request: int, keys: Sequence[Key], hinted: Collection[PeerId] = ()
    ) -> bool:
        """Send a lookup to a hinted peer. If the peer is not connected, starts a connection if one is due; the lookup
        waits for a connection attempt that has begun recently.

        `hinted`: all peers of the same hint, which are not removed to make room for this peer. False as for
        `send_lookup`. `ConnectionLost` follows if the connection cannot be established.
        """
        self._node.reach(peer, hinted)
        return self._send(peer, request, keys, may_wait=True)

    def _send(self, peer: PeerId, request: int, keys: Sequence[Key], may_wait: bool) -> bool:
        if not 0 < len(keys) <= MAX_KEYS or any(not 0 < len(key) <= messages.MAX_KEY_BYTES for key in keys):
            return False
        body = messages.encode(messages.Find(*messages.pack_keys(keys)))
        return self._node.send_request(peer, request, body, may_wait)

    def withdraw_lookup(self, peer: PeerId, request: int) -> bool:
        """Drop a hinted lookup that waits for a connection. False if it was sent, or has ended."""
        return self._node.withdraw_request(peer, request)

    def end_leases(self, peer: PeerId, keys: Sequence[Key]) -> None:
        """End the leases of these keys at a peer."""
        for first in range(0, len(keys), MAX_KEYS):
            body = messages.encode(messages.EndLeases(*messages.pack_keys(keys[first : first + MAX_KEYS])))
            if not self._node.send_notice(peer, body):
                return  # the connection is lost, so the peer ends all leases

    def close(self) -> None:
        """Close connections and end all leases. On the index's thread."""
        self._node.close(CLOSE_S)
        self.leases.close()

    # Answers of peers.

    def on_reply(self, peer: PeerId, request: int, body: bytes) -> None:
        message = messages.decode(body)
        if not isinstance(message, messages.FindReply):
            raise WireError(CloseReason.UNEXPECTED, type(message).__name__)
        self.events.append(PeerAnswer(peer, request, messages.slots_of(message), message.lease_s, self._clock()))

    def on_lost(self, peer: PeerId, was_ready: bool) -> None:
        self.events.append(ConnectionLost(peer, self._clock(), was_ready))

    def on_ready(self, peer: PeerId, description: Describe) -> None:
        """Does nothing: `PeerNode` records that the peer is ready."""

    # Lookups of peers.

    def on_request(self, link: LinkId, body: bytes) -> bytes:
        message = messages.decode(body)
        if not isinstance(message, messages.Find):
            raise WireError(CloseReason.UNEXPECTED, type(message).__name__)
        keys = messages.unpack_keys(message.keys, message.ends)
        slots: list[Slot | None] = self.leases.grant(link, keys)
        return messages.encode(messages.find_reply(slots, self.leases.lease_s))

    def on_notice(self, link: LinkId, body: bytes) -> None:
        message = messages.decode(body)
        if not isinstance(message, messages.EndLeases):
            raise WireError(CloseReason.UNEXPECTED, type(message).__name__)
        self.leases.end(link, messages.unpack_keys(message.keys, message.ends))

    def on_closed(self, link: LinkId) -> None:
        self.leases.end_all(link)
