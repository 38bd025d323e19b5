"""Peers as lists in this process: their chunks, the time of their answers, and the messages sent to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hybridkv.tiers import Key, Slot
from hybridkv.tiers.peer import ConnectionLost, PeerAnswer


class PlainPeers:
    """`PeerClient` that answers only when a test calls `answer`.

    Args: clock: seconds. held: chunks of each peer. lease_s: length of a lease.
    """

    def __init__(self, clock: Callable[[], float], held: Sequence[dict[Key, Slot]], lease_s: float = 1e6) -> None:
        self.events: deque[PeerAnswer | ConnectionLost] = deque()
        self.held = list(held)
        self.lost: set[int] = set()
        self.waiting: list[tuple[int, int, tuple[Key, ...]]] = []
        self.num_messages = 0
        self.given_up: list[tuple[int, Key]] = []
        self.is_closed = False
        self._clock = clock
        self._lease_s = lease_s

    def ready(self) -> list[int]:
        return [peer for peer in range(len(self.held)) if peer not in self.lost]

    def send_lookup(self, peer: int, request: int, keys: Sequence[Key]) -> bool:
        self.num_messages += 1
        self.waiting.append((peer, request, tuple(keys)))
        return True

    def end_leases(self, peer: int, keys: Sequence[Key]) -> None:
        self.given_up += [(peer, key) for key in keys]

    def answer(self, *peers: int) -> None:
        """Answer the lookups sent to these peers, or to all."""
        waiting, self.waiting = self.waiting, []
        for peer, request, keys in waiting:
            if peers and peer not in peers:
                self.waiting.append((peer, request, keys))
            elif peer not in self.lost:
                slots = tuple(self.held[peer].get(key) for key in keys)
                self.events.append(PeerAnswer(peer, request, slots, self._lease_s, self._clock()))

    def lose(self, peer: int) -> None:
        self.lost.add(peer)
        self.events.append(ConnectionLost(peer, self._clock()))

    def close(self) -> None:
        self.is_closed = True
