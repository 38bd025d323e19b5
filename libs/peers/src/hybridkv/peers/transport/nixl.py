"""`Transport` over NIXL: reads that use no CPU of the other side if the fabric supports that.

The agent has no progress thread, because this thread would keep a core busy. Reads progress in `poll`, `wait` and
`progress`, on the caller's thread. A post may block until its bytes arrive (as for memory of the same host), so a read
is posted in parts (`nixl_reads`).
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from hybridkv.peers.errors import PeersConfigurationError, PeersProtocolError
from hybridkv.peers.ranges import Ranges
from hybridkv.peers.transport.contract import (
    Region,
    RemoteId,
    TransferDone,
    TransferFailed,
    TransferFailureReason,
    TransferId,
    TransferState,
)
from hybridkv.peers.transport.memory import MAX_REGIONS, RegisteredMemory
from hybridkv.peers.transport.nixl_library import load_nixl, reason_of
from hybridkv.peers.transport.nixl_reads import HOST_DEVICE, KIND, NixlRead, NixlReads, NixlRemote
from hybridkv.peers.wire import WireError, pack_columns, unpack_columns

logger = logging.getLogger(__name__)

BACKEND = "UCX"
MAX_TRANSFERS = 256
"""Maximum unreleased reads."""
CAPABILITY_VERSION = 2
MAX_CAPABILITY_BYTES = 8 << 20


class NixlTransport:
    """`Transport` of one NIXL agent. `agent_name` must be new for each start: NIXL rejects a known name."""

    def __init__(
        self, agent_name: str, max_transfers: int = MAX_TRANSFERS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_transfers = max_transfers
        self._clock = clock
        api = load_nixl()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        self._agent_name = agent_name
        self._agent = api.nixl_agent(agent_name, config)
        if BACKEND not in self._agent.backends:
            raise PeersConfigurationError("nixl", f"one with {BACKEND}", sorted(self._agent.backends))
        # Guards every call of the agent: an agent without its own threads does not lock.
        self._lock = threading.RLock()
        self._handles: dict[int, Any] = {}
        self._remote_numbers = itertools.count(1)
        self._transfer_numbers = itertools.count(1)
        self._remotes: dict[RemoteId, NixlRemote] = {}
        self._reads = NixlReads(self._agent, clock)
        self._is_closed = False

    def register(self, regions: Sequence[Region]) -> bytes:
        self._demand_open("register")
        with self._lock:
            memory = self._reads.memory.with_regions(regions)
            first = len(self._reads.memory.regions)
            for number, region in enumerate(regions, first):
                row = np.array([[region.address, region.num_bytes, HOST_DEVICE]], dtype=np.uint64)
                try:
                    self._handles[number] = self._agent.register_memory(row, KIND)
                except Exception as error:
                    for taken in range(first, number):
                        self._agent.deregister_memory(self._handles.pop(taken))
                    raise PeersProtocolError(f"register: region {number}: {error}") from error
            self._reads.memory = memory
            return encode_capability(self._agent_name, self._agent.get_agent_metadata(), memory)

    def deregister(self, regions: Sequence[int]) -> None:
        """Removes regions. On some fabrics, a peer that attached before can read the memory while it is mapped."""
        self._demand_open("deregister")
        with self._lock:
            self._reads.memory = self._reads.memory.without(regions)
            for number in regions:
                self._agent.deregister_memory(self._handles.pop(number))

    def attach(self, capability: bytes) -> RemoteId | TransferFailed:
        self._demand_open("attach")
        decoded = decode_capability(capability)
        if isinstance(decoded, str):
            return TransferFailed(TransferFailureReason.REFUSED, decoded)
        agent, metadata, memory = decoded
        if agent == self._agent_name:
            return TransferFailed(TransferFailureReason.REFUSED, "this side's own capability")
        with self._lock:
            try:
                added = self._agent.add_remote_agent(metadata)
            except Exception as error:
                return TransferFailed(reason_of(error), f"attach: {error}")
            # The metadata also contains an agent name, which may be any bytes.
            name = added.decode(errors="replace") if isinstance(added, bytes) else added
            if name != agent:
                self._reads.forget_agent(added)
                return TransferFailed(TransferFailureReason.REFUSED, f"the metadata is of another agent, {name!r}")
            number = RemoteId(next(self._remote_numbers))
            known = self._remotes[number] = NixlRemote(agent, memory)
            self._reads.attach(known)
            return number

    def detach(self, remote: RemoteId) -> None:
        with self._lock:
            known = self._remotes.pop(remote, None)
            if known is not None:
                self._reads.give_up(known, TransferFailureReason.CLOSED, "the peer was detached")

    def is_attached(self, remote: RemoteId) -> bool:
        with self._lock:
            known = self._remotes.get(remote)
            return known is not None and known.is_attached

    def read(self, remote: RemoteId, ranges: Ranges, timeout_s: float) -> TransferId:
        self._demand_open("read")
        with self._lock:
            number = TransferId(next(self._transfer_numbers))
            now_s = self._clock()
            known = self._remotes.get(remote)
            read = NixlRead(known or NixlRemote("", RegisteredMemory()), now_s, now_s + timeout_s)
            is_full = len(self._reads) >= self._max_transfers
            self._reads.add(number, read)
            bounds_error = self._reads.memory.bounds_error(
                "local", ranges.local_regions, ranges.local_offsets, ranges.num_bytes
            )
            if is_full:
                read.fail(TransferFailureReason.BUSY, f"{self._max_transfers} reads are not released", now_s)
            elif known is None or not known.is_attached:
                read.fail(TransferFailureReason.CLOSED, "the peer is not attached", now_s)
            elif bounds_error := bounds_error or known.memory.bounds_error(
                "remote", ranges.remote_regions, ranges.remote_offsets, ranges.num_bytes
            ):
                read.fail(TransferFailureReason.REFUSED, bounds_error, now_s)
            elif not len(ranges):
                read.state = TransferDone(0, 0, 0.0)
            else:
                self._reads.begin(read, ranges)
            return number

    def poll(self, transfer: TransferId) -> TransferState:
        with self._lock:
            read = self._known(transfer)
            self._reads.advance(read)
            return read.state

    def cancel(self, transfer: TransferId) -> None:
        with self._lock:
            self._known(transfer).fail(TransferFailureReason.CANCELLED, "", self._clock())

    def release(self, transfer: TransferId) -> bool:
        with self._lock:
            return self._reads.get(transfer) is None or self._reads.release(transfer)

    def wait(self, timeout_s: float) -> None:
        until_s = self._clock() + timeout_s
        pause_s = 0.0
        while True:
            with self._lock:
                before = self._reads.num_waiting()
                self.progress()
                after = self._reads.num_waiting()
            left_s = until_s - self._clock()
            if after < before or left_s <= 0:
                return
            # The first pause is zero, so that a nearly finished read ends without delay.
            time.sleep(min(pause_s, left_s))
            pause_s = min(0.001, pause_s + (0.00001 if before else 0.0005))

    def progress(self) -> None:
        with self._lock:
            if self._agent is None:
                return
            self._reads.advance_all()
            try:
                # Progresses messages of peers that read from this side. Reads of this library send no notifications.
                self._agent.get_new_notifs()
            except Exception:
                logger.debug("NIXL could not make progress", exc_info=True)

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        with self._lock:
            if self._agent is None:
                return True
            until_s = self._clock() + timeout_s
            self._reads.fail_all(TransferFailureReason.CLOSED, "the transport was closed")
            while not self._reads.finish_posts() and self._clock() < until_s - timeout_s / 2:
                time.sleep(0.001)
            for remote in list(self._remotes):
                self.detach(remote)
            while not self._reads.finish_posts() and self._clock() < until_s:
                time.sleep(0.001)
            if not self._reads.finish_posts():
                return False
            for handle in self._handles.values():
                self._reads.quietly(functools.partial(self._agent.deregister_memory, handle))
            self._handles.clear()
            self._agent = None
            return True

    def _known(self, number: TransferId) -> NixlRead:
        known = self._reads.get(number)
        if known is None:
            raise PeersProtocolError(f"there is no transfer {number}, or it was released")
        return known

    def _demand_open(self, call: str) -> None:
        if self._is_closed:
            raise PeersProtocolError(f"{call}: called after close")


# Capabilities. Decoding any bytes gives a capability or an error text.


class _Capability(msgspec.Struct, frozen=True, array_like=True):
    version: int
    agent: str
    metadata: bytes
    regions: bytes
    """Two columns: address, num_bytes (0 for a deregistered region)."""


def encode_capability(agent: str, metadata: bytes, memory: RegisteredMemory) -> bytes:
    """Encodes a capability. `metadata` comes from NIXL and lets its holder read this memory."""
    regions = pack_columns((memory.addresses, memory.num_bytes))
    return msgspec.msgpack.encode(_Capability(CAPABILITY_VERSION, agent, metadata, regions))


def decode_capability(data: bytes) -> tuple[str, bytes, RegisteredMemory] | str:
    """Decodes a capability: (agent, metadata, regions), or an error text if the capability is invalid."""
    if len(data) > MAX_CAPABILITY_BYTES:
        return f"a capability of {len(data)} bytes"
    try:
        capability = msgspec.msgpack.decode(data, type=_Capability)
        if capability.version != CAPABILITY_VERSION:
            return f"a capability of version {capability.version}; this side supports {CAPABILITY_VERSION}"
        columns = unpack_columns(capability.regions, 2, MAX_REGIONS)
        rows = [Region(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        RegisteredMemory().with_regions([row for row in rows if row.num_bytes])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        return f"invalid capability: {type(error).__name__}"
    except (WireError, PeersProtocolError) as error:
        return f"invalid capability: {error}"
    memory = RegisteredMemory(tuple(row if row.num_bytes else None for row in rows))
    return capability.agent, capability.metadata, memory
