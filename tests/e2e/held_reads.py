"""A transport whose reads a test can stop halfway, and whose bytes it can change."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from hybridkv.peers.transport import (
    PENDING,
    Ranges,
    RemoteId,
    TransferDone,
    TransferFailed,
    TransferFailureReason,
    TransferId,
    TransferState,
)
from hybridkv.peers.transport.nixl import NixlTransport


@dataclass
class _Held:
    """A read whose second half has not started, or has its own transfer id."""

    rest: tuple[RemoteId, Ranges, float]
    second: TransferId | None = None
    is_over: bool = False


class HeldReads:
    """NIXL, except for the held read: half of its ranges are read immediately, the others after `let_go`.

    Any thread may call `hold` and `let_go`; all other methods belong to the connector's thread.
    """

    def __init__(self, name: str) -> None:
        self._inner = NixlTransport(name)
        self._left: int | None = None
        self._is_spoilt = False
        self._held: dict[TransferId, _Held] = {}
        self.is_holding = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def hold(self, after: int) -> None:
        """Let `after` more reads pass, and hold the next one."""
        self._left, self.is_holding = after, False

    def let_go(self, is_spoilt: bool = False) -> None:
        """Read everything. If `is_spoilt`, one byte of the held read is changed."""
        self._left, self._is_spoilt, self.is_holding = None, is_spoilt, False

    def read(self, remote: RemoteId, ranges: Ranges, timeout_s: float) -> TransferId:
        if self._left is None or self._left > 0:
            self._left = None if self._left is None else self._left - 1
            return self._inner.read(remote, ranges, timeout_s)
        half = len(ranges) // 2
        transfer = self._inner.read(remote, ranges.rows(0, half), timeout_s)
        self._held[transfer] = _Held((remote, ranges.rows(half, len(ranges)), timeout_s))
        return transfer

    def poll(self, transfer: TransferId) -> TransferState:
        held = self._held.get(transfer)
        if held is None:
            return self._inner.poll(transfer)
        if held.is_over:
            return TransferFailed(TransferFailureReason.CANCELLED)
        state = self._inner.poll(transfer if held.second is None else held.second)
        if not isinstance(state, TransferDone):
            return state
        if held.second is not None:
            self._spoil(held.rest[1])
            return state
        if self._left is None:
            held.second = self._inner.read(*held.rest)
        self.is_holding = self._left is not None
        return PENDING

    def _spoil(self, ranges: Ranges) -> None:
        if self._is_spoilt:
            [place] = self._inner._reads.memory.places(ranges.local_regions[:1], ranges.local_offsets[:1]).tolist()
            ctypes.c_uint8.from_address(place).value ^= 0xFF
            self._is_spoilt = False

    def cancel(self, transfer: TransferId) -> None:
        held = self._held.get(transfer)
        self._inner.cancel(transfer)
        if held is not None:
            held.is_over = True
            if held.second is not None:
                self._inner.cancel(held.second)

    def release(self, transfer: TransferId) -> bool:
        held = self._held.get(transfer)
        parts = [transfer] if held is None or held.second is None else [transfer, held.second]
        is_released = all(self._inner.release(each) for each in parts)
        if is_released:
            self._held.pop(transfer, None)
        return is_released
