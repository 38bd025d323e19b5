"""The tier at a server of LMCache, from what an operator says of it: where it is, and how much memory it shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from hybridkv.connectors.config import LMCacheTierConfig, parse_url
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.lmcache.connection import ServerAddress
from hybridkv.tiers import TierConfigurationError
from hybridkv.tiers.lmcache import (
    MAX_SIZES,
    LMCacheIndex,
    LMCacheMedium,
    LMCacheOptions,
    Site,
    open_index,
    open_medium,
)


def lmcache_index(
    config: LMCacheTierConfig,
    layout: CacheLayout,
    namespace: bytes,
    load_timeout_s: float,
    clock: Callable[[], float],
) -> LMCacheIndex:
    """The scheduler's half.

    Raises:
        TierConfigurationError: the server cannot be used, or chunks have too many sizes.
    """
    return open_index(_site(config, layout, namespace), _options(config, layout, load_timeout_s), clock)


def lmcache_medium(
    config: LMCacheTierConfig,
    layout: CacheLayout,
    namespace: bytes,
    rank: int,
    load_timeout_s: float,
    clock: Callable[[], float],
) -> LMCacheMedium:
    """One rank's medium."""
    return open_medium(_site(config, layout, namespace), rank, _options(config, layout, load_timeout_s), clock)


def _options(config: LMCacheTierConfig, layout: CacheLayout, load_timeout_s: float) -> LMCacheOptions:
    return LMCacheOptions(pool_bytes=max(1, config.pool // layout.world_size), move_timeout_s=load_timeout_s)


def _site(config: LMCacheTierConfig, layout: CacheLayout, namespace: bytes) -> Site:
    address = parse_url(config.url)
    assert address is not None
    server = ServerAddress(*address, config.http_port)
    try:
        return Site(server, namespace, layout.world_size, layout.chunk_sizes())
    except TierConfigurationError as error:
        if not _are_tails_too_many(layout):
            raise
        hint = (
            "each is registered at the server by itself, and the tails of a group have one for each number of blocks "
            "that a chunk has; choose chunk_tokens of fewer blocks, or unset prefix_match_unit of vLLM"
        )
        raise TierConfigurationError(error.field, error.expected, error.got, hint) from error


def _are_tails_too_many(layout: CacheLayout) -> bool:
    """Whether there would be sizes that can be registered, were it not for tails."""
    if layout.spec.tail_tokens is None:
        return False
    without = replace(layout, spec=msgspec.structs.replace(layout.spec, tail_tokens=None))
    return len(without.chunk_sizes()) <= MAX_SIZES
