"""`Transport` over NIXL: reads that need no processor of the other side where the fabric allows it.

One agent, without its progress thread, which would keep a core busy; reads go on in `poll`, `wait` and `progress`, on
the caller's thread. A post may block until its bytes are there (from memory of the same host it does), so a read is
posted in pieces.

A read that fails is over for its owner at once, but its memory only when NIXL says that each of its posts has ended: an
RDMA read cannot be taken back. Where one does not end, the peer is given up, which ends all that was posted to it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from hybridkv.peers.errors import PeersConfigurationError, PeersProtocolError
from hybridkv.peers.ranges import Int64Array, Ranges
from hybridkv.peers.transport.contract import (
    PENDING,
    Done,
    Failed,
    FailureReason,
    Region,
    RemoteId,
    TransferId,
    TransferState,
)
from hybridkv.peers.transport.memory import MAX_REGIONS, RegisteredMemory
from hybridkv.peers.transport.nixl_library import load_nixl, reason_of
from hybridkv.peers.transport.nixl_lists import HOST_DEVICE, UnitTable, is_on_units, posts_of
from hybridkv.peers.wire import WireError, pack_columns, unpack_columns

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MAX_CAPABILITY_BYTES = 8 << 20
LOCAL = "NIXL_INIT_AGENT"
KIND = "DRAM"


class NixlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`PeersConfigurationError` for a value that cannot work."""

    backend: str = "UCX"
    has_progress_thread: bool = False
    """It keeps a core busy. Over plain TCP a peer is read as quickly as it makes progress, and this is how."""
    post_bytes: int = 8 << 20
    """Posted at once: what a call may block for."""
    max_posts: int = 4
    """Of one read, where posts do not block."""
    max_transfers: int = 256
    """Not released, at a time."""
    abandon_s: float = 2.0
    """What was to be cancelled, and has not ended after so long, costs the connection to its peer."""

    def __post_init__(self) -> None:
        for name in ("post_bytes", "max_posts", "max_transfers"):
            if getattr(self, name) < 1:
                raise PeersConfigurationError(name, "a number >= 1", getattr(self, name))
        if not 0 < self.abandon_s < float("inf"):
            raise PeersConfigurationError("abandon_s", "a number > 0", self.abandon_s)


class _Capability(msgspec.Struct, frozen=True, array_like=True):
    version: int
    agent: str
    metadata: bytes
    regions: bytes
    """Three columns: address, num_bytes (0 of one that is no more), unit_bytes."""


class _Remote:
    def __init__(self, agent: str, memory: RegisteredMemory) -> None:
        self.agent = agent
        self.memory = memory
        self.units = UnitTable.of(memory)
        self.dlist: Any = None
        self.is_attached = True


class _Read:
    """One transfer. `failure` is set once it cannot succeed, `handles` are the posts that have not ended."""

    def __init__(self, remote: _Remote, began_s: float, deadline_s: float) -> None:
        self.remote = remote
        self.began_s = began_s
        self.deadline_s = deadline_s
        self.failed_s = 0.0
        self.posts: deque[Ranges] = deque()
        self.handles: list[Any] = []
        self.num_bytes = 0
        self.num_descriptors = 0
        self.state: TransferState = PENDING

    def fail(self, reason: FailureReason, detail: str, now_s: float) -> None:
        if self.state is PENDING:
            self.state = Failed(reason, detail)
            self.failed_s = now_s
            self.posts.clear()


