"""Network between two simulated engines: control connections and a transport that advance only when the simulation
steps them.

No thread and no real clock, so that one seed is one run. Messages are encoded and decoded by the real codec; handshake
and sockets are tested in libs/peers.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridkv.peers.control import Handlers, LinkId
from hybridkv.peers.ranges import Ranges
from hybridkv.peers.transport import (
    PENDING,
    RemoteId,
    TransferDone,
    TransferFailed,
    TransferFailureReason,
    TransferId,
    TransferState,
)
from hybridkv.peers.wire import CloseReason, Message, MessageCodec, WireLimits
from kits.peers.in_memory import InMemoryTransport, World

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

SILENCE_S = WireLimits().silence_timeout_s
FIRST_PORT = 20000


@dataclass(slots=True)
class End:
    """One side of a connection."""

    control: SimulatedControl
    handlers: Handlers
    link: LinkId
    is_open: bool = False
    in_flight: deque[bytes] = field(default_factory=deque)
    """Messages that the other side has sent and this one has not received."""


@dataclass(slots=True)
class Wire:
    """A connection, or an attempt at one. `server` is None until it is accepted."""

    client: End
    address: tuple[str, int]
    wanted_name: str | None
    begun_s: float
    server: End | None = None

    def other(self, end: End) -> End | None:
        return self.server if end is self.client else self.client


class Network:
    """All connections. While `stalled` it carries nothing, and after `SILENCE_S` of that all connections end."""

    def __init__(self, random: Random, clock: Callable[[], float]) -> None:
        self._random = random
        self.clock = clock
        self.listeners: dict[tuple[str, int], tuple[SimulatedControl, Handlers]] = {}
        self._wires: list[Wire] = []
        self._ports = itertools.count(FIRST_PORT)
        self.links = itertools.count(1)
        self.stalled = False
        self._stalled_since_s = 0.0

    def bind(self, host: str, port: int, control: SimulatedControl, handlers: Handlers) -> int:
        port = port or next(self._ports)
        assert (host, port) not in self.listeners, "the earlier listener of this port is gone"
        self.listeners[host, port] = control, handlers
        return port

    def begin(self, end: End, address: tuple[str, int], name: str | None) -> None:
        self._wires.append(Wire(end, address, name, self.clock()))

    def of(self, control: SimulatedControl, link: LinkId) -> tuple[Wire, End] | None:
        for wire in self._wires:
            for end in (wire.client, wire.server):
                if end is not None and end.control is control and end.link == link:
                    return wire, end
        return None

    def stall(self) -> None:
        if not self.stalled:
            self.stalled, self._stalled_since_s = True, self.clock()

    def cut(self) -> None:
        """Ends every connection, as a network does: messages in flight are lost."""
        for wire in list(self._wires):
            self.end(wire, None, CloseReason.RESET)

    def drop(self, control: SimulatedControl) -> None:
        """A process is gone: its ends receive nothing, and the other ends are closed."""
        for address in [address for address, (owner, _) in self.listeners.items() if owner is control]:
            del self.listeners[address]
        for wire in list(self._wires):
            ends = [end for end in (wire.client, wire.server) if end is not None]
            if any(end.control is control for end in ends):
                self._wires.remove(wire)
                for end in ends:
                    if end.control is not control:
                        self._close(wire, end, CloseReason.RESET)

    def end(self, wire: Wire, by: End | None, reason: CloseReason) -> None:
        """Closes the end `by` with the reason, the other one with ENDED."""
        self._wires.remove(wire)
        for end in (wire.client, wire.server):
            if end is not None:
                self._close(wire, end, reason if by is None or end is by else CloseReason.ENDED)

    def _close(self, wire: Wire, end: End, reason: CloseReason) -> None:
        was_open, end.is_open = end.is_open, False
        if was_open or end is wire.client:
            end.handlers.closed(end.link, reason)

    def turn(self) -> None:
        """Delivers some of the messages in flight."""
        if self.stalled:
            if self.clock() - self._stalled_since_s > SILENCE_S:
                for wire in list(self._wires):
                    self.end(wire, None, CloseReason.RESET if wire.server else CloseReason.TOO_SLOW)
            return
        for wire in list(self._wires):
            if wire in self._wires:
                self._go_on(wire)

    def _go_on(self, wire: Wire) -> None:
        if wire.server is None:
            if self._random.random() < 0.6:
                self._answer(wire)
            return
        for end in (wire.client, wire.server):
            for _ in range(self._random.randrange(4)):
                if not end.in_flight or not end.is_open:
                    break
                end.handlers.received(end.link, end.control.codec.decode(end.in_flight.popleft()))

    def _answer(self, wire: Wire) -> None:
        control, handlers = self.listeners.get(wire.address, (None, None))
        if control is None or handlers is None:
            self.end(wire, wire.client, CloseReason.UNREACHABLE)
        elif wire.wanted_name is not None and control.name != wire.wanted_name:
            self.end(wire, wire.client, CloseReason.WRONG_PEER)
        elif control is wire.client.control:
            self.end(wire, wire.client, CloseReason.SELF)
        else:
            wire.server = End(control, handlers, LinkId(next(self.links)), is_open=True)
            wire.client.is_open = True
            handlers.opened(wire.server.link, wire.client.control.name)
            wire.client.handlers.opened(wire.client.link, control.name)


class SimulatedControl:
    """The part of `ControlLoop` that the connector uses, over a `Network`."""

    def __init__(self, network: Network, name: str, limits: WireLimits) -> None:
        self.network = network
        self.name = name
        self.codec = MessageCodec(limits)

    def listen(self, host: str, port: int, handlers: Handlers, idle_s: float) -> tuple[str, int]:
        return host, self.network.bind(host, port, self, handlers)

    def connect(self, host: str, port: int, expected_peer: str | None, handlers: Handlers) -> LinkId:
        link = LinkId(next(self.network.links))
        self.network.begin(End(self, handlers, link), (host, port), expected_peer)
        return link

    def send(self, link: LinkId, message: Message) -> bool:
        body = self.codec.encode(message)
        found = self.network.of(self, link)
        if found is None or not found[1].is_open:
            return False
        other = found[0].other(found[1])
        assert other is not None
        other.in_flight.append(body)
        return True

    def end(self, link: LinkId, reason: CloseReason = CloseReason.DONE) -> None:
        if (found := self.network.of(self, link)) is not None:
            self.network.end(*found, reason)

    def close(self, timeout_s: float) -> bool:
        self.network.drop(self)
        return True


@dataclass(slots=True)
class _Flight:
    """A read in flight: the number of its ranges that have arrived, and whether it must stop."""

    remote: RemoteId
    ranges: Ranges
    num_arrived: int = 0
    is_stopping: bool = False


class SteppedTransport(InMemoryTransport):
    """A read arrives range by range in each turn, and goes on for a while after it was cancelled."""

    def __init__(self, peer_name: str, world: World, random: Random) -> None:
        super().__init__(peer_name, world)
        self._random = random
        self._pace = random.choice((0.7, 0.5, 0.15))
        self._flights: dict[TransferId, _Flight] = {}

    @property
    def num_unreleased(self) -> int:
        return len(self._states)

    def read(self, remote: RemoteId, ranges: Ranges, timeout_s: float) -> TransferId:
        transfer = super().read(remote, ranges, timeout_s)
        if self._states[transfer] is PENDING:
            # A cut may be inside a page when its block is given to another request.
            self._flights[transfer] = _Flight(remote, ranges.cut(96))
        return transfer

    def move(self) -> None:
        """Delivers some of the ranges in flight."""
        for transfer, flight in list(self._flights.items()):
            if flight.remote not in self._remotes:
                self._land(transfer, TransferFailed(TransferFailureReason.CLOSED))
            elif self._random.random() < self._pace:
                self._go_on(transfer, flight)

    def _go_on(self, transfer: TransferId, flight: _Flight) -> None:
        upto = min(len(flight.ranges), flight.num_arrived + 1 + self._random.randrange(len(flight.ranges)))
        if upto > flight.num_arrived:
            state = self._copy(flight.remote, flight.ranges.rows(flight.num_arrived, upto))
            if isinstance(state, TransferFailed):
                self._land(transfer, state)
                return
        flight.num_arrived = upto
        if flight.is_stopping and self._random.random() < 0.3:
            self._land(transfer, TransferFailed(TransferFailureReason.CANCELLED))
        elif upto == len(flight.ranges):
            self._land(transfer, TransferDone(flight.ranges.total_bytes, len(flight.ranges), 0.0))

    def _land(self, transfer: TransferId, state: TransferState) -> None:
        del self._flights[transfer]
        self._states[transfer] = state

    def poll(self, transfer: TransferId) -> TransferState:
        return self._states[transfer]

    def cancel(self, transfer: TransferId) -> None:
        if transfer in self._flights:
            self._flights[transfer].is_stopping = True

    def release(self, transfer: TransferId) -> bool:
        if transfer in self._flights:
            self._flights[transfer].is_stopping = True
            return False
        return super().release(transfer)

    def close(self, timeout_s: float) -> bool:
        self._flights.clear()
        return super().close(timeout_s)
