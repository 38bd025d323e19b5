"""Worker half of HybridNixlConnector: passes plans to the rank's agent thread and returns its results.

The worker half decides nothing, and never raises in the engine after start-up. Before `close`, it waits only for copies
to and from a host buffer. `close` waits a bounded time for the agent.
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
from hybridkv.connectors.vllm.common.role import Role
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
from hybridkv.peers.transport.nixl_library import require_nixl
from hybridkv.peers.wire import NO_SECRET, Secret, WireLimits, read_secret

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.hybridkv.nixl")
clock = time.monotonic


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a rank, known before the engine allocates its KV cache.

    Args:
        config: configuration of the connector.
        engine_id: id of this engine.
        rank: tensor-parallel rank.
        tp_size: number of ranks of this engine.
        kv_role: role of the engine: producer, consumer, or both.
        uses_host_buffer: True if transfers use a copy of the KV cache in host memory.
    """

    config: NixlConfig
    engine_id: str
    rank: int
    tp_size: int
    kv_role: Role
    uses_host_buffer: bool = False


@dataclass(slots=True)
class WorkerResults:
    """Loads and leases that ended since the last step. A failed load is in `finished` too."""

    finished: set[str]
    failed: set[str]
    released: set[str]


class NixlWorker:
    """Worker half on one rank.

    Args:
        settings: settings of the rank.
        layout: groups of the model.
        metrics: counters of this half.

    Raises:
        ConfigurationError: the secret file cannot be used.
    """

    def __init__(self, settings: WorkerSettings, layout: CacheLayout, metrics: NixlMetrics) -> None:
        self._settings = settings
        self._layout = layout
        self._metrics = metrics
        self._secret = _secret(settings.config)
        self._agent: Agent | None = None
        self._address: WorkerAddress | None = None
        self._failures: dict[str, tuple[NixlLoadFailure, ...]] = {}
        self._buffer: HostBuffer | None = None
        self._loading: dict[str, BlockIds] = {}
        """Blocks of running loads into the host buffer, by request."""

    def register(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, Any],
        environ: Mapping[str, str],
    ) -> None:
        """Registers the engine's KV tensors and starts the agent, which listens if the engine produces.

        Raises:
            ConfigurationError: the tensors differ from the engine's description, or the address cannot be bound.
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
            self._metrics,
        )
        if settings.kv_role.stores:
            self._address = WorkerAddress(self._listen(self._agent), name)

    def _listen(self, agent: Agent) -> int:
        listen = self._settings.config.listen
        port = listen.port + self._settings.rank if listen.port else 0
        try:
            return agent.listen(listen.host, port)
        except OSError as error:
            hint = "choose another port, or 0 for any; rank n takes the n-th port after it"
            got = f"{listen.host}:{port}: {error.strerror or error}"
            raise ConfigurationError(f"{ROOT}.listen", "an address that this process can bind", got, hint) from None
        except PeersConfigurationError as error:
            raise ConfigurationError(f"{ROOT}.listen.host", error.expected, error.got, error.hint) from None

    def take_address(self) -> WorkerAddress | None:
        """Takes the address of this rank for consumers. None after the first call, and if the rank does not produce."""
        address, self._address = self._address, None
        return address

    def start(self, plan: NixlStepPlan) -> None:
        """Clears the blocks of the host buffer that loads will fill, then submits a step's plan to the agent thread."""
        if plan.is_empty:
            return
        if self._buffer is not None:
            for load in plan.loads:
                blocks = self._loading[load.request_id] = loaded_blocks(self._layout.spec.groups, load)
                self._buffer.clear(blocks)
        self._require_agent().submit(plan)

    def save(self, plan: NixlStepPlan) -> None:
        """Makes the plan's copies to host memory and waits for them."""
        if self._buffer is not None:
            for copy in plan.host_copies:
                self._buffer.save(copy.block_ids)

    def results(self) -> WorkerResults:
        """Takes the loads and leases that ended since the last call. Copies loaded blocks from a host buffer to the
        device, and waits for the copies."""
        results = self._require_agent().take_results()
        for request_id in results.finished:
            blocks = self._loading.pop(request_id, None)
            if self._buffer is not None and blocks is not None and request_id not in results.failures:
                self._buffer.load(blocks)
        self._failures |= {name: (failure,) for name, failure in results.failures.items()}
        return WorkerResults(results.finished, set(results.failures), results.released)

    def take_failures(self) -> dict[str, tuple[NixlLoadFailure, ...]]:
        """Takes the failures of loads that `results` has reported."""
        failures, self._failures = self._failures, {}
        return failures

    def close(self) -> None:
        """Stops the agent, so that no peer reads this rank's memory. Logs if a thread or a transfer did not end in
        time."""
        if self._agent is not None and not self._agent.close():
            logger.warning("HybridNixlConnector: a thread, or a transfer of a peer, did not end in time")
        self._agent = None

    def _require_agent(self) -> Agent:
        if self._agent is None:
            raise RuntimeError("HybridNixlConnector has no registered KV caches, or it was shut down")
        return self._agent


def open_transport(name: str) -> Transport:
    """Opens the NIXL transport of one rank.

    Raises:
        ConfigurationError: NIXL is not installed.
    """
    # Import here: the import loads libraries that a process without this connector does not need.
    from hybridkv.peers.transport.nixl import NixlTransport

    try:
        return NixlTransport(name)
    except PeersConfigurationError as error:
        raise ConfigurationError("kv_connector", error.expected, error.got, error.hint) from None


def _bounds(config: NixlConfig) -> ReadBounds:
    """Time limits of a read. Reading and checking may each take the whole load timeout."""
    whole_s = config.load_timeout_seconds
    # Twice: one timeout for the proof of the secret, one for the descriptions.
    return ReadBounds(2 * config.connect_timeout_seconds, whole_s, whole_s, whole_s=whole_s)


def require_nixl_and_secret(config: NixlConfig) -> None:
    """Checks that NIXL is installed and that the secret can be read.

    Raises:
        ConfigurationError: NIXL is not installed, or the secret cannot be read.
    """
    try:
        require_nixl()
    except PeersConfigurationError as error:
        raise ConfigurationError("kv_connector", error.expected, error.got, error.hint) from None
    _secret(config)


def _secret(config: NixlConfig) -> Secret:
    if config.secret_file is None:
        return NO_SECRET
    try:
        return read_secret(config.secret_file)
    except PeersConfigurationError as error:
        raise ConfigurationError(f"{ROOT}.secret_file", error.expected, error.got, error.hint) from None
