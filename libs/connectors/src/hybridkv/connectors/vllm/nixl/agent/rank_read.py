"""Read from one rank of a producer: the transfer, then a check of the lease and of digests.

`RankRead` performs commands and reports events. `hybridkv.peers.reads` decides the next command.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hybridkv.connectors.vllm.nixl.agent.connections import ConnectionState, ControlChannel, ProducerConnection
from hybridkv.connectors.vllm.nixl.agent.lease_server import BUSY, DIGESTS_FAILED, ENDED
from hybridkv.connectors.vllm.nixl.memory.rank_memory import DigestThread, NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import PromptLoad
from hybridkv.peers.cells import Side
from hybridkv.peers.digests import DigestRequest, digest_request, digest_runs, mismatches
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.leases import SLOT_BYTES
from hybridkv.peers.pairing import Pairing, Resume
from hybridkv.peers.reads import Checked, Connected, Event, PeerLost, ReadFailure, ReadStage, TransferEnded
from hybridkv.peers.tables import BlockTables
from hybridkv.peers.transport import (
    Ranges,
    TransferFailed,
    TransferFailureReason,
    TransferId,
    TransferPending,
    TransferState,
    Transport,
)
from hybridkv.peers.wire import Digests, RequestDigests, pack_columns
from hybridkv.peers.wire.messages import DIGEST_BYTES
from hybridkv.tiers.threads import Outcome

CELLS_PER_REQUEST = 16384
_OF_DIGESTS = {ENDED: ReadFailure.LEASE, DIGESTS_FAILED: ReadFailure.OTHER}
_OF_TRANSPORT = {
    TransferFailureReason.GONE: ReadFailure.GONE,
    TransferFailureReason.REFUSED: ReadFailure.REFUSED,
    TransferFailureReason.TIMEOUT: ReadFailure.TIMEOUT,
    TransferFailureReason.CANCELLED: ReadFailure.CANCELLED,
}


@dataclass(slots=True)
class ReadTools:
    """Objects that all reads share.

    Args:
        memory: memory of this rank.
        transport: moves bytes.
        control: sends requests for digests.
        digest_thread: digests this rank's pages.
        numbers: unique numbers of requests for digests.
        verify: True to compare digests.
        is_full: True if the transport has refused a read of pages in this tick. Then others wait for the next tick.
        may_ask_again: True in a tick in which requests for digests are sent again if the producer was busy.
    """

    memory: NixlRankMemory
    transport: Transport
    control: ControlChannel
    digest_thread: DigestThread
    numbers: Iterator[int]
    verify: bool
    is_full: bool = False
    may_ask_again: bool = False


@dataclass(slots=True)
class _ReadCheck:
    """State of the checks after a transfer."""

    timeout_s: float
    place: int | None = None
    """Scratch slot into which the lease is read."""
    transfer: TransferId | None = None
    lease_is_valid: bool = False
    was_queue_full: bool = False
    """The digest thread's queue was full at the last attempt."""
    ours: Outcome[list[bytes]] | None = None
    digests_agree: bool = False


@dataclass(slots=True)
class _DigestReplies:
    """Digests that were requested from the producer."""

    request: DigestRequest
    theirs: dict[int, bytes | None] = field(default_factory=dict)
    """Replies by number of the request, in order; None before the reply."""
    busy: set[int] = field(default_factory=set)
    """Numbers of requests that the producer refused because it was busy."""
    failure: str = ""


