"""A producer's side on one rank, in the words of one thread: who may read, for how long, and what the bytes were.

The table of leases says what holds. An entry is taken out before the engine hears that the blocks are free, so whoever
reads the entry behind the blocks knows whether they were still what they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from hybridkv.connectors.vllm.identity.background import Background, Outcome
from hybridkv.connectors.vllm.nixl.links import Control
from hybridkv.connectors.vllm.nixl.memory import RankMemory
from hybridkv.connectors.vllm.nixl.messages import Offered, Opened
from hybridkv.connectors.vllm.nixl.params import LeaseName
from hybridkv.connectors.vllm.nixl.stats import PeerRecorder
from hybridkv.peers.comparison import Refusal, compare
from hybridkv.peers.control import LinkId
from hybridkv.peers.description import Description
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


@dataclass(frozen=True, slots=True)
class Offer:
    """What consumers are told of this rank.

    Args:
        description: of it.
        transport: its name.
        capability: with which its memory is read.
        lease_s: how long blocks are held without a word.
        clock: seconds.
    """

    description: Description
    transport: str
    capability: bytes
    lease_s: float
    clock: Callable[[], float]


@dataclass(slots=True)
class _Lease:
    request_id: str
    name: LeaseName
    is_offered: bool = False
    is_done: bool = False
    until_s: float = 0.0


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
        self._encoded = msgspec.msgpack.encode(offer.description)
        self._digesting = Background("hybridkv-peer-digests")
        self._by_request: dict[str, _Lease] = {}
        self._by_slot: dict[int, _Lease] = {}
        self._fits: dict[LinkId, bool] = {}
        self._answers: list[tuple[LinkId, AskDigests, Outcome[bytes]]] = []
        self.released: set[str] = set()
        """Requests whose blocks may be given away, since somebody looked."""

    @property
    def is_busy(self) -> bool:
        """Whether there is something that ends or goes on by itself."""
        return bool(self._answers)

    @property
    def num_offered(self) -> int:
        return sum(lease.is_offered for lease in self._by_request.values())

    # What the engine says.

    def open(self, opened: Opened) -> None:
        """A request whose blocks may be handed over."""
        lease = _Lease(opened.request_id, opened.lease)
        self._by_request[opened.request_id] = self._by_slot[opened.lease.slot] = lease
        self._memory.open(opened.lease)

    def drop(self, request_id: str) -> None:
        """It is not handed over; nobody was told of its lease."""
        lease = self._by_request.get(request_id)
        if lease is not None:
            self._take_out(lease)

    def offer(self, offered: Offered) -> None:
        """It has finished, and its consumer may be told by now; it may even be done."""
        lease = self._by_request.get(offered.request_id)
        if lease is None:
            self.released.add(offered.request_id)
            return
        lease.is_offered = True
        lease.until_s = self._offer.clock() + self._offer.lease_s
        if lease.is_done:
            self._end(lease, "done")

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
                lease = self._holding(message.lease)
                if lease is not None and lease.is_offered:
                    lease.until_s = self._offer.clock() + self._offer.lease_s
                remaining_s = self._offer.lease_s if lease is not None else 0.0
                self._control.send(link, Renewed(message.lease, remaining_s))
            case Done():
                self._done(message)
            case AskDigests():
                self._asked(link, message)
            case _:
                self._control.end(link, CloseReason.UNEXPECTED)

    def _described(self, link: LinkId, message: Describe) -> None:
        try:
            theirs = msgspec.msgpack.decode(message.description, type=Description)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._control.end(link, CloseReason.MALFORMED)
            return
        # The consumer reads, so it is the one whose side is "ours".
        agreement = compare(theirs, self._offer.description)
        if message.transport != self._offer.transport:
            agreement = Refusal("transport", message.transport, self._offer.transport, "name one on both sides")
        if isinstance(agreement, Refusal):
            logger.warning("a consumer does not fit: %s: theirs is %s, ours is %s", *_words(agreement))
            field, mine, yours = agreement.field, agreement.theirs, agreement.ours
            self._control.send(link, Refused(field[:4096], mine[:4096], yours[:4096], agreement.hint[:4096]))
            return
        self._fits[link] = True
        self._control.send(link, Describe(self._encoded, self._offer.transport, self._offer.capability))
        self._control.send(link, Accepted())

    def _done(self, message: Done) -> None:
        lease = self._holding(message.lease)
        if lease is None:
            return
        if lease.is_offered:
            self._end(lease, "done")
        else:
            # Its plan is still on the way from the scheduler, which holds the blocks until it hears from here.
            lease.is_done = True

    def _asked(self, link: LinkId, message: AskDigests) -> None:
        if not self._fits.get(link):
            self._control.end(link, CloseReason.UNEXPECTED)
            return
        if self._holding(message.lease) is None:
            self._control.send(link, Digests(message.request, b"", "the lease has ended"))
            return
        columns = unpack_columns(message.ranges, 3, MAX_ITEMS)
        (ends,) = unpack_columns(message.ends, 1, MAX_ITEMS)
        taken = self._digesting.submit(lambda: self._memory.digests(columns, ends))
        if taken is None:
            self._control.send(link, Digests(message.request, b"", "busy"))
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
                failure = "the ranges are not in the KV cache"
            elif self._holding(message.lease) is None:
                failure = "the lease has ended"
            self._control.send(link, Digests(message.request, b"" if failure else taken.value or b"", failure))
        self._answers = waiting
        now_s = self._offer.clock()
        for lease in list(self._by_request.values()):
            if lease.is_offered and now_s >= lease.until_s:
                self._end(lease, "expired")
                logger.warning("nobody fetched request %s in time; its blocks are free", lease.request_id)

    def close(self) -> None:
        """No more digests are taken, and no lease holds any more."""
        self._digesting.close()
        for lease in list(self._by_request.values()):
            self._take_out(lease)

    def _holding(self, found: LeaseId) -> _Lease | None:
        lease = self._by_slot.get(found.slot)
        return lease if lease is not None and lease.name.nonce == found.nonce else None

    def _end(self, lease: _Lease, outcome: str) -> None:
        self._take_out(lease)
        self._recorder.lease(outcome)
        self.released.add(lease.request_id)

    def _take_out(self, lease: _Lease) -> None:
        self._memory.end(lease.name)
        del self._by_request[lease.request_id], self._by_slot[lease.name.slot]


def _words(refusal: Refusal) -> tuple[str, str, str]:
    return refusal.field, refusal.ours, refusal.theirs
