"""The tiers that an operator configured, built for one engine: indexes for its scheduler, media for each worker."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from hybridkv.connectors.config import ROOT, OffloadConfig, format_size
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.tiers import TierIndex, TierMedium
from hybridkv.tiers.ram import RamArena, RamIndex, choose_granule_bytes
from hybridkv.tiers.stack import StackOptions, TierMover, TierStack


@dataclass(frozen=True, slots=True)
class ArenaSizes:
    """Bytes of one rank's arena, and of its granules."""

    rank_bytes: int
    granule_bytes: int


def clock() -> float:
    """Seconds, for every deadline of the connector."""
    return time.monotonic()


def arena_sizes(config: OffloadConfig, layout: CacheLayout) -> ArenaSizes:
    """How large each rank's part of host memory is.

    Raises:
        ConfigurationError: not one chunk fits into it, or it does not fit into this host.
    """
    path = f"{ROOT}.tiers[0].capacity"
    capacity = config.ram.capacity
    chunk_bytes = _chunk_bytes(layout)
    granule = choose_granule_bytes([num_bytes for num_bytes in chunk_bytes if num_bytes])
    smallest = sum(-(-num_bytes // granule) * granule for num_bytes in chunk_bytes) * layout.world_size
    if capacity < smallest:
        raise ConfigurationError(
            path,
            f"at least {smallest} bytes, which one chunk of {layout.spec.chunk_tokens} tokens takes",
            f"{capacity} bytes",
            f'a prefix can hit only if all its chunks fit; try "{format_size(64 * smallest).replace(" ", "")}" or more',
        )
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if capacity > available:
        raise ConfigurationError(
            path, f"at most the {format_size(available)} of this host", format_size(capacity), "lower it"
        )
    return ArenaSizes(capacity // layout.world_size // granule * granule, granule)


def build_stack(config: OffloadConfig, layout: CacheLayout, sizes: ArenaSizes) -> TierStack:
    """The scheduler's half of all tiers.

    Raises:
        ConfigurationError: the disk tier cannot use its directory.
    """
    near = RamIndex(sizes.rank_bytes, sizes.granule_bytes)
    options = StackOptions(load_timeout_s=config.load_timeout_seconds)
    return TierStack(near, disk_index(config, layout), layout.world_size, clock, options)


def build_mover(config: OffloadConfig, layout: CacheLayout, arena: RamArena, rank: int) -> TierMover | None:
    """A worker's half of the slow tier, None where there is none."""
    medium = disk_medium(config, layout, rank)
    return None if medium is None else TierMover(arena, medium, clock)


def disk_index(config: OffloadConfig, layout: CacheLayout) -> TierIndex | None:
    """The index of the disk tier, None where none is configured."""
    return None


def disk_medium(config: OffloadConfig, layout: CacheLayout, rank: int) -> TierMedium | None:
    """One rank's medium of the disk tier, None where none is configured."""
    return None


def _chunk_bytes(layout: CacheLayout) -> list[int]:
    return [layout.largest_chunk_bytes(group) for group in layout.spec.stored_groups]