class RankRead:
    """Read of one request from one rank of the producer. One thread calls all methods.

    Args:
        tools: objects that all reads share.
        index: index among the ranks from which the request reads.
        rank: rank of the producer.
        peer: connection to the rank.
        load: load of the request.
    """

    def __init__(self, tools: ReadTools, index: int, rank: int, peer: ProducerConnection, load: PromptLoad) -> None:
        self._tools = tools
        self._index = index
        self.rank = rank
        self.peer = peer
        self._load = load
        self._pairing: Pairing | None = None
        self._transfer: TransferId | None = None
        self._timeout_s = 0.0
        self._requested: _DigestReplies | None = None
        self._check: _ReadCheck | None = None
        self.num_descriptors = 0
        self.detail = ""
        """Description of the failure, for logs."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the read."""
        return self._pairing.num_bytes if self._pairing is not None else 0

    @property
    def request_numbers(self) -> tuple[int, ...]:
        """Numbers of the requests for digests."""
        return tuple(self._requested.theirs) if self._requested is not None else ()

    @property
    def is_moving(self) -> bool:
        """True if a transfer of pages or of the lease is running."""
        return self._transfer is not None or (self._check is not None and self._check.transfer is not None)

    def poll(self, stage: ReadStage) -> Event | None:
        """Polls for the event that ends a stage. Returns None before this event."""
        match stage:
            case ReadStage.CONNECTING:
                return self._connected()
            case ReadStage.READING:
                return self._read()
            case ReadStage.ENDING:
                return TransferEnded(self._index) if self._try_release_transfer() else None
            case ReadStage.CHECKING:
                return self._checked()
        return None

    def start(self, timeout_s: float) -> None:
        """Prepares the transfer, which the next poll starts. With `verify`, requests the producer's digests."""
        assert self._pairing is not None
        self._timeout_s = timeout_s
        if self._tools.verify:
            self._request_digests(self._pairing)

    def cancel(self) -> None:
        """Cancels the transfer."""
        if self._transfer is not None:
            self._tools.transport.cancel(self._transfer)

    def check(self, timeout_s: float) -> None:
        """Starts the checks."""
        self._check = _ReadCheck(timeout_s, digests_agree=not self._tools.verify)

    def on_digests(self, message: Digests) -> bool:
        """Takes digests from the producer. False if the producer was busy; then a later check requests them again."""
        if self._requested is not None and message.request in self._requested.theirs:
            if message.failure == BUSY:
                self._requested.busy.add(message.request)
                return False
            self._requested.failure = self._requested.failure or message.failure
            self._requested.theirs[message.request] = message.digests
        return True

    def try_release(self) -> bool:
        """Releases transfers. Returns True if no transfer writes into this rank's memory any more; else call again."""
        check = self._check
        if check is not None and check.transfer is not None:
            if not self._tools.transport.release(check.transfer):
                return False
            check.transfer = None
        if check is not None and check.place is not None:
            self._tools.memory.give_scratch(check.place)
            check.place = None
        return self._try_release_transfer()

    # Events.

    def _connected(self) -> Event | None:
        peer, load, prompt = self.peer, self._load, self._load.prompt
        if peer.state is ConnectionState.OVER:
            return self._lost()
        if peer.state is ConnectionState.CONNECTING or peer.exchange is None:
            return None
        theirs = peer.exchange.agreement.theirs
        if (theirs.rank, theirs.tp_size) != (self.rank, len(prompt.ranks)):
            # The proxy's list decides which heads are read from which rank, and digests do not show a wrong order.
            requested = f"rank {self.rank} of {len(prompt.ranks)}"
            self.detail = f"expected {requested}, but the peer is rank {theirs.rank} of {theirs.tp_size}"
            return PeerLost(self._index, ReadFailure.PAIRING)
        pairing = peer.exchange.pair(
            _ours(load),
            BlockTables(prompt.num_tokens, prompt.first_blocks, prompt.block_ids),
            Resume(load.num_tokens, load.computed_tokens),
        )
        if isinstance(pairing, Incompatibility):
            self.detail = str(pairing)
            return PeerLost(self._index, ReadFailure.PAIRING)
        self._pairing = pairing
        return Connected(self._index)

    def _read(self) -> Event | None:
        if self._transfer is None:
            if self.peer.state is ConnectionState.OVER:
                return self._lost()
            if self._tools.is_full:
                return None
            assert self._pairing is not None and self.peer.remote is not None
            self._transfer = self._tools.transport.read(self.peer.remote, self._pairing.ranges, self._timeout_s)
        state = self._tools.transport.poll(self._transfer)
        if isinstance(state, TransferPending):
            return self._lost() if self.peer.state is ConnectionState.OVER else None
        if not self._try_release_transfer():
            return None
        if _is_busy(state):
            # The oldest read tries again first. The deadline of this stage bounds the wait.
            self._tools.is_full = True
            return None
        if isinstance(state, TransferFailed):
            return TransferEnded(self._index, self._reason(state))
        self.num_descriptors = state.num_descriptors
        return TransferEnded(self._index)

    def _checked(self) -> Event | None:
        check = self._check
        assert check is not None
        failure = self._check_lease(check) or self._check_digests(check)
        if failure is ReadFailure.DIGEST and not check.lease_is_valid:
            # Digests also differ if the lease has ended and the blocks have other content. So check the lease first.
            failure = None
        if failure is not None or (check.lease_is_valid and check.digests_agree):
            return Checked(self._index, failure)
        return self._lost() if self.peer.state is ConnectionState.OVER else None

    def _lost(self) -> Event:
        failure = self.peer.failure
        assert failure is not None
        self.detail = failure.detail
        return PeerLost(self._index, ReadFailure(failure.reason))

    def _reason(self, state: TransferFailed) -> ReadFailure:
        if state.reason is TransferFailureReason.CLOSED and self.peer.failure is not None:
            # The transport closed the peer because the connection ended, so report the reason of that end.
            self.detail = self.peer.failure.detail
            return ReadFailure(self.peer.failure.reason)
        self.detail = state.detail or str(state.reason)
        return _OF_TRANSPORT.get(state.reason, ReadFailure.TRANSPORT)

    def _try_release_transfer(self) -> bool:
        if self._transfer is not None and self._tools.transport.release(self._transfer):
            self._transfer = None
        return self._transfer is None

    # The lease.

    def _check_lease(self, check: _ReadCheck) -> ReadFailure | None:
        """Checks the lease. Returns the failure; None if the lease is valid or not yet read. The lease is read after
        all bytes, so a valid lease was valid during the whole transfer."""
        if check.lease_is_valid:
            return None
        if check.transfer is None:
            return self._begin_lease_read(check)
        state = self._tools.transport.poll(check.transfer)
        if isinstance(state, TransferPending) or not self._tools.transport.release(check.transfer):
            return None
        check.transfer = None
        if _is_busy(state):
            return None  # later polls try again, until the deadline
        if isinstance(state, TransferFailed):
            return self._reason(state)
        assert check.place is not None
        if not self._tools.memory.has_nonce(check.place, self._load.prompt.lease.nonce):
            self.detail = "the lease ended before the last byte was read"
            return ReadFailure.LEASE
        check.lease_is_valid = True
        return None

    def _begin_lease_read(self, check: _ReadCheck) -> ReadFailure | None:
        peer, memory = self.peer, self._tools.memory
        if peer.state is ConnectionState.OVER or peer.exchange is None or peer.remote is None:
            return None
        check.place = memory.take_scratch() if check.place is None else check.place
        if check.place is None:
            return None
        theirs = peer.exchange.agreement.theirs.region_bytes
        table, offset = NixlRankMemory.table_region(len(theirs)), self._load.prompt.lease.slot * SLOT_BYTES
        if table < 0 or offset + SLOT_BYTES > theirs[table]:
            self.detail = "the lease's slot is outside the producer's lease table"
            return ReadFailure.LEASE
        row = (memory.scratch_region, check.place * SLOT_BYTES, table, offset, SLOT_BYTES)
        check.transfer = self._tools.transport.read(peer.remote, Ranges.of([row]), check.timeout_s)
        return None

    # Digests.

    def _request_digests(self, pairing: Pairing) -> None:
        requested = self._requested = _DigestReplies(digest_request(pairing))
        for part in requested.request.parts(CELLS_PER_REQUEST):
            number = next(self._tools.numbers)
            requested.theirs[number] = None
            self._request_part(number, part)

    def _request_part(self, number: int, part: DigestRequest) -> None:
        spans = pack_columns(part.columns)
        question = RequestDigests(number, self._load.prompt.lease, part.num_tokens, spans)
        self._tools.control.send(self.peer.link, question)

    def _request_again(self, requested: _DigestReplies) -> None:
        """Sends requests again that the producer refused because it was busy."""
        for number, part in zip(requested.theirs, requested.request.parts(CELLS_PER_REQUEST), strict=True):
            if number in requested.busy:
                self._request_part(number, part)
        requested.busy.clear()

    def _check_digests(self, check: _ReadCheck) -> ReadFailure | None:
        if check.digests_agree:
            return None
        requested = self._requested
        assert requested is not None
        if requested.failure:
            self.detail = requested.failure
            return _OF_DIGESTS.get(requested.failure, ReadFailure.PAIRING)
        if requested.busy and self._tools.may_ask_again:
            self._request_again(requested)
        if check.ours is None:
            return self._take_ours(check, requested.request)
        theirs = [each for each in requested.theirs.values() if each is not None]
        if not check.ours.is_done or len(theirs) < len(requested.theirs):
            return None
        if check.ours.error is not None or check.ours.value is None:
            self.detail = f"digests could not be taken: {check.ours.error}"
            return ReadFailure.OTHER
        wrong = mismatches(requested.request, check.ours.value, _split(b"".join(theirs)))
        if wrong:
            group, cell = wrong[0]
            self.detail = f"{len(wrong)} cells differ from the producer's, the first is cell {cell} of group {group}"
            return ReadFailure.DIGEST
        check.digests_agree = True
        return None

    def _take_ours(self, check: _ReadCheck, request: DigestRequest) -> ReadFailure | None:
        if check.was_queue_full and self._tools.digest_thread.is_full:
            return None
        exchange = self.peer.exchange
        assert exchange is not None
        runs = digest_runs(exchange, Side.OURS, _ours(self._load), request)
        if isinstance(runs, Incompatibility):
            self.detail = str(runs)
            return ReadFailure.PAIRING
        # None if the digest thread's queue is full: then later polls try again, until the deadline.
        check.ours = self._tools.digest_thread.start_digests(runs)
        check.was_queue_full = check.ours is None
        return None


def _is_busy(state: TransferState) -> bool:
    """True if the transport did not start a transfer, because it has too many."""
    return isinstance(state, TransferFailed) and state.reason is TransferFailureReason.BUSY


def _ours(load: PromptLoad) -> BlockTables:
    return BlockTables.whole(load.num_tokens, load.block_ids)


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
