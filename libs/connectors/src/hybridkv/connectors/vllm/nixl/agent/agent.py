"""The thread of a rank that speaks with peers: everything that they and the engine say comes to it in turn.

So neither reads nor leases need a lock, and nothing that a peer does, or leaves undone, holds up the engine.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hybridkv.connectors.vllm.nixl.agent.connections import ControlChannel, ProducerConnections
from hybridkv.connectors.vllm.nixl.agent.lease_server import LeaseServer, ServerOptions
from hybridkv.connectors.vllm.nixl.agent.read_manager import ReadManager, ReadOptions
from hybridkv.connectors.vllm.nixl.agent.remote_leases import RemoteLeases
from hybridkv.connectors.vllm.nixl.memory.rank_memory import NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import NixlLoadFailure, NixlStepPlan
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.peers.control import ControlLoop, Handlers, LinkId
from hybridkv.peers.transport import Transport
from hybridkv.peers.wire import CloseReason, Digests, Message

MAX_LINK_BYTES = 32 << 20
"""Of one peer: a few of the longest messages that there are."""
MAX_BYTES = 256 << 20
"""Of all of them."""
MESSAGE_OVERHEAD_BYTES = 512
"""What a message takes up beside what it carries."""


class Backlog:
    """Bytes by link. Any thread may call.

    Args:
        max_link_bytes: of one peer.
        max_bytes: of all.
    """

    def __init__(self, max_link_bytes: int = MAX_LINK_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self._max_link_bytes = max_link_bytes
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._by_link: dict[LinkId, int] = {}
        self._total = 0

    @property
    def num_bytes(self) -> int:
        """That wait."""
        return self._total

    def add(self, link: LinkId, num_bytes: int) -> bool:
        """Whether a message of so many bytes may wait. Then it does."""
        with self._lock:
            waiting = self._by_link.get(link, 0) + num_bytes
            if waiting > self._max_link_bytes or self._total + num_bytes > self._max_bytes:
                return False
            self._by_link[link] = waiting
            self._total += num_bytes
            return True

    def remove(self, link: LinkId, num_bytes: int) -> None:
        """It was heard."""
        with self._lock:
            self._total -= num_bytes
            left = self._by_link[link] - num_bytes
            if left:
                self._by_link[link] = left
            else:
                del self._by_link[link]


def message_bytes(message: Message) -> int:
    """About what it takes up while it waits."""
    fields = (getattr(message, name) for name in message.__struct_fields__)
    return MESSAGE_OVERHEAD_BYTES + sum(len(field) for field in fields if isinstance(field, bytes | str))


logger = logging.getLogger("vllm.hybridkv.nixl")

MAX_INBOX_MESSAGES = 1 << 16
"""Words that may wait for the thread; a peer that says more is not listened to any longer."""
BUSY_S, IDLE_S = 0.001, 0.05
"""How long the thread looks away while something is under way, and while nothing is."""
CLOSE_S = 2.0


@dataclass(slots=True)
class AgentResults:
    """What ended since the engine last looked."""

    finished: set[str] = field(default_factory=set)
    failures: dict[str, NixlLoadFailure] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)


class Agent:
    """Runs a rank's dealings with its peers.

    Args:
        loop: control connections. The agent closes it.
        transport: moves bytes; everything is registered. The agent closes it.
        memory: what was registered.
        offer: what consumers are told.
        options: how reads are made.
        recorder: counts what happens.
    """

    def __init__(
        self,
        loop: ControlLoop,
        transport: Transport,
        memory: NixlRankMemory,
        offer: ServerOptions,
        options: ReadOptions,
        recorder: NixlMetrics,
    ) -> None:
        self._loop = loop
        self._transport = transport
        control = ControlChannel(
            lambda host, port, name: loop.connect(host, port, name, self._handlers(self._of_producer)),
            loop.send,
            loop.end,
            lambda: self._inbox.put(lambda: None),
        )
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._server = LeaseServer(offer, memory, control, recorder)
        self._connections = ProducerConnections(offer.description, transport, control, options.max_links)
        self._reads = ReadManager(memory, self._connections, transport, control, recorder, options)
        self._remote_leases = RemoteLeases(self._connections, control, options.clock)
        self._connections.in_use = lambda: self._reads.links | self._remote_leases.links
        self._backlog = Backlog()
        self._lock = threading.Lock()
        self._results = AgentResults()
        self._is_closing = False
        self._parts = (
            *(self._server.tick, self._reads.tick, self._release_ranks, self._remote_leases.tick, self._publish),
            self._connections.end_turn,
        )
        self._thread = threading.Thread(target=self._run, name="hybridkv-peer-agent", daemon=True)
        self._begin()

    def listen(self, host: str, port: int) -> int:
        """Lets consumers in; at which port. `OSError` where it cannot be bound."""
        return self._loop.listen(host, port, self._handlers(self._of_consumer))[1]

    def submit(self, plan: NixlStepPlan) -> None:
        """What the scheduler says. Called by the engine's thread."""
        # A consumer that is connected may read before this rank's thread has a turn, and would find no lease.
        for opened in plan.opened:
            self._server.show(opened.lease)
        self._inbox.put(lambda: self._carry_out(plan))

    def take_results(self) -> AgentResults:
        """What ended since the last call. Called by the engine's thread."""
        with self._lock:
            results, self._results = self._results, AgentResults()
        return results

    def close(self) -> bool:
        """Ends everything. False where something could not be ended in time, and memory must stay mapped."""
        self._inbox.put(self._begin_closing)
        is_over = self._join()
        is_over = self._loop.close(CLOSE_S) and is_over
        is_over = self._server.is_closed(CLOSE_S) and self._reads.is_closed(CLOSE_S) and is_over
        return self._transport.close(CLOSE_S) and is_over

    # What a simulation, which takes the turns itself, replaces.

    def _begin(self) -> None:
        """Turns are taken from now on."""
        self._thread.start()

    def _join(self) -> bool:
        """No turn is taken any more; False where one does not end."""
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    # On the thread.

    def _run(self) -> None:
        while not self._is_closing:
            self._turn(BUSY_S, IDLE_S)

    def _turn(self, busy_s: float, idle_s: float) -> None:
        """Goes on with everything, once it has looked away as long as it may."""
        self._try(lambda: self._process_inbox(busy_s, idle_s))
        for part in self._parts:
            self._try(part)

    def _try(self, part: Callable[[], None]) -> None:
        """What fails stops nothing else: a request that nobody reports would wait for ever, and so would its blocks."""
        try:
            part()
        except Exception:
            logger.exception("the connector to peers met a bug")

    def _process_inbox(self, busy_s: float, idle_s: float) -> None:
        if self._reads.is_moving:
            self._transport.wait(busy_s)
            wait_s = 0.0
        else:
            # Whatever else is waited for comes as a word.
            self._transport.progress()
            wait_s = busy_s if self._reads.is_busy or self._server.is_busy else idle_s
        try:
            self._try(self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait())
            for _ in range(self._inbox.qsize()):
                self._try(self._inbox.get_nowait())
        except queue.Empty:
            pass

    def _release_ranks(self) -> None:
        for request_id, rank, is_read in self._reads.released_ranks:
            self._remote_leases.part(request_id, rank, is_read)
        self._reads.released_ranks = []
        for request_id, failure in self._reads.ended:
            self._remote_leases.end(request_id, failure is None)

    def _publish(self) -> None:
        ended, released = self._reads.ended, self._server.released
        if not ended and not released:
            return
        with self._lock:
            for request_id, failure in ended:
                self._results.finished.add(request_id)
                if failure is not None:
                    self._results.failures[request_id] = failure
            self._results.released |= released
        self._reads.ended, self._server.released = [], set()

    def _carry_out(self, plan: NixlStepPlan) -> None:
        for request_id in plan.dropped:
            self._try(partial(self._server.drop, request_id))
        for opened in plan.opened:
            self._try(partial(self._server.open, opened))
        for offered in plan.offered:
            self._try(partial(self._server.offer, offered))
        for waiting in plan.waiting:
            self._try(partial(self._remote_leases.begin, waiting.request_id, waiting.prompt))
        for load in plan.loads:
            self._try(partial(self._reads.begin, load))
        for request_id in plan.ended:
            self._try(partial(self._end_request, request_id))

    def _end_request(self, request_id: str) -> None:
        if not self._reads.cancel(request_id):
            self._remote_leases.end(request_id, False)

    def _begin_closing(self) -> None:
        self._is_closing = True
        self._server.close()
        self._reads.close()

    # On the control connections' thread.

    def _handlers(self, received: Callable[[LinkId, Message], None]) -> Handlers:
        is_server = received == self._of_consumer
        opened: Callable[[LinkId], None] = self._server.opened if is_server else self._connections.opened

        def say(link: LinkId, message: Message) -> None:
            num_bytes = message_bytes(message)
            if self._inbox.qsize() > MAX_INBOX_MESSAGES or not self._backlog.add(link, num_bytes):
                self._loop.end(link, CloseReason.BACKLOG)
            else:
                self._inbox.put(lambda: self._receive(link, message, num_bytes, received))

        return Handlers(
            opened=lambda link, name: self._inbox.put(lambda: opened(link)),
            received=say,
            closed=lambda link, reason: self._inbox.put(lambda: self._closed(link, reason)),
        )

    # On the thread again.

    def _receive(
        self, link: LinkId, message: Message, num_bytes: int, received: Callable[[LinkId, Message], None]
    ) -> None:
        self._backlog.remove(link, num_bytes)
        try:
            received(link, message)
        except Exception:
            # It got through every check: nobody knows what this peer believes now.
            self._loop.end(link, CloseReason.HANDLER)
            raise

    def _of_consumer(self, link: LinkId, message: Message) -> None:
        self._server.received(link, message)

    def _of_producer(self, link: LinkId, message: Message) -> None:
        peer = self._connections.of_link(link)
        if peer is None or self._connections.received(peer, message):
            return
        if isinstance(message, Digests):
            self._reads.answered(peer, message)

    def _closed(self, link: LinkId, reason: CloseReason) -> None:
        self._connections.closed(link, reason)
        self._server.closed(link)
