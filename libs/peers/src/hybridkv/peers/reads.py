"""The life of one request that reads from peers, over all ranks that it reads from: a value, and what follows.

Every rank goes from CONNECTING over READING and CHECKING to DONE; the first that fails ends it for all. The engine is
told once. Not before every transfer has really ended, though: what was cancelled may still write, and the engine would
give the blocks to others. Whatever happens, each rank that was reached is told once that its lease may end.

    life, commands = advance(life, event, now_s)

Nothing here waits or reads: whoever drives it carries out the commands and tells what came of them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import TypeAlias


class Stage(enum.StrEnum):
    """How far one rank is."""

    CONNECTING = "connecting"
    READING = "reading"
    CHECKING = "checking"
    """The bytes are here. Does the lease still stand, and are the digests equal?"""
    ENDING = "ending"
    """It is given up, and its transfer may still write."""
    DONE = "done"
    FAILED = "failed"


class Reason(enum.StrEnum):
    """Why a read failed: one word for a counter's label."""

    GONE = "gone"
    """The peer went away, or cannot be reached."""
    REFUSED = "refused"
    """The two sides do not fit, or the other one does not hold what is asked for."""
    TIMEOUT = "timeout"
    """A stage, or the whole read, took longer than it may."""
    LEASE = "lease"
    """It ended while the bytes were read: they may be another request's."""
    DIGEST = "digest"
    """What arrived is not what was sent."""
    PAIRING = "pairing"
    """The lists of blocks do not fit each other."""
    PROTOCOL = "protocol"
    """The peer says what does not belong here."""
    TRANSPORT = "transport"
    BUSY = "busy"
    """One of the two sides has as much to do as it may have."""
    CANCELLED = "cancelled"
    """By this side."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ReadBounds:
    """Times in seconds, all but the last for one rank.

    Args:
        connect_s: to be connected, agreed and ready to read.
        read_s: for the transfer.
        check_s: for the lease and the digests.
        end_s: for a transfer that was cancelled to end, before its connection is cut.
        whole_s: from the beginning until every rank is checked, whatever the stages may take.
    """

    connect_s: float = 10.0
    read_s: float = 30.0
    check_s: float = 10.0
    end_s: float = 10.0
    whole_s: float = math.inf


# Events.


@dataclass(frozen=True, slots=True)
class Connected:
    """A rank agrees, and its part of the request has been paired."""

    peer: int


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """No byte of a rank's transfer will be written any more. `failure` says why it is not whole."""

    peer: int
    failure: Reason | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """Lease and digests of a rank were compared. `failure` says what was wrong."""

    peer: int
    failure: Reason | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank cannot be reached, refuses, or has gone. It does not say that its transfer has ended."""

    peer: int
    failure: Reason


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants the request any more, or whoever drives it cannot."""

    failure: Reason = Reason.CANCELLED


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = Connected | TransferEnded | Checked | Lost | Abort | Tick


# Commands.


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the rank's transfer. `TransferEnded` must follow, whatever happens."""

    peer: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the rank's transfer early. `TransferEnded` must follow still."""

    peer: int


@dataclass(frozen=True, slots=True)
class Sever:
    """It did not end: take its connection down, so that nothing can be written. `TransferEnded` must follow still."""

    peer: int


@dataclass(frozen=True, slots=True)
class Check:
    """Compare lease and digests of what arrived; `Checked` or `Lost` follows."""

    peer: int


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the rank that its lease may end, if it can be told."""

    peer: int


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the engine, once: loaded where `failure` is None. The blocks are its own again."""

    failure: Reason | None


Command: TypeAlias = Start | Cancel | Sever | Check | Release | Report


@dataclass(frozen=True, slots=True)
class PeerRead:
    """One rank's part.

    Args:
        stage: how far it is.
        deadline_s: of the stage; None where it has none.
        reads: bytes are to be read from it. A rank from which nothing is needed, or not any more, is only told so.
        severed: it has been.
    """

    stage: Stage
    deadline_s: float | None
    reads: bool
    severed: bool = False


@dataclass(frozen=True, slots=True)
class ReadLife:
    """A request's read.

    Args:
        peers: one for each remote rank.
        bounds: of times.
        latest_s: when all must be checked.
        wanted: something was to be read: the engine waits for a report.
        failure: the first one.
        reported: the engine has been told.
    """

    peers: tuple[PeerRead, ...]
    bounds: ReadBounds
    latest_s: float
    wanted: bool
    failure: Reason | None = None
    reported: bool = False

    @property
    def over(self) -> bool:
        """Nothing will follow any more."""
        return all(peer.stage in _OVER for peer in self.peers)

    @property
    def next_deadline_s(self) -> float | None:
        """When a `Tick` will next matter."""
        return min((peer.deadline_s for peer in self.peers if peer.deadline_s is not None), default=None)


_OVER = frozenset((Stage.DONE, Stage.FAILED))
_WRITING = frozenset((Stage.READING, Stage.ENDING))
"""Stages in which a transfer may still write."""

_NOTHING: tuple[Command, ...] = ()
_Step: TypeAlias = tuple[PeerRead, tuple[Command, ...], Reason | None]


