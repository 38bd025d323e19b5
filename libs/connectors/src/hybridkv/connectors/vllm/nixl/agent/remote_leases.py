"""What a consumer's rank says to producers of the blocks that they hold for it: hold them on, and need them no more.

Each rank of the producer hears it from those that read from it, and one that nobody reads from hears it from one. A
producer that was cut off is connected to again, a few times and no longer than its lease holds; one that cannot be
reached is not waited for: its lease ends by itself. Several requests may show one lease, as the answers to one prompt
do: the last of them says that it is needed no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.connectors.vllm.nixl.agent.connections import Control, Peer, Peers, PeerState
from hybridkv.connectors.vllm.nixl.params import RemotePrompt
from hybridkv.peers.control import LinkId
from hybridkv.peers.ranks import RankLink
from hybridkv.peers.wire import Done, Renew

RENEWALS_A_LEASE = 4
LEAST_RENEWAL_S = 0.05
"""Between two renewals: how long a lease holds is what a proxy says."""
MAX_REDIALS, REDIAL_S = 3, 1.0
"""How often a connection that was cut off is made again, and how long is waited between, if not less."""
MAX_REDIALED = 1024
"""Where more leases than these are held, those that end while they are cut off end by themselves."""
_NO_USE = ("refused", "protocol")
"""Why a connection ended that would end so again."""


@dataclass(slots=True)
class _Tie:
    """A rank that holds blocks for us."""

    link: RankLink
    peer: Peer
    redials_left: int = MAX_REDIALS
    next_dial_s: float = 0.0

    @property
    def is_cut(self) -> bool:
        return not self.peer.is_open and self.peer.state is PeerState.OVER


@dataclass(slots=True)
class _Hold:
    prompt: RemotePrompt
    ties: tuple[_Tie, ...]
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
        clock: seconds.
    """

    def __init__(self, peers: Peers, control: Control, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._control = control
        self._clock = clock
        self._holds: dict[str, _Hold] = {}

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    @property
    def links(self) -> set[LinkId]:
        """Connections to ranks that hold blocks for us, and are to hear of it."""
        return {tie.peer.link for hold in self._holds.values() for tie in hold.ties}

    def begin(self, request_id: str, prompt: RemotePrompt) -> None:
        """Its producer is to go on holding the blocks. The connection is made now: it will be needed."""
        links = self._peers.told_links(len(prompt.ranks))
        ties = tuple(_Tie(link, self._peers.get(prompt.host, prompt.ranks[link.rank])) for link in links)
        now_s = self._clock()
        self._holds[request_id] = _Hold(prompt, ties, now_s + _every_s(prompt), now_s + prompt.lease_seconds)

    def part(self, request_id: str, rank: int, is_read: bool) -> None:
        """One rank's blocks are needed no more, while those of others may be. Its connection stands."""
        hold = self._holds.get(request_id)
        if hold is None:
            return
        for tie in hold.ties:
            if tie.link.rank == rank and self._say_done(hold, tie, is_read):
                hold.ties = tuple(other for other in hold.ties if other is not tie)

    def end(self, request_id: str, is_read: bool) -> None:
        """The blocks are needed no more."""
        hold = self._holds.get(request_id)
        if hold is not None and hold.is_read is None:
            hold.is_read = is_read
            self._part(request_id, hold, is_read)

    def tick(self) -> None:
        """Renews what is due, and says what could not be said before."""
        now_s = self._clock()
        for request_id, hold in list(self._holds.items()):
            if hold.is_read is not None:
                self._part(request_id, hold, hold.is_read)
            elif now_s >= hold.next_renewal_s:
                self._renew(hold, now_s)

    def _renew(self, hold: _Hold, now_s: float) -> None:
        hold.next_renewal_s = now_s + _every_s(hold.prompt)
        for tie in hold.ties:
            if not tie.peer.is_open:
                self._dial_again(hold, tie, now_s)
            elif self._control.send(tie.peer.link, Renew(hold.prompt.lease)):
                hold.until_s = now_s + hold.prompt.lease_seconds
                tie.redials_left = MAX_REDIALS

    def _part(self, request_id: str, hold: _Hold, is_read: bool) -> None:
        """Says it to those that are connected, and keeps those that may still be."""
        now_s, waiting = self._clock(), list[_Tie]()
        for tie in hold.ties:
            self._dial_again(hold, tie, now_s)
            if tie.peer.is_open:
                is_over = self._say_done(hold, tie, is_read)
            else:
                is_over = tie.is_cut and (tie.redials_left == 0 or not self._is_worth_a_dial(tie))
            if not is_over:
                waiting.append(tie)
        hold.ties = tuple(waiting)
        if not waiting or now_s >= hold.until_s:
            del self._holds[request_id]

    def _dial_again(self, hold: _Hold, tie: _Tie, now_s: float) -> None:
        """One that was cut off: whoever has connected to it since, or we, now and then while its lease holds."""
        if not tie.is_cut or now_s >= hold.until_s or now_s < tie.next_dial_s or tie.redials_left == 0:
            return
        if self._is_worth_a_dial(tie):
            tie.redials_left -= 1
            tie.next_dial_s = now_s + min(REDIAL_S, _every_s(hold.prompt))
            tie.peer = self._peers.get(hold.prompt.host, hold.prompt.ranks[tie.link.rank])

    def _is_worth_a_dial(self, tie: _Tie) -> bool:
        failure = tie.peer.failure
        return len(self._holds) <= MAX_REDIALED and (failure is None or failure.reason not in _NO_USE)

    def _say_done(self, hold: _Hold, tie: _Tie, is_read: bool) -> bool:
        if any(self._is_held_by(other, hold, tie) for other in self._holds.values() if other is not hold):
            return True
        link = tie.link
        done = Done(hold.prompt.lease, is_read, link.reader, link.num_readers)
        return tie.peer.is_open and self._control.send(tie.peer.link, done)

    @staticmethod
    def _is_held_by(other: _Hold, hold: _Hold, tie: _Tie) -> bool:
        return other.prompt.lease == hold.prompt.lease and any(
            each.peer.address == tie.peer.address for each in other.ties
        )


def _every_s(prompt: RemotePrompt) -> float:
    return max(LEAST_RENEWAL_S, prompt.lease_seconds / RENEWALS_A_LEASE)
