"""Leases on the blocks of finished requests: one lease per request, and one slot of registered memory per lease.

A rank writes the nonce of a lease into its slot before peers may read the blocks, and clears the slot before the blocks
are freed. Afterwards the slot holds zero or the nonce of another lease. A reader reads the blocks, then the slot, and
compares the nonce: an unchanged nonce proves that no block was freed during the read. Blocks that several requests
share need no extra state, and a late reader cannot accept blocks of another request.

The scheduler owns `LeaseSlots` and assigns a lease to a request before the request can finish. Each rank owns its
`Leases`, writes the slots and decides when a lease ends on this rank. Each lease ends once: when all readers are done,
when it expires, or when it is aborted. Neither class has a clock.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec

from hybridkv.peers.errors import PeersProtocolError

SLOT_BYTES: Final = 16
"""Size of a slot in memory: 8 bytes of nonce, little-endian, then 8 reserved bytes that are zero."""
NO_NONCE: Final = 0
MAX_NONCE: Final = (1 << 63) - 1


Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NONCE)]


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Slot and nonce of one lease, also on the wire.

    Args:
        slot: index of the slot.
        nonce: number from 1 to `MAX_NONCE`; differs from the previous nonce in this slot.
    """

    slot: Natural
    nonce: Natural


class LeaseSlots:
    """Allocator of lease slots.

    Args:
        max_leases: number of slots.
        nonces: returns an unpredictable number from 1 to `MAX_NONCE`.
    """

    def __init__(self, max_leases: int, nonces: Callable[[], int]) -> None:
        if max_leases < 1:
            raise ValueError(f"max_leases must be 1 or more, got {max_leases}")
        self._nonces = nonces
        # The slot that has been free for the longest time comes first.
        self._free = deque(range(max_leases))
        self._last = [NO_NONCE] * max_leases
        self._issued: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, request_id: str) -> Lease | None:
        """Returns the request's lease, the same on each call until `retire`. Returns None if no slot is free: the
        request's blocks are neither held nor offered."""
        known = self._issued.get(request_id)
        if known is not None:
            return known
        if not self._free:
            return None
        slot = self._free.popleft()
        lease = Lease(slot, self._draw(self._last[slot]))
        self._last[slot] = lease.nonce
        self._issued[request_id] = lease
        return lease

    def of(self, request_id: str) -> Lease | None:
        """Returns the request's lease, or None."""
        return self._issued.get(request_id)

    def retire(self, request_id: str) -> bool:
        """Frees the request's slot. Call it after every rank has ended the lease. False if the request has no lease."""
        lease = self._issued.pop(request_id, None)
        if lease is None:
            return False
        self._free.append(lease.slot)
        return True

    def _draw(self, other_than: int) -> int:
        for _ in range(64):
            nonce = self._nonces()
            if NO_NONCE < nonce <= MAX_NONCE and nonce != other_than:
                return nonce
        raise PeersProtocolError("nonces() returned no new number from 1 to 2**63 - 1")


