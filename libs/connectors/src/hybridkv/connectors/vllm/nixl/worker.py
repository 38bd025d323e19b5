"""The worker's half of HybridNixlConnector: hands the engine's plans to the rank's agent, and back what ended.

It decides nothing, waits for nothing, and raises nothing in the engine once it runs.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.role import Duties
from hybridkv.connectors.vllm.nixl.agent.agent import Agent
from hybridkv.connectors.vllm.nixl.agent.lease_server import ServerOptions
from hybridkv.connectors.vllm.nixl.agent.read_manager import ReadOptions
from hybridkv.connectors.vllm.nixl.config import NixlConfig
from hybridkv.connectors.vllm.nixl.memory.description import RankPlace, describe, identity_facts
from hybridkv.connectors.vllm.nixl.memory.host_buffer import BlockIds, HostBuffer, loaded_blocks
from hybridkv.connectors.vllm.nixl.memory.page_parts import page_orders
from hybridkv.connectors.vllm.nixl.memory.rank_memory import NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import NixlLoadFailure, NixlStepPlan, WorkerAddress
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.peers.control import ControlLoop
from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.reads import ReadBounds
from hybridkv.peers.transport import Region, Transport
from hybridkv.peers.wire import NO_SECRET, Secret, WireLimits, read_secret

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.hybridkv.nixl")
clock = time.monotonic


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a rank knows before the engine's memory is there.

    Args:
        config: of the operator.
        engine_id: of this engine.
        rank: tensor-parallel.
        tp_size: ranks of this engine.
        duties: whether it produces, consumes, or does both.
        uses_host_buffer: peers read and write a copy in host memory.
    """

    config: NixlConfig
    engine_id: str
    rank: int
    tp_size: int
    duties: Duties
    uses_host_buffer: bool = False


@dataclass(slots=True)
class WorkerResults:
    """What ended since the last step; a failed load is in both sets."""

    finished: set[str]
    failed: set[str]
    released: set[str]


