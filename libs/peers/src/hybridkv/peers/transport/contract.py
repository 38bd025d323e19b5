"""What a transport promises: one side registers memory, the other reads it. CONTRACT.md names the tests.

It knows regions and bytes; neither groups nor leases. Whether what was read was still what it should be is for
`hybridkv.peers.leases` to say, which reads one slot more, behind the data.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NewType, Protocol, TypeAlias, runtime_checkable

import msgspec

from hybridkv.peers.ranges import Ranges

RemoteId = NewType("RemoteId", int)
"""One attached peer, for as long as the transport lives: numbers are not used again."""

TransferId = NewType("TransferId", int)
"""One read, until it was released: numbers are not used again."""


class Region(msgspec.Struct, frozen=True):
    """Memory of the host, in this process. Its number is the count of regions that were registered before it."""

    address: int
    num_bytes: int


class FailureReason(enum.StrEnum):
    """One word for a counter's label."""

    GONE = "gone"
    """The peer, or the way to it, is no more."""
    REFUSED = "refused"
    """A range does not lie in registered memory, of this side or of the other; or the capability is none."""
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    BUSY = "busy"
    """As many reads as allowed are not released. Nothing was done."""
    CLOSED = "closed"
    """This transport was closed, or the peer was detached, or it was given up and must be attached anew."""
    BROKEN = "broken"
    """The transport failed in a way of its own."""


class Pending(msgspec.Struct, frozen=True, tag=True):
    """Not over. Local memory may be written at any time."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """Every byte has arrived."""

    num_bytes: int
    num_descriptors: int
    """Pieces that were asked for, once neighbours were joined."""
    seconds: float
    """From `read` to the last byte, as far as the transport looked."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Any of the local ranges may hold anything, and may still be written until `release` says True."""

    reason: FailureReason
    detail: str = ""


TransferState: TypeAlias = Pending | Done | Failed

PENDING: Final = Pending()


@runtime_checkable
class Transport(Protocol):
    """Reads of registered memory, one-sided: the other process is not asked to do anything.

    One thread makes the calls, but for `register` and `deregister`, which any thread may make. What a peer, the network
    or the system does comes back as a value. `PeersProtocolError` is for the caller's mistakes: a number that was never
    given, memory that is none, a call after `close` other than `poll`, `cancel`, `release` and `close`.

    Local ranges of one read must not overlap, and belong to the transport until `release` has said True.
    """

    def register(self, regions: Sequence[Region]) -> bytes:
        """Memory that may be read from elsewhere, and read into, from now on. It must stay mapped until `deregister`.

        The capability to read everything that is registered now: for who has proven a right to it, and nobody else.
        A peer that attached an earlier one does not know the regions that came later.
        """
        ...

    def deregister(self, regions: Sequence[int]) -> None:
        """These numbers stand for nothing from now on; where the transport sees every read, none touches them any more.

        None of them may be read into at the time. The numbers of the others stay.
        """
        ...

    def attach(self, capability: bytes) -> RemoteId | Failed:
        """Another process's memory. Does not wait for that process; a capability that is none is REFUSED."""
        ...

    def detach(self, remote: RemoteId) -> None:
        """Its reads fail, for CLOSED. Repeatable."""
        ...

    def read(self, remote: RemoteId, ranges: Ranges, timeout_s: float) -> TransferId:
        """Begin to fetch; `poll` says how it goes, also where nothing could be begun. No ranges: done at once.

        A range outside of registered memory of this side fails before a byte moves.
        """
        ...

    def poll(self, transfer: TransferId) -> TransferState:
        """How it goes. Once it is over, the same again until it is released. Does not wait."""
        ...

    def cancel(self, transfer: TransferId) -> None:
        """Stop it as soon as can be; `poll` says when that is, unless it is over already. Does not wait."""
        ...

    def release(self, transfer: TransferId) -> bool:
        """Forget a read. True: no local memory is written for it any more. Repeatable; True for one that is forgotten.

        False: it is still going on. It is cancelled by this, and the caller asks again later. Does not wait.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Come back when a read may have gone on, or a peer needs this process, and after `timeout_s` at the latest."""
        ...

    def progress(self) -> None:
        """Give the transport a moment. One without a thread of its own needs it on both sides. Does not wait."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End every read and serve nobody any more. Repeatable. False: memory may still be written, or read from."""
        ...
