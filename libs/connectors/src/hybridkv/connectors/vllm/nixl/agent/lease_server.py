"""A producer's side on one rank, in the words of one thread: who may read, for how long, and what the bytes were.

The table of leases says what holds. An entry is taken out before the engine hears that the blocks are free, so whoever
reads the entry behind the blocks knows whether they were still what they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.connectors.vllm.common.identity.background import Outcome
from hybridkv.connectors.vllm.nixl.agent.connections import ControlChannel
from hybridkv.connectors.vllm.nixl.memory.rank_memory import DigestThread, NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import OfferedRequest, OpenedLease
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.peers.cells import Side
from hybridkv.peers.comparison import compare
from hybridkv.peers.control import LinkId
from hybridkv.peers.description import Description, decode, encode
from hybridkv.peers.digests import DigestRequest, digest_runs
from hybridkv.peers.leases import NO_NONCE, Ended, Lease, LeaseBounds, LeaseEnd, Leases
from hybridkv.peers.pairing import Exchange
from hybridkv.peers.refusal import Refusal
from hybridkv.peers.tables import BlockTables
from hybridkv.peers.wire import (
    Accepted,
    AskDigests,
    CloseReason,
    Describe,
    Digests,
    Done,
    Message,
    Refused,
    Renew,
    Renewed,
    unpack_columns,
)

logger = logging.getLogger("vllm.hybridkv.nixl")

MAX_ITEMS = 65536
MAX_DIGEST_REQUESTS, MAX_DIGEST_REQUESTS_PER_LINK = 1024, 256
"""For digests, that may wait at the same time; one more is not answered."""
MAX_LOG_CHARS = 200
"""Of what a peer says, so much comes into a log."""
ENDED, BUSY, DIGESTS_FAILED = "the lease has ended", "busy", "digests could not be taken"
"""Why digests are not given, besides what is wrong with a question."""
MAX_LEASE_LENGTHS = 20
"""How many times its length a lease may last, however often it is renewed."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What consumers are told of this rank.

    Args:
        description: of it.
        capability: with which its memory is read.
        max_leases: at the same time.
        lease_s: how long blocks are held without a word.
        clock: seconds.
    """

    description: Description
    capability: bytes
    max_leases: int
    lease_s: float
    clock: Callable[[], float]


@dataclass(slots=True)
class _PendingDigests:
    """A consumer's, for digests."""

    link: LinkId
    number: int
    lease: Lease
    exchange: Exchange
    request: DigestRequest
    waits: bool = False
    """For the thread that digests, which had much to do."""
    taken: Outcome[list[bytes]] | None = None


