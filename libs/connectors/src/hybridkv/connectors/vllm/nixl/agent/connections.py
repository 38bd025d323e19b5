"""A consumer's connections to producers' ranks: one each, in which both describe themselves before a byte moves."""

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
from hybridkv.peers.pairing import Exchange
from hybridkv.peers.ranks import RankLink, rank_links, telling_links
from hybridkv.peers.refusal import Refusal
from hybridkv.peers.transport import Failed, RemoteId, Transport
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
    """How far a connection is."""

    CONNECTING = "it is being made, or the other side has not described itself"
    READY = "both sides fit"
    OVER = "it ended, or could not be made, or they do not fit"


@dataclass(slots=True)
class ProducerConnection:
    """One rank of a producer. What is None is not known before it is READY."""

    address: tuple[str, int, str]
    link: LinkId
    state: ConnectionState = ConnectionState.CONNECTING
    is_open: bool = False
    """Both sides have proven the secret, and something may be said; also to one whose memory does not fit ours."""
    failure: NixlLoadFailure | None = None
    exchange: Exchange | None = None
    remote: RemoteId | None = None


class ControlChannel:
    """What is asked of the control connections, and `wake`, for other threads: have the agent's look again.

    Implemented by `agent.py` over `hybridkv.peers.control`.
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
    """Connections by address. Calls come from one thread.

    Args:
        ours: this rank.
        transport: attaches what a producer lets this one read.
        control: connections.
        max_links: that may be dialled at the same time. Where there is no room for one more, one that nobody uses is
            given up.
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
        """The one that was asked for last is the last."""
        self._by_link: dict[LinkId, ProducerConnection] = {}
        self._links: dict[int, tuple[RankLink, ...] | None] = {}
        self._fresh: set[LinkId] = set()
        """Asked for in this turn: whoever did may be about to use them."""
        self.in_use: Callable[[], set[LinkId]] = set
        """Connections of reads, and of leases that are held."""

    def links_to(self, num_ranks: int) -> tuple[RankLink, ...] | None:
        """What this rank has to do with each rank of a producer of so many; None where the sizes do not fit."""
        if num_ranks not in self._links:
            ours = self._ours
            self._links[num_ranks] = rank_links(ours.total_heads, ours.tp_size, ours.rank, num_ranks)
        return self._links[num_ranks]

    def links_for_done(self, num_ranks: int) -> tuple[RankLink, ...]:
        """The same; where sizes do not fit, ranks that are only told that their blocks are not needed."""
        return self.links_to(num_ranks) or telling_links(self._ours.tp_size, self._ours.rank, num_ranks)

    def explain_no_links(self, num_ranks: int) -> str:
        """Why nothing can be read from a producer of so many ranks."""
        layers = (layer for group in self._ours.groups for layer in group.layers)
        whole = next((f" ({each.name})" for each in layers if any(not p.total_heads for p in each.pieces)), "")
        ours = self._ours.tp_size
        return f"tp_size: ours is {ours}, theirs is {num_ranks}, and heads are not shared so that both fit{whole}"

    def get(self, host: str, rank: RankAddress) -> ProducerConnection:
        """The connection to a rank, which is begun where there is none."""
        address = (host, rank.port, rank.name)
        peer = self._by_address.pop(address, None)
        if peer is None:
            self._make_room()
            peer = ProducerConnection(address, self._control.connect(*address))
            self._by_link[peer.link] = peer
        self._by_address[address] = peer
        self._fresh.add(peer.link)
        return peer

    def end_turn(self) -> None:
        """Whoever asked for a connection uses it by now, or never."""
        self._fresh.clear()

    def _make_room(self) -> None:
        """Gives up the connection that nobody has asked for the longest, of those that stand and that nobody uses.

        Where all are in use the control connections say that there are too many.
        """
        if len(self._by_link) < self._max_links:
            return
        used = self.in_use() | self._fresh
        idle = next((peer for peer in self._by_address.values() if peer.is_open and peer.link not in used), None)
        if idle is not None:
            logger.debug("peer %s at %s:%d makes room for another", idle.address[2], *idle.address[:2])
            self._end(idle, NixlLoadFailure("gone", "it was given up for another peer"), CloseReason.DONE)

    def of_link(self, link: LinkId) -> ProducerConnection | None:
        """Whose connection this is."""
        return self._by_link.get(link)

    def opened(self, link: LinkId) -> None:
        """Both sides have proven the secret."""
        peer = self._by_link.get(link)
        if peer is not None:
            peer.is_open = True
            # Nobody reads from a consumer, so it says nothing of how that would be done.
            self._control.send(link, Describe(self._encoded, b""))

    def received(self, peer: ProducerConnection, message: Message) -> bool:
        """Takes what leads to READY. False: it is about something else."""
        if isinstance(message, Describe):
            self._described(peer, message)
        elif isinstance(message, Accepted):
            if peer.state is ConnectionState.CONNECTING and peer.remote is not None:
                peer.state = ConnectionState.READY
        elif isinstance(message, Refused):
            said = Refusal(message.field, message.theirs, message.ours, message.hint)
            self._refuse(peer, str(said))
        else:
            return False
        return True

    def _described(self, peer: ProducerConnection, message: Describe) -> None:
        if peer.exchange is not None:
            self._over(peer, NixlLoadFailure("protocol", "described twice"), CloseReason.UNEXPECTED)
            return
        theirs = decode(message.description)
        agreement = compare(self._ours, theirs) if isinstance(theirs, Description) else theirs
        if isinstance(agreement, Refusal):
            self._refuse(peer, str(agreement))
            return
        remote = self._transport.attach(message.capability)
        if isinstance(remote, Failed):
            self._refuse(peer, f"{remote.reason}: {remote.detail}")
            return
        peer.exchange, peer.remote = Exchange(agreement), remote

    def sever(self, peer: ProducerConnection) -> None:
        """A transfer of it will not end: nothing of it is written any more once it is cut off."""
        if peer.state is not ConnectionState.OVER:
            self._over(peer, NixlLoadFailure("timeout", "a transfer could not be ended"), CloseReason.DONE)

    def closed(self, link: LinkId, reason: CloseReason) -> None:
        """The connection is no more."""
        peer = self._by_link.pop(link, None)
        if peer is None:
            return
        detail = f"the connection to {peer.address[0]}:{peer.address[1]} ended: {reason}"
        self._forget(peer, NixlLoadFailure(_CLOSED.get(reason, "gone"), detail))

    def _refuse(self, peer: ProducerConnection, detail: str) -> None:
        """Nothing is read from this one. The connection stays, so that it is not asked again for each request and
        hears when its blocks are not needed."""
        if peer.state is not ConnectionState.OVER:
            logger.warning("peer %s at %s:%d does not fit: %.500r", peer.address[2], *peer.address[:2], detail)
        peer.state, peer.failure = ConnectionState.OVER, NixlLoadFailure("refused", detail)

    def _over(self, peer: ProducerConnection, failure: NixlLoadFailure, reason: CloseReason) -> None:
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
