"""Builder of the scheduler's half: agrees on a chunk size with the server, then connects."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hybridkv.connectors.config import ROOT, format_size
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import suspect_groups
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.common.identity.identification import IdentityBuilder
from hybridkv.connectors.vllm.common.layout import CacheLayout, resolve_groups, resolve_layout
from hybridkv.connectors.vllm.common.role import role_of
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.lmcache.config import LMCacheConfig
from hybridkv.connectors.vllm.lmcache.load_tracker import LoadTracker
from hybridkv.connectors.vllm.lmcache.scheduler import LMCacheScheduler, SchedulerParts
from hybridkv.connectors.vllm.lmcache.session_spec import address_of, plain_spec, session_spec_of
from hybridkv.connectors.vllm.lmcache.store_tracker import StoreTracker
from hybridkv.hashing import TAG_BYTES
from hybridkv.lmcache.connection import Connection, ConnectionOptions, Down
from hybridkv.lmcache.geometry import Geometry, PageGroup, chunk_alignment
from hybridkv.lmcache.keys import WORD_BYTES, cache_name
from hybridkv.lmcache.operations import LookupHandle, Operations, Prefix
from hybridkv.lmcache.session import LMCacheSession
from hybridkv.planner import GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.hybridkv.lmcache")

NAME = "HybridLMCacheConnector"
_NAME_BYTES = TAG_BYTES + 32
"""Length of a chunk's key with the longest block hash of vLLM, in bytes."""


def agree_on_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: LMCacheConfig) -> CacheLayout:
    """Layout of the engine's groups for the server's chunk size, or for the configured one if no server answers.
    Connects to the server. Both halves call this function.

    Raises:
        ConfigurationError: no server answers and no chunk size is configured, or the server cannot store these groups.
    """
    num_hosts = getattr(vllm_config.parallel_config, "nnodes", 1)
    if num_hosts != 1:
        raise ConfigurationError("nnodes", "1", num_hosts, "a server maps only the memory of ranks on its own host")
    specs = resolve_groups(vllm_config, kv_cache_config).specs
    # The requirements on a server depend on blocks and windows, not on bytes.
    groups = tuple(PageGroup(plain_spec(spec), 1) for spec in specs if spec.kind is not GroupKind.SCRATCH)
    answer = _server_chunk_tokens(config, groups)
    chunk_tokens = config.chunk_tokens if isinstance(answer, Down) else answer
    if chunk_tokens is None:
        raise ConfigurationError(
            f"{ROOT}.url",
            f"a server that answers within {config.connect_timeout_seconds:g} s",
            f"{config.url} ({answer})",
            "start `lmcache server` first, or set chunk_tokens to its --chunk-size: then the engine starts without it",
        )
    if config.chunk_tokens not in (None, chunk_tokens):
        raise ConfigurationError(
            f"{ROOT}.chunk_tokens",
            f"{chunk_tokens}, the chunk size of the server at {config.url}",
            config.chunk_tokens,
            "leave it out, or start the server with another --chunk-size",
        )
    require_fit(chunk_tokens, groups)
    return resolve_layout(vllm_config, kv_cache_config, chunk_tokens)


