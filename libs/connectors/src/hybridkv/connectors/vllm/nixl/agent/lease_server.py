"""Producer's side of the agent: serves descriptions, leases and digests to consumers.

The lease table lists the valid leases. A lease is removed from the table before the engine can free its blocks. So a
consumer that finds the lease in the table after a read has read the right blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.connectors.errors import printable
from hybridkv.connectors.vllm.nixl.agent.connections import ControlChannel
from hybridkv.connectors.vllm.nixl.memory.rank_memory import DigestThread, NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import OfferedRequest, OpenedLease
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.peers.cells import Side
from hybridkv.peers.comparison import compare
from hybridkv.peers.control import LinkId
from hybridkv.peers.description import Description, decode, encode
from hybridkv.peers.digests import DigestRequest, digest_runs
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.leases import NO_NONCE, Ended, Lease, LeaseBounds, LeaseEnd, Leases
from hybridkv.peers.pairing import Exchange
from hybridkv.peers.tables import BlockTables
from hybridkv.peers.wire import (
    Accepted,
    CloseReason,
    Describe,
    Digests,
    LeaseDone,
    Message,
    Refused,
    Renew,
    Renewed,
    RequestDigests,
    unpack_columns,
)
from hybridkv.tiers.threads import Outcome

logger = logging.getLogger("vllm.hybridkv.nixl")

MAX_SPANS = 65536
MAX_DIGEST_REQUESTS, MAX_DIGEST_REQUESTS_PER_LINK = 1024, 256
"""Limits of waiting requests for digests: of all consumers, and of one connection. Further requests get `BUSY`."""
MAX_LOG_CHARS = 200
"""Limit of the characters of a peer's text in a log line."""
ENDED, BUSY, DIGESTS_FAILED = "the lease has ended", "busy", "digests could not be taken"
"""Reasons to send no digests, in addition to errors in a request."""
MAX_LEASE_LENGTHS = 20
"""Limit of the time that a lease lasts with renewals, in multiples of `lease_s`."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the lease server.

    Args:
        description: description of this rank.
        capability: transport capability with which consumers read this rank's memory.
        max_leases: maximum leases at the same time.
        lease_s: duration of a lease without a renewal.
        clock: returns seconds.
    """

    description: Description
    capability: bytes
    max_leases: int
    lease_s: float
    clock: Callable[[], float]


@dataclass(slots=True)
class _PendingDigests:
    """Consumer's request for digests."""

    link: LinkId
    number: int
    lease: Lease
    exchange: Exchange
    request: DigestRequest
    was_queue_full: bool = False
    """The digest thread's queue was full at the last attempt."""
    digests: Outcome[list[bytes]] | None = None


