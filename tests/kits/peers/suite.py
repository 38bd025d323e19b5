"""Common parts of the transport suites. Uses no test framework."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hybridkv.peers.transport import (
    PENDING,
    Ranges,
    RemoteId,
    TransferFailed,
    TransferFailureReason,
    TransferId,
    TransferState,
    Transport,
)
from kits.peers.memory import Bytes, expected, pattern, poisoned, region_of

TIMEOUT_S = 300.0
"""For events that come at once on an idle machine."""


def until(holds: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Waits for a state that another thread or process reaches. AssertionError if it does not come in time."""
    until_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until_s, holds
        time.sleep(0.002)


class Reader:
    """One side that reads, with poisoned memory of its own.

    `neighbours` are transports of the same process, which may need to be polled to serve this one.
    """

    def __init__(
        self,
        transport: Transport,
        sizes: Sequence[int],
        neighbours: Sequence[Transport] = (),
    ) -> None:
        self.transport = transport
        self.neighbours = neighbours
        self.regions: list[Bytes] = [poisoned(size) for size in sizes]
        self.capability = transport.register([region_of(each) for each in self.regions])

    def attach(self, capability: bytes) -> RemoteId:
        remote = self.transport.attach(capability)
        assert not isinstance(remote, TransferFailed), remote
        return remote

    def finish(self, remote: RemoteId, ranges: Ranges, timeout_s: float = TIMEOUT_S) -> TransferState:
        """Reads, waits for the end, releases."""
        transfer = self.transport.read(remote, ranges, timeout_s)
        state = self.ended(transfer)
        self.release(transfer)
        return state

    def ended(self, transfer: TransferId) -> TransferState:
        """Waits for the end of a read and returns its state."""
        until_s = time.monotonic() + TIMEOUT_S
        while (state := self.transport.poll(transfer)) is PENDING:
            assert time.monotonic() < until_s, "the read does not end"
            self._turn()
        return state

    def release(self, transfer: TransferId) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not self.transport.release(transfer):
            assert time.monotonic() < until_s, "the read is never released"
            self._turn()

    def check(self, remote_regions: Sequence[Bytes], ranges: Ranges, before: Sequence[Bytes]) -> None:
        """Requires that exactly the bytes of the ranges have changed, into the peer's."""
        for ours, wanted in zip(self.regions, expected(before, remote_regions, ranges), strict=True):
            assert ours.tobytes() == wanted.tobytes()

    def _turn(self) -> None:
        for neighbour in self.neighbours:
            neighbour.progress()
        self.transport.wait(0.001 if self.neighbours else 0.05)


def reason_of(state: TransferState) -> TransferFailureReason | None:
    return state.reason if isinstance(state, TransferFailed) else None


def whole(size: int, region: int = 0) -> Ranges:
    """All of one region on both sides."""
    return Ranges.of([(region, 0, region, 0, size)])


__all__ = [
    "TIMEOUT_S",
    "Reader",
    "pattern",
    "poisoned",
    "reason_of",
    "region_of",
    "whole",
]
