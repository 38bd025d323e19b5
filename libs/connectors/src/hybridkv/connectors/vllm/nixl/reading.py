"""A consumer's reads on one rank, in the words of one thread: what is asked of a producer, checked, and believed.

A read ends well only when its lease stood in the producer's table after the last byte had arrived, and both sides'
digests agree. However it ends, it ends once, and never while a byte of it may still be written: then the engine would
give the blocks to somebody else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hybridkv.connectors.vllm.identity.background import Background, Outcome
from hybridkv.connectors.vllm.nixl.links import Control, Peer, Peers, PeerState
from hybridkv.connectors.vllm.nixl.memory import RankMemory
from hybridkv.connectors.vllm.nixl.messages import Load, LoadFailure
from hybridkv.connectors.vllm.nixl.serving import BUSY, ENDED, OUTSIDE
from hybridkv.connectors.vllm.nixl.stats import PeerRecorder
from hybridkv.peers.leases import SLOT_BYTES
from hybridkv.peers.pairing import Resume
from hybridkv.peers.refusal import Refusal
from hybridkv.peers.tables import BlockTables
from hybridkv.peers.transport import Failed, Pending, Ranges, TransferId, Transport
from hybridkv.peers.wire import AskDigests, Digests, LeaseId, pack_columns

logger = logging.getLogger("vllm.hybridkv.nixl")

RANGES_A_MESSAGE = 16384
RANGES_A_DIGEST = 64
_DIGEST_REASONS = {ENDED: "lease", BUSY: "busy", OUTSIDE: "pairing"}
_REASONS = ("gone", "refused", "timeout", "busy", "cancelled")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How reads are made.

    Args:
        rank: of this worker; it reads from the same one of the producer.
        tp_size: ranks of this engine.
        load_timeout_s: how long a read may take.
        verify: whether digests are compared.
        clock: seconds.
    """

    rank: int
    tp_size: int
    load_timeout_s: float
    verify: bool
    clock: Callable[[], float]


@dataclass(slots=True)
class _Read:
    """One request's read. Times are seconds of the clock."""

    load: Load
    began_s: float
    peer: Peer | None = None
    ranges: Ranges | None = None
    transfer: TransferId | None = None
    place: int | None = None
    """In our scratch memory, into which the lease is read; None until the data are there."""
    is_believed: bool = False
    """The lease stood in the table behind the last byte."""
    waits: list[tuple[int, Ranges]] = field(default_factory=list)
    """Asked digests, by the number of the question."""
    theirs: dict[int, bytes] = field(default_factory=dict)
    ours: Outcome[list[bytes]] | None = None
    num_descriptors: int = 0
    failure: LoadFailure | None = None