class NixlWorker:
    """One rank.

    Args:
        settings: what is known of it.
        layout: the model's groups.
        recorder: counts what happens.

    Raises:
        ConfigurationError: the secret cannot be used.
    """

    def __init__(self, settings: WorkerSettings, layout: CacheLayout, recorder: NixlMetrics) -> None:
        self._settings = settings
        self._layout = layout
        self._recorder = recorder
        self._secret = _secret(settings.config)
        self._agent: Agent | None = None
        self._address: WorkerAddress | None = None
        self._failures: dict[str, tuple[NixlLoadFailure, ...]] = {}
        self._buffer: HostBuffer | None = None
        self._loading: dict[str, BlockIds] = {}
        """Of loads that are under way into the copy in host memory."""

    def register(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, Any],
        environ: Mapping[str, str],
    ) -> None:
        """Takes the engine's KV tensors, and begins to listen.

        Raises:
            ConfigurationError: they are not as described, or the address cannot be listened on.
        """
        settings, config = self._settings, self._settings.config
        compat.permit_amx()
        name = f"{settings.engine_id[:64]}.{secrets.token_hex(8)}.{settings.rank}"
        facts = identity_facts(vllm_config, config, self._layout, kv_caches, environ)
        place = RankPlace(name, settings.rank, settings.tp_size)
        orders = page_orders(vllm_config, kv_cache_config, self._layout)
        num_blocks = kv_cache_config.num_blocks
        if settings.uses_host_buffer:
            self._buffer = HostBuffer(kv_caches, self._layout.layers, num_blocks)
            kv_caches = self._buffer.kv_caches
            logger.info("HybridNixlConnector: %d MiB of host memory for peers", self._buffer.num_bytes >> 20)
        description, regions = describe(place, facts, self._layout, kv_caches, num_blocks, orders)
        memory = NixlRankMemory(regions, config.max_leases)
        description = msgspec.structs.replace(
            description, region_bytes=tuple(region.num_bytes for region in memory.regions)
        )
        limits = WireLimits(handshake_timeout_s=config.connect_timeout_seconds)
        transport = open_transport(name)
        capability = transport.register([Region(each.address, each.num_bytes) for each in memory.regions])
        self._agent = Agent(
            ControlLoop(name, self._secret, limits, clock),
            transport,
            memory,
            ServerOptions(description, capability, config.max_leases, config.lease_seconds, clock),
            ReadOptions(_bounds(config), config.verify, clock, limits.max_connections),
            self._recorder,
        )
        if settings.duties.stores:
            self._address = WorkerAddress(self._listen(self._agent), name)

    def _listen(self, agent: Agent) -> int:
        listen = self._settings.config.listen
        port = listen.port + self._settings.rank if listen.port else 0
        try:
            return agent.listen(listen.host, port)
        except OSError as error:
            hint = "choose another port, or 0 for any; ranks take the ports that follow"
            got = f"{listen.host}:{port}: {error.strerror or error}"
            raise ConfigurationError(f"{ROOT}.listen", "an address that can be listened on", got, hint) from None
        except PeersConfigurationError as error:
            raise ConfigurationError(f"{ROOT}.listen.host", error.expected, error.got, error.hint) from None

    def take_address(self) -> WorkerAddress | None:
        """Where consumers find this rank, if the scheduler was not told yet."""
        address, self._address = self._address, None
        return address

    def start(self, plan: NixlStepPlan) -> None:
        """Carries out a step's plan, elsewhere."""
        if plan.is_empty:
            return
        if self._buffer is not None:
            for load in plan.loads:
                blocks = self._loading[load.request_id] = loaded_blocks(self._layout.spec.groups, load)
                self._buffer.clear(blocks)
        self._require_agent().submit(plan)

    def save(self, plan: NixlStepPlan) -> None:
        """Copies to host memory what is handed over, if peers read that."""
        if self._buffer is not None:
            for copy in plan.host_copies:
                self._buffer.save(copy.block_ids)

    def results(self) -> WorkerResults:
        """Loads and leases that ended since the last call."""
        results = self._require_agent().take_results()
        for request_id in results.finished:
            blocks = self._loading.pop(request_id, None)
            if self._buffer is not None and blocks is not None and request_id not in results.failures:
                self._buffer.load(blocks)
        self._failures |= {name: (failure,) for name, failure in results.failures.items()}
        return WorkerResults(results.finished, set(results.failures), results.released)

    def take_failures(self) -> dict[str, tuple[NixlLoadFailure, ...]]:
        """Why loads failed that were reported."""
        failures, self._failures = self._failures, {}
        return failures

    def close(self) -> None:
        """Ends everything. No peer reads from here any more."""
        if self._agent is not None and not self._agent.close():
            logger.warning("HybridNixlConnector: a peer's transfer could not be ended in time")
        self._agent = None

    def _require_agent(self) -> Agent:
        if self._agent is None:
            raise RuntimeError("the KV caches of HybridNixlConnector were not registered, or it was shut down")
        return self._agent


def open_transport(name: str) -> Transport:
    """The transport of one rank.

    Raises:
        ConfigurationError: NIXL is not installed.
    """
    # Not at the top: it brings libraries that a process without this connector should not load.
    from hybridkv.peers.transport.nixl import NixlTransport

    try:
        return NixlTransport(name)
    except PeersConfigurationError as error:
        raise ConfigurationError("kv_connector", error.expected, error.got, error.hint) from None


def _bounds(config: NixlConfig) -> ReadBounds:
    """No stage of a load has less than the whole of it, but for a peer's answer."""
    whole_s = config.load_timeout_seconds
    # To prove the secret, and once more to say what it is.
    return ReadBounds(2 * config.connect_timeout_seconds, whole_s, whole_s, whole_s=whole_s)


def _secret(config: NixlConfig) -> Secret:
    if config.secret_file is None:
        return NO_SECRET
    try:
        return read_secret(config.secret_file)
    except PeersConfigurationError as error:
        raise ConfigurationError(f"{ROOT}.secret_file", error.expected, error.got, error.hint) from None