def begin(reads: tuple[bool, ...], bounds: ReadBounds, now_s: float) -> ReadLife:
    """A request that needs bytes from the ranks where `reads` is True, and is known to all of them.

    Raises:
        ValueError: there is no rank.
    """
    if not reads:
        raise ValueError("a read needs one remote rank at least")
    latest_s = now_s + bounds.whole_s
    peers = tuple(PeerRead(Stage.CONNECTING, min(now_s + bounds.connect_s, latest_s), each) for each in reads)
    return ReadLife(peers, bounds, latest_s, any(reads))


def advance(life: ReadLife, event: Event, now_s: float) -> tuple[ReadLife, tuple[Command, ...]]:
    """What follows from an event. One that comes too late, or twice, changes nothing."""
    if life.over:
        return life, ()
    if isinstance(event, Abort):
        return _settled(life, (), life.failure or event.failure, now_s)
    if isinstance(event, Tick):
        return _ticked(life, now_s)
    if not 0 <= event.peer < len(life.peers):
        return life, ()
    peer, commands, failure = _peer_step(life, event, now_s)
    changed = replace(life, peers=_with(life.peers, event.peer, peer))
    return _settled(changed, commands, life.failure or failure, now_s)


def _ticked(life: ReadLife, now_s: float) -> tuple[ReadLife, tuple[Command, ...]]:
    commands: tuple[Command, ...] = ()
    failure = life.failure
    for index, peer in enumerate(life.peers):
        if peer.deadline_s is None or now_s < peer.deadline_s:
            continue
        if peer.stage is Stage.ENDING:
            life = replace(life, peers=_with(life.peers, index, replace(peer, deadline_s=None, severed=True)))
            commands += (Sever(index),)
        else:
            given_up, more = _given_up(index, peer, life.bounds, now_s)
            life = replace(life, peers=_with(life.peers, index, given_up))
            commands += more
            failure = failure or Reason.TIMEOUT
    return _settled(life, commands, failure, now_s)


def _peer_step(life: ReadLife, event: Connected | TransferEnded | Checked | Lost, now_s: float) -> _Step:
    """One rank's next stage, what to do, and why it failed if it did."""
    index, bounds = event.peer, life.bounds
    peer = life.peers[index]
    stage = peer.stage
    if type(event) is Connected and stage is Stage.CONNECTING:
        if not peer.reads:
            return _at(peer, Stage.DONE), (Release(index),), None
        return _at(peer, Stage.READING, min(now_s + bounds.read_s, life.latest_s)), (Start(index),), None
    if type(event) is TransferEnded and stage is Stage.READING:
        if event.failure is not None:
            return _at(peer, Stage.FAILED), (Release(index),), event.failure
        return _at(peer, Stage.CHECKING, min(now_s + bounds.check_s, life.latest_s)), (Check(index),), None
    if type(event) is TransferEnded and stage is Stage.ENDING:
        return _at(peer, Stage.FAILED), (Release(index),), None
    if type(event) is Checked and stage is Stage.CHECKING:
        if event.failure is not None:
            return _at(peer, Stage.FAILED), (Release(index),), event.failure
        return _at(peer, Stage.DONE), (Release(index),), None
    if type(event) is Lost and stage not in _OVER and stage is not Stage.ENDING:
        given_up, commands = _given_up(index, peer, bounds, now_s)
        return given_up, commands, event.failure
    return peer, (), None


def _given_up(index: int, peer: PeerRead, bounds: ReadBounds, now_s: float) -> tuple[PeerRead, tuple[Command, ...]]:
    """A rank of which nothing more is wanted. One that may still write is not over."""
    if peer.stage is Stage.READING:
        return _at(peer, Stage.ENDING, now_s + bounds.end_s), (Cancel(index),)
    if peer.stage is Stage.CHECKING:
        return _at(peer, Stage.FAILED), (Release(index),)
    if peer.stage is Stage.CONNECTING:
        # Nobody there knows us; should the connection stand after all, whoever drives this ends it.
        return _at(peer, Stage.FAILED), ()
    return peer, ()


def _settled(
    life: ReadLife, commands: tuple[Command, ...], failure: Reason | None, now_s: float
) -> tuple[ReadLife, tuple[Command, ...]]:
    """Ends the other ranks of a read that has failed, and tells the engine when that is safe.

    Ranks that have not answered yet go on: they are told that their leases may end, once they do.
    """
    life = replace(life, failure=failure)
    if failure is not None:
        for index, peer in enumerate(life.peers):
            given_up, more = peer, _NOTHING
            if peer.stage in (Stage.READING, Stage.CHECKING):
                given_up, more = _given_up(index, peer, life.bounds, now_s)
            elif peer.stage is Stage.CONNECTING:
                given_up = replace(peer, reads=False)
            life = replace(life, peers=_with(life.peers, index, given_up))
            commands += more
    if life.reported or not life.wanted:
        return life, commands
    if failure is not None and not any(peer.stage in _WRITING for peer in life.peers):
        return replace(life, reported=True), (*commands, Report(failure))
    if failure is None and all(peer.stage is Stage.DONE for peer in life.peers if peer.reads):
        return replace(life, reported=True), (*commands, Report(None))
    return life, commands


def _at(peer: PeerRead, stage: Stage, deadline_s: float | None = None) -> PeerRead:
    return replace(peer, stage=stage, deadline_s=deadline_s)


def _with(peers: tuple[PeerRead, ...], index: int, peer: PeerRead) -> tuple[PeerRead, ...]:
    return (*peers[:index], peer, *peers[index + 1 :])