class LeaseServer:
    """Server for consumers. One thread calls all methods except `publish`.

    Args:
        options: options of the server.
        memory: memory of this rank.
        control: sends messages to consumers.
        metrics: counters of this half.
    """

    def __init__(
        self, options: ServerOptions, memory: NixlRankMemory, control: ControlChannel, metrics: NixlMetrics
    ) -> None:
        self._options = options
        self._memory = memory
        self._control = control
        self._metrics = metrics
        self._encoded = encode(options.description)
        bounds = LeaseBounds(options.lease_s, options.lease_s, MAX_LEASE_LENGTHS * options.lease_s)
        self._leases = Leases(options.max_leases, bounds, memory.write_slot)
        self._opened: dict[Lease, str] = {}
        """Requests that run, or that have finished but are not yet offered, by lease. Not those in
        `_held_before_plan` and `_ended_before_plan`."""
        self._held_before_plan: set[str] = set()
        """Finished requests with a lease that a consumer used before `offer`."""
        self._ended_before_plan: set[str] = set()
        """Finished requests with a lease that a consumer used and that ended before `offer`."""
        self._digest_thread = DigestThread(memory, control.wake)
        self._tables: dict[str, BlockTables] = {}
        """Blocks of offered requests."""
        self._exchanges: dict[LinkId, Exchange | None] = {}
        """Agreement by connection; None until both descriptions are known and compatible."""
        self._described_links: set[LinkId] = set()
        self._pending_digests: list[_PendingDigests] = []
        self._unread_links: set[LinkId] = set()
        """Connections of consumers that may read, but have not yet sent `LeaseDone`."""
        self.released: set[str] = set()
        """Requests with ended leases. The agent takes them, and the engine frees their blocks."""

    @property
    def is_busy(self) -> bool:
        """True if the agent must poll often: for digests, or for a consumer's first read.

        For the first read from a peer, a transport may need calls of `progress` on both sides.
        """
        return bool(self._pending_digests or self._unread_links)

    # Calls of the engine.

    def publish(self, lease: Lease) -> None:
        """Writes a lease into the table, before `open`. The engine's thread calls this method. This is safe, because no
        other thread writes into a slot between two leases."""
        if 0 <= lease.slot < self._options.max_leases:
            self._memory.write_slot(lease.slot, lease.nonce)

    def open(self, opened: OpenedLease) -> None:
        """Opens the lease of a request that may be handed over."""
        try:
            self._leases.open(opened.request_id, opened.lease)
        except Exception:
            # Otherwise the lease would stay in the table forever.
            self.publish(Lease(opened.lease.slot, NO_NONCE))
            raise
        self._opened[opened.lease] = opened.request_id

    def drop(self, request_id: str) -> None:
        """Ends the lease of a request that is not handed over. No consumer has the lease."""
        self._forget(request_id)
        self._leases.abort(request_id)

    def offer(self, offered: OfferedRequest) -> None:
        """Offers a finished request to consumers. A consumer may already have used the lease, or have ended it."""
        request_id = offered.request_id
        self._forget(request_id)
        self._tables[request_id] = offered.tables
        if request_id in self._ended_before_plan:
            self._ended_before_plan.discard(request_id)
            self._release(request_id)
        elif request_id in self._held_before_plan:
            self._held_before_plan.discard(request_id)
        elif not self._leases.hold(request_id, self._options.clock()):
            # Without a lease no consumer can read these blocks or send `LeaseDone`.
            self._metrics.count_lease("dropped")
            self._release(request_id)

    def _forget(self, request_id: str) -> None:
        self._opened = {lease: name for lease, name in self._opened.items() if name != request_id}

    # Messages of consumers.

    def opened(self, link: LinkId) -> None:
        """Handles a new connection: the consumer has proven the secret."""
        self._exchanges[link] = None

    def closed(self, link: LinkId) -> None:
        """Handles the end of a connection. Leases continue, because the consumer may reconnect."""
        self._exchanges.pop(link, None)
        self._unread_links.discard(link)
        self._described_links.discard(link)
        self._pending_digests = [pending for pending in self._pending_digests if pending.link != link]

    def received(self, link: LinkId, message: Message) -> None:
        """Handles a message of a consumer. An unexpected message ends its connection."""
        match message:
            case Describe():
                self._on_describe(link, message)
            case Renew():
                holds = self._leased_request(message.lease) is not None
                holds = holds and self._leases.renew(message.lease, self._options.clock())
                self._control.send(link, Renewed(message.lease, self._options.lease_s if holds else 0.0))
            case LeaseDone():
                self._unread_links.discard(link)
                self._leased_request(message.lease)
                ended = self._leases.done(message.lease, message.reader, message.num_readers)
                if ended is not None:
                    self._end(ended)
            case RequestDigests():
                self._on_request_digests(link, message)
            case _:
                self._control.end(link, CloseReason.UNEXPECTED)

    def _on_describe(self, link: LinkId, message: Describe) -> None:
        if link in self._described_links:
            self._control.end(link, CloseReason.UNEXPECTED)
            return
        self._described_links.add(link)
        theirs = decode(message.description)
        # For `compare`, "ours" is the side that reads: the consumer.
        agreement = compare(theirs, self._options.description) if isinstance(theirs, Description) else theirs
        if isinstance(agreement, Incompatibility):
            field, theirs_is, ours_is = agreement.field, agreement.ours, agreement.theirs
            texts = [each[:MAX_LOG_CHARS] for each in (field, theirs_is, ours_is)]
            logger.warning("a consumer is incompatible: %r: theirs is %r, ours is %r", *texts)
            self._control.send(link, Refused(field[:4096], ours_is[:4096], theirs_is[:4096], agreement.hint[:4096]))
            return
        self._exchanges[link] = Exchange(agreement)
        self._unread_links.add(link)
        self._control.send(link, Describe(self._encoded, self._options.capability))
        self._control.send(link, Accepted())

    def _leased_request(self, lease: Lease) -> str | None:
        """Request with this lease; None if the lease has ended.

        A consumer has the nonce only after the request has finished. If the scheduler's plan that offers the request
        has not arrived yet, the lease time starts now. The scheduler holds the blocks until this rank releases them.
        """
        now_s = self._options.clock()
        request_id = self._opened.pop(lease, None)
        if request_id is not None:
            self._leases.hold(request_id, now_s)
            self._held_before_plan.add(request_id)
        return self._leases.holds(lease, now_s)

    def _on_request_digests(self, link: LinkId, message: RequestDigests) -> None:
        exchange = self._exchanges.get(link)
        if exchange is None:
            self._control.end(link, CloseReason.UNEXPECTED)
        elif (
            len(self._pending_digests) >= MAX_DIGEST_REQUESTS or self._num_pending(link) >= MAX_DIGEST_REQUESTS_PER_LINK
        ):
            self._control.send(link, Digests(message.request, b"", BUSY))
        else:
            columns = unpack_columns(message.spans, 3, MAX_SPANS)
            request = DigestRequest.of(message.num_tokens, columns)
            self._pending_digests.append(_PendingDigests(link, message.request, message.lease, exchange, request))

    def _num_pending(self, link: LinkId) -> int:
        return sum(pending.link == link for pending in self._pending_digests)

    def _answer(self, pending: _PendingDigests) -> Digests | None:
        """Reply to a request for digests. None if the digests or the plan that offers the blocks are not there yet."""
        number, request_id = pending.number, self._leased_request(pending.lease)
        if request_id is None:
            return Digests(number, b"", ENDED)
        return self._begin_digests(pending, request_id) if pending.digests is None else self._digests_of(pending)

    def _begin_digests(self, pending: _PendingDigests, request_id: str) -> Digests | None:
        tables = self._tables.get(request_id)
        if tables is None:
            return None
        if pending.was_queue_full and self._digest_thread.is_full:
            # Do not compute the runs before the queue has room: runs of all waiting requests would take much memory.
            return None
        runs = digest_runs(pending.exchange, Side.THEIRS, tables, pending.request)
        if isinstance(runs, Incompatibility):
            return Digests(pending.number, b"", str(runs)[:4096])
        pending.digests = self._digest_thread.start_digests(runs)
        # If the digest thread's queue is full, the request waits, at most until its lease ends.
        pending.was_queue_full = pending.digests is None
        return self._digests_of(pending)

    def _digests_of(self, pending: _PendingDigests) -> Digests | None:
        number, taken = pending.number, pending.digests
        if taken is None or not taken.is_done:
            return None
        if taken.error is not None or taken.value is None:
            logger.warning("%s: %s", DIGESTS_FAILED, taken.error)
            return Digests(number, b"", DIGESTS_FAILED)
        return Digests(number, b"".join(taken.value))

    def tick(self) -> None:
        """Sends digests that are ready and ends expired leases."""
        waiting = []
        for pending in self._pending_digests:
            try:
                answer = self._answer(pending)
            except Exception:  # a bug fails only its own request
                logger.exception("bug in a request for digests")
                answer = Digests(pending.number, b"", DIGESTS_FAILED)
            if answer is None:
                waiting.append(pending)
            else:
                self._control.send(pending.link, answer)
        self._pending_digests = waiting
        for ended in self._leases.expire(self._options.clock()):
            logger.warning("no consumer read request %s in time; its blocks are free", printable(ended.request_id))
            self._end(ended)

    def close(self) -> None:
        """Stops digests and ends all leases."""
        self._digest_thread.close()
        self._leases.close()

    def wait_until_closed(self, timeout_s: float) -> bool:
        """Waits for the digest thread. Returns False if it still reads the engine's memory after `timeout_s`."""
        return self._digest_thread.wait_until_ended(timeout_s)

    def _end(self, ended: Ended) -> None:
        self._metrics.count_lease("expired" if ended.why is LeaseEnd.EXPIRED else "done")
        if ended.request_id in self._held_before_plan:
            self._held_before_plan.discard(ended.request_id)
            self._ended_before_plan.add(ended.request_id)
        else:
            self._release(ended.request_id)

    def _release(self, request_id: str) -> None:
        self._tables.pop(request_id, None)
        self.released.add(request_id)