def require_fit(chunk_tokens: int, groups: Sequence[PageGroup]) -> None:
    """Checks a chunk size: whole blocks of every group, and at least as many tokens as a chunk's key has words.

    Raises:
        ConfigurationError: the chunk size does not fit.
    """
    unit, least = chunk_alignment(groups), -(-_NAME_BYTES // WORD_BYTES)
    if chunk_tokens % unit or chunk_tokens < least:
        raise ConfigurationError(
            f"{ROOT}.chunk_tokens",
            f"a multiple of {unit} tokens, the common multiple of the groups' blocks, and {least} or more",
            chunk_tokens,
            f"use {-(-max(chunk_tokens, least) // unit) * unit}, for the server's --chunk-size too",
        )


def _server_chunk_tokens(config: LMCacheConfig, groups: Sequence[PageGroup]) -> int | Down:
    """Chunk size of the server, or why it is unknown.

    Raises:
        ConfigurationError: the server cannot store these groups.
    """
    connection = Connection(address_of(config), LMCacheSession(groups, b"", 1, 0), ConnectionOptions())
    try:
        state = connection.wait_ready(config.connect_timeout_seconds)
    finally:
        connection.close()
    if not isinstance(state, Down):
        return state.chunk_tokens
    if state.refusal is not None:
        refusal = state.refusal
        raise ConfigurationError(
            f"{ROOT}.url", f"a server whose {refusal.field} is {refusal.expected}", refusal.got, refusal.hint
        )
    return state


class LMCacheBuilder:
    """Builder of the scheduler's half.

    Args:
        vllm_config: final configuration of vLLM.
        config: configuration of the connector.
        layout: layout of the engine's groups.
        room: admits concurrent loads.
        metrics: the connector's metrics.

    Raises:
        ConfigurationError: a fact of the engine cannot be read.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: LMCacheConfig,
        layout: CacheLayout,
        room: LoadRoom,
        metrics: ConnectorMetrics,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._layout = layout
        self._room = room
        self._metrics = metrics
        self._session_spec = session_spec_of(config, layout)
        self._identification = IdentityBuilder(vllm_config, config, layout, NAME, is_shared=True)
        self.connection: Connection | None = None
        """Connection to the server; None before `build`."""

    def build(self, ranks: Mapping[int, Mapping[str, str]]) -> LMCacheScheduler:
        """Builds the scheduler's half and starts to connect.

        Args:
            ranks: facts of each worker.

        Raises:
            ConfigurationError: `identity_ignores` has an unknown name.
        """
        session_spec, layout, clock = self._session_spec, self._layout, time.monotonic
        identity = self._identification.identity(ranks)
        geometry = Geometry(session_spec.groups, session_spec.chunk_tokens)
        name = cache_name(identity.namespace, geometry.digest())
        # The memory of this session is never used. Its registration gives the server the groups of the cache, so that
        # lookups work before the ranks register. The ranks get the namespace with the first step.
        session = LMCacheSession(
            session_spec.groups, identity.namespace, session_spec.world_size, 1, session_spec.chunk_tokens
        )
        self.connection = connection = Connection(session_spec.address, session, session_spec.connection, clock)
        operations = Operations(connection, clock)

        def lookup(digests: Sequence[bytes]) -> LookupHandle:
            prefix = Prefix(name, session_spec.world_size, session_spec.words(digests))
            return operations.lookup(prefix, None, self._config.lookup_timeout_seconds)

        load_tracker = LoadTracker(layout, lookup, session_spec.num_chunks, self._room, self._metrics, clock)

        def separate_objects() -> bool | None:
            ready = connection.ready
            return ready.facts.separate_groups if ready is not None else None

        store_tracker = StoreTracker(layout, geometry, separate_objects, load_tracker, identity.adapters, self._metrics)
        kv_role = role_of(self._vllm_config.kv_transfer_config)
        self._announce(name)
        parts = SchedulerParts(load_tracker, store_tracker, self._room)

        def close() -> None:
            connection.close()
            session.close()

        scheduler = LMCacheScheduler(layout, identity, session_spec.payload_bytes, parts, kv_role, self._metrics, close)
        scheduler.set_suspect_groups(suspect_groups(NAME, self._vllm_config, layout))
        return scheduler

    def _announce(self, name: str) -> None:
        spec, config, transfer = self._layout.spec, self._config, self._vllm_config.kv_transfer_config
        num_tokens = self._session_spec.num_chunks * spec.chunk_tokens
        logger.info(
            "%s: groups %s; chunk of %d tokens from the server at %s; %s of shared memory, so a request "
            "restores up to %d tokens; load timeout %.3g s; kv_load_failure_policy %s; kv_role %s, so it %s; "
            "cache %s",
            NAME,
            ", ".join(f"{i} {group.kind.name} blocks of {group.block_tokens}" for i, group in enumerate(spec.groups)),
            spec.chunk_tokens,
            config.url,
            format_size(config.pool),
            num_tokens,
            config.load_timeout_seconds,
            getattr(transfer, "kv_load_failure_policy", "unknown"),
            transfer.kv_role,
            role_of(transfer).words(),
            name,
        )
        unit = chunk_alignment(self._session_spec.groups)
        if unit < spec.chunk_tokens and any(group.kind is GroupKind.RECURRENT for group in spec.groups):
            logger.warning(
                "%s: the engine saves states at multiples of %d tokens, but the server stores only those at multiples "
                "of %d: start it with --chunk-size %d, or few prompts are found",
                NAME,
                unit,
                spec.chunk_tokens,
                unit,
            )
        longest = self._vllm_config.model_config.max_model_len
        if num_tokens < longest:
            logger.warning(
                "%s: a prompt of %d tokens is restored up to token %d, because no more fits into the shared memory: "
                'raise "pool"',
                NAME,
                longest,
                num_tokens,
            )
