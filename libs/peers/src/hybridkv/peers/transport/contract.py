"""Transport contract: one side registers memory, the other reads it. CONTRACT.md names the tests.

A transport handles regions and bytes, not groups or leases. `hybridkv.peers.leases` checks that the blocks were still
valid, by reading the lease slot after the data.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NewType, Protocol, TypeAlias, runtime_checkable

import msgspec

from hybridkv.peers.ranges import Ranges

RemoteId = NewType("RemoteId", int)
"""Id of one attached peer. Never reused by the transport."""

TransferId = NewType("TransferId", int)
"""Id of one read, valid until the read is released. Never reused."""


class Region(msgspec.Struct, frozen=True):
    """Host memory of this process. Its number is the count of regions registered before it."""

    address: int
    num_bytes: int


class TransferFailureReason(enum.StrEnum):
    """Reason of a failed read, for counter labels."""

    GONE = "gone"
    """The peer, or the connection to it, is lost."""
    REFUSED = "refused"
    """A range is outside the registered memory of either side, or the capability is invalid."""
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    BUSY = "busy"
    """Too many unreleased reads. Nothing was read."""
    CLOSED = "closed"
    """The transport was closed, or the peer was detached or given up; attach it again."""
    BROKEN = "broken"
    """Any other failure of the transport."""


class TransferPending(msgspec.Struct, frozen=True, tag=True):
    """In flight. Local memory may be written at any time."""


class TransferDone(msgspec.Struct, frozen=True, tag=True):
    """Every byte has arrived."""

    num_bytes: int
    num_descriptors: int
    """Descriptors posted, after adjacent ranges were merged."""
    seconds: float
    """Time from `read` until the transport saw the last byte."""


class TransferFailed(msgspec.Struct, frozen=True, tag=True):
    """The content of the local ranges is undefined. They may still be written until `release` returns True."""

    reason: TransferFailureReason
    detail: str = ""


TransferState: TypeAlias = TransferPending | TransferDone | TransferFailed

PENDING: Final = TransferPending()


@runtime_checkable
class Transport(Protocol):
    """One-sided reads of registered memory: the other process takes no action.

    One thread makes all calls except `register` and `deregister`, which any thread may call. Failures of a peer, the
    network or the system are returned as values. Caller errors raise `PeersProtocolError`: an unknown number, an
    invalid memory range, a call after `close` other than `poll`, `cancel`, `release` and `close`.

    Local ranges of one read must not overlap. They belong to the transport until `release` returns True.
    """

    def register(self, regions: Sequence[Region]) -> bytes:
        """Registers memory that peers may read and that reads may write. It must stay mapped until `deregister`.

        Returns the capability to read all memory registered so far. Give it only to peers that proved the secret. A
        peer that attached an earlier capability cannot read regions registered later.
        """
        ...

    def deregister(self, regions: Sequence[int]) -> None:
        """Removes regions. If the transport sees every read, no later read touches them.

        No read may be writing to them. The numbers of the other regions do not change.
        """
        ...

    def attach(self, capability: bytes) -> RemoteId | TransferFailed:
        """Attaches the memory of another process without waiting for it. An invalid capability is REFUSED."""
        ...

    def detach(self, remote: RemoteId) -> None:
        """Detaches a peer. Its reads fail with CLOSED. Repeatable."""
        ...

    def read(self, remote: RemoteId, ranges: Ranges, timeout_s: float) -> TransferId:
        """Starts a read. `poll` returns its state, also if it could not start. A read without ranges is done at once.

        A range outside the registered memory of this side fails the read before a byte moves.
        """
        ...

    def poll(self, transfer: TransferId) -> TransferState:
        """State of a read. A final state does not change until `release`. Does not wait."""
        ...

    def cancel(self, transfer: TransferId) -> None:
        """Stops a read as soon as possible; `poll` shows when. No effect on a finished read. Does not wait."""
        ...

    def release(self, transfer: TransferId) -> bool:
        """Releases a read. True: it writes no local memory any more. Repeatable; True for a released read.

        False: it is still in flight; this call cancels it, and the caller calls again later. Does not wait.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Waits until a read may have progressed or a peer needs this process, at most `timeout_s`."""
        ...

    def progress(self) -> None:
        """Makes progress. A transport without its own thread needs this on both sides. Does not wait."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Ends every read and stops serving peers. Repeatable. False: memory may still be written or read."""
        ...
