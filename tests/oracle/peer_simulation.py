"""Simulation of engines that exchange KV, with no thread, socket or clock of their own: everything advances in turns.

The connector is the real one of both roles. Replaced are its thread, its control connections, its transport, its
digester and its clock.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from hybridkv.connectors.vllm.nixl import worker
from hybridkv.connectors.vllm.nixl.agent import lease_server, read_manager
from hybridkv.connectors.vllm.nixl.agent.agent import Agent
from hybridkv.connectors.vllm.nixl.memory.rank_memory import SCRATCH_SLOTS, NixlRankMemory
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.tiers.threads import Outcome
from kits.peers.faults import FaultInjectingTransport, FaultPlan
from kits.peers.in_memory import World
from oracle import engine
from oracle.peer_network import Network, SimulatedControl, SteppedTransport
from oracle.runner import OracleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from random import Random

    from hybridkv.peers.digests import DigestRuns
    from hybridkv.peers.transport import Transport
    from hybridkv.peers.wire import WireLimits

T = TypeVar("T")


class BugError(OracleError):
    """The connector's thread raised an exception, or reached a forbidden state."""


class LateOutcome(Outcome[T]):
    """Result that is ready after some polls."""

    def __init__(self, work: Callable[[], T], num_looks: int) -> None:
        super().__init__()
        self._work: Callable[[], T] | None = work
        self._looks_left = num_looks

    @property
    def is_done(self) -> bool:
        self._looks_left -= 1
        if self._looks_left < 0 and self._work is not None:
            work, self._work = self._work, None
            self.run(work)
        return self._work is None


class LateDigesting:
    """Replaces the digest thread. Sometimes it is full."""

    def __init__(self, memory: NixlRankMemory, random: Random) -> None:
        self._memory = memory
        self._random = random

    @property
    def is_full(self) -> bool:
        """True at random."""
        return self._random.random() < 0.5

    def start_digests(self, runs: DigestRuns) -> Outcome[list[bytes]] | None:
        if self._random.random() < 0.05:
            return None
        return LateOutcome(lambda: self._memory.digests(runs), self._random.choice((0, 0, 1, 3)))

    def close(self) -> None:
        """Nothing is queued."""

    def wait_until_ended(self, timeout_s: float) -> bool:
        return True


@dataclass
class Simulation:
    """One world, with all engines that were ever started in it.

    Attributes: random: decides the order of everything. plan: faults of the transports of engines that are started from
    now on. now_s: the time on all clocks. failures: number of failed reads by reason. details: of the same, as text.
    outcomes: of leases and of prompts.
    """

    random: Random
    plan: FaultPlan
    now_s: float = 1000.0
    failures: dict[str, int] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    agents: list[SteppedAgent] = field(default_factory=list)
    transports: dict[str, SteppedTransport] = field(default_factory=dict)
    world: World = field(default_factory=World)

    def __post_init__(self) -> None:
        self.network = Network(self.random, lambda: self.now_s)

    def open_transport(self, name: str) -> Transport:
        transport = self.transports[name] = SteppedTransport(name, self.world, self.random)
        return FaultInjectingTransport(transport, self.plan)

    def turn(self) -> None:
        """A turn of each part, in any order."""
        for agent in self.random.sample(self.agents, len(self.agents)):
            if self.random.random() < 0.7:
                agent.turn()
            if self.random.random() < 0.5:
                self.network.turn()
        for transport in self.transports.values():
            transport.move()

    def kill(self, agents: Sequence[Agent]) -> None:
        """Kills all ranks of an engine, as SIGKILL does."""
        for agent in [agent for agent in self.agents if agent in agents]:
            self.agents.remove(agent)
            self.network.drop(agent.control)
            del self.transports[agent.name]
            self.world.kill(agent.name.encode())

    @property
    def is_quiet(self) -> bool:
        """Whether no agent has a read, a lease or a hold, as far as they know."""
        return all(not agent.kept() for agent in self.agents)

    def kept(self) -> str:
        """Leftovers, as text."""
        left = [f"{agent.name}: {agent.kept()}" for agent in self.agents if agent.kept()]
        transfers = sum(transport.num_unreleased for transport in self.transports.values())
        return "; ".join([*left, *([f"{transfers} transfers that were not released"] if transfers else [])])

    def count(self, tally: dict[str, int], name: str) -> None:
        tally[name] = tally.get(name, 0) + 1


class SteppedAgent(Agent):
    """An agent that the simulation steps."""

    simulation: Simulation

    def _begin(self) -> None:
        control = self._loop
        assert isinstance(control, SimulatedControl)
        self.control, self.name = control, control.name
        self.simulation.agents.append(self)

    def _join(self) -> bool:
        while not self._is_closing:
            self._turn(0.0, 0.0)
        if self in self.simulation.agents:
            self.simulation.agents.remove(self)
            del self.simulation.transports[self.name]
        return True

    def turn(self) -> None:
        self._turn(0.0, 0.0)
        broken = [read.detail for read in self._reads._reads.values() if read.is_broken]
        if broken:
            raise BugError(f"{self.name}: {broken}")

    def _try(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BugError:
            raise
        except Exception as error:
            raise BugError(f"{self.name}: {type(error).__name__}: {error}") from error

    def _publish(self) -> None:
        for _, failure in self._reads.ended:
            if failure is not None:
                self.simulation.count(self.simulation.failures, failure.reason)
                self.simulation.details.append(failure.detail)
        super()._publish()

    def kept(self) -> str:
        """Reads and leases that have not ended, as text."""
        scratch = SCRATCH_SLOTS - len(self._reads._tools.memory._free)
        found = {
            "reads": len(self._reads._reads),
            "leftovers": len(self._reads._leftovers),
            "questions": len(self._server._pending_digests) + len(self._reads._rank_by_request),
            "leases": len(self._server._leases),
            "tables": len(self._server._tables),
            "early": len(self._server._held_before_plan)
            + len(self._server._ended_before_plan)
            + len(self._server._opened),
            "holds": self._remote_leases.num_leases,
            "scratch": scratch,
        }
        return ", ".join(f"{name} {number}" for name, number in found.items() if number)


@contextmanager
def installed(simulation: Simulation) -> Iterator[pytest.MonkeyPatch]:
    """Engines that are built in here belong to the simulation."""

    class ItsAgent(SteppedAgent):
        pass

    ItsAgent.simulation = simulation

    def control(name: str, secret: Any, limits: WireLimits, clock: Any) -> SimulatedControl:
        return SimulatedControl(simulation.network, name, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "clock", lambda: simulation.now_s)
        patch.setattr(worker, "ControlLoop", control)
        patch.setattr(worker, "Agent", ItsAgent)
        patch.setattr(worker, "open_transport", simulation.open_transport)
        for module in (read_manager, lease_server):
            patch.setattr(module, "DigestThread", lambda memory, wake: LateDigesting(memory, simulation.random))
        patch.setattr(
            NixlMetrics, "count_lease", lambda self, name: simulation.count(simulation.outcomes, f"lease {name}")
        )
        patch.setattr(
            NixlMetrics, "count_prompt", lambda self, name: simulation.count(simulation.outcomes, f"prompt {name}")
        )
        patch.setattr(engine, "IDLE_PAUSE_S", 0.0)
        yield patch
