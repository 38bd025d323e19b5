"""Connections of a consumer's rank, one per rank of a producer. Both sides exchange descriptions before a read."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.connectors.vllm.nixl.messages import NixlLoadFailure
from hybridkv.connectors.vllm.nixl.params import RankAddress
from hybridkv.peers.comparison import compare
from hybridkv.peers.control import LinkId
from hybridkv.peers.description import Description, decode, encode
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.pairing import Exchange
from hybridkv.peers.ranks import RankLink, rank_links, release_links
from hybridkv.peers.transport import RemoteId, TransferFailed, Transport
from hybridkv.peers.wire import Accepted, CloseReason, Describe, Message, Refused, WireLimits

logger = logging.getLogger("vllm.hybridkv.nixl")

_CLOSED = {
    CloseReason.SECRET: "refused",
    CloseReason.NO_SECRET: "refused",
    CloseReason.VERSION: "refused",
    CloseReason.WRONG_PEER: "gone",
    CloseReason.TOO_SLOW: "timeout",
    CloseReason.BACKLOG: "timeout",
    CloseReason.SELF: "refused",
    CloseReason.MALFORMED: "protocol",
    CloseReason.OVERSIZED: "protocol",
    CloseReason.UNEXPECTED: "protocol",
    CloseReason.TOO_MANY: "busy",
    CloseReason.HANDLER: "other",
}


class ConnectionState(enum.Enum):
    """State of a connection."""

    CONNECTING = "it is not open, or the other side has not yet sent its description and accepted ours"
    READY = "both sides are compatible"
    OVER = "it ended, it failed, or the sides are not compatible"


@dataclass(slots=True)
class ProducerConnection:
    """Connection to one rank of a producer. `exchange` and `remote` are set before the state is READY."""

    address: tuple[str, int, str]
    link: LinkId
    state: ConnectionState = ConnectionState.CONNECTING
    is_open: bool = False
    """Both sides have proven the secret, so messages can be sent. Also true for a rank with incompatible memory."""
    failure: NixlLoadFailure | None = None
    exchange: Exchange | None = None
    remote: RemoteId | None = None


class ControlChannel:
    """Functions of the control connections, and `wake`, which other threads call to wake the agent's thread.

    `agent.py` implements these functions with `hybridkv.peers.control`.
    """

    def __init__(
        self,
        connect: Callable[[str, int, str], LinkId],
        send: Callable[[LinkId, Message], bool],
        end: Callable[[LinkId, CloseReason], None],
        wake: Callable[[], None],
    ) -> None:
        self.connect = connect
        self.send = send
        self.end = end
        self.wake = wake


class ProducerConnections:
    """Connections by address. One thread calls all methods.

    Args:
        ours: description of this rank.
        transport: attaches producers' memory.
        control: control connections.
        max_links: maximum connections at the same time. A further connection replaces an unused connection.
    """

    def __init__(
        self,
        ours: Description,
        transport: Transport,
        control: ControlChannel,
        max_links: int = WireLimits().max_connections,
    ) -> None:
        self._ours = ours
        self._encoded = encode(ours)
        self._transport = transport
        self._control = control
        self._max_links = max_links
        self._by_address: dict[tuple[str, int, str], ProducerConnection] = {}
        """In LRU order: the most recently used is the last."""
        self._by_link: dict[LinkId, ProducerConnection] = {}
        self._rank_links: dict[int, tuple[RankLink, ...] | None] = {}
        self._fresh: set[LinkId] = set()
        """Connections that were requested in this turn, so `find_links_in_use` may not return them yet."""
        self.find_links_in_use: Callable[[], set[LinkId]] = set
        """Returns the connections of running reads and of leases."""

    def rank_links_for(self, num_ranks: int) -> tuple[RankLink, ...] | None:
        """Ranks of a producer that this rank reads from or sends `LeaseDone` to. None if the tensor-parallel sizes are
        incompatible. Opens no connection."""
        if num_ranks not in self._rank_links:
            ours = self._ours
            self._rank_links[num_ranks] = rank_links(ours.total_heads, ours.tp_size, ours.rank, num_ranks)
        return self._rank_links[num_ranks]

    def rank_links_for_done(self, num_ranks: int) -> tuple[RankLink, ...]:
        """Like `rank_links_for`. If the sizes are incompatible: ranks to which this rank only sends `LeaseDone`."""
        return self.rank_links_for(num_ranks) or release_links(self._ours.tp_size, self._ours.rank, num_ranks)

    def explain_no_rank_links(self, num_ranks: int) -> str:
        """Text that explains why `rank_links_for` is None."""
        layers = (layer for group in self._ours.groups for layer in group.layers)
        whole = next((f" ({each.name})" for each in layers if any(not p.total_heads for p in each.pieces)), "")
        ours = self._ours.tp_size
        return f"tp_size: ours is {ours}, theirs is {num_ranks}, and heads cannot be split to fit both{whole}"

    def get(self, host: str, rank: RankAddress) -> ProducerConnection:
        """Returns the connection to a rank. Connects if there is no connection, and again if the transport has given up
        the rank: then no new read over the earlier connection would succeed. Earlier loads over it end with `gone`,
        also those that have their bytes and wait only for digests."""
        address = (host, rank.port, rank.name)
        peer = self._by_address.get(address)
        if peer is not None and self._is_given_up(peer):
            detail = "the transport has given up the peer; connecting again"
            self._fail(peer, NixlLoadFailure("gone", detail), CloseReason.DONE)
        peer = self._by_address.pop(address, None)
        if peer is None:
            self._make_room()
            peer = ProducerConnection(address, self._control.connect(*address))
            self._by_link[peer.link] = peer
        self._by_address[address] = peer
        self._fresh.add(peer.link)
        return peer

    def _is_given_up(self, peer: ProducerConnection) -> bool:
        """True if the transport has given up a compatible rank."""
        is_over = peer.state is ConnectionState.OVER
        return not is_over and peer.remote is not None and not self._transport.is_attached(peer.remote)

    def end_turn(self) -> None:
        """Ends a turn. A connection requested in this turn is returned by `find_links_in_use` now, or is not used."""
        self._fresh.clear()

    def _make_room(self) -> None:
        """Ends the least recently used open connection that is not in use, if `max_links` is reached.

        If it ends none, the control loop closes the oldest connection that is not open, or refuses the new connection
        with `TOO_MANY` if all are open.
        """
        if len(self._by_link) < self._max_links:
            return
        used = self.find_links_in_use() | self._fresh
        idle = next((peer for peer in self._by_address.values() if peer.is_open and peer.link not in used), None)
        if idle is not None:
            logger.debug("peer %s at %s:%d makes room for another", idle.address[2], *idle.address[:2])
            self._end(idle, NixlLoadFailure("gone", "it ended to make room for another peer"), CloseReason.DONE)

    def of_link(self, link: LinkId) -> ProducerConnection | None:
        """Connection with this link."""
        return self._by_link.get(link)

    def opened(self, link: LinkId) -> None:
        """Handles the proof of the secret by both sides: sends this rank's description."""
        peer = self._by_link.get(link)
        if peer is not None:
            peer.is_open = True
            # No peer reads from a consumer, so the capability is empty.
            self._control.send(link, Describe(self._encoded, b""))

    def received(self, peer: ProducerConnection, message: Message) -> bool:
        """Handles the producer's description, and its acceptance or refusal of ours. Returns False for any other
        message."""
        if isinstance(message, Describe):
            self._described(peer, message)
        elif isinstance(message, Accepted):
            if peer.state is ConnectionState.CONNECTING and peer.remote is not None:
                peer.state = ConnectionState.READY
        elif isinstance(message, Refused):
            said = Incompatibility(message.field, message.theirs, message.ours, message.hint)
            self._mark_incompatible(peer, str(said))
        else:
            return False
        return True

    def _described(self, peer: ProducerConnection, message: Describe) -> None:
        if peer.exchange is not None:
            self._fail(peer, NixlLoadFailure("protocol", "the producer sent two descriptions"), CloseReason.UNEXPECTED)
            return
        theirs = decode(message.description)
        agreement = compare(self._ours, theirs) if isinstance(theirs, Description) else theirs
        if isinstance(agreement, Incompatibility):
            self._mark_incompatible(peer, str(agreement))
            return
        remote = self._transport.attach(message.capability)
        if isinstance(remote, TransferFailed):
            self._mark_incompatible(peer, f"{remote.reason}: {remote.detail}")
            return
        peer.exchange, peer.remote = Exchange(agreement), remote

    def sever(self, peer: ProducerConnection) -> None:
        """Ends a connection, to end a transfer that does not end."""
        if peer.state is not ConnectionState.OVER:
            self._fail(peer, NixlLoadFailure("timeout", "a transfer did not end"), CloseReason.DONE)

    def closed(self, link: LinkId, reason: CloseReason) -> None:
        """Handles the end of a connection."""
        peer = self._by_link.pop(link, None)
        if peer is None:
            return
        detail = f"the connection to {peer.address[0]}:{peer.address[1]} ended: {reason}"
        self._forget(peer, NixlLoadFailure(_CLOSED.get(reason, "gone"), detail))

    def _mark_incompatible(self, peer: ProducerConnection, detail: str) -> None:
        """Marks a rank as incompatible. The connection stays open, to keep the refusal and to send `LeaseDone`."""
        if peer.state is not ConnectionState.OVER:
            logger.warning("peer %s at %s:%d is incompatible: %.500r", peer.address[2], *peer.address[:2], detail)
        peer.state, peer.failure = ConnectionState.OVER, NixlLoadFailure("refused", detail)

    def _fail(self, peer: ProducerConnection, failure: NixlLoadFailure, reason: CloseReason) -> None:
        logger.warning("peer %s at %s:%d: %s", peer.address[2], peer.address[0], peer.address[1], failure.detail)
        self._end(peer, failure, reason)

    def _end(self, peer: ProducerConnection, failure: NixlLoadFailure, reason: CloseReason) -> None:
        self._by_link.pop(peer.link, None)
        self._forget(peer, failure)
        self._control.end(peer.link, reason)

    def _forget(self, peer: ProducerConnection, failure: NixlLoadFailure) -> None:
        if self._by_address.get(peer.address) is peer:
            del self._by_address[peer.address]
        peer.state, peer.failure, peer.is_open = ConnectionState.OVER, failure, False
        if peer.remote is not None:
            self._transport.detach(peer.remote)
