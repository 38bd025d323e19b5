"""A server, and what of a cache lies there: what both halves of the connector must say of it alike."""

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
from hybridkv.lmcache.keys import page_identity, words_of
from hybridkv.lmcache.pool import ALIGNMENT_BYTES
from hybridkv.planner import GroupSpec

SPARE_SHARE = 4
"""Stores leave one part in so many of a pool to loads."""
_CHUNK_HINT = "raise pool, or start the server with a smaller --chunk-size"


@dataclass(frozen=True, slots=True)
class Site:
    """One server of one engine.

    Args:
        address: of the server, on this host: it maps the ranks' memory.
        groups: the engine's stored ones, in the engine's order.
        group_indexes: which of the engine's groups these are.
        chunk_tokens: of the server, and of the engine.
        world_size: ranks that each have a part of every page.
        pool_bytes: of shared memory, of one rank.
        connect_timeout_s: how long what comes first waits for the server.
        store_timeout_s: how long a store waits for room, and then for its answer.
        connection: how the server is kept in touch with.
        rank: whose part of every page is meant.
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
        """Chunks that are under way at one time at most."""
        return num_chunks(self.groups, self.chunk_tokens, self.pool_bytes)

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Of one page of each group."""
        return tuple(group.payload_bytes for group in self.groups)

    def with_payload_bytes(self, payload_bytes: tuple[int, ...]) -> Site:
        """The same with pages of these sizes: the halves may know their layers in different words, and one name of a
        cache is made of one size."""
        groups = tuple(PageGroup(group.spec, size) for group, size in zip(self.groups, payload_bytes, strict=True))
        return replace(self, groups=groups)

    def words(self, digests: Iterable[bytes]) -> bytes:
        """What the server hashes for a prefix."""
        return words_of(digests, self.chunk_tokens)

    def identity(self, digest: bytes, group: int, block: int) -> bytes:
        """Of this rank's page: `digest` names its chunk, `group` counts among `groups`, `block` in the chunk."""
        return page_identity(digest + self.rank.to_bytes(2, "little"), group, block)


def site_of(config: LMCacheConfig, layout: CacheLayout) -> Site:
    """What an operator says of a server, and an engine of its groups.

    Raises:
        ConfigurationError: the pool has no room for a chunk.
    """
    site = Site(
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
    if not site.num_chunks:
        geometry = Geometry(site.groups, site.chunk_tokens)
        needed = (_rest_bytes(geometry) + _chunk_bytes(geometry)) * layout.world_size
        raise ConfigurationError(
            f"{ROOT}.pool", f"at least {needed} bytes, which one chunk takes", config.pool, _CHUNK_HINT
        )
    return site


def chunks_at_once(num_chunks: int) -> int:
    """Chunks of one store that are under way at one time at most, of a pool for so many: several are beside loads."""
    return max(1, num_chunks // SPARE_SHARE)


def address_of(config: LMCacheConfig) -> ServerAddress:
    """Where the server listens."""
    address = parse_url(config.url)
    assert address is not None, "the configuration was decoded"
    return ServerAddress(*address, config.http_port)


def plain_spec(spec: GroupSpec) -> GroupSpec:
    """Without what does not change what a server keeps: whether a block can be cut, which here never is."""
    return msgspec.structs.replace(spec, part_tokens=None)


def page_groups(layout: CacheLayout) -> tuple[PageGroup, ...]:
    """The stored groups, each with the bytes of one block on one rank."""
    groups = layout.spec.groups
    return tuple(PageGroup(plain_spec(groups[index]), layout.block_bytes(index)) for index in layout.spec.stored_groups)


def num_chunks(groups: tuple[PageGroup, ...], chunk_tokens: int, pool_bytes: int) -> int:
    """Chunks that a pool of so many bytes has room for; 0 where it has none."""
    geometry = Geometry(groups, chunk_tokens)
    return max(0, pool_bytes - _rest_bytes(geometry)) // _chunk_bytes(geometry)


def _chunk_bytes(geometry: Geometry) -> int:
    return sum(kept * page for kept, page in zip(geometry.kept_per_chunk, geometry.page_bytes, strict=True))


def _rest_bytes(geometry: Geometry) -> int:
    """What is no chunk's: of each group the page that stands for nothing, and what it ends with."""
    return sum(page + ALIGNMENT_BYTES for page in geometry.page_bytes)
