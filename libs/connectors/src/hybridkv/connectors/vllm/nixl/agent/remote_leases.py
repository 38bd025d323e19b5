"""Leases at producers: a consumer's rank renews leases, and sends `LeaseDone` when it no longer needs the blocks.

Each rank of the producer gets `LeaseDone` from all ranks that read from it, or from one rank if no rank reads from it.
After a lost connection this rank reconnects, a few times and only while the lease lasts. The rank does not wait for an
unreachable producer: the lease expires. Several requests may share a lease (samples of one prompt): then `LeaseDone` is
sent for the last of these requests.
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
from hybridkv.peers.wire import LeaseDone, Renew

RENEWALS_PER_LEASE = 4
MIN_RENEWAL_S = 0.05
"""Minimum time between two renewals: the lease time comes from a proxy, which may send any value."""
MAX_RECONNECTS, RECONNECT_S = 3, 1.0
"""Maximum reconnects after a lost connection, and the pause between two reconnects in seconds; less if renewals are
more frequent. Before `end`, only renewals reconnect, so the pause is the time between two renewals."""
MAX_LEASES_TO_RECONNECT = 1024
"""Maximum number of leases at which lost connections are opened again. Above it, leases of lost connections expire."""
_PERMANENT_FAILURES = ("refused", "protocol")
"""Reasons for which a new connection would fail in the same way."""


@dataclass(slots=True)
class _LeaseHolder:
    """Rank of the producer that holds blocks for this rank."""

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
    """End of the lease, counted from the last renewal that this rank sent."""
    is_read: bool | None = None
    """None before `end`; then True if the blocks were read."""


class RemoteLeases:
    """Leases at producers, by request. One thread calls all methods.

    Args:
        peers: connections to producers.
        control: sends messages.
        clock: returns seconds.
    """

    def __init__(self, peers: ProducerConnections, control: ControlChannel, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._control = control
        self._clock = clock
        self._leases: dict[str | int, _RemoteLease] = {}
        """By request; after the request's end by a number, because a later request may have its id."""

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def links(self) -> set[LinkId]:
        """Connections to ranks that hold blocks for this rank."""
        return {holder.peer.link for lease in self._leases.values() for holder in lease.holders}

    def begin(self, request_id: str, prompt: RemotePrompt) -> None:
        """Starts to renew a lease. Connects to the producer now, because the load will need the connection. Ends the
        lease of an earlier request with this id.

        The first renewal is sent at once over an open connection: the producer may end a connection that was silent.
        """
        links = self._peers.rank_links_for_done(len(prompt.ranks))
        holders = tuple(_LeaseHolder(link, self._peers.get(prompt.host, prompt.ranks[link.rank])) for link in links)
        now_s = self._clock()
        earlier = self._leases.get(request_id)
        # The new request may have the same lease, so it is added before the earlier one ends.
        self._leases[request_id] = _RemoteLease(
            prompt, holders, now_s + _renewal_interval_s(prompt), now_s + prompt.lease_seconds
        )
        for holder in holders:
            if holder.peer.is_open:
                self._control.send(holder.peer.link, Renew(prompt.lease))
        if earlier is not None:
            self._end(earlier, False)

    def release_rank(self, request_id: str, rank: int, is_read: bool) -> None:
        """Sends `LeaseDone` to one rank of the producer, if it is connected and no other request shares the lease. The
        leases at other ranks and the connection stay."""
        lease = self._leases.get(request_id)
        if lease is None:
            return
        for holder in lease.holders:
            if holder.link.rank == rank and self._send_done(lease, holder, is_read):
                lease.holders = tuple(other for other in lease.holders if other is not holder)

    def end(self, request_id: str, is_read: bool) -> None:
        """Sends `LeaseDone` to all ranks of the producer that have not received it."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self._end(lease, is_read)

    def _end(self, lease: _RemoteLease, is_read: bool) -> None:
        lease.is_read = is_read
        self._leases[id(lease)] = lease
        self._release(lease, is_read)

    def tick(self) -> None:
        """Sends due renewals, and `LeaseDone` messages that could not be sent before."""
        now_s = self._clock()
        for lease in list(self._leases.values()):
            if lease.is_read is not None:
                self._release(lease, lease.is_read)
            elif now_s >= lease.next_renewal_s:
                self._renew(lease, now_s)

    def _renew(self, lease: _RemoteLease, now_s: float) -> None:
        lease.next_renewal_s = now_s + _renewal_interval_s(lease.prompt)
        for holder in lease.holders:
            if not holder.peer.is_open:
                self._reconnect(lease, holder, now_s)
            elif self._control.send(holder.peer.link, Renew(lease.prompt.lease)):
                lease.until_s = now_s + lease.prompt.lease_seconds
                holder.reconnects_left = MAX_RECONNECTS

    def _release(self, lease: _RemoteLease, is_read: bool) -> None:
        """Sends `LeaseDone` to connected ranks. Keeps ranks that may connect again, until the end of the lease."""
        now_s, waiting = self._clock(), list[_LeaseHolder]()
        for holder in lease.holders:
            self._reconnect(lease, holder, now_s)
            if holder.peer.is_open:
                is_over = self._send_done(lease, holder, is_read)
            else:
                is_over = holder.is_lost and (holder.reconnects_left == 0 or not self._may_reconnect(holder))
            if not is_over:
                waiting.append(holder)
        lease.holders = tuple(waiting)
        if not waiting or now_s >= lease.until_s:
            del self._leases[id(lease)]

    def _reconnect(self, lease: _RemoteLease, holder: _LeaseHolder, now_s: float) -> None:
        """Replaces a lost connection by an existing or a new connection, at intervals while the lease lasts."""
        if (
            not holder.is_lost
            or now_s >= lease.until_s
            or now_s < holder.next_reconnect_s
            or holder.reconnects_left == 0
        ):
            return
        if self._may_reconnect(holder):
            holder.reconnects_left -= 1
            holder.next_reconnect_s = now_s + min(RECONNECT_S, _renewal_interval_s(lease.prompt))
            holder.peer = self._peers.get(lease.prompt.host, lease.prompt.ranks[holder.link.rank])

    def _may_reconnect(self, holder: _LeaseHolder) -> bool:
        failure = holder.peer.failure
        return len(self._leases) <= MAX_LEASES_TO_RECONNECT and (
            failure is None or failure.reason not in _PERMANENT_FAILURES
        )

    def _send_done(self, lease: _RemoteLease, holder: _LeaseHolder, is_read: bool) -> bool:
        """Sends `LeaseDone` unless another request shares the lease. Returns True if there is nothing left to send."""
        if any(self._is_leased_by(other, lease, holder) for other in self._leases.values() if other is not lease):
            return True
        link = holder.link
        done = LeaseDone(lease.prompt.lease, is_read, link.reader, link.num_readers)
        return holder.peer.is_open and self._control.send(holder.peer.link, done)

    @staticmethod
    def _is_leased_by(other: _RemoteLease, lease: _RemoteLease, holder: _LeaseHolder) -> bool:
        return other.prompt.lease == lease.prompt.lease and any(
            each.peer.address == holder.peer.address for each in other.holders
        )


def _renewal_interval_s(prompt: RemotePrompt) -> float:
    return max(MIN_RENEWAL_S, prompt.lease_seconds / RENEWALS_PER_LEASE)
