"""Transport for tests, between peers of one process: a read is a copy, made at the first poll."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence

from hybridkv.peers.errors import PeersProtocolError
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
)
from hybridkv.peers.transport.memory import RegisteredMemory


class World:
    """Registry of the peers of one process. `kill` acts like SIGKILL on a process."""

    def __init__(self) -> None:
        self.transports: dict[bytes, InMemoryTransport] = {}
        self.lock = threading.Lock()
        """Prevents copies from memory that is being deregistered."""

    def kill(self, capability: bytes) -> None:
        self.transports.pop(capability.split(b"/")[0], None)


class InMemoryTransport:
    """Deterministic: no thread, no clock. A read is done, or has failed, at its first poll."""

    def __init__(self, peer_name: str, world: World, max_transfers: int = 256) -> None:
        self._peer = peer_name.encode()
        self._world = world
        self._max_transfers = max_transfers
        self.memory = RegisteredMemory()
        self._numbers = itertools.count(1)
        self._remotes: dict[RemoteId, tuple[bytes, int]] = {}
        self._reads: dict[TransferId, tuple[RemoteId, Ranges]] = {}
        self._states: dict[TransferId, TransferState] = {}
        self._is_closed = False
        world.transports[self._peer] = self

    def register(self, regions: Sequence[Region]) -> bytes:
        self._require_open("register")
        self.memory = self.memory.with_regions(regions)
        return self._peer + b"/%d" % len(self.memory.regions)

    def deregister(self, regions: Sequence[int]) -> None:
        self._require_open("deregister")
        with self._world.lock:
            self.memory = self.memory.without(regions)

    def attach(self, capability: bytes) -> RemoteId | TransferFailed:
        self._require_open("attach")
        peer, _, known = capability.partition(b"/")
        if not known.isdigit() or peer == self._peer:
            return TransferFailed(TransferFailureReason.REFUSED, "no capability of this transport")
        remote = RemoteId(next(self._numbers))
        self._remotes[remote] = (peer, int(known))
        return remote

    def detach(self, remote: RemoteId) -> None:
        self._remotes.pop(remote, None)

    def is_attached(self, remote: RemoteId) -> bool:
        return remote in self._remotes

    def read(self, remote: RemoteId, ranges: Ranges, timeout_s: float) -> TransferId:
        self._require_open("read")
        number = TransferId(next(self._numbers))
        bounds_error = self.memory.bounds_error("local", ranges.local_regions, ranges.local_offsets, ranges.num_bytes)
        state: TransferState = PENDING
        if len(self._states) >= self._max_transfers:
            state = TransferFailed(TransferFailureReason.BUSY)
        elif remote not in self._remotes:
            state = TransferFailed(TransferFailureReason.CLOSED)
        elif bounds_error:
            state = TransferFailed(TransferFailureReason.REFUSED, bounds_error)
        elif not len(ranges):
            state = TransferDone(0, 0, 0.0)
        self._states[number] = state
        self._reads[number] = (remote, ranges)
        return number

    def poll(self, transfer: TransferId) -> TransferState:
        if transfer not in self._states:
            raise PeersProtocolError(f"there is no transfer {transfer}, or it was released")
        if self._states[transfer] is PENDING:
            with self._world.lock:
                self._states[transfer] = self._copy(*self._reads[transfer])
        return self._states[transfer]

    def cancel(self, transfer: TransferId) -> None:
        if transfer not in self._states:
            raise PeersProtocolError(f"there is no transfer {transfer}, or it was released")
        if self._states[transfer] is PENDING:
            self._states[transfer] = TransferFailed(TransferFailureReason.CANCELLED)

    def release(self, transfer: TransferId) -> bool:
        self._states.pop(transfer, None)
        self._reads.pop(transfer, None)
        return True

    def wait(self, timeout_s: float) -> None:
        """Does nothing: reads advance in `poll`."""

    def progress(self) -> None:
        """Does nothing: reads advance in `poll`."""

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        with self._world.lock:
            self._world.transports.pop(self._peer, None)
        for number, state in self._states.items():
            if state is PENDING:
                self._states[number] = TransferFailed(TransferFailureReason.CLOSED)
        return True

    def _copy(self, remote: RemoteId, ranges: Ranges) -> TransferState:
        peer, known = self._remotes.get(remote, (b"", 0))
        if not peer:
            return TransferFailed(TransferFailureReason.CLOSED)
        other = self._world.transports.get(peer)
        if other is None:
            return TransferFailed(TransferFailureReason.GONE)
        bounds_error = other.memory.bounds_error(
            "remote", ranges.remote_regions, ranges.remote_offsets, ranges.num_bytes
        )
        if bounds_error or bool((ranges.remote_regions >= known).any()):
            return TransferFailed(TransferFailureReason.REFUSED, bounds_error or "a region that came later")
        ours = self.memory.places(ranges.local_regions, ranges.local_offsets)
        theirs = other.memory.places(ranges.remote_regions, ranges.remote_offsets)
        for to, source, size in zip(ours.tolist(), theirs.tolist(), ranges.num_bytes.tolist(), strict=True):
            ctypes.memmove(to, source, size)
        return TransferDone(ranges.total_bytes, len(ranges), 0.0)

    def _require_open(self, call: str) -> None:
        if self._is_closed:
            raise PeersProtocolError(f"{call}: called after close")
