"""Agent: the thread of a rank for its peers. This thread handles plans of the engine and messages one after another.

So reads and leases need no lock, and a slow peer cannot delay the engine.
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
from hybridkv.tiers.threads import BackgroundThread

MAX_LINK_BYTES = 32 << 20
"""Limit of the waiting bytes from one peer: a few messages of the largest size."""
MAX_BYTES = 256 << 20
"""Limit of the waiting bytes from all peers."""
MESSAGE_OVERHEAD_BYTES = 512
"""Memory of a message besides its byte fields."""


class Backlog:
    """Bytes of messages that wait for the agent's thread, by connection, with limits. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_link: dict[LinkId, int] = {}
        self._total = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that wait now."""
        return self._total

    def add(self, link: LinkId, num_bytes: int) -> bool:
        """Adds a message. Returns False, and adds nothing, if a limit would be exceeded."""
        with self._lock:
            waiting = self._by_link.get(link, 0) + num_bytes
            if waiting > MAX_LINK_BYTES or self._total + num_bytes > MAX_BYTES:
                return False
            self._by_link[link] = waiting
            self._total += num_bytes
            return True

    def remove(self, link: LinkId, num_bytes: int) -> None:
        """Removes a message that the agent's thread has taken."""
        with self._lock:
            self._total -= num_bytes
            left = self._by_link[link] - num_bytes
            if left:
                self._by_link[link] = left
            else:
                del self._by_link[link]


def message_bytes(message: Message) -> int:
    """Approximate memory of a waiting message."""
    fields = (getattr(message, name) for name in message.__struct_fields__)
    return MESSAGE_OVERHEAD_BYTES + sum(len(field) for field in fields if isinstance(field, bytes | str))


logger = logging.getLogger("vllm.hybridkv.nixl")

MAX_INBOX_MESSAGES = 1 << 16
"""Limit of the calls and messages that wait for the thread. A further message ends its connection."""
BUSY_S, IDLE_S = 0.001, 0.05
"""Poll intervals of the thread: with work in progress, and without."""
CLOSE_S = 2.0


@dataclass(slots=True)
class AgentResults:
    """Loads and leases that ended since the last `take_results`."""

    finished: set[str] = field(default_factory=set)
    failures: dict[str, NixlLoadFailure] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)