class LeaseServer:
    """Leases and those who ask. Calls come from one thread.

    Args:
        offer: what consumers are told.
        memory: of this rank.
        control: says things to them.
        recorder: counts what happens.
    """

    def __init__(
        self, offer: ServerOptions, memory: NixlRankMemory, control: ControlChannel, recorder: NixlMetrics
    ) -> None:
        self._options = offer
        self._memory = memory
        self._control = control
        self._recorder = recorder
        self._encoded = encode(offer.description)
        bounds = LeaseBounds(offer.lease_s, offer.lease_s, MAX_LEASE_LENGTHS * offer.lease_s)
        self._leases = Leases(offer.max_leases, bounds, memory.write_slot)
        self._opened: dict[Lease, str] = {}
        """Requests that run, or have finished and whose plan is on the way."""
        self._held_before_plan: set[str] = set()
        """Of the latter, those whose consumers came before the plan."""
        self._ended_before_plan: set[str] = set()
        """Of these, those that were done before it."""
        self._digesting = DigestThread(memory, control.wake)
        self._tables: dict[str, BlockTables] = {}
        """Of finished requests whose plan has come."""
        self._exchanges: dict[LinkId, Exchange | None] = {}
        """Connections, and what was agreed on them, None until then."""
        self._described_links: set[LinkId] = set()
        self._pending_digests: list[_PendingDigests] = []
        self._unread_links: set[LinkId] = set()
        """Consumers that may read, and have read nothing yet."""
        self.released: set[str] = set()
        """Requests whose blocks may be given away, since somebody looked."""

    @property
    def is_busy(self) -> bool:
        """Whether there is something that goes on by itself: an answer, or a first read.

        A transport may need both sides for its first read from a peer, and turns of this side make it go on.
        """
        return bool(self._pending_digests or self._unread_links)

    # What the engine says.

    def show(self, lease: Lease) -> None:
        """Writes a lease that `open` is about to tell of. Called by the engine's thread: nobody else writes into a slot
        between its last lease and this one."""
        if 0 <= lease.slot < self._options.max_leases:
            self._memory.write_slot(lease.slot, lease.nonce)

    def open(self, opened: OpenedLease) -> None:
        """A request whose blocks may be handed over."""
        try:
            self._leases.open(opened.request_id, opened.lease)
        except Exception:
            # Nobody would ever take it out of the slot again.
            self.show(Lease(opened.lease.slot, NO_NONCE))
            raise
        self._opened[opened.lease] = opened.request_id

    def drop(self, request_id: str) -> None:
        """It is not handed over; nobody was told of its lease."""
        self._forget(request_id)
        self._leases.abort(request_id)

    def offer(self, offered: OfferedRequest) -> None:
        """It has finished, and its consumer may be told by now; it may even be done."""
        request_id = offered.request_id
        self._forget(request_id)
        self._tables[request_id] = offered.tables
        if request_id in self._ended_before_plan:
            self._ended_before_plan.discard(request_id)
            self._release(request_id)
        elif request_id in self._held_before_plan:
            self._held_before_plan.discard(request_id)
        elif not self._leases.hold(request_id, self._options.clock()):
            # Without a lease nobody can read these blocks, and nobody would ever say that he has.
            self._recorder.lease("dropped")
            self._release(request_id)

    def _forget(self, request_id: str) -> None:
        self._opened = {lease: name for lease, name in self._opened.items() if name != request_id}

    # What consumers say.

    def opened(self, link: LinkId) -> None:
        """Somebody has proven the secret."""
        self._exchanges[link] = None

    def closed(self, link: LinkId) -> None:
        """A connection is no more. Its leases run on: the consumer may come back."""
        self._exchanges.pop(link, None)
        self._unread_links.discard(link)
        self._described_links.discard(link)
        self._pending_digests = [pending for pending in self._pending_digests if pending.link != link]

    def received(self, link: LinkId, message: Message) -> None:
        """Whatever a consumer says. What does not belong here ends its connection."""
        match message:
            case Describe():
                self._described(link, message)
            case Renew():
                holds = self._leased_request(message.lease) is not None
                holds = holds and self._leases.renew(message.lease, self._options.clock())
                self._control.send(link, Renewed(message.lease, self._options.lease_s if holds else 0.0))
            case Done():
                self._unread_links.discard(link)
                self._leased_request(message.lease)
                ended = self._leases.done(message.lease, message.reader, message.num_readers)
                if ended is not None:
                    self._end(ended)
            case AskDigests():
                self._asked(link, message)
            case _:
                self._control.end(link, CloseReason.UNEXPECTED)

    def _described(self, link: LinkId, message: Describe) -> None:
        if link in self._described_links:
            self._control.end(link, CloseReason.UNEXPECTED)
            return
        self._described_links.add(link)
        theirs = decode(message.description)
        # The consumer reads, so it is the one whose side is "ours".
        agreement = compare(theirs, self._options.description) if isinstance(theirs, Description) else theirs
        if isinstance(agreement, Refusal):
            field, theirs_is, ours_is = agreement.field, agreement.ours, agreement.theirs
            said = [each[:MAX_LOG_CHARS] for each in (field, theirs_is, ours_is)]
            logger.warning("a consumer does not fit: %r: theirs is %r, ours is %r", *said)
            self._control.send(link, Refused(field[:4096], ours_is[:4096], theirs_is[:4096], agreement.hint[:4096]))
            return
        self._exchanges[link] = Exchange(agreement)
        self._unread_links.add(link)
        self._control.send(link, Describe(self._encoded, self._options.capability))
        self._control.send(link, Accepted())

    def _leased_request(self, lease: Lease) -> str | None:
        """The request whose lease holds.

        Who knows its nonce was told by a request that has finished. So if its plan is still on the way from the
        scheduler, which keeps the blocks until it hears from here, the time begins now.
        """
        now_s = self._options.clock()
        request_id = self._opened.pop(lease, None)
        if request_id is not None:
            self._leases.hold(request_id, now_s)
            self._held_before_plan.add(request_id)
        return self._leases.holds(lease, now_s)

    def _asked(self, link: LinkId, message: AskDigests) -> None:
        exchange = self._exchanges.get(link)
        if exchange is None:
            self._control.end(link, CloseReason.UNEXPECTED)
        elif (
            len(self._pending_digests) >= MAX_DIGEST_REQUESTS or self._num_pending(link) >= MAX_DIGEST_REQUESTS_PER_LINK
        ):
            self._control.send(link, Digests(message.request, b"", BUSY))
        else:
            columns = unpack_columns(message.spans, 3, MAX_ITEMS)
            request = DigestRequest.of(message.num_tokens, columns)
            self._pending_digests.append(_PendingDigests(link, message.request, message.lease, exchange, request))

    def _num_pending(self, link: LinkId) -> int:
        return sum(pending.link == link for pending in self._pending_digests)

    def _answer(self, pending: _PendingDigests) -> Digests | None:
        """None until there is one: the plan that says which blocks these are may be on its way."""
        number, request_id = pending.number, self._leased_request(pending.lease)
        if request_id is None:
            return Digests(number, b"", ENDED)
        return self._begin_digests(pending, request_id) if pending.taken is None else self._taken(pending)

    def _begin_digests(self, pending: _PendingDigests, request_id: str) -> Digests | None:
        tables = self._tables.get(request_id)
        if tables is None:
            return None
        if pending.waits and self._digesting.is_full:
            # What is to be digested is not kept: of all questions it would be much, and is worked out once more.
            return None
        runs = digest_runs(pending.exchange, Side.THEIRS, tables, pending.request)
        if isinstance(runs, Refusal):
            return Digests(pending.number, b"", str(runs)[:4096])
        pending.taken = self._digesting.take(runs)
        # Where the thread has much to do the question waits, no longer than its lease.
        pending.waits = pending.taken is None
        return self._taken(pending)

    def _taken(self, pending: _PendingDigests) -> Digests | None:
        number, taken = pending.number, pending.taken
        if taken is None or not taken.is_done:
            return None
        if taken.error is not None or taken.value is None:
            logger.warning("%s: %s", DIGESTS_FAILED, taken.error)
            return Digests(number, b"", DIGESTS_FAILED)
        return Digests(number, b"".join(taken.value))

    def tick(self) -> None:
        """Answers what can be answered, and ends what has run out."""
        waiting = []
        for pending in self._pending_digests:
            try:
                answer = self._answer(pending)
            except Exception:  # a bug costs its own question: leases end, and others are answered
                logger.exception("a question about digests met a bug")
                answer = Digests(pending.number, b"", DIGESTS_FAILED)
            if answer is None:
                waiting.append(pending)
            else:
                self._control.send(pending.link, answer)
        self._pending_digests = waiting
        for ended in self._leases.expire(self._options.clock()):
            logger.warning("nobody fetched request %s in time; its blocks are free", ended.request_id)
            self._end(ended)

    def close(self) -> None:
        """No more digests are taken, and no lease holds any more."""
        self._digesting.close()
        self._leases.close()

    def is_closed(self, timeout_s: float) -> bool:
        """Whether nothing looks at the engine's memory any more, by then."""
        return self._digesting.has_ended(timeout_s)

    def _end(self, ended: Ended) -> None:
        self._recorder.lease("expired" if ended.why is LeaseEnd.EXPIRED else "done")
        if ended.request_id in self._held_before_plan:
            self._held_before_plan.discard(ended.request_id)
            self._ended_before_plan.add(ended.request_id)
        else:
            self._release(ended.request_id)

    def _release(self, request_id: str) -> None:
        self._tables.pop(request_id, None)
        self.released.add(request_id)
