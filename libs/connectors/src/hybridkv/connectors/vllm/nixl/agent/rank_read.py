"""One producer's rank in a read: the transfer, the lease behind it, and digests of what arrived.

It does and it looks. What follows from what it sees is `hybridkv.peers.reads`' to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hybridkv.connectors.vllm.common.identity.background import Outcome
from hybridkv.connectors.vllm.nixl.agent.connections import ConnectionState, ControlChannel, ProducerConnection
from hybridkv.connectors.vllm.nixl.agent.lease_server import BUSY, DIGESTS_FAILED, ENDED
from hybridkv.connectors.vllm.nixl.memory.rank_memory import DigestThread, NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import PromptLoad
from hybridkv.peers.cells import Side
from hybridkv.peers.digests import DigestRequest, digest_request, digest_runs, mismatches
from hybridkv.peers.leases import SLOT_BYTES
from hybridkv.peers.pairing import Pairing, Resume
from hybridkv.peers.reads import Checked, Connected, Event, Lost, Reason, Stage, TransferEnded
from hybridkv.peers.refusal import Refusal
from hybridkv.peers.tables import BlockTables
from hybridkv.peers.transport import Failed, FailureReason, Pending, Ranges, TransferId, Transport
from hybridkv.peers.wire import AskDigests, Digests, pack_columns
from hybridkv.peers.wire.messages import DIGEST_BYTES

CELLS_PER_REQUEST = 16384
_OF_DIGESTS = {ENDED: Reason.LEASE, BUSY: Reason.BUSY, DIGESTS_FAILED: Reason.OTHER}
_OF_TRANSPORT = {
    FailureReason.GONE: Reason.GONE,
    FailureReason.REFUSED: Reason.REFUSED,
    FailureReason.TIMEOUT: Reason.TIMEOUT,
    FailureReason.CANCELLED: Reason.CANCELLED,
    FailureReason.BUSY: Reason.BUSY,
}


@dataclass(frozen=True, slots=True)
class ReadTools:
    """What every read is done with.

    Args:
        memory: of this rank.
        transport: moves bytes.
        control: asks for digests.
        digesting: takes ours.
        numbers: of questions, each another.
        verify: whether digests are compared.
    """

    memory: NixlRankMemory
    transport: Transport
    control: ControlChannel
    digesting: DigestThread
    numbers: Iterator[int]
    verify: bool


@dataclass(slots=True)
class _ReadCheck:
    """What is compared of a transfer that has ended."""

    timeout_s: float
    place: int | None = None
    """In our scratch memory, into which the lease is read."""
    transfer: TransferId | None = None
    lease_stands: bool = False
    waits: bool = False
    """For the thread that digests, which had much to do."""
    ours: Outcome[list[bytes]] | None = None
    digests_agree: bool = False


@dataclass(slots=True)
class _DigestReplies:
    """Digests that the producer was asked for."""

    request: DigestRequest
    theirs: dict[int, bytes | None] = field(default_factory=dict)
    """By the number of the question, in order; None where there is no answer yet."""
    failure: str = ""


class RankRead:
    """A rank's part of one request's read. Calls come from one thread.

    Args:
        tools: it is done with.
        index: of the rank among those that the request reads from.
        rank: of the producer.
        peer: the connection to it.
        load: the request's.
    """

    def __init__(self, tools: ReadTools, index: int, rank: int, peer: ProducerConnection, load: PromptLoad) -> None:
        self._tools = tools
        self._index = index
        self.rank = rank
        self.peer = peer
        self._load = load
        self._pairing: Pairing | None = None
        self._transfer: TransferId | None = None
        self._asked: _DigestReplies | None = None
        self._check: _ReadCheck | None = None
        self.num_descriptors = 0
        self.is_transport_closed = False
        """The transport has given the peer up: nothing is read from it before it is connected to again."""
        self.detail = ""
        """Of what went wrong, for people."""

    @property
    def num_bytes(self) -> int:
        """That it reads."""
        return self._pairing.num_bytes if self._pairing is not None else 0

    @property
    def questions(self) -> tuple[int, ...]:
        """That were asked, by number."""
        return tuple(self._asked.theirs) if self._asked is not None else ()

    @property
    def is_moving(self) -> bool:
        """Whether the transport moves bytes for it."""
        return self._transfer is not None or (self._check is not None and self._check.transfer is not None)

    def look(self, stage: Stage) -> Event | None:
        """What has happened since, in a stage that waits for something."""
        match stage:
            case Stage.CONNECTING:
                return self._connected()
            case Stage.READING:
                return self._read()
            case Stage.ENDING:
                return TransferEnded(self._index) if self._is_at_rest() else None
            case Stage.CHECKING:
                return self._checked()
        return None

    def start(self, timeout_s: float) -> None:
        """Begins the transfer, and asks what it should bring."""
        assert self._pairing is not None and self.peer.remote is not None
        self._transfer = self._tools.transport.read(self.peer.remote, self._pairing.ranges, timeout_s)
        if self._tools.verify:
            self._ask(self._pairing)

    def cancel(self) -> None:
        """Ends the transfer early."""
        if self._transfer is not None:
            self._tools.transport.cancel(self._transfer)

    def check(self, timeout_s: float) -> None:
        """Begins to compare."""
        self._check = _ReadCheck(timeout_s, digests_agree=not self._tools.verify)

    def answered(self, message: Digests) -> None:
        """The producer's digests."""
        if self._asked is not None and message.request in self._asked.theirs:
            self._asked.failure = self._asked.failure or message.failure
            self._asked.theirs[message.request] = message.digests

    def is_quiet(self) -> bool:
        """Whether nothing of it is written any more, into our scratch memory either. Asked until it is."""
        check = self._check
        if check is not None and check.transfer is not None:
            if not self._tools.transport.release(check.transfer):
                return False
            check.transfer = None
        if check is not None and check.place is not None:
            self._tools.memory.give_scratch(check.place)
            check.place = None
        return self._is_at_rest()

    # What has happened.

    def _connected(self) -> Event | None:
        peer, load, prompt = self.peer, self._load, self._load.prompt
        if peer.state is ConnectionState.OVER:
            return self._lost()
        if peer.state is ConnectionState.CONNECTING or peer.exchange is None:
            return None
        theirs = peer.exchange.agreement.theirs
        if (theirs.rank, theirs.tp_size) != (self.rank, len(prompt.ranks)):
            # Which heads are read from whom follows from the list that a proxy carried; digests are of what was read.
            asked = f"rank {self.rank} of {len(prompt.ranks)}"
            self.detail = f"{asked} was asked, and rank {theirs.rank} of {theirs.tp_size} answered"
            return Lost(self._index, Reason.PAIRING)
        pairing = peer.exchange.pair(
            _ours(load),
            BlockTables(prompt.num_tokens, prompt.first_blocks, prompt.block_ids),
            Resume(load.num_tokens, load.computed_tokens),
        )
        if isinstance(pairing, Refusal):
            self.detail = str(pairing)
            return Lost(self._index, Reason.PAIRING)
        self._pairing = pairing
        return Connected(self._index)

    def _read(self) -> Event | None:
        if self._transfer is None:
            return TransferEnded(self._index, Reason.OTHER)
        state = self._tools.transport.poll(self._transfer)
        if isinstance(state, Pending):
            return self._lost() if self.peer.state is ConnectionState.OVER else None
        if not self._is_at_rest():
            return None
        if isinstance(state, Failed):
            return TransferEnded(self._index, self._reason(state))
        self.num_descriptors = state.num_descriptors
        return TransferEnded(self._index)

    def _checked(self) -> Event | None:
        check = self._check
        assert check is not None
        failure = self._look_at_lease(check) or self._look_at_digests(check)
        if failure is Reason.DIGEST and not check.lease_stands:
            # Bytes differ where others have the blocks by now, too. Whether they have, the lease says.
            failure = None
        if failure is not None or (check.lease_stands and check.digests_agree):
            return Checked(self._index, failure)
        return self._lost() if self.peer.state is ConnectionState.OVER else None

    def _lost(self) -> Event:
        failure = self.peer.failure
        assert failure is not None
        self.detail = failure.detail
        return Lost(self._index, Reason(failure.reason))

    def _reason(self, state: Failed) -> Reason:
        if state.reason is FailureReason.CLOSED:
            self.is_transport_closed = True
            if self.peer.failure is not None:
                # It was closed because of the connection: that is why.
                self.detail = self.peer.failure.detail
                return Reason(self.peer.failure.reason)
        self.detail = state.detail or str(state.reason)
        return _OF_TRANSPORT.get(state.reason, Reason.TRANSPORT)

    def _is_at_rest(self) -> bool:
        if self._transfer is not None and self._tools.transport.release(self._transfer):
            self._transfer = None
        return self._transfer is None

    # The lease.

    def _look_at_lease(self, check: _ReadCheck) -> Reason | None:
        """What is read there was there when all bytes before it had been read."""
        if check.lease_stands:
            return None
        if check.transfer is None:
            return self._begin_lease_read(check)
        state = self._tools.transport.poll(check.transfer)
        if isinstance(state, Pending) or not self._tools.transport.release(check.transfer):
            return None
        check.transfer = None
        if isinstance(state, Failed):
            return self._reason(state)
        assert check.place is not None
        if not self._tools.memory.has_nonce(check.place, self._load.prompt.lease.nonce):
            self.detail = "the lease had ended before the last byte was read"
            return Reason.LEASE
        check.lease_stands = True
        return None

    def _begin_lease_read(self, check: _ReadCheck) -> Reason | None:
        peer, memory = self.peer, self._tools.memory
        if peer.state is ConnectionState.OVER or peer.exchange is None or peer.remote is None:
            return None
        check.place = memory.take_scratch() if check.place is None else check.place
        if check.place is None:
            return None
        theirs = peer.exchange.agreement.theirs.region_bytes
        table, offset = NixlRankMemory.table_region(len(theirs)), self._load.prompt.lease.slot * SLOT_BYTES
        if table < 0 or offset + SLOT_BYTES > theirs[table]:
            self.detail = "a slot outside of the producer's table"
            return Reason.LEASE
        row = (memory.scratch_region, check.place * SLOT_BYTES, table, offset, SLOT_BYTES)
        check.transfer = self._tools.transport.read(peer.remote, Ranges.of([row]), check.timeout_s)
        return None

    # Digests.

    def _ask(self, pairing: Pairing) -> None:
        asked = self._asked = _DigestReplies(digest_request(pairing))
        for part in asked.request.parts(CELLS_PER_REQUEST):
            number = next(self._tools.numbers)
            asked.theirs[number] = None
            spans = pack_columns(part.columns)
            question = AskDigests(number, self._load.prompt.lease, part.num_tokens, spans)
            self._tools.control.send(self.peer.link, question)

    def _look_at_digests(self, check: _ReadCheck) -> Reason | None:
        if check.digests_agree:
            return None
        asked = self._asked
        assert asked is not None
        if asked.failure:
            self.detail = asked.failure
            return _OF_DIGESTS.get(asked.failure, Reason.PAIRING)
        if check.ours is None:
            return self._take_ours(check, asked.request)
        theirs = [each for each in asked.theirs.values() if each is not None]
        if not check.ours.is_done or len(theirs) < len(asked.theirs):
            return None
        if check.ours.error is not None or check.ours.value is None:
            self.detail = f"digests could not be taken: {check.ours.error}"
            return Reason.OTHER
        wrong = mismatches(asked.request, check.ours.value, _split(b"".join(theirs)))
        if wrong:
            group, cell = wrong[0]
            self.detail = f"{len(wrong)} cells are not what the producer holds, the first is {cell} of group {group}"
            return Reason.DIGEST
        check.digests_agree = True
        return None

    def _take_ours(self, check: _ReadCheck, request: DigestRequest) -> Reason | None:
        if check.waits and self._tools.digesting.is_full:
            return None
        exchange = self.peer.exchange
        assert exchange is not None
        runs = digest_runs(exchange, Side.OURS, _ours(self._load), request)
        if isinstance(runs, Refusal):
            self.detail = str(runs)
            return Reason.PAIRING
        # None where the thread has much to do: then once more, until the deadline.
        check.ours = self._tools.digesting.take(runs)
        check.waits = check.ours is None
        return None


def _ours(load: PromptLoad) -> BlockTables:
    return BlockTables.whole(load.num_tokens, load.block_ids)


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