class LeaseEnd(enum.StrEnum):
    """Why a lease ended."""

    DONE = "done"
    """Every reader is done."""
    EXPIRED = "expired"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease that has ended. Its slot holds no nonce.

    Args:
        request_id: request of the lease.
        why: reason.
    """

    request_id: str
    why: LeaseEnd


@dataclass(frozen=True, slots=True)
class LeaseBounds:
    """Lease durations in seconds.

    Args:
        hold_s: duration from the end of the request, without a renewal.
        renew_s: duration from a renewal.
        longest_s: maximum duration from the end of the request, with renewals.
    """

    hold_s: float = 30.0
    renew_s: float = 20.0
    longest_s: float = 600.0


@dataclass(slots=True)
class _Open:
    """The request is running. No peer has the nonce."""

    lease: Lease


@dataclass(slots=True)
class _Held:
    """The request has finished and its blocks are held."""

    lease: Lease
    expires_s: float
    latest_s: float
    done_readers: set[int]


class Leases:
    """Leases of one rank.

    Args:
        max_leases: number of slots.
        bounds: lease durations.
        write: writes a nonce into a slot; the nonce is in memory when the call returns.
    """

    def __init__(self, max_leases: int, bounds: LeaseBounds, write: Callable[[int, int], None]) -> None:
        self._max_leases = max_leases
        self._bounds = bounds
        self._write = write
        self._states: dict[str, _Open | _Held] = {}
        self._requests: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_held(self) -> int:
        """Number of requests with held blocks."""
        return sum(type(state) is _Held for state in self._states.values())

    @property
    def next_expiry_s(self) -> float | None:
        """Time of the next expiry; None if no lease is held."""
        return min((state.expires_s for state in self._states.values() if type(state) is _Held), default=None)

    def open(self, request_id: str, lease: Lease) -> None:
        """Opens the lease of a running request and writes the nonce. Repeatable.

        Raises:
            PeersProtocolError: the slot does not exist or has another lease, or the request has another lease.
        """
        known = self._states.get(request_id)
        if known is not None and known.lease == lease:
            return
        if known is not None or lease.slot in self._requests or not 0 <= lease.slot < self._max_leases:
            raise PeersProtocolError(
                f"slot {lease.slot} cannot be opened for {request_id}: the slot or the request has another lease"
            )
        self._write(lease.slot, lease.nonce)
        self._states[request_id] = _Open(lease)
        self._requests[lease.slot] = request_id

    def hold(self, request_id: str, now_s: float) -> bool:
        """Starts the lease time of a finished request with held blocks.

        Returns:
            False if the request has no lease: do not hold its blocks, because no peer may read them. Also False if the
            lease time has started already; then nothing changes.
        """
        state = self._states.get(request_id)
        if type(state) is not _Open:
            return False
        bounds = self._bounds
        latest_s = now_s + bounds.longest_s
        self._states[request_id] = _Held(state.lease, min(now_s + bounds.hold_s, latest_s), latest_s, set())
        return True

    def holds(self, lease: Lease, now_s: float) -> str | None:
        """Request of a held lease. None if the lease has ended or expired, or if the request still runs."""
        request_id = self._requests.get(lease.slot, "")
        state = self._states.get(request_id)
        if type(state) is _Held and state.lease == lease and now_s < state.expires_s:
            return request_id
        return None

    def renew(self, lease: Lease, now_s: float) -> bool:
        """Extends a lease. Returns False if the lease is not held: its blocks may be freed."""
        request_id = self.holds(lease, now_s)
        if request_id is None:
            return False
        state = self._states[request_id]
        assert type(state) is _Held
        state.expires_s = max(state.expires_s, min(now_s + self._bounds.renew_s, state.latest_s))
        return True

    def done(self, lease: Lease, reader: int, num_readers: int) -> Ended | None:
        """Records that a reader is done. Returns the ended lease after the last reader, else None.

        Returns None for a lease that is not held, and for a reader that was done before.

        Args:
            lease: sent by the reader.
            reader: index of the reader.
            num_readers: number of readers; the lease ends when all are done.
        """
        request_id = self._requests.get(lease.slot, "")
        state = self._states.get(request_id)
        if type(state) is not _Held or state.lease != lease or reader in state.done_readers:
            return None
        state.done_readers.add(reader)
        if len(state.done_readers) < num_readers:
            return None
        return self._end(request_id, LeaseEnd.DONE)

    def abort(self, request_id: str) -> Ended | None:
        """Ends the lease of an aborted request. Returns None if the request has no lease."""
        return self._end(request_id, LeaseEnd.ABORTED) if request_id in self._states else None

    def expire(self, now_s: float) -> list[Ended]:
        """Ends expired leases."""
        due = [
            request_id
            for request_id, state in self._states.items()
            if type(state) is _Held and state.expires_s <= now_s
        ]
        return [self._end(request_id, LeaseEnd.EXPIRED) for request_id in due]

    def close(self) -> list[Ended]:
        """Ends all leases."""
        return [self._end(request_id, LeaseEnd.ABORTED) for request_id in list(self._states)]

    def _end(self, request_id: str, why: LeaseEnd) -> Ended:
        """Ends a lease. Clears the slot before the caller frees the blocks."""
        state = self._states[request_id]
        self._write(state.lease.slot, NO_NONCE)
        del self._states[request_id]
        del self._requests[state.lease.slot]
        return Ended(request_id, why)
