"""Reads in flight on one NIXL agent. Errors become states of reads.

A failed read ends for its owner at once. The read's memory stays in use until NIXL reports the end of each post of the
read, because an RDMA read cannot be recalled. If a post does not end, the peer is given up: this ends all posts to the
peer. A peer with a broken connection is given up too, because NIXL does not repair the connection.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridkv.peers.ranges import Int64Array, Ranges
from hybridkv.peers.transport.contract import (
    PENDING,
    TransferDone,
    TransferFailed,
    TransferFailureReason,
    TransferId,
    TransferState,
)
from hybridkv.peers.transport.memory import RegisteredMemory
from hybridkv.peers.transport.nixl_library import reason_of

logger = logging.getLogger(__name__)

KIND = "DRAM"
HOST_DEVICE = 0
"""Device id of host memory in NIXL."""
POST_BYTES = 8 << 20
"""Bytes per post, about; always less than twice as many. NIXL's call may block until the post is complete."""
MAX_POSTS = 4
"""Maximum posts in flight of one read, if posts do not block."""
ABANDON_S = 2.0
"""If a failed or cancelled read has not ended after this time, its peer is given up."""


class NixlRemote:
    def __init__(self, agent: str, memory: RegisteredMemory) -> None:
        self.agent = agent
        self.memory = memory
        self.is_attached = True


class NixlRead:
    """One read. `state` is `TransferFailed` once the read cannot succeed; `handles` are the unfinished posts."""

    def __init__(self, remote: NixlRemote, began_s: float, deadline_s: float) -> None:
        self.remote = remote
        self.began_s = began_s
        self.deadline_s = deadline_s
        self.failed_s = 0.0
        self.posts: deque[Ranges] = deque()
        self.handles: list[Any] = []
        self.post_error: TransferFailed | None = None
        """Error of NIXL in a post, also one after the read has failed or was cancelled. GONE replaces another."""
        self.num_bytes = 0
        self.num_descriptors = 0
        self.state: TransferState = PENDING

    def fail(self, reason: TransferFailureReason, detail: str, now_s: float) -> None:
        if self.state is PENDING:
            self.state = TransferFailed(reason, detail)
            self.failed_s = now_s
            self.posts.clear()

    def fail_post(self, error: TransferFailed, now_s: float) -> None:
        """Handles an error of NIXL in a post."""
        if self.post_error is None or error.reason is TransferFailureReason.GONE:
            self.post_error = error
        self.fail(error.reason, error.detail, now_s)


