"""What a consumer's rank says to producers of the blocks that they hold for it: hold them on, and need them no more.

A producer that cannot be reached is not waited for: its lease ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.connectors.vllm.nixl.links import Control, Peer, Peers, PeerState
from hybridkv.connectors.vllm.nixl.params import RemotePrompt
from hybridkv.peers.wire import Done, LeaseId, Renew

RENEWALS_A_LEASE = 4


@dataclass(slots=True)
class _Hold:
    prompt: RemotePrompt
    peers: tuple[Peer, ...]
    next_renewal_s: float
    until_s: float
    """When the lease has ended if nothing was said of it since it was last renewed."""
    is_read: bool | None = None
    """Whether its blocks were read, once they are needed no more."""


class Holding:
    """Leases by request. Calls come from one thread.

    Args:
        peers: connections to producers.
        control: says things on them.
        rank: of this worker: it speaks with the same one of the producer, and those that have no other.
        tp_size: ranks of this engine.
        clock: seconds.
    """

    def __init__(self, peers: Peers, control: Control, rank: int, tp_size: int, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._control = control
        self._rank = rank
        self._tp_size = tp_size
        self._clock = clock
        self._holds: dict[str, _Hold] = {}

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    def begin(self, request_id: str, prompt: RemotePrompt) -> None:
        """Its producer is to go on holding the blocks. The connection is made now: it will be needed."""
        ranks = prompt.ranks[self._rank :: self._tp_size]
        peers = tuple(self._peers.get(prompt.host, rank) for rank in ranks)
        now_s = self._clock()
        every_s = prompt.lease_seconds / RENEWALS_A_LEASE
        self._holds[request_id] = _Hold(prompt, peers, now_s + every_s, now_s + prompt.lease_seconds)

    def end(self, request_id: str, is_read: bool) -> None:
        """The blocks are needed no more."""
        hold = self._holds.get(request_id)
        if hold is not None and hold.is_read is None:
            hold.is_read = is_read
            self._part(request_id, hold)

    def tick(self) -> None:
        """Renews what is due, and says what could not be said before."""
        now_s = self._clock()
        for request_id, hold in list(self._holds.items()):
            if hold.is_read is not None:
                self._part(request_id, hold)
            elif now_s >= hold.next_renewal_s:
                self._renew(hold, now_s)

    def _renew(self, hold: _Hold, now_s: float) -> None:
        hold.next_renewal_s = now_s + hold.prompt.lease_seconds / RENEWALS_A_LEASE
        for peer in hold.peers:
            if peer.is_open and self._control.send(peer.link, Renew(_lease(hold.prompt))):
                hold.until_s = now_s + hold.prompt.lease_seconds

    def _part(self, request_id: str, hold: _Hold) -> None:
        """Says it to those that are connected, and keeps those that may still be."""
        waiting = tuple(peer for peer in hold.peers if not peer.is_open and peer.state is not PeerState.OVER)
        for peer in hold.peers:
            if peer.is_open:
                self._control.send(peer.link, Done(_lease(hold.prompt), bool(hold.is_read)))
        hold.peers = waiting
        if not waiting or self._clock() >= hold.until_s:
            del self._holds[request_id]


def _lease(prompt: RemotePrompt) -> LeaseId:
    return LeaseId(prompt.lease.slot, prompt.lease.nonce)
