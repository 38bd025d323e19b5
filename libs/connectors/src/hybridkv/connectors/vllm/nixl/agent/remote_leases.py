"""What a consumer's rank says to producers of the blocks that they hold for it: hold them on, and need them no more.

Each rank of the producer hears it from those that read from it, and one that nobody reads from hears it from one. A
producer that was cut off is connected to again, a few times and no longer than its lease holds; one that cannot be
reached is not waited for: its lease ends by itself. Several requests may show one lease, as the answers to one prompt
do: the last of them says that it is needed no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.connectors.vllm.nixl.agent.connections import (
    ConnectionState,
    ControlChannel,
    ProducerConnection,
    ProducerConnections,
)
from hybridkv.connectors.vllm.nixl.params import RemotePrompt
from hybridkv.peers.control import LinkId
from hybridkv.peers.ranks import RankLink
from hybridkv.peers.wire import Done, Renew

RENEWALS_PER_LEASE = 4
MIN_RENEWAL_S = 0.05
"""Between two renewals: how long a lease holds is what a proxy says."""
MAX_RECONNECTS, RECONNECT_S = 3, 1.0
"""How often a connection that was cut off is made again, and how long is waited between, if not less."""
MAX_RECONNECTED_LEASES = 1024
"""Where more leases than these are held, those that end while they are cut off end by themselves."""
_PERMANENT_FAILURES = ("refused", "protocol")
"""Why a connection ended that would end so again."""


@dataclass(slots=True)
class _LeaseHolder:
    """A rank that holds blocks for us."""

    link: RankLink
    peer: ProducerConnection
    reconnects_left: int = MAX_RECONNECTS
    next_reconnect_s: float = 0.0

    @property
    def is_lost(self) -> bool:
        return not self.peer.is_open and self.peer.state is ConnectionState.OVER


@dataclass(slots=True)
class _RemoteLease:
    prompt: RemotePrompt
    holders: tuple[_LeaseHolder, ...]
    next_renewal_s: float
    until_s: float
    """When the lease has ended if nothing was said of it since it was last renewed."""
    is_read: bool | None = None
    """Whether its blocks were read, once they are needed no more."""


class RemoteLeases:
    """Leases by request. Calls come from one thread.

    Args:
        peers: connections to producers.
        control: says things on them.
        clock: seconds.
    """

    def __init__(self, peers: ProducerConnections, control: ControlChannel, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._control = control
        self._clock = clock
        self._leases: dict[str, _RemoteLease] = {}

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def links(self) -> set[LinkId]:
        """Connections to ranks that hold blocks for us, and are to hear of it."""
        return {holder.peer.link for hold in self._leases.values() for holder in hold.holders}

    def begin(self, request_id: str, prompt: RemotePrompt) -> None:
        """Its producer is to go on holding the blocks. The connection is made now: it will be needed."""
        links = self._peers.links_for_done(len(prompt.ranks))
        holders = tuple(_LeaseHolder(link, self._peers.get(prompt.host, prompt.ranks[link.rank])) for link in links)
        now_s = self._clock()
        self._leases[request_id] = _RemoteLease(
            prompt, holders, now_s + _renewal_interval_s(prompt), now_s + prompt.lease_seconds
        )

    def part(self, request_id: str, rank: int, is_read: bool) -> None:
        """One rank's blocks are needed no more, while those of others may be. Its connection stands."""
        hold = self._leases.get(request_id)
        if hold is None:
            return
        for holder in hold.holders:
            if holder.link.rank == rank and self._send_done(hold, holder, is_read):
                hold.holders = tuple(other for other in hold.holders if other is not holder)

    def end(self, request_id: str, is_read: bool) -> None:
        """The blocks are needed no more."""
        hold = self._leases.get(request_id)
        if hold is not None and hold.is_read is None:
            hold.is_read = is_read
            self._part(request_id, hold, is_read)

    def tick(self) -> None:
        """Renews what is due, and says what could not be said before."""
        now_s = self._clock()
        for request_id, hold in list(self._leases.items()):
            if hold.is_read is not None:
                self._part(request_id, hold, hold.is_read)
            elif now_s >= hold.next_renewal_s:
                self._renew(hold, now_s)

    def _renew(self, hold: _RemoteLease, now_s: float) -> None:
        hold.next_renewal_s = now_s + _renewal_interval_s(hold.prompt)
        for holder in hold.holders:
            if not holder.peer.is_open:
                self._reconnect(hold, holder, now_s)
            elif self._control.send(holder.peer.link, Renew(hold.prompt.lease)):
                hold.until_s = now_s + hold.prompt.lease_seconds
                holder.reconnects_left = MAX_RECONNECTS

    def _part(self, request_id: str, hold: _RemoteLease, is_read: bool) -> None:
        """Says it to those that are connected, and keeps those that may still be."""
        now_s, waiting = self._clock(), list[_LeaseHolder]()
        for holder in hold.holders:
            self._reconnect(hold, holder, now_s)
            if holder.peer.is_open:
                is_over = self._send_done(hold, holder, is_read)
            else:
                is_over = holder.is_lost and (holder.reconnects_left == 0 or not self._may_reconnect(holder))
            if not is_over:
                waiting.append(holder)
        hold.holders = tuple(waiting)
        if not waiting or now_s >= hold.until_s:
            del self._leases[request_id]

    def _reconnect(self, hold: _RemoteLease, holder: _LeaseHolder, now_s: float) -> None:
        """One that was cut off: whoever has connected to it since, or we, now and then while its lease holds."""
        if (
            not holder.is_lost
            or now_s >= hold.until_s
            or now_s < holder.next_reconnect_s
            or holder.reconnects_left == 0
        ):
            return
        if self._may_reconnect(holder):
            holder.reconnects_left -= 1
            holder.next_reconnect_s = now_s + min(RECONNECT_S, _renewal_interval_s(hold.prompt))
            holder.peer = self._peers.get(hold.prompt.host, hold.prompt.ranks[holder.link.rank])

    def _may_reconnect(self, holder: _LeaseHolder) -> bool:
        failure = holder.peer.failure
        return len(self._leases) <= MAX_RECONNECTED_LEASES and (
            failure is None or failure.reason not in _PERMANENT_FAILURES
        )

    def _send_done(self, hold: _RemoteLease, holder: _LeaseHolder, is_read: bool) -> bool:
        if any(self._is_leased_by(other, hold, holder) for other in self._leases.values() if other is not hold):
            return True
        link = holder.link
        done = Done(hold.prompt.lease, is_read, link.reader, link.num_readers)
        return holder.peer.is_open and self._control.send(holder.peer.link, done)

    @staticmethod
    def _is_leased_by(other: _RemoteLease, hold: _RemoteLease, holder: _LeaseHolder) -> bool:
        return other.prompt.lease == hold.prompt.lease and any(
            each.peer.address == holder.peer.address for each in other.holders
        )


def _renewal_interval_s(prompt: RemotePrompt) -> float:
    return max(MIN_RENEWAL_S, prompt.lease_seconds / RENEWALS_PER_LEASE)
