"""What every suite of transports starts from. Uses no test framework."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.peers.testing.memory import Bytes, expected, pattern, poisoned, region_of
from hybridkv.peers.transport import PENDING, Failed, FailureReason, Ranges, RemoteId, TransferState, Transport

TIMEOUT_S = 60.0
"""Of reads that shall succeed: long enough for a busy machine."""
MAX_TURNS = 1_000_000


class Reader:
    """One side that reads, with poisoned memory of its own."""

    def __init__(self, transport: Transport, sizes: Sequence[int], unit_bytes: int = 0) -> None:
        self.transport = transport
        self.regions: list[Bytes] = [poisoned(size) for size in sizes]
        self.capability = transport.register([region_of(each, unit_bytes) for each in self.regions])

    def attach(self, capability: bytes) -> RemoteId:
        remote = self.transport.attach(capability)
        assert not isinstance(remote, Failed), remote
        return remote

    def finish(self, remote: RemoteId, ranges: Ranges, timeout_s: float = TIMEOUT_S) -> TransferState:
        """Read, wait for the end, release."""
        transfer = self.transport.read(remote, ranges, timeout_s)
        state = ended(self.transport, transfer)
        release(self.transport, transfer)
        return state

    def check(self, remote_regions: Sequence[Bytes], ranges: Ranges, before: Sequence[Bytes]) -> None:
        """That exactly the bytes of the ranges have changed, into the peer's."""
        for ours, wanted in zip(self.regions, expected(before, remote_regions, ranges), strict=True):
            assert ours.tobytes() == wanted.tobytes()


def ended(transport: Transport, transfer: object) -> TransferState:
    """The state in which a read ends. Each turn waits a little, so an endless read fails the test."""
    for _ in range(MAX_TURNS):
        state = transport.poll(transfer)  # type: ignore[arg-type]
        if state is not PENDING:
            return state
        transport.wait(0.05)
    raise AssertionError("the read does not end")


def release(transport: Transport, transfer: object) -> None:
    for _ in range(MAX_TURNS):
        if transport.release(transfer):  # type: ignore[arg-type]
            return
        transport.wait(0.01)
    raise AssertionError("the read is never released")


def reason_of(state: TransferState) -> FailureReason | None:
    return state.reason if isinstance(state, Failed) else None


def whole(size: int, region: int = 0) -> Ranges:
    """All of one region of either side."""
    return Ranges.of([(region, 0, region, 0, size)])


__all__ = [
    "TIMEOUT_S",
    "Reader",
    "ended",
    "pattern",
    "poisoned",
    "reason_of",
    "region_of",
    "release",
    "whole",
]