class NixlTransport:
    """`agent_name`: fresh for each process and start, since NIXL takes no second one of a name that it knows."""

    name = "nixl"

    def __init__(
        self, agent_name: str, options: NixlOptions | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options or NixlOptions()
        self._clock = clock
        api = load_nixl()
        config = api.nixl_agent_config(
            enable_prog_thread=self._options.has_progress_thread, backends=[self._options.backend]
        )
        self._agent_name = agent_name
        self._agent = api.nixl_agent(agent_name, config)
        if self._options.backend not in self._agent.backends:
            raise PeersConfigurationError("backend", "one that this NIXL has", self._options.backend)
        # Every call of the agent is made under it: an agent without its own threads does not lock.
        self._lock = threading.RLock()
        self._memory = RegisteredMemory()
        self._handles: dict[int, Any] = {}
        self._units = UnitTable.of(self._memory)
        self._dlist: Any = None
        self._dlist_memory: RegisteredMemory | None = None
        self._remote_numbers = itertools.count(1)
        self._transfer_numbers = itertools.count(1)
        self._remotes: dict[RemoteId, _Remote] = {}
        self._reads: dict[TransferId, _Read] = {}
        self._is_closed = False

    def register(self, regions: Sequence[Region]) -> bytes:
        self._demand_open("register")
        with self._lock:
            memory = self._memory.with_regions(regions)
            first = len(self._memory.regions)
            for number, region in enumerate(regions, first):
                row = np.array([[region.address, region.num_bytes, HOST_DEVICE]], dtype=np.uint64)
                try:
                    self._handles[number] = self._agent.register_memory(row, KIND)
                except Exception as error:
                    for taken in range(first, number):
                        self._agent.deregister_memory(self._handles.pop(taken))
                    raise PeersProtocolError(f"register: region {number}: {error}") from error
            self._memory = memory
            return self._capability()

    def deregister(self, regions: Sequence[int]) -> None:
        """A peer that attached before may still read this memory while it is mapped: not every fabric looks twice."""
        self._demand_open("deregister")
        with self._lock:
            self._memory = self._memory.without(regions)
            self._drop_local_list()
            for number in regions:
                self._agent.deregister_memory(self._handles.pop(number))

    def attach(self, capability: bytes) -> RemoteId | Failed:
        self._demand_open("attach")
        decoded = _decode_capability(capability)
        if isinstance(decoded, str):
            return Failed(FailureReason.REFUSED, decoded)
        agent, metadata, memory = decoded
        if agent == self._agent_name:
            return Failed(FailureReason.REFUSED, "this side's own capability")
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:
                return Failed(reason_of(error), f"attach: {error}")
            name = name.decode() if isinstance(name, bytes) else name
            if name != agent:
                self._forget_agent(name)
                return Failed(FailureReason.REFUSED, f"the metadata is of another agent, {name!r}")
            number = RemoteId(next(self._remote_numbers))
            self._remotes[number] = _Remote(agent, memory)
            return number

    def detach(self, remote: RemoteId) -> None:
        with self._lock:
            known = self._remotes.pop(remote, None)
            if known is not None:
                self._give_up(known, FailureReason.CLOSED, "the peer was detached")

    def read(self, remote: RemoteId, ranges: Ranges, timeout_s: float) -> TransferId:
        self._demand_open("read")
        with self._lock:
            number = TransferId(next(self._transfer_numbers))
            now_s = self._clock()
            known = self._remotes.get(remote)
            read = _Read(known or _Remote("", RegisteredMemory()), now_s, now_s + timeout_s)
            is_full = len(self._reads) >= self._options.max_transfers
            self._reads[number] = read
            why_not = self._memory.why_not("local", ranges.local_regions, ranges.local_offsets, ranges.num_bytes)
            if is_full:
                read.fail(FailureReason.BUSY, f"{self._options.max_transfers} reads are not released", now_s)
            elif known is None or not known.is_attached:
                read.fail(FailureReason.CLOSED, "the peer is not attached", now_s)
            elif why_not := why_not or known.memory.why_not(
                "remote", ranges.remote_regions, ranges.remote_offsets, ranges.num_bytes
            ):
                read.fail(FailureReason.REFUSED, why_not, now_s)
            elif not len(ranges):
                read.state = Done(0, 0, 0.0)
            else:
                read.posts.extend(posts_of(ranges, self._options.post_bytes))
            return number

    def poll(self, transfer: TransferId) -> TransferState:
        with self._lock:
            read = self._reads.get(transfer)
            if read is None:
                raise PeersProtocolError(f"there is no transfer {transfer}, or it was released")
            self._advance(read)
            return read.state

    def cancel(self, transfer: TransferId) -> None:
        with self._lock:
            read = self._reads.get(transfer)
            if read is None:
                raise PeersProtocolError(f"there is no transfer {transfer}, or it was released")
            read.fail(FailureReason.CANCELLED, "", self._clock())

    def release(self, transfer: TransferId) -> bool:
        with self._lock:
            read = self._reads.get(transfer)
            if read is None:
                return True
            if read.handles or read.state is PENDING:
                read.fail(FailureReason.CANCELLED, "", self._clock())
                self._advance(read)
            if read.handles:
                return False
            del self._reads[transfer]
            return True

    def wait(self, timeout_s: float) -> None:
        until_s = self._clock() + timeout_s
        pause_s = 0.0
        while True:
            with self._lock:
                running = [read for read in self._reads.values() if read.state is PENDING]
                before = sum(len(read.posts) + len(read.handles) for read in running)
                self.progress()
                after = sum(len(read.posts) + len(read.handles) for read in running)
            left_s = until_s - self._clock()
            if after < before or left_s <= 0:
                return
            # At first without a pause: what is near its end is waited for where it ends.
            time.sleep(min(pause_s, left_s))
            pause_s = min(0.001, pause_s + (0.00001 if running else 0.0005))

    def progress(self) -> None:
        with self._lock:
            if self._agent is None:
                return
            for read in self._reads.values():
                if read.state is PENDING or read.handles:
                    self._advance(read)
            try:
                # What moves messages of peers to whom this side is the target. None of ours carries a notification.
                self._agent.get_new_notifs()
            except Exception:
                logger.debug("NIXL could not make progress", exc_info=True)

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        with self._lock:
            if self._agent is None:
                return True
            until_s = self._clock() + timeout_s
            for read in self._reads.values():
                read.fail(FailureReason.CLOSED, "the transport was closed", self._clock())
            while not self._is_quiet() and self._clock() < until_s - timeout_s / 2:
                time.sleep(0.001)
            for remote in list(self._remotes):
                self.detach(remote)
            while not self._is_quiet() and self._clock() < until_s:
                time.sleep(0.001)
            if not self._is_quiet():
                return False
            self._drop_local_list()
            for handle in self._handles.values():
                self._quietly(functools.partial(self._agent.deregister_memory, handle))
            self._handles.clear()
            self._agent = None
            return True

    def _is_quiet(self) -> bool:
        for read in self._reads.values():
            if read.handles:
                self._advance(read)
        return not any(read.handles for read in self._reads.values())

    def _advance(self, read: _Read) -> None:
        """Look after what was posted, and post the next. Errors become the state."""
        now_s = self._clock()
        for handle in list(read.handles):
            self._look_at(read, handle, now_s)
        if read.state is PENDING and now_s >= read.deadline_s:
            read.fail(FailureReason.TIMEOUT, "", now_s)
        if read.state is not PENDING:
            if read.handles and read.remote.is_attached and now_s - read.failed_s > self._options.abandon_s:
                self._give_up(read.remote, FailureReason.GONE, "a read of this peer could not be ended otherwise")
            return
        while read.posts and len(read.handles) < self._options.max_posts:
            if self._post(read, read.posts.popleft(), now_s) or read.state is not PENDING:
                break
        if read.state is PENDING and not read.posts and not read.handles:
            read.state = Done(read.num_bytes, read.num_descriptors, self._clock() - read.began_s)

    def _look_at(self, read: _Read, handle: Any, now_s: float) -> None:
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            read.fail(reason_of(error), str(error), now_s)
            state = "ERR"
        if state == "PROC":
            return
        if state != "DONE":
            read.fail(FailureReason.BROKEN, f"NIXL says {state}", now_s)
        self._end(read, handle)

    def _post(self, read: _Read, ranges: Ranges, now_s: float) -> bool:
        """Whether it was over when it returned, so that the next call had better be the caller's."""
        handle = None
        try:
            handle = self._make(read, ranges)
            state = self._agent.transfer(handle)
        except Exception as error:
            read.fail(reason_of(error), str(error), now_s)
            state = "ERR"
        read.num_bytes += ranges.total_bytes
        read.num_descriptors += len(ranges)
        if handle is not None:
            read.handles.append(handle)
            if state != "PROC":
                self._end(read, handle)
        if state not in ("DONE", "PROC"):
            read.fail(FailureReason.BROKEN, f"NIXL says {state}", now_s)
        return bool(state == "DONE")

    def _end(self, read: _Read, handle: Any) -> None:
        """A post that has ended is given back; one that NIXL keeps stays in the list, and its memory with it."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            read.fail(reason_of(error), str(error), self._clock())
            return
        read.handles.remove(handle)

    def _make(self, read: _Read, ranges: Ranges) -> Any:
        remote = read.remote
        self._prepare_local()
        if is_on_units(self._units, remote.units, ranges):
            if remote.dlist is None:
                remote.dlist = self._agent.prep_xfer_dlist(remote.agent, remote.units.rows, KIND)
            ours = self._units.numbers(ranges.local_regions, ranges.local_offsets, ranges.num_bytes)
            theirs = remote.units.numbers(ranges.remote_regions, ranges.remote_offsets, ranges.num_bytes)
            return self._agent.make_prepped_xfer("READ", self._dlist, ours, remote.dlist, theirs)
        local = _descriptors(self._memory, ranges.local_regions, ranges.local_offsets, ranges.num_bytes)
        far = _descriptors(remote.memory, ranges.remote_regions, ranges.remote_offsets, ranges.num_bytes)
        lists = [self._agent.get_xfer_descs(each, KIND) for each in (local, far)]
        return self._agent.initialize_xfer("READ", lists[0], lists[1], remote.agent)

    def _prepare_local(self) -> None:
        if self._dlist_memory is self._memory:
            return
        self._drop_local_list()
        self._units = UnitTable.of(self._memory)
        if len(self._units):
            self._dlist = self._agent.prep_xfer_dlist(LOCAL, self._units.rows, KIND)
        self._dlist_memory = self._memory

    def _drop_local_list(self) -> None:
        if self._dlist is not None:
            self._quietly(self._dlist.release)
        self._dlist = None
        self._dlist_memory = None

    def _give_up(self, remote: _Remote, reason: FailureReason, detail: str) -> None:
        """Close the way to a peer: NIXL ends all that was posted to it."""
        if not remote.is_attached:
            return
        remote.is_attached = False
        now_s = self._clock()
        for read in self._reads.values():
            if read.remote is remote:
                read.fail(reason, detail, now_s)
        if remote.dlist is not None:
            self._quietly(remote.dlist.release)
        self._forget_agent(remote.agent)

    def _forget_agent(self, agent: str) -> None:
        self._quietly(lambda: self._agent.remove_remote_agent(agent))

    def _quietly(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            logger.debug("NIXL refused to clean up: %s", error)

    def _capability(self) -> bytes:
        memory = self._memory
        regions = pack_columns((memory.addresses, memory.num_bytes, memory.units))
        metadata = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(_Capability(FORMAT_VERSION, self._agent_name, metadata, regions))

    def _demand_open(self, call: str) -> None:
        if self._is_closed:
            raise PeersProtocolError(f"{call}: called after close")


def _descriptors(memory: RegisteredMemory, regions: Int64Array, offsets: Int64Array, num_bytes: Int64Array) -> Any:
    devices = np.full(len(num_bytes), HOST_DEVICE, dtype=np.int64)
    return np.stack([memory.places(regions, offsets), num_bytes, devices], axis=1).astype(np.uint64)


def _decode_capability(data: bytes) -> tuple[str, bytes, RegisteredMemory] | str:
    """(agent, metadata, regions), or why it is none."""
    if len(data) > MAX_CAPABILITY_BYTES:
        return f"a capability of {len(data)} bytes"
    try:
        capability = msgspec.msgpack.decode(data, type=_Capability)
        if capability.version != FORMAT_VERSION:
            return f"a capability of version {capability.version}; this side knows {FORMAT_VERSION}"
        columns = unpack_columns(capability.regions, 3, MAX_REGIONS)
        rows = [Region(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        RegisteredMemory().with_regions([row for row in rows if row.num_bytes])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        return f"no capability of this transport: {type(error).__name__}"
    except (WireError, PeersProtocolError) as error:
        return f"no capability of this transport: {error}"
    memory = RegisteredMemory(tuple(row if row.num_bytes else None for row in rows))
    return capability.agent, capability.metadata, memory
