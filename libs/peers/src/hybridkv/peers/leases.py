"""How long the blocks of a finished request may be read: one lease a request, and one slot of memory a lease.

A slot holds its lease's nonce from before the blocks may be read until before they are given back, and zero, or another
lease's nonce, afterwards. A reader reads the blocks, then the slot, and compares: where the nonce still stands no block
was given back while it read. So a block that two requests share needs nothing of its own, and a reader that comes late
cannot take other tokens for its own.

`LeaseSlots` stands where requests are scheduled, and gives a lease to a request before it can finish; `Leases` stands
in each rank, writes the slots and decides when a rank has done with a request. Each lease ends once, by whichever comes
first: every reader has said so, its time is up, or it is aborted. Neither has a clock.
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
"""A slot in memory: the nonce, and as many bytes that are zero and kept for later, both little-endian."""
NO_NONCE: Final = 0
MAX_NONCE: Final = (1 << 63) - 1


Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NONCE)]


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """What a reader shows and compares, also on the wire.

    Args:
        slot: where it stands.
        nonce: 1 to `MAX_NONCE`; no lease before it in this slot had the same.
    """

    slot: Natural
    nonce: Natural


class LeaseSlots:
    """Gives out slots.

    Args:
        max_leases: slots that there are.
        nonces: draws a number from 1 to `MAX_NONCE` that nobody can guess.
    """

    def __init__(self, max_leases: int, nonces: Callable[[], int]) -> None:
        if max_leases < 1:
            raise ValueError(f"max_leases must be 1 or more, got {max_leases}")
        self._nonces = nonces
        # The slot that has rested longest comes next.
        self._free = deque(range(max_leases))
        self._last = [NO_NONCE] * max_leases
        self._issued: dict[str, Lease] = {}
        self.refused = 0
        """Requests that got none. Their blocks are not held, and nobody is told that they could be read."""

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, request_id: str) -> Lease | None:
        """The request's lease, the same each time it is asked for; None, counted, where no slot is free."""
        known = self._issued.get(request_id)
        if known is not None:
            return known
        if not self._free:
            self.refused += 1
            return None
        slot = self._free.popleft()
        lease = Lease(slot, self._draw(self._last[slot]))
        self._last[slot] = lease.nonce
        self._issued[request_id] = lease
        return lease

    def of(self, request_id: str) -> Lease | None:
        """The request's lease, if it has one."""
        return self._issued.get(request_id)

    def retire(self, request_id: str) -> bool:
        """Every rank has ended the lease: its slot may be given to another. False where there is none to retire."""
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
        raise PeersProtocolError("nonces() draws no number from 1 to 2**63 - 1, or always the same one")


