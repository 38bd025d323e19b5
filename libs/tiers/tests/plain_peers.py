"""Peers as lists in this process: their chunks, the time of their answers, and the messages sent to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from hybridkv.tiers import Key, Slot
from hybridkv.tiers.peer import ConnectionLost, PeerAnswer
from hybridkv.tiers.peer.places import Address, PeerId


class PlainPeers:
    """Lookup client of a `PeerIndex` that answers only when a test calls `answer`.

    Args:
        clock: seconds.
        held: chunks of each listed peer.
        lease_s: length of a lease.
    """

    hinted: dict[PeerId, dict[Key, Slot]]
    """Chunks of each unlisted peer."""

    def __init__(self, clock: Callable[[], float], held: Sequence[dict[Key, Slot]], lease_s: float = 1e6) -> None:
        self.events: deque[PeerAnswer | ConnectionLost] = deque()
        self.held = list(held)
        self.lost: set[PeerId] = set()
        self.hinted = {}
        self.connecting: set[PeerId] = set()
        """Lookups for these wait for their connection."""
        self.waiting: list[tuple[PeerId, int, tuple[Key, ...]]] = []
        self.sent: dict[tuple[PeerId, int], tuple[Key, ...]] = {}
        self.num_messages = 0
        self.given_up: list[tuple[PeerId, Key]] = []
        self.is_closed = False
        self._clock = clock
        self._lease_s = lease_s

    def ready(self) -> list[int]:
        return [peer for peer in range(len(self.held)) if peer not in self.lost]

    def peer_at(self, address: Address) -> PeerId:
        host, port = address
        return port if host == "listed" else address

    def send_lookup(self, peer: PeerId, request: int, keys: Sequence[Key]) -> bool:
        self.num_messages += 1
        self.waiting.append((peer, request, tuple(keys)))
        self.sent[peer, request] = tuple(keys)
        return True

    def send_hinted_lookup(
        self, peer: PeerId, request: int, keys: Sequence[Key], hinted: Collection[PeerId] = ()
    ) -> bool:
        is_known = peer in self.hinted or isinstance(peer, int)
        return is_known and peer not in self.lost and self.send_lookup(peer, request, keys)

    def withdraw_lookup(self, peer: PeerId, request: int) -> bool:
        if peer in self.connecting:
            self.waiting = [each for each in self.waiting if each[:2] != (peer, request)]
        return peer in self.connecting

    def end_leases(self, peer: PeerId, keys: Sequence[Key]) -> None:
        self.given_up += [(peer, key) for key in keys]

    def answer(self, *peers: PeerId) -> None:
        """Answer the lookups sent to these peers, or to all."""
        waiting, self.waiting = self.waiting, []
        for peer, request, keys in waiting:
            if peers and peer not in peers:
                self.waiting.append((peer, request, keys))
            elif peer not in self.lost:
                held = self.held[peer] if isinstance(peer, int) else self.hinted[peer]
                slots = tuple(held.get(key) for key in keys)
                self.events.append(PeerAnswer(peer, request, slots, self._lease_s, self._clock()))

    def lose(self, peer: PeerId) -> None:
        self.lost.add(peer)
        self.events.append(ConnectionLost(peer, self._clock(), peer not in self.connecting))

    def close(self) -> None:
        self.is_closed = True
