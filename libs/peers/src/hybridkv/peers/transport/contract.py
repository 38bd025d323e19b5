"""Transport contract: one side registers memory, the other side reads this memory. CONTRACT.md names the tests.

A transport handles regions and bytes, not groups or leases. The reader checks that the blocks were still valid, by
reading the lease slot after the data (see `hybridkv.peers.leases`).
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
    """Host memory of this process. The number of a region is the count of regions registered before."""

    address: int
    num_bytes: int


class TransferFailureReason(enum.StrEnum):
    """Reason of a failed read or `attach`, for counter labels."""

    GONE = "gone"
    """The peer or its connection is lost."""
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
    """Descriptors posted: one per range, or several for a range that the transport cuts."""
    seconds: float
    """Time from `read` until the transport noticed the last byte."""


class TransferFailed(msgspec.Struct, frozen=True, tag=True):
    """The read failed. Its local ranges have undefined content, and may be written until `release` returns True."""

    reason: TransferFailureReason
    detail: str = ""


TransferState: TypeAlias = TransferPending | TransferDone | TransferFailed

PENDING: Final = TransferPending()


@runtime_checkable
class Transport(Protocol):
    """One-sided reads of registered memory: the other process takes no action.

    One thread makes all calls except `register` and `deregister`, which any thread may call. Failures of a peer, the
    network or the system are returned as values. Caller errors raise `PeersProtocolError`: `poll` or `cancel` of an
    unknown read, `deregister` of an unknown region, an invalid memory range, and `register`, `deregister`, `attach` or
    `read` after `close`.

    Local ranges of one read must not overlap. These ranges belong to the transport until `release` returns True.
    """

    def register(self, regions: Sequence[Region]) -> bytes:
        """Registers memory that peers may read and reads may write. The memory must stay mapped until `deregister`.

        Returns the capability to read all memory registered so far. Give it only to peers that proved the secret. A
        peer that attached an earlier capability cannot read regions registered later.
        """
        ...

    def deregister(self, regions: Sequence[int]) -> None:
        """Removes regions. If the transport controls the reads of peers, no later read touches the regions.

        The caller must not remove a region that a read still writes. The numbers of the other regions do not change.
        """
        ...

    def attach(self, capability: bytes) -> RemoteId | TransferFailed:
        """Attaches the memory of another process. Does not wait for that process. An invalid capability is REFUSED."""
        ...

    def detach(self, remote: RemoteId) -> None:
        """Detaches a peer. Its reads fail with CLOSED. Repeatable."""
        ...

    def is_attached(self, remote: RemoteId) -> bool:
        """False if the peer was detached, or if the transport has given it up. Then attach it again before a read."""
        ...

    def read(self, remote: RemoteId, ranges: Ranges, timeout_s: float) -> TransferId:
        """Starts a read. If a read cannot start, `poll` returns the failure. A read without ranges is done at once.

        A range outside the registered memory of this side fails the read before a byte moves.
        """
        ...

    def poll(self, transfer: TransferId) -> TransferState:
        """State of a read. A final state does not change until `release`. Does not wait."""
        ...

    def cancel(self, transfer: TransferId) -> None:
        """Cancels a read. `release` returns True once the read has ended. Ignores a finished read. Does not wait."""
        ...

    def release(self, transfer: TransferId) -> bool:
        """Releases a read. Returns True if the read no longer writes local memory. Repeatable. Does not wait.

        Returns False if the read is still in flight: this call cancels the read, and the caller must call again later.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Waits until a read may have progressed or a peer needs this process, at most `timeout_s`."""
        ...

    def progress(self) -> None:
        """Makes progress. A transport without its own thread needs this call on both sides. Does not wait."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Ends every read and stops serving peers. Repeatable. Returns False if memory may still be written or read."""
        ...
