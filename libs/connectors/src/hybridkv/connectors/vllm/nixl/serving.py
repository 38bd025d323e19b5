"""A producer's side on one rank, in the words of one thread: who may read, for how long, and what the bytes were.

The table of leases says what holds. An entry is taken out before the engine hears that the blocks are free, so whoever
reads the entry behind the blocks knows whether they were still what they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.connectors.vllm.identity.background import Background, Outcome
from hybridkv.connectors.vllm.nixl.links import Control
from hybridkv.connectors.vllm.nixl.memory import RankMemory
from hybridkv.connectors.vllm.nixl.messages import Opened
from hybridkv.connectors.vllm.nixl.stats import PeerRecorder
from hybridkv.peers.comparison import compare
from hybridkv.peers.control import LinkId
from hybridkv.peers.description import Description, decode, encode
from hybridkv.peers.leases import Ended, Lease, LeaseBounds, LeaseEnd, Leases
from hybridkv.peers.refusal import Refusal
from hybridkv.peers.wire import (
    Accepted,
    AskDigests,
    CloseReason,
    Describe,
    Digests,
    Done,
    LeaseId,
    Message,
    Refused,
    Renew,
    Renewed,
    unpack_columns,
)

logger = logging.getLogger("vllm.hybridkv.nixl")

MAX_ITEMS = 65536
ENDED, BUSY, OUTSIDE = "the lease has ended", "busy", "the ranges are not in the KV cache"
"""Why digests are not given."""
LONGEST_LEASES = 20
"""How many times its length a lease may last, however often it is renewed."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What consumers are told of this rank.

    Args:
        description: of it.
        transport: its name.
        capability: with which its memory is read.
        max_leases: at the same time.
        lease_s: how long blocks are held without a word.
        clock: seconds.
    """

    description: Description
    transport: str
    capability: bytes
    max_leases: int
    lease_s: float
    clock: Callable[[], float]


class Serving:
    """Leases and those who ask. Calls come from one thread.

    Args:
        offer: what consumers are told.
        memory: of this rank.
        control: says things to them.
        recorder: counts what happens.
    """

    def __init__(self, offer: Offer, memory: RankMemory, control: Control, recorder: PeerRecorder) -> None:
        self._offer = offer
        self._memory = memory
        self._control = control
        self._recorder = recorder
        self._encoded = encode(offer.description)
        bounds = LeaseBounds(offer.lease_s, offer.lease_s, LONGEST_LEASES * offer.lease_s)
        self._leases = Leases(offer.max_leases, bounds, memory.write_slot)
        self._opened: dict[Lease, str] = {}
        """Requests that run, or have finished and whose plan is on the way."""
        self._early: set[str] = set()
        """Of the latter, those whose consumers came before the plan."""
        self._ended_early: set[str] = set()
        """Of these, those that were done before it."""
        self._digesting = Background("hybridkv-peer-digests")
        self._fits: dict[LinkId, bool] = {}
        self._answers: list[tuple[LinkId, AskDigests, Outcome[bytes]]] = []
        self.released: set[str] = set()
        """Requests whose blocks may be given away, since somebody looked."""

    @property
    def is_busy(self) -> bool:
        """Whether there is something that goes on by itself."""
        return bool(self._answers)

    # What the engine says.

    def open(self, opened: Opened) -> None:
        """A request whose blocks may be handed over."""
        self._leases.open(opened.request_id, opened.lease)
        self._opened[opened.lease] = opened.request_id

    def drop(self, request_id: str) -> None:
        """It is not handed over; nobody was told of its lease."""
        self._forget(request_id)
        self._leases.abort(request_id)

    def offer(self, request_id: str) -> None:
        """It has finished, and its consumer may be told by now; it may even be done."""
        self._forget(request_id)
        if request_id in self._ended_early:
            self._ended_early.discard(request_id)
            self.released.add(request_id)
        elif request_id in self._early:
            self._early.discard(request_id)
        else:
            self._leases.hold(request_id, self._offer.clock())

    def _forget(self, request_id: str) -> None:
        self._opened = {lease: name for lease, name in self._opened.items() if name != request_id}

    # What consumers say.

    def opened(self, link: LinkId) -> None:
        """Somebody has proven the secret."""
        self._fits[link] = False

    def closed(self, link: LinkId) -> None:
        """A connection is no more. Its leases run on: the consumer may come back."""
        self._fits.pop(link, None)

    def received(self, link: LinkId, message: Message) -> None:
        """Whatever a consumer says. What does not belong here ends its connection."""
        match message:
            case Describe():
                self._described(link, message)
            case Renew():
                holds = self._holds(message.lease) and self._leases.renew(_lease(message.lease), self._offer.clock())
                self._control.send(link, Renewed(message.lease, self._offer.lease_s if holds else 0.0))
            case Done():
                self._holds(message.lease)
                # Ranks of one size read from each other one to one.
                ended = self._leases.done(_lease(message.lease), reader=0, num_readers=1)
                if ended is not None:
                    self._end(ended)
            case AskDigests():
                self._asked(link, message)
            case _:
                self._control.end(link, CloseReason.UNEXPECTED)

    def _described(self, link: LinkId, message: Describe) -> None:
        theirs = decode(message.description)
        # The consumer reads, so it is the one whose side is "ours".
        agreement = compare(theirs, self._offer.description) if isinstance(theirs, Description) else theirs
        if message.transport != self._offer.transport:
            agreement = Refusal("transport", message.transport, self._offer.transport, "name one on both sides")
        if isinstance(agreement, Refusal):
            field, theirs_is, ours_is = agreement.field, agreement.ours, agreement.theirs
            logger.warning("a consumer does not fit: %s: theirs is %s, ours is %s", field, theirs_is, ours_is)
            self._control.send(link, Refused(field[:4096], ours_is[:4096], theirs_is[:4096], agreement.hint[:4096]))
            return
        self._fits[link] = True
        self._control.send(link, Describe(self._encoded, self._offer.transport, self._offer.capability))
        self._control.send(link, Accepted())

    def _holds(self, shown: LeaseId) -> bool:
        """Whether a lease holds. Who knows its nonce was told by a request that has finished, so if its plan is still
        on the way from the scheduler, which keeps the blocks until it hears from here, the time begins now."""
        lease, now_s = _lease(shown), self._offer.clock()
        request_id = self._opened.pop(lease, None)
        if request_id is not None:
            self._leases.hold(request_id, now_s)
            self._early.add(request_id)
        return self._leases.holds(lease, now_s) is not None

    def _asked(self, link: LinkId, message: AskDigests) -> None:
        if not self._fits.get(link):
            self._control.end(link, CloseReason.UNEXPECTED)
            return
        if not self._holds(message.lease):
            self._control.send(link, Digests(message.request, b"", ENDED))
            return
        columns = unpack_columns(message.ranges, 3, MAX_ITEMS)
        (ends,) = unpack_columns(message.ends, 1, MAX_ITEMS)
        taken = self._digesting.submit(lambda: self._memory.digests(columns, ends))
        if taken is None:
            self._control.send(link, Digests(message.request, b"", BUSY))
        else:
            self._answers.append((link, message, taken))

    def tick(self) -> None:
        """Answers what can be answered, and ends what has run out."""
        waiting = []
        for link, message, taken in self._answers:
            if not taken.is_done:
                waiting.append((link, message, taken))
                continue
            failure = ""
            if taken.error is not None:
                failure = OUTSIDE
            elif not self._holds(message.lease):
                failure = ENDED
            self._control.send(link, Digests(message.request, b"" if failure else taken.value or b"", failure))
        self._answers = waiting
        for ended in self._leases.expire(self._offer.clock()):
            logger.warning("nobody fetched request %s in time; its blocks are free", ended.request_id)
            self._end(ended)

    def close(self) -> None:
        """No more digests are taken, and no lease holds any more."""
        self._digesting.close()
        self._leases.close()

    def _end(self, ended: Ended) -> None:
        self._recorder.lease("expired" if ended.why is LeaseEnd.EXPIRED else "done")
        if ended.request_id in self._early:
            self._early.discard(ended.request_id)
            self._ended_early.add(ended.request_id)
        else:
            self.released.add(ended.request_id)


def _lease(shown: LeaseId) -> Lease:
    return Lease(shown.slot, shown.nonce)