class LeaseEnd(enum.StrEnum):
    """Why a lease ended."""

    DONE = "done"
    """Every reader has said so."""
    EXPIRED = "expired"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease that has ended: its slot holds no nonce any more.

    Args:
        request_id: whose.
        why: it ended.
        was_held: the engine keeps the request's blocks for it, and is now to be told that it need not.
    """

    request_id: str
    why: LeaseEnd
    was_held: bool


@dataclass(frozen=True, slots=True)
class LeaseBounds:
    """Times in seconds.

    Args:
        hold_s: from when a request finishes.
        renew_s: from when a reader asks for more.
        longest_s: from when it finishes, however often it is renewed.
    """

    hold_s: float = 30.0
    renew_s: float = 20.0
    longest_s: float = 600.0


@dataclass(slots=True)
class _Open:
    """The request runs. Nobody has been told the nonce."""

    lease: Lease


@dataclass(slots=True)
class _Held:
    """The request has finished and its blocks are held."""

    lease: Lease
    expires_s: float
    latest_s: float
    done_readers: set[int]


class Leases:
    """The leases of one rank.

    Args:
        max_leases: slots that there are.
        bounds: how long leases live.
        write: puts a nonce into a slot; it stands in memory when this returns.
    """

    def __init__(self, max_leases: int, bounds: LeaseBounds, write: Callable[[int, int], None]) -> None:
        self._max_leases = max_leases
        self._bounds = bounds
        self._write = write
        self._states: dict[str, _Open | _Held] = {}
        self._requests: dict[int, str] = {}
        self.late = 0
        """Renewals and ends that came for a lease which is no more, or never was."""

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_held(self) -> int:
        """Requests whose blocks the engine keeps."""
        return sum(type(state) is _Held for state in self._states.values())

    @property
    def next_expiry_s(self) -> float | None:
        """When `expire` will next have something to end."""
        return min((state.expires_s for state in self._states.values() if type(state) is _Held), default=None)

    def open(self, request_id: str, lease: Lease) -> None:
        """The request runs: the nonce is written. Said twice it is the same.

        Raises:
            PeersProtocolError: the slot is not there or has another lease, or the request has another one.
        """
        known = self._states.get(request_id)
        if known is not None and known.lease == lease:
            return
        if known is not None or lease.slot in self._requests or not 0 <= lease.slot < self._max_leases:
            raise PeersProtocolError(
                f"slot {lease.slot} cannot be opened for {request_id}: it, or the request, is taken"
            )
        self._write(lease.slot, lease.nonce)
        self._states[request_id] = _Open(lease)
        self._requests[lease.slot] = request_id

    def hold(self, request_id: str, now_s: float) -> bool:
        """The request has finished and the engine keeps its blocks: the time begins.

        Returns:
            False where it has no open lease: then its blocks may not be read, and must not be kept.
        """
        state = self._states.get(request_id)
        if type(state) is not _Open:
            return False
        bounds = self._bounds
        latest_s = now_s + bounds.longest_s
        self._states[request_id] = _Held(state.lease, min(now_s + bounds.hold_s, latest_s), latest_s, set())
        return True

    def holds(self, lease: Lease, now_s: float) -> str | None:
        """The request whose blocks a reader may be served, None where the lease is no more or its time is up."""
        request_id = self._requests.get(lease.slot, "")
        state = self._states.get(request_id)
        if type(state) is _Held and state.lease == lease and now_s < state.expires_s:
            return request_id
        return None

    def renew(self, lease: Lease, now_s: float) -> bool:
        """A reader needs more time. False, counted, where there is nothing to renew: what it reads may be gone."""
        request_id = self.holds(lease, now_s)
        if request_id is None:
            self.late += 1
            return False
        state = self._states[request_id]
        assert type(state) is _Held
        state.expires_s = max(state.expires_s, min(now_s + self._bounds.renew_s, state.latest_s))
        return True

    def done(self, lease: Lease, reader: int, num_readers: int) -> Ended | None:
        """A reader has what it wanted, or wants it no more. None, counted, for a lease that is no more.

        Args:
            lease: that it showed.
            reader: its rank.
            num_readers: ranks that read from this one; when all of them have said so the lease ends.
        """
        request_id = self._requests.get(lease.slot, "")
        state = self._states.get(request_id)
        if type(state) is not _Held or state.lease != lease or reader in state.done_readers:
            self.late += 1
            return None
        state.done_readers.add(reader)
        if len(state.done_readers) < num_readers:
            return None
        return self._end(request_id, LeaseEnd.DONE)

    def abort(self, request_id: str) -> Ended | None:
        """The request is no more, for whatever reason on this side. None where its lease has ended already."""
        return self._end(request_id, LeaseEnd.ABORTED) if request_id in self._states else None

    def expire(self, now_s: float) -> list[Ended]:
        """Ends what has had its time."""
        due = [
            request_id
            for request_id, state in self._states.items()
            if type(state) is _Held and state.expires_s <= now_s
        ]
        return [self._end(request_id, LeaseEnd.EXPIRED) for request_id in due]

    def close(self) -> list[Ended]:
        """Ends all of them."""
        return [self._end(request_id, LeaseEnd.ABORTED) for request_id in list(self._states)]

    def _end(self, request_id: str, why: LeaseEnd) -> Ended:
        """The slot is emptied before anybody is told that the blocks may go."""
        state = self._states[request_id]
        self._write(state.lease.slot, NO_NONCE)
        del self._states[request_id]
        del self._requests[state.lease.slot]
        return Ended(request_id, why, type(state) is _Held)
