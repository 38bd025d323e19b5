"""State machine of one request that reads from peers, over all remote ranks. A frozen value and a pure function.

Each rank goes through CONNECTING, READING and CHECKING to DONE. A rank without bytes to read goes from CONNECTING to
DONE. The first failure ends the read for all ranks. If there are bytes to read, the engine gets one report, after every
transfer has ended: a cancelled transfer may still write, and the engine reuses the blocks after the report.
`ReleaseLease` is issued once for each rank that was reached.

    life, commands = advance(life, event, now_s)

The module does no I/O: its driver executes the commands and reports the results as events.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import TypeAlias


class ReadStage(enum.StrEnum):
    """State of one remote rank."""

    CONNECTING = "connecting"
    READING = "reading"
    CHECKING = "checking"
    """The bytes have arrived. The lease and the digests are being compared."""
    ENDING = "ending"
    """The rank is given up, but its transfer may still write."""
    DONE = "done"
    FAILED = "failed"


class ReadFailure(enum.StrEnum):
    """Reason of a failed read, for counter labels."""

    GONE = "gone"
    """The peer exited or cannot be reached."""
    REFUSED = "refused"
    """The two sides are incompatible, or the peer does not hold the blocks."""
    TIMEOUT = "timeout"
    """A stage or the whole read took too long."""
    LEASE = "lease"
    """The lease ended during the read: the bytes may belong to another request."""
    DIGEST = "digest"
    """The digests of the bytes differ."""
    PAIRING = "pairing"
    """The block lists of the two sides do not match."""
    PROTOCOL = "protocol"
    """The peer sent an unexpected message."""
    TRANSPORT = "transport"
    BUSY = "busy"
    """One side has reached a limit."""
    CANCELLED = "cancelled"
    """Cancelled by this side."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ReadBounds:
    """Timeouts in seconds. Each one except `whole_s` applies to one rank.

    Args:
        connect_s: timeout to connect, agree and pair.
        read_s: timeout of the transfer.
        check_s: timeout to compare the lease and the digests.
        end_s: timeout for the end of a cancelled transfer; then its connection is severed.
        whole_s: timeout from the start until every rank is checked.
    """

    connect_s: float = 10.0
    read_s: float = 30.0
    check_s: float = 10.0
    end_s: float = 10.0
    whole_s: float = math.inf


# Events.


@dataclass(frozen=True, slots=True)
class Connected:
    """A rank is connected and has agreed, and its part of the request is paired."""

    peer: int


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The transfer of a rank writes no more bytes. `failure` is set if the transfer is incomplete."""

    peer: int
    failure: ReadFailure | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """Lease and digests of a rank were compared. `failure` is set if they differ."""

    peer: int
    failure: ReadFailure | None = None


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A rank cannot be reached, refuses, or is lost. Its transfer may still write."""

    peer: int
    failure: ReadFailure


@dataclass(frozen=True, slots=True)
class Abort:
    """The request is aborted, or its driver cannot continue."""

    failure: ReadFailure = ReadFailure.CANCELLED


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: check the deadlines."""


Event: TypeAlias = Connected | TransferEnded | Checked | PeerLost | Abort | Tick


# Commands.


@dataclass(frozen=True, slots=True)
class Start:
    """Start the transfer of a rank. `TransferEnded` must always follow."""

    peer: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the transfer of a rank. `TransferEnded` must follow."""

    peer: int


@dataclass(frozen=True, slots=True)
class Sever:
    """Close the connection of a transfer that did not end, so that the transfer ends. `TransferEnded` must follow."""

    peer: int


