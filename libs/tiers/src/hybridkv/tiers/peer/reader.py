"""Peer reader: queued and running reads of chunks from peers, and the check of their digests.

The reading thread makes all calls except `close` and the callbacks `on_ready`, `on_reply` and `on_lost`. The callbacks
run on the connections' thread, and put work for the reading thread into `inbox`.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from hybridkv.peers.transport import Ranges, Region, RemoteId, TransferDone, TransferFailed, TransferId, Transport
from hybridkv.peers.transport import TransferFailureReason as TransportFailure
from hybridkv.peers.wire import CloseReason, Describe, WireError, pack_columns
from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, Slot, Ticket
from hybridkv.tiers.digests import view_digest
from hybridkv.tiers.peer import messages
from hybridkv.tiers.peer.node import PeerNode
from hybridkv.tiers.peer.options import PeerOptions
from hybridkv.tiers.peer.places import PeerId, peer_of, to_peer_slot

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
MEMORY_REGION: Final = 0
"""Region number of a rank's memory, here and at every peer. The memory is registered first."""
_still_mapped: list[object] = []
"""Memory that a closed transport may still access. This memory is never freed."""


@dataclass(slots=True, eq=False)
class PeerLoad:
    """Load of one chunk."""

    ticket: Ticket
    key: Key
    tier_slot: Slot
    views: list[memoryview]
    since_s: float
    deadline_s: float = 0.0
    transfer: TransferId | None = None
    is_read: bool = False
    seal_answer: tuple[int, bytes] | None = None
    """State and digest from the peer's `SealsReply`."""
    failure: Failure | None = None
    staging: npt.NDArray[np.uint8] | None = None
    """Temporary buffer, if the destination is not registered."""
    staging_region: int = -1
    peer: PeerId = field(init=False)

    def __post_init__(self) -> None:
        self.peer = peer_of(self.tier_slot)


@dataclass(slots=True)
class _Source:
    """One peer, from which this rank reads."""

    remote: RemoteId
    waiting: dict[int, list[PeerLoad]] = field(default_factory=dict)
    """Loads that wait for seals, by request number."""


