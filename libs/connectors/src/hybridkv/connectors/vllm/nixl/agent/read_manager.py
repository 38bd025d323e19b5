"""Read manager: a consumer's reads on one rank. `hybridkv.peers.reads` is the state machine of each read.

A read succeeds only if the lease table of each rank that was read has the lease after the last byte has arrived, and,
with `verify`, both sides' digests are equal. A read ends exactly once, and never while a transfer may still write into
the engine's blocks, because the engine may give the blocks to another request after the end.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.connectors.errors import printable
from hybridkv.connectors.vllm.nixl.agent.connections import ControlChannel, ProducerConnection, ProducerConnections
from hybridkv.connectors.vllm.nixl.agent.rank_read import RankRead, ReadTools
from hybridkv.connectors.vllm.nixl.memory.rank_memory import DigestThread, NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import NixlLoadFailure, PromptLoad
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.peers.control import LinkId
from hybridkv.peers.ranks import RankLink
from hybridkv.peers.reads import (
    Abort,
    Cancel,
    Check,
    Command,
    Event,
    ReadBounds,
    ReadFailure,
    ReadLife,
    ReadStage,
    ReleaseLease,
    Report,
    Sever,
    Start,
    Tick,
    advance,
    begin,
)
from hybridkv.peers.transport import Transport
from hybridkv.peers.wire import Digests, WireLimits

logger = logging.getLogger("vllm.hybridkv.nixl")

MIN_TIMEOUT_S = 0.001
ASK_AGAIN_S = 0.05
"""Seconds between attempts to request digests from a busy producer."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reads.

    Args:
        bounds: time limits.
        verify: True to compare digests.
        clock: returns seconds.
        max_links: maximum connections to producers' ranks at the same time.
    """

    bounds: ReadBounds
    verify: bool
    clock: Callable[[], float]
    max_links: int = WireLimits().max_connections


@dataclass(slots=True)
class _RequestRead:
    """Read of one request. Times are seconds of the clock."""

    load: PromptLoad
    began_s: float
    ranks: tuple[RankRead, ...]
    life: ReadLife
    detail: str = ""
    """Description of the first failure."""
    is_broken: bool = False
    """A bug was logged for this read."""


class ReadManager:
    """Reads by request. One thread calls all methods.

    Args:
        memory: memory of this rank.
        peers: connections to producers.
        transport: moves bytes.
        control: sends requests for digests.
        metrics: counters of this half.
        options: options of reads.
    """

    def __init__(
        self,
        memory: NixlRankMemory,
        peers: ProducerConnections,
        transport: Transport,
        control: ControlChannel,
        metrics: NixlMetrics,
        options: ReadOptions,
    ) -> None:
        self._peers = peers
        self._metrics = metrics
        self._options = options
        self._digest_thread = DigestThread(memory, control.wake)
        self._tools = ReadTools(memory, transport, control, self._digest_thread, itertools.count(1), options.verify)
        self._reads: dict[str, _RequestRead] = {}
        self._rank_by_request: dict[int, RankRead] = {}
        self._ask_again_s = 0.0
        self._leftovers: list[RankRead] = []
        """Ranks of ended reads that still read a lease into a scratch slot."""
        self.ended: list[tuple[str, NixlLoadFailure | None]] = []
        """Ended reads: request id, and the failure or None. The agent takes them."""
        self.released_ranks: list[tuple[str, int, bool]] = []
        """Producers' ranks that a read no longer needs: request id, rank, and True if the rank was read."""

    @property
    def is_busy(self) -> bool:
        """True if a read is running: then the agent must poll often."""
        return bool(self._reads or self._leftovers)

    @property
    def is_moving(self) -> bool:
        """True if a transfer is running."""
        return any(rank.is_moving for read in self._reads.values() for rank in read.ranks) or bool(self._leftovers)

    @property
    def links(self) -> set[LinkId]:
        """Connections of running reads, and of ended reads that still read a lease."""
        reads = (rank for read in self._reads.values() for rank in read.ranks)
        return {rank.peer.link for rank in (*reads, *self._leftovers)}

    def begin(self, load: PromptLoad) -> None:
        """Starts a read. The read always appears in `ended`, because the engine waits for its end."""
        try:
            self._begin(load)
        except Exception as error:
            logger.exception("bug in a read")
            self._report(load, NixlLoadFailure("other", f"{type(error).__name__}: {error}"))

    def _begin(self, load: PromptLoad) -> None:
        prompt = load.prompt
        links = self._peers.rank_links_for(len(prompt.ranks))
        if load.refused is not None:
            self._report(load, NixlLoadFailure("other", load.refused))
        elif links is None:
            self._report(load, NixlLoadFailure("refused", self._peers.explain_no_rank_links(len(prompt.ranks))))
        else:
            # The next tick advances the read.
            self._reads[load.request_id] = self._begun(load, [link for link in links if link.reads])

    def _begun(self, load: PromptLoad, links: list[RankLink]) -> _RequestRead:
        prompt, now_s = load.prompt, self._options.clock()
        ranks = tuple(
            RankRead(self._tools, index, link.rank, self._peers.get(prompt.host, prompt.ranks[link.rank]), load)
            for index, link in enumerate(links)
        )
        return _RequestRead(load, now_s, ranks, begin((True,) * len(ranks), self._options.bounds, now_s))

    def cancel(self, request_id: str) -> bool:
        """Cancels the read of an ended request. The read still appears in `ended`. False if there is no read."""
        read = self._reads.get(request_id)
        if read is None:
            return False
        self._feed(read, Abort())
        return True

    def on_digests(self, peer: ProducerConnection, message: Digests) -> None:
        """Takes digests from a producer. Ignores digests that were not requested from this producer."""
        rank = self._rank_by_request.get(message.request)
        if rank is not None and rank.peer is peer and rank.on_digests(message):
            del self._rank_by_request[message.request]

    def tick(self) -> None:
        """Advances every read as far as possible."""
        now_s = self._options.clock()
        self._tools.is_full = False
        self._tools.may_ask_again = now_s >= self._ask_again_s
        if self._tools.may_ask_again:
            self._ask_again_s = now_s + ASK_AGAIN_S
        for read in list(self._reads.values()):
            try:
                self._advance(read)
            except Exception as error:  # a bug fails only its own request
                if not read.is_broken:
                    logger.exception("bug in a read")
                    read.is_broken, read.detail = True, f"{type(error).__name__}: {error}"
                self._feed(read, Abort(ReadFailure.OTHER))
        self._leftovers = [rank for rank in self._leftovers if not rank.try_release()]

    def close(self) -> None:
        """Stops digests."""
        self._digest_thread.close()

    def wait_until_closed(self, timeout_s: float) -> bool:
        """Waits for the digest thread. Returns False if it still reads the engine's memory after `timeout_s`."""
        return self._digest_thread.wait_until_ended(timeout_s)

    def _advance(self, read: _RequestRead) -> None:
        for index, rank in enumerate(read.ranks):
            while not read.life.reported and (event := rank.poll(read.life.peers[index].stage)) is not None:
                self._feed(read, event)
        deadline_s = read.life.next_deadline_s
        if not read.life.reported and deadline_s is not None and self._options.clock() >= deadline_s:
            self._feed(read, Tick())

    def _feed(self, read: _RequestRead, event: Event) -> None:
        now_s, before = self._options.clock(), read.life
        read.life, commands = advance(before, event, now_s)
        if before.failure is None and read.life.failure is not None and not read.detail:
            read.detail = _detail(read, before, event, now_s)
        for command in commands:
            self._execute(read, command, now_s)

    def _execute(self, read: _RequestRead, command: Command, now_s: float) -> None:
        if isinstance(command, Report):
            self._end(read, command.failure)
            return
        rank, state = read.ranks[command.peer], read.life.peers[command.peer]
        left_s = MIN_TIMEOUT_S if state.deadline_s is None else max(MIN_TIMEOUT_S, state.deadline_s - now_s)
        match command:
            case Start():
                rank.start(left_s)
                self._rank_by_request |= dict.fromkeys(rank.request_numbers, rank)
            case Cancel():
                rank.cancel()
            case Sever():
                self._peers.sever(rank.peer)
            case Check():
                rank.check(left_s)
            case ReleaseLease():
                self.released_ranks.append((read.load.request_id, rank.rank, state.stage is ReadStage.DONE))

    def _end(self, read: _RequestRead, failure: ReadFailure | None) -> None:
        del self._reads[read.load.request_id]
        for rank in read.ranks:
            for number in rank.request_numbers:
                self._rank_by_request.pop(number, None)
            if not rank.try_release():
                self._leftovers.append(rank)
        if failure is not None:
            self._report(read.load, NixlLoadFailure(str(failure), read.detail))
            return
        self.ended.append((read.load.request_id, None))
        num_bytes = sum(rank.num_bytes for rank in read.ranks)
        num_descriptors = sum(rank.num_descriptors for rank in read.ranks)
        self._metrics.count_read(self._options.clock() - read.began_s, num_bytes, num_descriptors)

    def _report(self, load: PromptLoad, failure: NixlLoadFailure) -> None:
        self.ended.append((load.request_id, failure))
        self._metrics.count_failure(failure.reason)
        if failure.reason != "cancelled":
            logger.warning("load of request %s failed: %s", printable(load.request_id), failure.detail)


def _detail(read: _RequestRead, before: ReadLife, event: Event, now_s: float) -> str:
    if isinstance(event, Abort):
        return "the request has ended"
    if isinstance(event, Tick):
        late = [peer.stage for peer in before.peers if peer.deadline_s is not None and now_s >= peer.deadline_s]
        return f"timeout in stage {' and '.join(dict.fromkeys(late))}"
    return read.ranks[event.peer].detail or "unknown reason"