class NixlReads:
    """All unreleased reads of one agent. The owner holds its lock during each call."""

    def __init__(self, agent: Any, clock: Callable[[], float]) -> None:
        self._agent = agent
        self._clock = clock
        self._reads: dict[TransferId, NixlRead] = {}
        self._attached: list[NixlRemote] = []
        self.memory = RegisteredMemory()
        """Registered memory of this side. Each change replaces this value."""

    def __len__(self) -> int:
        return len(self._reads)

    def get(self, number: TransferId) -> NixlRead | None:
        return self._reads.get(number)

    def add(self, number: TransferId, read: NixlRead) -> None:
        self._reads[number] = read

    def attach(self, remote: NixlRemote) -> None:
        """Adds a peer that NIXL has added. An agent may be attached several times."""
        self._attached.append(remote)

    def begin(self, read: NixlRead, ranges: Ranges) -> None:
        """Queues the posts of a read; `advance` posts them. The ranges must be checked on both sides."""
        read.posts.extend(posts_of(ranges, POST_BYTES))

    def release(self, number: TransferId) -> bool:
        """Releases a read. Returns False if one of its posts has not ended; this call then cancels the read."""
        read = self._reads[number]
        if read.handles or read.state is PENDING:
            read.fail(TransferFailureReason.CANCELLED, "", self._clock())
            self.advance(read)
        if read.handles:
            return False
        del self._reads[number]
        return True

    def num_waiting(self) -> int:
        """Number of queued and unfinished posts of pending reads."""
        return sum(len(each.posts) + len(each.handles) for each in self._reads.values() if each.state is PENDING)

    def advance_all(self) -> None:
        for read in self._reads.values():
            if read.state is PENDING or read.handles:
                self.advance(read)

    def fail_all(self, reason: TransferFailureReason, detail: str) -> None:
        for read in self._reads.values():
            read.fail(reason, detail, self._clock())

    def finish_posts(self) -> bool:
        """Advances the posts in flight. Returns True if none is left."""
        for read in self._reads.values():
            if read.handles:
                self.advance(read)
        return not any(read.handles for read in self._reads.values())

    def advance(self, read: NixlRead) -> None:
        """Checks the posts of a read and posts the next ones. Errors become the state. May give up the peer, which
        fails the other reads of this peer."""
        now_s = self._clock()
        for handle in list(read.handles):
            self._check_post(read, handle, now_s)
        if read.state is PENDING and now_s >= read.deadline_s:
            read.fail(TransferFailureReason.TIMEOUT, "", now_s)
        while read.state is PENDING and read.posts and len(read.handles) < MAX_POSTS:
            if self._post(read, read.posts.popleft(), now_s):
                break
        if isinstance(read.state, TransferFailed):
            self._give_up_bad_peer(read, now_s)
        elif read.state is PENDING and not read.posts and not read.handles:
            read.state = TransferDone(read.num_bytes, read.num_descriptors, self._clock() - read.began_s)

    def _give_up_bad_peer(self, read: NixlRead, now_s: float) -> None:
        """Gives up the peer of a failed read if its connection is or may be broken, or if a post does not end.

        NIXL keeps a broken connection, and every later read would fail, although the peer may be alive. For the posts
        in flight when a connection breaks, NIXL may report another error than the loss of the peer. After such an
        error, the peer is given up if no read of it is pending. A pending read reports the loss itself. A failed or
        cancelled read does not: its posts may end without an error.
        """
        error = read.post_error
        if read.handles:
            if now_s - read.failed_s > ABANDON_S:
                self._give_up_agent(read.remote, "a read of this peer did not end after it was cancelled")
        elif error is not None and (
            error.reason is TransferFailureReason.GONE
            or (error.reason is TransferFailureReason.BROKEN and not self._has_pending_read(read.remote))
        ):
            self._give_up_agent(read.remote, error.detail)

    def _has_pending_read(self, remote: NixlRemote) -> bool:
        return any(read.remote.agent == remote.agent and read.state is PENDING for read in self._reads.values())

    def _give_up_agent(self, remote: NixlRemote, detail: str) -> None:
        """Gives up all attachments of a peer's agent: they share the connection."""
        if not remote.is_attached:
            return
        for each in [each for each in self._attached if each.agent == remote.agent]:
            self._leave(each, TransferFailureReason.GONE, detail)
        self.forget_agent(remote.agent)

    def _check_post(self, read: NixlRead, handle: Any, now_s: float) -> None:
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            read.fail_post(TransferFailed(reason_of(error), str(error)), now_s)
            state = "ERR"
        if state == "PROC":
            return
        if state != "DONE":
            read.fail_post(TransferFailed(TransferFailureReason.BROKEN, f"NIXL returned {state}"), now_s)
        self._end(read, handle)

    def _post(self, read: NixlRead, ranges: Ranges, now_s: float) -> bool:
        """Posts some ranges. Returns True if the post completed at once; then the caller defers the next post."""
        handle = None
        try:
            handle = self._make(read, ranges)
            state = self._agent.transfer(handle)
        except Exception as error:
            read.fail_post(TransferFailed(reason_of(error), str(error)), now_s)
            state = "ERR"
        read.num_bytes += ranges.total_bytes
        read.num_descriptors += len(ranges)
        if handle is not None:
            read.handles.append(handle)
            if state != "PROC":
                self._end(read, handle)
        if state not in ("DONE", "PROC"):
            read.fail_post(TransferFailed(TransferFailureReason.BROKEN, f"NIXL returned {state}"), now_s)
        return bool(state == "DONE")

    def _end(self, read: NixlRead, handle: Any) -> None:
        """Releases the handle of a finished post. If NIXL refuses, the handle stays and the memory stays in use."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            read.fail_post(TransferFailed(reason_of(error), str(error)), self._clock())
            return
        read.handles.remove(handle)

    def _make(self, read: NixlRead, ranges: Ranges) -> Any:
        remote = read.remote
        local = descriptors(self.memory, ranges.local_regions, ranges.local_offsets, ranges.num_bytes)
        source = descriptors(remote.memory, ranges.remote_regions, ranges.remote_offsets, ranges.num_bytes)
        lists = [self._agent.get_xfer_descs(each, KIND) for each in (local, source)]
        return self._agent.initialize_xfer("READ", lists[0], lists[1], remote.agent)

    def give_up(self, remote: NixlRemote, reason: TransferFailureReason, detail: str) -> None:
        """Gives up one attachment of a peer and closes the connection, so that NIXL ends all posts to the peer.

        NIXL has one connection per agent, even if the agent is attached several times. The connection stays open for
        the other attachments if no post of this attachment is in flight.
        """
        if not remote.is_attached:
            return
        same = [each for each in self._attached if each.agent == remote.agent]
        is_quiet = not any(read.handles for read in self._reads.values() if read.remote is remote)
        given_up = [remote] if is_quiet else same
        for each in given_up:
            self._leave(each, reason, detail)
        if len(given_up) == len(same):
            self.forget_agent(remote.agent)

    def _leave(self, remote: NixlRemote, reason: TransferFailureReason, detail: str) -> None:
        remote.is_attached = False
        self._attached.remove(remote)
        now_s = self._clock()
        for read in self._reads.values():
            if read.remote is remote:
                read.fail(reason, detail, now_s)

    def forget_agent(self, agent: str | bytes) -> None:
        self.quietly(lambda: self._agent.remove_remote_agent(agent))

    def quietly(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            logger.debug("NIXL refused to clean up: %s", error)


def descriptors(
    memory: RegisteredMemory, regions: Int64Array, offsets: Int64Array, num_bytes: Int64Array
) -> npt.NDArray[np.uint64]:
    """(address, bytes, device) of each range. The ranges must be checked.

    These lists are built for each post. Prepared lists, indexed by number, as in vLLM, made reads no faster in a test
    with 64 to 4096 blocks of 16 KiB.
    """
    devices = np.full(len(num_bytes), HOST_DEVICE, dtype=np.int64)
    return np.stack([memory.places(regions, offsets), num_bytes, devices], axis=1).astype(np.uint64)


def posts_of(ranges: Ranges, post_bytes: int) -> Iterator[Ranges]:
    """Splits a read into posts of about `post_bytes`, in order. Cuts ranges that are longer."""
    ranges = ranges.cut(post_bytes)
    begins = np.cumsum(ranges.num_bytes) - ranges.num_bytes
    share = begins // post_bytes
    bounds = [0, *(np.flatnonzero(share[1:] != share[:-1]) + 1).tolist(), len(ranges)]
    for first, last in itertools.pairwise(bounds):
        yield ranges.rows(first, last)