class PeerReader:
    """Reads chunks from peers into one rank.

    Args:
        transport: transport. Closed by `close`.
        memory: this rank's memory, region `MEMORY_REGION`; loads into it need no temporary buffer.
        options: limits.
        clock: seconds.
    """

    def __init__(
        self,
        transport: Transport,
        memory: memoryview,
        options: PeerOptions,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._memory: memoryview | None = memory
        self._base = _address(memory)
        self._num_bytes = memory.nbytes
        self._options = options
        self._clock = clock
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Work for the reading thread. Thread-safe."""
        self.node: PeerNode | None = None
        """Set before the first load."""
        self.on_ended: Callable[[Completion], None] = lambda completion: None
        self._sources: dict[PeerId, _Source] = {}
        self._waiting: deque[PeerLoad] = deque()
        self._reading: list[PeerLoad] = []
        self._reading_bytes = 0
        self._next_request = 1
        self._next_region = MEMORY_REGION + 1

    # Callbacks, on the connections' thread.

    def on_ready(self, peer: PeerId, description: Describe) -> None:
        self.inbox.put(lambda: self._attach(peer, description.capability))

    def on_reply(self, peer: PeerId, request: int, body: bytes) -> None:
        message = messages.decode(body)
        if not isinstance(message, messages.SealsReply):
            raise WireError(CloseReason.UNEXPECTED, type(message).__name__)
        self.inbox.put(lambda: self._on_seals(peer, request, message))

    def on_lost(self, peer: PeerId, was_ready: bool) -> None:
        self.inbox.put(lambda: self._detach(peer))

    # On the reading thread.

    @property
    def is_busy(self) -> bool:
        return bool(self._reading or self._waiting)

    def wait(self, timeout_s: float) -> None:
        self._transport.wait(timeout_s)

    def begin(self, load: PeerLoad) -> None:
        self._waiting.append(load)

    def step(self) -> None:
        """Make progress on all loads. Loads still end at their timeouts if `progress` or the node raises. If a transfer
        cannot be released, its load does not end, because the transfer may still write the load's memory."""
        try:
            self._transport.progress()
            if self._waiting:
                assert self.node is not None
                self.node.ready()  # starts connections that are due
        finally:
            self._end_loads()
            self._disconnect_given_up()
            self._start_loads()

    def _end_loads(self) -> None:
        for load in list(self._reading):
            try:
                if not self._poll_and_release(load):
                    continue
                self._reading.remove(load)
                self._reading_bytes -= load.tier_slot.num_bytes
                self._finish(load)
            except Exception as error:  # a bug must fail only this load
                self._fail_on_bug(load, error)

    def _disconnect_given_up(self) -> None:
        """Disconnects peers that the transport has given up, because every later read of them would fail. The node
        connects to them again. Other loads from these peers fail, also those that have their bytes and wait only for
        seals."""
        for peer, source in list(self._sources.items()):
            if not self._transport.is_attached(source.remote):
                self._detach(peer)
                assert self.node is not None
                self.node.disconnect(peer)

    def _start_loads(self) -> None:
        now_s, in_use = self._clock(), {load.peer for load in self._reading}
        is_ready: dict[PeerId, bool] = {}
        put_back: list[PeerLoad] = []
        started: dict[PeerId, list[PeerLoad]] = {}
        while self._waiting:
            load = self._waiting.popleft()
            try:
                source = self._source(load.peer, is_ready, in_use)
                if source is None:
                    if now_s - load.since_s < self._options.reach_timeout_s:
                        put_back.append(load)
                    else:
                        self._fail(load, FailureReason.IO, "the peer cannot be reached")
                elif now_s - load.since_s >= self._options.load_timeout_s:
                    self._fail(
                        load,
                        FailureReason.IO,
                        "timeout: the load did not start in time, because of earlier loads or a slow connection",
                    )
                elif not self._has_room(load.tier_slot.num_bytes):
                    put_back.append(load)
                    break
                else:
                    self._read(load, source.remote)
                    in_use.add(load.peer)
                    started.setdefault(load.peer, []).append(load)
            except Exception as error:  # a bug must fail only this load
                self._fail_on_bug(load, error)
        self._waiting.extendleft(reversed(put_back))
        for peer, loads in started.items():
            self._request_seals(peer, loads)

    def _source(self, peer: PeerId, is_ready: dict[PeerId, bool], in_use: set[PeerId]) -> _Source | None:
        """The peer, if it is ready. `is_ready`: peers that this step has checked already."""
        if peer not in is_ready:
            assert self.node is not None
            is_ready[peer] = self.node.reach(peer, in_use)
        return self._sources.get(peer) if is_ready[peer] else None

    def _has_room(self, num_bytes: int) -> bool:
        if len(self._reading) >= self._options.max_reads:
            return False
        return not self._reading or self._reading_bytes + num_bytes <= self._options.reading_bytes

    def _read(self, load: PeerLoad, remote: RemoteId) -> None:
        load.deadline_s = load.since_s + self._options.load_timeout_s
        local = self._local_extents(load)
        ranges = _ranges(local, to_peer_slot(load.tier_slot).extents)
        load.transfer = self._transport.read(remote, ranges, max(0.0, load.deadline_s - self._clock()))
        self._reading.append(load)
        self._reading_bytes += load.tier_slot.num_bytes

    def _local_extents(self, load: PeerLoad) -> list[tuple[int, int, int]]:
        """(region, offset, num_bytes) of the destination."""
        addresses = [_address(view) - self._base for view in load.views]
        if all(0 <= at <= self._num_bytes - len(view) for at, view in zip(addresses, load.views, strict=True)):
            return [(MEMORY_REGION, at, len(view)) for at, view in zip(addresses, load.views, strict=True)]
        load.staging = np.empty(load.tier_slot.num_bytes, dtype=np.uint8)
        self._transport.register([Region(int(load.staging.ctypes.data), load.staging.nbytes)])
        load.staging_region, self._next_region = self._next_region, self._next_region + 1
        return [(load.staging_region, 0, load.staging.nbytes)]

    def _request_seals(self, peer: PeerId, loads: Sequence[PeerLoad]) -> None:
        assert self.node is not None
        request, self._next_request = self._next_request, self._next_request + 1
        keys, ends = messages.pack_keys([load.key for load in loads])
        offsets = pack_columns([[to_peer_slot(load.tier_slot).first_offset for load in loads]])
        self._sources[peer].waiting[request] = list(loads)
        if not self.node.send_request(peer, request, messages.encode(messages.SealsRequest(keys, ends, offsets))):
            self._sources[peer].waiting.pop(request, None)
            for load in loads:
                self._mark_failed(load, FailureReason.IO, "the peer is gone")

    def _poll_and_release(self, load: PeerLoad) -> bool:
        """Poll the transfer of a load, fail the load at its deadline, and release the transfer if the load has ended.
        True if it is released: then the transport no longer writes for the load."""
        assert load.transfer is not None
        if not load.is_read and load.failure is None:
            state = self._transport.poll(load.transfer)
            load.is_read = isinstance(state, TransferDone)
            if isinstance(state, TransferFailed):
                busy = state.reason is TransportFailure.BUSY
                reason = FailureReason.BUSY if busy else FailureReason.IO
                load.failure = Failure(reason, f"{state.reason}: {state.detail}")
        if load.failure is None and self._clock() >= load.deadline_s and (not load.is_read or load.seal_answer is None):
            load.failure = Failure(FailureReason.IO, "timeout: the peer took too long")
        if load.failure is None and (not load.is_read or load.seal_answer is None):
            return False
        return self._transport.release(load.transfer)

    def _finish(self, load: PeerLoad) -> None:
        failure, digest = load.failure, None
        if failure is None:
            assert load.seal_answer is not None
            state, sealed = load.seal_answer
            views = load.views if load.staging is None else [load.staging.data]
            if state != messages.SEALED:
                is_another = state == messages.OTHER_KEY
                reason = FailureReason.WRONG_KEY if is_another else FailureReason.MISSING
                failure = Failure(reason, f"the peer holds {load.key.hex()} no more")
            elif (digest := view_digest(views)) != sealed:
                failure = Failure(
                    FailureReason.CHECKSUM, f"the bytes of {load.key.hex()} are not those that were sealed"
                )
        if load.staging is not None:
            self._transport.deregister([load.staging_region])
            if failure is None:
                _scatter(load.staging, load.views)
        self.on_ended(Completion(load.ticket, failure, None if failure else digest))

    def _fail(self, load: PeerLoad, reason: FailureReason, detail: str) -> None:
        self.on_ended(Completion(load.ticket, Failure(reason, detail)))

    def _fail_on_bug(self, load: PeerLoad, error: Exception) -> None:
        """Fail a load, at once or when its transfer has ended."""
        detail = f"{type(error).__name__}: {error}"
        if load.failure is None:
            logger.error("unexpected error in a load from a peer", exc_info=error)
        if load in self._reading:
            self._mark_failed(load, FailureReason.IO, detail)
        else:
            self._fail(load, FailureReason.IO, detail)

    def _mark_failed(self, load: PeerLoad, reason: FailureReason, detail: str) -> None:
        if load.failure is None:
            load.failure = Failure(reason, detail)

    # Connection events.

    def _attach(self, peer: PeerId, capability: bytes) -> None:
        self._detach(peer)
        assert self.node is not None
        remote = self._transport.attach(capability)
        if isinstance(remote, TransferFailed):
            logger.warning("peer %s cannot be read: %s: %s", peer, remote.reason, remote.detail)
            self.node.disconnect(peer)
            return
        self._sources[peer] = _Source(remote)

    def _detach(self, peer: PeerId) -> None:
        source = self._sources.pop(peer, None)
        if source is None:
            return
        self._transport.detach(source.remote)
        for load in [load for load in self._reading if load.peer == peer]:
            self._mark_failed(load, FailureReason.IO, "the peer is gone")

    def _on_seals(self, peer: PeerId, request: int, message: messages.SealsReply) -> None:
        source = self._sources.get(peer)
        loads = source.waiting.pop(request, None) if source is not None else None
        if loads is None:
            return
        try:
            answers = messages.seals_of(message, len(loads))
        except WireError:
            assert self.node is not None
            self.node.disconnect(peer)
            return
        for load, answer in zip(loads, answers, strict=True):
            load.seal_answer = answer

    # Closing.

    def close(self, has_thread_ended: bool) -> None:
        """Close connections and the transport, and fail open loads with CLOSED. Memory that the transport may still
        access is never freed.

        Args:
            has_thread_ended: True if the reading thread has ended.
        """
        is_over = self.node is None or self.node.close(CLOSE_S)
        is_over &= self._transport.close(CLOSE_S) and has_thread_ended
        loads = [*self._waiting, *self._reading]
        if not is_over:
            _still_mapped.append((self._memory, [(load.staging, load.views) for load in loads]))
        self._memory = None
        for load in loads:
            self._fail(load, FailureReason.CLOSED, "the medium was closed")
        self._waiting.clear()
        self._reading.clear()


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _ranges(local: Sequence[tuple[int, int, int]], remote: Sequence[tuple[int, int]]) -> Ranges:
    """Ranges of a read: local and remote extents, split at the boundaries of both lists. Both lists have the same total
    size."""
    rows: list[tuple[int, int, int, int, int]] = []
    pieces = iter(remote)
    start, left = 0, 0
    for region, offset, num_bytes in local:
        done = 0
        while done < num_bytes:
            if not left:
                start, left = next(pieces)
            size = min(left, num_bytes - done)
            rows.append((region, offset + done, MEMORY_REGION, start, size))
            done, start, left = done + size, start + size, left - size
    return Ranges.of(rows)


def _scatter(source: npt.NDArray[np.uint8], views: Sequence[memoryview]) -> None:
    at = 0
    for view in views:
        np.frombuffer(view, dtype=np.uint8)[:] = source[at : at + len(view)]
        at += len(view)
