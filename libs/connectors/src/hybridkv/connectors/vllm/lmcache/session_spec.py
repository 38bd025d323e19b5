"""Parameters of the session at a server. Both halves of the connector must use the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.lmcache.config import LMCacheConfig, parse_url
from hybridkv.lmcache.connection import ConnectionOptions, ServerAddress
from hybridkv.lmcache.geometry import Geometry, PageGroup
from hybridkv.lmcache.keys import page_identity, prefix_words
from hybridkv.lmcache.pool import ALIGNMENT_BYTES
from hybridkv.planner import GroupSpec

SPARE_SHARE = 4
"""Stores leave 1/`SPARE_SHARE` of the pool to loads."""
_CHUNK_HINT = "raise pool, or start the server with a smaller --chunk-size"


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Parameters of one engine's sessions at one server.

    Args:
        address: address of the server. The server must be on this host, because it maps the ranks' memory.
        groups: stored groups, in the engine's order.
        group_indexes: engine's index of each of `groups`.
        chunk_tokens: chunk size of the server and of the engine.
        world_size: number of ranks; each stores its own part of every page.
        pool_bytes: shared memory of one rank, in bytes.
        connect_timeout_s: timeout of the first connection.
        store_timeout_s: timeout of a store for free pages, and again for the answer of the server.
        connection: options of the connection.
        rank: rank of this process.
    """

    address: ServerAddress
    groups: tuple[PageGroup, ...]
    group_indexes: tuple[int, ...]
    chunk_tokens: int
    world_size: int
    pool_bytes: int
    connect_timeout_s: float
    store_timeout_s: float
    connection: ConnectionOptions
    rank: int = 0

    @property
    def num_chunks(self) -> int:
        """Maximum number of chunks in transit."""
        return num_chunks(self.groups, self.chunk_tokens, self.pool_bytes)

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Payload of one page of each group, in bytes."""
        return tuple(group.payload_bytes for group in self.groups)

    def with_payload_bytes(self, payload_bytes: tuple[int, ...]) -> SessionSpec:
        """Copy with these payload sizes. Both halves must use the same sizes, because the name of the cache contains
        them."""
        groups = tuple(PageGroup(group.spec, size) for group, size in zip(self.groups, payload_bytes, strict=True))
        return replace(self, groups=groups)

    def words(self, digests: Iterable[bytes]) -> bytes:
        """Words that the server hashes for a prefix."""
        return prefix_words(digests, self.chunk_tokens)

    def identity(self, digest: bytes, group: int, block: int) -> bytes:
        """Identity of this rank's page.

        Args:
            digest: digest of the chunk.
            group: index in `groups`.
            block: index of the block in the chunk.
        """
        return page_identity(digest + self.rank.to_bytes(2, "little"), group, block)


def session_spec_of(config: LMCacheConfig, layout: CacheLayout) -> SessionSpec:
    """Session parameters for a configuration and a layout.

    Raises:
        ConfigurationError: the pool is too small for one chunk.
    """
    spec = SessionSpec(
        address_of(config),
        page_groups(layout),
        layout.spec.stored_groups,
        layout.spec.chunk_tokens,
        layout.world_size,
        config.pool // layout.world_size,
        config.connect_timeout_seconds,
        config.store_timeout_seconds,
        ConnectionOptions(beat_s=config.heartbeat_seconds),
    )
    if not spec.num_chunks:
        geometry = Geometry(spec.groups, spec.chunk_tokens)
        needed = (_overhead_bytes(geometry) + _chunk_bytes(geometry)) * layout.world_size
        raise ConfigurationError(
            f"{ROOT}.pool", f"at least {needed} bytes, the size of one chunk", config.pool, _CHUNK_HINT
        )
    return spec


def chunks_at_once(num_chunks: int) -> int:
    """Maximum number of chunks that one call stores at the server, for a pool of `num_chunks`. A larger store makes
    several calls."""
    return max(1, num_chunks // SPARE_SHARE)


def address_of(config: LMCacheConfig) -> ServerAddress:
    """Address of the server."""
    address = parse_url(config.url)
    assert address is not None, "the configuration was decoded"
    return ServerAddress(*address, config.http_port)


def plain_spec(spec: GroupSpec) -> GroupSpec:
    """Copy of a spec without `part_tokens`: blocks are never cut here."""
    return msgspec.structs.replace(spec, part_tokens=None)


def page_groups(layout: CacheLayout) -> tuple[PageGroup, ...]:
    """Stored groups, each with the size of one block on one rank, in bytes."""
    groups = layout.spec.groups
    return tuple(PageGroup(plain_spec(groups[index]), layout.block_bytes(index)) for index in layout.spec.stored_groups)


def num_chunks(groups: tuple[PageGroup, ...], chunk_tokens: int, pool_bytes: int) -> int:
    """Number of chunks that fit into a pool of `pool_bytes`; 0 if none fits."""
    geometry = Geometry(groups, chunk_tokens)
    return max(0, pool_bytes - _overhead_bytes(geometry)) // _chunk_bytes(geometry)


def _chunk_bytes(geometry: Geometry) -> int:
    return sum(kept * page for kept, page in zip(geometry.kept_per_chunk, geometry.page_bytes, strict=True))


def _overhead_bytes(geometry: Geometry) -> int:
    """Bytes outside chunks: a null page and the alignment of each group."""
    return sum(page + ALIGNMENT_BYTES for page in geometry.page_bytes)
