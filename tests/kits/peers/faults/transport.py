"""`Transport` that delays, loses, truncates, corrupts and ends reads as planned, and otherwise delegates to another."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from hybridkv.peers.transport import (
    PENDING,
    Ranges,
    Region,
    RemoteId,
    TransferDone,
    TransferFailed,
    TransferFailureReason,
    TransferId,
    TransferState,
    Transport,
)
from hybridkv.peers.transport.memory import RegisteredMemory
from kits.peers.faults.plan import Action, Fail, FaultPlan, HalfDone, Late, Lost, Vanish, WrongBytes


class _Planned:
    """State of one planned read; `override` is its state once the plan has decided it."""

    def __init__(self, action: Action, ranges: Ranges) -> None:
        self.action = action
        self.ranges = ranges
        self.polls_left = action.num_polls if isinstance(action, Late) else 0
        self.override: TransferState | None = None


class FaultInjectingTransport:
    """Starts no thread and reads no clock. Changes memory only in `poll`."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
        self._memory = RegisteredMemory()
        self._num_reads = 0
        self._gone: set[RemoteId] = set()
        self._planned: dict[TransferId, _Planned] = {}

    def register(self, regions: Sequence[Region]) -> bytes:
        capability = self._inner.register(regions)
        self._memory = self._memory.with_regions(regions)
        return capability

    def deregister(self, regions: Sequence[int]) -> None:
        self._inner.deregister(regions)
        self._memory = self._memory.without(regions)

    def attach(self, capability: bytes) -> RemoteId | TransferFailed:
        return self._inner.attach(capability)

    def detach(self, remote: RemoteId) -> None:
        self._inner.detach(remote)

    def is_attached(self, remote: RemoteId) -> bool:
        return self._inner.is_attached(remote)

    def read(self, remote: RemoteId, ranges: Ranges, timeout_s: float) -> TransferId:
        if not len(ranges):
            return self._inner.read(remote, ranges, timeout_s)
        self._num_reads += 1
        action = self._plan.action(self._num_reads)
        if isinstance(action, Vanish):
            self._gone.add(remote)
        asked = ranges
        if remote in self._gone or isinstance(action, Fail):
            asked = ranges.rows(0, 0)
        elif isinstance(action, HalfDone):
            asked = ranges.rows(0, min(action.num_ranges, len(ranges)))
        transfer = self._inner.read(remote, asked, timeout_s)
        if remote in self._gone:
            action = Fail(TransferFailureReason.GONE)
        if action is not None:
            self._planned[transfer] = _Planned(action, ranges)
        return transfer

    def poll(self, transfer: TransferId) -> TransferState:
        state = self._inner.poll(transfer)
        planned = self._planned.get(transfer)
        if planned is None or state is PENDING:
            return state
        if planned.override is None:
            planned.override = self._decide(planned, state)
        return planned.override or PENDING

    def cancel(self, transfer: TransferId) -> None:
        self._inner.cancel(transfer)
        planned = self._planned.get(transfer)
        if planned is not None and planned.override is None:
            planned.override = TransferFailed(TransferFailureReason.CANCELLED)

    def release(self, transfer: TransferId) -> bool:
        if not self._inner.release(transfer):
            return False
        self._planned.pop(transfer, None)
        return True

    def wait(self, timeout_s: float) -> None:
        self._inner.wait(timeout_s)

    def progress(self) -> None:
        self._inner.progress()

    def close(self, timeout_s: float) -> bool:
        is_closed = self._inner.close(timeout_s)
        for planned in self._planned.values():
            planned.override = planned.override or TransferFailed(TransferFailureReason.CLOSED)
        return is_closed

    def _decide(self, planned: _Planned, state: TransferState) -> TransferState | None:
        """The final state, or None for one more poll."""
        action = planned.action
        if isinstance(state, TransferFailed):
            return state
        if isinstance(action, Fail | HalfDone):
            return TransferFailed(action.reason, "injected")
        if isinstance(action, Lost):
            return None
        if isinstance(action, Late):
            planned.polls_left -= 1
            return None if planned.polls_left >= 0 else state
        if isinstance(action, WrongBytes) and isinstance(state, TransferDone):
            self._invert(planned.ranges, action.byte_index % planned.ranges.total_bytes)
        return state

    def _invert(self, ranges: Ranges, position: int) -> None:
        places = self._memory.places(ranges.local_regions, ranges.local_offsets)
        for address, size in zip(places.tolist(), ranges.num_bytes.tolist(), strict=True):
            if position < size:
                ctypes.c_uint8.from_address(address + position).value ^= 0xFF
                return
            position -= size