class Agent:
    """Agent thread of a rank.

    Args:
        loop: control connections. The agent closes the loop.
        transport: moves bytes; all memory is registered. The agent closes the transport.
        memory: registered memory.
        server_options: options of the server for consumers.
        options: options of reads.
        metrics: counters of this half.
    """

    def __init__(
        self,
        loop: ControlLoop,
        transport: Transport,
        memory: NixlRankMemory,
        server_options: ServerOptions,
        options: ReadOptions,
        metrics: NixlMetrics,
    ) -> None:
        self._loop = loop
        self._transport = transport
        control = ControlChannel(
            lambda host, port, name: loop.connect(host, port, name, self._handlers(self._on_producer_message)),
            loop.send,
            loop.end,
            lambda: self._inbox.put(lambda: None),
        )
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lease_s = server_options.lease_s
        self._server = LeaseServer(server_options, memory, control, metrics)
        self._connections = ProducerConnections(server_options.description, transport, control, options.max_links)
        self._reads = ReadManager(memory, self._connections, transport, control, metrics, options)
        self._remote_leases = RemoteLeases(self._connections, control, options.clock)
        self._connections.find_links_in_use = lambda: self._reads.links | self._remote_leases.links
        self._backlog = Backlog()
        self._lock = threading.Lock()
        self._results = AgentResults()
        self._is_closing = False
        self._parts = (
            *(self._server.tick, self._reads.tick, self._release_ranks, self._remote_leases.tick, self._publish),
            self._connections.end_turn,
        )
        self._thread = BackgroundThread("hybridkv-peer-agent")
        self._begin()

    def listen(self, host: str, port: int) -> int:
        """Listens for consumers. Returns the port. Raises `OSError` if the address cannot be bound.

        A consumer sends renewals while it needs blocks, so a consumer that is silent for a whole lease needs none.
        """
        return self._loop.listen(host, port, self._handlers(self._on_consumer_message), self._lease_s)[1]

    def submit(self, plan: NixlStepPlan) -> None:
        """Queues the scheduler's plan. The engine's thread calls this."""
        # A connected consumer may read the lease before the agent's thread runs next.
        for opened in plan.opened:
            self._server.publish(opened.lease)
        self._inbox.put(lambda: self._execute(plan))

    def take_results(self) -> AgentResults:
        """Takes the results since the last call. A failed load is in `finished` too. The engine's thread calls this."""
        with self._lock:
            results, self._results = self._results, AgentResults()
        return results

    def close(self) -> bool:
        """Stops all threads and transfers. Returns False if one did not stop in time: keep the memory mapped then."""
        self._inbox.put(self._begin_closing)
        has_stopped = self._join()
        has_stopped = self._loop.close(CLOSE_S) and has_stopped
        has_stopped = self._server.wait_until_closed(CLOSE_S) and self._reads.wait_until_closed(CLOSE_S) and has_stopped
        return self._transport.close(CLOSE_S) and has_stopped

    # A simulation replaces these two methods and calls `_turn` itself.

    def _begin(self) -> None:
        """Starts the thread."""
        self._thread.submit(self._run)

    def _join(self) -> bool:
        """Waits for the last turn. Returns False if the turn does not end in time."""
        self._thread.close()
        return self._thread.wait_until_ended(CLOSE_S)

    # On the agent's thread.

    def _run(self) -> None:
        while not self._is_closing:
            self._turn(BUSY_S, IDLE_S)

    def _turn(self, busy_s: float, idle_s: float) -> None:
        """Takes one turn: waits for messages, at most for the poll interval, and advances all parts."""
        self._try(lambda: self._process_inbox(busy_s, idle_s))
        for part in self._parts:
            self._try(part)

    def _try(self, part: Callable[[], None]) -> None:
        """Calls a part and logs its exception, so that the other parts still run. Without these parts, requests would
        never end."""
        try:
            part()
        except Exception:
            logger.exception("bug in the agent of HybridNixlConnector")

    def _process_inbox(self, busy_s: float, idle_s: float) -> None:
        if self._reads.is_moving:
            self._transport.wait(busy_s)
            wait_s = 0.0
        else:
            # All other events come through the inbox.
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
            self._remote_leases.release_rank(request_id, rank, is_read)
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

    def _execute(self, plan: NixlStepPlan) -> None:
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

    # The returned handlers run on the control connections' thread.

    def _handlers(self, received: Callable[[LinkId, Message], None]) -> Handlers:
        is_server = received == self._on_consumer_message
        opened: Callable[[LinkId], None] = self._server.opened if is_server else self._connections.opened

        def on_message(link: LinkId, message: Message) -> None:
            num_bytes = message_bytes(message)
            if self._inbox.qsize() > MAX_INBOX_MESSAGES or not self._backlog.add(link, num_bytes):
                self._loop.end(link, CloseReason.BACKLOG)
            else:
                self._inbox.put(lambda: self._receive(link, message, num_bytes, received))

        return Handlers(
            opened=lambda link, name: self._inbox.put(lambda: opened(link)),
            received=on_message,
            closed=lambda link, reason: self._inbox.put(lambda: self._closed(link, reason)),
        )

    # On the agent's thread again.

    def _receive(
        self, link: LinkId, message: Message, num_bytes: int, received: Callable[[LinkId, Message], None]
    ) -> None:
        self._backlog.remove(link, num_bytes)
        try:
            received(link, message)
        except Exception:
            # The message was valid but only partly handled, so the two sides may have different states.
            self._loop.end(link, CloseReason.HANDLER)
            raise

    def _on_consumer_message(self, link: LinkId, message: Message) -> None:
        self._server.received(link, message)

    def _on_producer_message(self, link: LinkId, message: Message) -> None:
        peer = self._connections.of_link(link)
        if peer is None or self._connections.received(peer, message):
            return
        if isinstance(message, Digests):
            self._reads.on_digests(peer, message)

    def _closed(self, link: LinkId, reason: CloseReason) -> None:
        self._connections.closed(link, reason)
        self._server.closed(link)