@dataclass(frozen=True, slots=True)
class Check:
    """Compare the lease and the digests. `Checked` or `PeerLost` follows."""

    peer: int


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Send `LeaseDone` to the rank, if the rank is connected."""

    peer: int


@dataclass(frozen=True, slots=True)
class Report:
    """Report the result to the engine, once: success if `failure` is None. The blocks belong to the engine again."""

    failure: ReadFailure | None


Command: TypeAlias = Start | Cancel | Sever | Check | ReleaseLease | Report


@dataclass(frozen=True, slots=True)
class PeerRead:
    """State of one remote rank.

    Args:
        stage: current stage.
        deadline_s: deadline of the stage, if any.
        reads: True if bytes are read from this rank. If False, only its lease is released.
    """

    stage: ReadStage
    deadline_s: float | None
    reads: bool


@dataclass(frozen=True, slots=True)
class ReadLife:
    """State of the read of one request.

    Args:
        peers: one entry per remote rank.
        bounds: timeouts.
        latest_s: deadline of the whole read.
        expects_report: True if there are bytes to read; then the engine waits for a report.
        failure: first failure.
        reported: True after `Report` was issued.
    """

    peers: tuple[PeerRead, ...]
    bounds: ReadBounds
    latest_s: float
    expects_report: bool
    failure: ReadFailure | None = None
    reported: bool = False

    @property
    def is_over(self) -> bool:
        """True if every rank is DONE or FAILED."""
        return all(peer.stage in _OVER for peer in self.peers)

    @property
    def next_deadline_s(self) -> float | None:
        """Time of the next deadline; None if there is none."""
        return min((peer.deadline_s for peer in self.peers if peer.deadline_s is not None), default=None)


_OVER = frozenset((ReadStage.DONE, ReadStage.FAILED))
_WRITING = frozenset((ReadStage.READING, ReadStage.ENDING))
"""Stages with a transfer that may write."""

_NOTHING: tuple[Command, ...] = ()
_Step: TypeAlias = tuple[PeerRead, tuple[Command, ...], ReadFailure | None]


def begin(reads: tuple[bool, ...], bounds: ReadBounds, now_s: float) -> ReadLife:
    """Initial state. `reads` has one entry per remote rank: True if bytes are read from this rank.

    Raises:
        ValueError: `reads` is empty.
    """
    if not reads:
        raise ValueError("a read needs at least one remote rank")
    latest_s = now_s + bounds.whole_s
    peers = tuple(PeerRead(ReadStage.CONNECTING, min(now_s + bounds.connect_s, latest_s), each) for each in reads)
    return ReadLife(peers, bounds, latest_s, any(reads))


def advance(life: ReadLife, event: Event, now_s: float) -> tuple[ReadLife, tuple[Command, ...]]:
    """New state and commands after an event. A late or repeated event changes nothing."""
    if life.is_over:
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
        if peer.stage is ReadStage.ENDING:
            life = replace(life, peers=_with(life.peers, index, replace(peer, deadline_s=None)))
            commands += (Sever(index),)
        else:
            given_up, more = _given_up(index, peer, life.bounds, now_s)
            life = replace(life, peers=_with(life.peers, index, given_up))
            commands += more
            failure = failure or ReadFailure.TIMEOUT
    return _settled(life, commands, failure, now_s)


def _peer_step(life: ReadLife, event: Connected | TransferEnded | Checked | PeerLost, now_s: float) -> _Step:
    """New state of one rank, commands, and the failure if any."""
    index, bounds = event.peer, life.bounds
    peer = life.peers[index]
    stage = peer.stage
    if type(event) is Connected and stage is ReadStage.CONNECTING:
        if not peer.reads:
            return _at(peer, ReadStage.DONE), (ReleaseLease(index),), None
        return _at(peer, ReadStage.READING, min(now_s + bounds.read_s, life.latest_s)), (Start(index),), None
    if type(event) is TransferEnded and stage is ReadStage.READING:
        if event.failure is not None:
            return _at(peer, ReadStage.FAILED), (ReleaseLease(index),), event.failure
        return _at(peer, ReadStage.CHECKING, min(now_s + bounds.check_s, life.latest_s)), (Check(index),), None
    if type(event) is TransferEnded and stage is ReadStage.ENDING:
        return _at(peer, ReadStage.FAILED), (ReleaseLease(index),), None
    if type(event) is Checked and stage is ReadStage.CHECKING:
        if event.failure is not None:
            return _at(peer, ReadStage.FAILED), (ReleaseLease(index),), event.failure
        return _at(peer, ReadStage.DONE), (ReleaseLease(index),), None
    if type(event) is PeerLost and stage not in _OVER and stage is not ReadStage.ENDING:
        given_up, commands = _given_up(index, peer, bounds, now_s)
        return given_up, commands, event.failure
    return peer, (), None


def _given_up(index: int, peer: PeerRead, bounds: ReadBounds, now_s: float) -> tuple[PeerRead, tuple[Command, ...]]:
    """Gives up a rank. A rank with a transfer that may still write goes to ENDING."""
    if peer.stage is ReadStage.READING:
        return _at(peer, ReadStage.ENDING, now_s + bounds.end_s), (Cancel(index),)
    if peer.stage is ReadStage.CHECKING:
        return _at(peer, ReadStage.FAILED), (ReleaseLease(index),)
    if peer.stage is ReadStage.CONNECTING:
        # The rank was not reached: there is no transfer to cancel and no lease to release.
        return _at(peer, ReadStage.FAILED), ()
    return peer, ()


def _settled(
    life: ReadLife, commands: tuple[Command, ...], failure: ReadFailure | None, now_s: float
) -> tuple[ReadLife, tuple[Command, ...]]:
    """Gives up the other ranks of a failed read, and reports to the engine when no transfer can write.

    Ranks that are still connecting continue without reading, so that their leases are released after they connect.
    """
    life = replace(life, failure=failure)
    if failure is not None:
        for index, peer in enumerate(life.peers):
            given_up, more = peer, _NOTHING
            if peer.stage in (ReadStage.READING, ReadStage.CHECKING):
                given_up, more = _given_up(index, peer, life.bounds, now_s)
            elif peer.stage is ReadStage.CONNECTING:
                given_up = replace(peer, reads=False)
            life = replace(life, peers=_with(life.peers, index, given_up))
            commands += more
    if life.reported or not life.expects_report:
        return life, commands
    if failure is not None and not any(peer.stage in _WRITING for peer in life.peers):
        return replace(life, reported=True), (*commands, Report(failure))
    if failure is None and all(peer.stage is ReadStage.DONE for peer in life.peers if peer.reads):
        return replace(life, reported=True), (*commands, Report(None))
    return life, commands


def _at(peer: PeerRead, stage: ReadStage, deadline_s: float | None = None) -> PeerRead:
    return replace(peer, stage=stage, deadline_s=deadline_s)


def _with(peers: tuple[PeerRead, ...], index: int, peer: PeerRead) -> tuple[PeerRead, ...]:
    return (*peers[:index], peer, *peers[index + 1 :])