class Reading:
    """Reads by request. Calls come from one thread.

    Args:
        memory: of this rank.
        peers: connections to producers.
        transport: moves bytes.
        control: says that a read has ended, and asks for digests.
        recorder: counts what happens.
        options: how reads are made.
    """

    def __init__(
        self,
        memory: RankMemory,
        peers: Peers,
        transport: Transport,
        control: Control,
        recorder: PeerRecorder,
        options: ReadOptions,
    ) -> None:
        self._memory = memory
        self._peers = peers
        self._transport = transport
        self._control = control
        self._recorder = recorder
        self._options = options
        self._reads: dict[str, _Read] = {}
        self._asked: dict[int, str] = {}
        self._questions = 0
        self._digesting = Background("hybridkv-peer-digests")
        self.ended: list[tuple[str, LoadFailure | None]] = []
        """Reads that ended since somebody looked, and why they failed."""

    @property
    def is_busy(self) -> bool:
        """Whether a read is under way, which somebody must look at."""
        return bool(self._reads)

    def begin(self, load: Load) -> None:
        """Begins a read. Its end is in `ended`."""
        read = self._reads[load.request_id] = _Read(load, self._options.clock())
        prompt = load.prompt
        if load.refused is not None:
            read.failure = LoadFailure("other", load.refused)
        elif len(prompt.ranks) != self._options.tp_size:
            theirs, ours = len(prompt.ranks), self._options.tp_size
            detail = f"tp_size: ours is {ours}, theirs is {theirs}; pages that move whole need the same on both sides"
            read.failure = LoadFailure("refused", detail)
        else:
            read.peer = self._peers.get(prompt.host, prompt.ranks[self._options.rank])
        self._advance(read)

    def cancel(self, request_id: str) -> bool:
        """Nobody waits for this read any more. It still ends. False where there is no such read."""
        read = self._reads.get(request_id)
        if read is None:
            return False
        if read.failure is None:
            read.failure = LoadFailure("cancelled", "the request has ended")
            self._advance(read)
        return True

    def answered(self, message: Digests) -> None:
        """A producer's digests."""
        read = self._reads.get(self._asked.pop(message.request, ""))
        if read is None or read.failure is not None:
            return
        if message.failure:
            read.failure = LoadFailure(_DIGEST_REASONS.get(message.failure, "other"), message.failure)
        else:
            read.theirs[message.request] = message.digests

    def tick(self) -> None:
        """Goes on with every read as far as it can go."""
        for read in list(self._reads.values()):
            try:
                self._advance(read)
            except Exception as error:  # a bug costs its own request, and no other
                logger.exception("a read met a bug")
                read.failure = read.failure or LoadFailure("other", f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """No more digests are taken."""
        self._digesting.close()

    def _advance(self, read: _Read) -> None:
        if read.failure is None:
            read.failure = self._go_on(read)
        if read.failure is None and read.is_believed:
            verified = self._verified(read)
            if verified is None:
                return
            if verified:
                self._end(read)
                return
            read.failure = LoadFailure("digest", "what arrived is not what the producer holds")
        if read.failure is not None and self._is_quiet(read):
            self._end(read)

    def _go_on(self, read: _Read) -> LoadFailure | None:
        peer = read.peer
        if self._options.clock() - read.began_s >= self._options.load_timeout_s:
            return LoadFailure("timeout", f"it took longer than {self._options.load_timeout_s:g} s")
        if peer is None or read.is_believed:
            return None
        if peer.state is PeerState.OVER:
            return peer.failure
        if peer.state is PeerState.CONNECTING:
            return None
        if read.ranges is None:
            return self._start(read, peer)
        if read.transfer is None:
            return self._read_lease(read, peer)
        state = self._transport.poll(read.transfer)
        if isinstance(state, Pending):
            return None
        if isinstance(state, Failed):
            reason = str(state.reason)
            return LoadFailure(reason if reason in _REASONS else "transport", state.detail or reason)
        if read.place is None:
            read.num_descriptors = state.num_descriptors
            self._transport.release(read.transfer)
            read.transfer = None
            return self._read_lease(read, peer)
        if not self._memory.shows(read.place, read.load.prompt.lease.nonce):
            return LoadFailure("lease", "the lease had ended before the last byte was read")
        read.is_believed = True
        return None if self._is_quiet(read) else LoadFailure("transport", "a finished transfer is not at rest")

    def _start(self, read: _Read, peer: Peer) -> LoadFailure | None:
        assert peer.exchange is not None and peer.remote is not None
        load, prompt = read.load, read.load.prompt
        pairing = peer.exchange.pair(
            BlockTables.whole(load.num_tokens, load.block_ids),
            BlockTables(prompt.num_tokens, prompt.first_blocks, prompt.block_ids),
            Resume(load.num_tokens, load.computed_tokens),
        )
        if isinstance(pairing, Refusal):
            return LoadFailure("pairing", str(pairing))
        read.ranges = Ranges(*pairing.ranges.columns)
        read.transfer = self._transport.read(peer.remote, read.ranges, self._left_s(read))
        if self._options.verify:
            self._ask(read, peer)
        return None

    def _ask(self, read: _Read, peer: Peer) -> None:
        assert read.ranges is not None
        for first in range(0, len(read.ranges), RANGES_A_MESSAGE):
            part = read.ranges.rows(first, first + RANGES_A_MESSAGE)
            self._questions += 1
            read.waits.append((self._questions, part))
            self._asked[self._questions] = read.load.request_id
            ranges = pack_columns([part.remote_regions, part.remote_offsets, part.num_bytes])
            self._control.send(
                peer.link, AskDigests(self._questions, _lease(read.load), ranges, pack_columns([_ends(len(part))]))
            )

    def _read_lease(self, read: _Read, peer: Peer) -> LoadFailure | None:
        """Where the lease is, behind the data. What is read there was there when all of them had been read."""
        assert peer.exchange is not None and peer.remote is not None
        read.place = self._memory.take_scratch()
        if read.place is None:
            return None
        theirs = peer.exchange.agreement.theirs.region_bytes
        table, offset = RankMemory.table_region(len(theirs)), read.load.prompt.lease.slot * SLOT_BYTES
        if table < 0 or offset + SLOT_BYTES > theirs[table]:
            return LoadFailure("lease", "a slot outside of the producer's table")
        row = (self._memory.scratch_region, read.place * SLOT_BYTES, table, offset, SLOT_BYTES)
        read.transfer = self._transport.read(peer.remote, Ranges.of([row]), self._left_s(read))
        return None

    def _verified(self, read: _Read) -> bool | None:
        """Whether digests agree; None until both sides have them."""
        if not self._options.verify:
            return True
        if read.ours is None:
            parts = [part for _, part in read.waits]
            read.ours = self._digesting.submit(lambda: [self._digests(part) for part in parts])
            return None
        if not read.ours.is_done or len(read.theirs) < len(read.waits):
            return None
        if read.ours.error is not None or read.ours.value is None:
            logger.warning("digests could not be taken: %s", read.ours.error)
            return False
        return read.ours.value == [read.theirs[number] for number, _ in read.waits]

    def _digests(self, part: Ranges) -> bytes:
        return self._memory.digests((part.local_regions, part.local_offsets, part.num_bytes), _ends(len(part)))

    def _is_quiet(self, read: _Read) -> bool:
        """Whether no byte of it is written any more."""
        if read.transfer is not None:
            if not self._transport.release(read.transfer):
                return False
            read.transfer = None
        return read.ours is None or read.ours.is_done

    def _end(self, read: _Read) -> None:
        load = read.load
        self.ended.append((load.request_id, read.failure))
        del self._reads[load.request_id]
        for number, _ in read.waits:
            self._asked.pop(number, None)
        if read.place is not None:
            self._memory.give_scratch(read.place)
        if read.failure is None:
            assert read.ranges is not None
            seconds = self._options.clock() - read.began_s
            self._recorder.read(seconds, read.ranges.total_bytes, read.num_descriptors)
        else:
            self._recorder.failure(read.failure.reason)
            if read.failure.reason != "cancelled":
                logger.warning("request %s could not be loaded: %s", load.request_id, read.failure.detail)

    def _left_s(self, read: _Read) -> float:
        return max(0.001, self._options.load_timeout_s - (self._options.clock() - read.began_s))


def _lease(load: Load) -> LeaseId:
    return LeaseId(load.prompt.lease.slot, load.prompt.lease.nonce)


def _ends(num_ranges: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A digest for so many ranges each."""
    return np.minimum(np.arange(RANGES_A_DIGEST, num_ranges + RANGES_A_DIGEST, RANGES_A_DIGEST), num_ranges)
