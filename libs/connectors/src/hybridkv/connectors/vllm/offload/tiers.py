"""Configured tiers, opened for one engine: indexes for its scheduler, media for each worker."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.config import (
    ROOT,
    DiskTierConfig,
    ObjectTierConfig,
    OffloadConfig,
    PeerTierConfig,
    SlowerTierConfig,
    format_size,
)
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.offload.object_tier import object_index, object_medium
from hybridkv.connectors.vllm.offload.peer_tier import peer_index, peer_medium
from hybridkv.hashing import Fingerprint
from hybridkv.tiers import SealedMemory, TierConfigurationError, TierIndex, TierMedium
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, Fsync
from hybridkv.tiers.ram import RamIndex, choose_granule_bytes
from hybridkv.tiers.stack import CascadePolicy, SlowerTier, SlowerTierOptions, TierStack

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hybridkv")

_FIELDS = {"capacity_bytes": "capacity"}
"""Configuration keys of tier options with another name."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Arguments of a slower tier's index besides its configuration.

    Args:
        layout: the engine's groups.
        fingerprint: identity of the stored content.
        burst_bytes: limit for bytes that arrive at one time, over all ranks.
        near: index of the primary tier, for tiers that report its keys to others.
        load_timeout_s: timeout of a load from the tier.
    """

    layout: CacheLayout
    fingerprint: Fingerprint
    burst_bytes: int = 0
    near: RamIndex | None = None
    load_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """Arguments of a slower tier's medium besides its configuration.

    Args:
        rank: rank of the worker.
        arena: the worker's part of the primary tier.
        load_timeout_s: timeout of a load from the tier.
    """

    rank: int
    arena: SealedMemory
    load_timeout_s: float


@dataclass(frozen=True, slots=True)
class ArenaSizes:
    """Sizes in bytes: one rank's arena, its granules, and the smallest chunk or tail."""

    rank_bytes: int
    granule_bytes: int
    smallest_bytes: int = 1


def clock() -> float:
    """Clock of all deadlines of the connector, in seconds."""
    return time.monotonic()


def arena_sizes(config: OffloadConfig, layout: CacheLayout) -> ArenaSizes:
    """Sizes of each rank's part of host memory.

    Raises:
        ConfigurationError: it has no room for one chunk, or is larger than the host's memory.
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
    # If attention never reads before the current chunk, nothing is stored.
    smallest_bytes = next(iter(layout.chunk_sizes()), granule)
    return ArenaSizes(capacity // layout.world_size // granule * granule, granule, smallest_bytes)


def build_stack(config: OffloadConfig, layout: CacheLayout, fingerprint: Fingerprint, sizes: ArenaSizes) -> TierStack:
    """Stack of all tiers, for the scheduler.

    Raises:
        ConfigurationError: a tier cannot be opened.
    """
    try:
        near = RamIndex(sizes.rank_bytes, sizes.granule_bytes, sizes.smallest_bytes)
    except TierConfigurationError as error:
        raise _of_tier(config, "ram", error) from error
    logger.info(
        "HybridOffloadConnector: host memory: index of %d records takes up to %.1f MiB",
        near.max_keys,
        near.most_index_bytes / 2**20,
    )
    slower = slower_tiers(config, layout, fingerprint, near)
    return TierStack(near, slower, layout.world_size, clock)


def slower_tiers(
    config: OffloadConfig, layout: CacheLayout, fingerprint: Fingerprint, near: RamIndex
) -> list[SlowerTier]:
    """The tiers below host memory. `near` is the index of host memory.

    Raises:
        ConfigurationError: a tier cannot be opened.
    """
    slower = []
    for name, tier in config.slower.items():
        options = SlowerTierOptions(
            cascades=CascadePolicy(tier.cascade),
            load_timeout_s=config.load_timeout_of(tier),
            ask_timeout_s=config.ask_timeout_of(tier),
        )
        burst_bytes = int(options.cascading_share * near.capacity_bytes) * layout.world_size
        try:
            index = open_index(tier, Setting(layout, fingerprint, burst_bytes, near, options.load_timeout_s))
        except TierConfigurationError as error:
            raise _of_tier(config, name, error) from error
        if tier.ask_timeout_seconds is not None and not index.answers_late:
            index.close()
            raise ConfigurationError(
                f"{config.path_of(name)}.ask_timeout_seconds",
                "a tier that answers late",
                f"one of type {name}, which answers at once",
                "leave it out",
            )
        slower.append(SlowerTier(name, index, options))
    return slower


def _of_tier(config: OffloadConfig, name: str, error: TierConfigurationError) -> ConfigurationError:
    of_all = error.field in OffloadConfig.__struct_fields__
    path = f"{ROOT if of_all else config.path_of(name)}.{_FIELDS.get(error.field, error.field)}"
    return ConfigurationError(path, error.expected, repr(error.got), error.hint)


def open_index(tier: SlowerTierConfig, setting: Setting) -> TierIndex:
    """Index of a slower tier.

    Raises:
        TierConfigurationError: the tier cannot be opened. `field` is a key of its configuration.
    """
    match tier:
        case DiskTierConfig():
            return disk_index(tier, setting)
        case PeerTierConfig():
            assert setting.near is not None
            return peer_index(tier, setting.near, setting.fingerprint, setting.load_timeout_s, clock)
        case ObjectTierConfig():
            return object_index(tier, setting.layout, setting.fingerprint, setting.load_timeout_s, clock)
    raise AssertionError(f"no index for {type(tier).__name__}")


def open_medium(tier: SlowerTierConfig, namespace: bytes, worker: WorkerPart) -> TierMedium:
    """Medium of a slower tier for one worker."""
    match tier:
        case DiskTierConfig():
            return disk_medium(tier, namespace, worker.rank)
        case PeerTierConfig():
            return peer_medium(tier, worker.arena, namespace, worker.rank, worker.load_timeout_s, clock)
        case ObjectTierConfig():
            return object_medium(tier, worker.rank, worker.load_timeout_s)
    raise AssertionError(f"no medium for {type(tier).__name__}")


def require_own_directory(config: OffloadConfig, vllm_config: VllmConfig) -> None:
    """Checks that all workers can use the directory or address of a tier, and that no other engine shares it.

    Raises:
        ConfigurationError: the engine has workers on several hosts, or is one of several of a data-parallel group.
    """
    parallel = vllm_config.parallel_config
    owned = [("a disk tier", "path")] if config.disk is not None else []
    owned += [("a peer tier", "address")] if config.peer is not None else []
    for tier, what in owned:
        if (num_hosts := getattr(parallel, "nnodes", 1)) != 1:
            hint = f"its {what} belongs to one host; use host memory alone, or an object tier"
            raise ConfigurationError("nnodes", f"1 with {tier}", num_hosts, hint)
        size = getattr(parallel, "data_parallel_size", 1)
        # For dense models vLLM sets each engine's data_parallel_size to 1; only the local rank shows the group.
        has_own = getattr(parallel, "data_parallel_external_lb", False)
        rank = 0 if has_own else getattr(parallel, "data_parallel_rank_local", None) or 0
        if size != 1 or rank:
            raise ConfigurationError(
                "data_parallel_size",
                f"1 with {tier}",
                size if size != 1 else f"rank {rank} on this host of a group that is given one configuration",
                f"its {what} belongs to one engine; use an object tier or host memory alone, or start each engine by "
                f"itself with its own {what}",
            )


def opened_at_once(config: OffloadConfig) -> frozenset[str]:
    """Tiers with a medium that a worker opens at its start, because other engines read from it."""
    return frozenset(config.slower) & {"peer"}


def media(config: OffloadConfig, rank: int, arena: SealedMemory) -> dict[str, Callable[[bytes], TierMedium]]:
    """For each slower tier a function that opens the worker's medium for a namespace. `arena` is the worker's part of
    the primary tier."""

    def opener(tier: SlowerTierConfig) -> Callable[[bytes], TierMedium]:
        worker = WorkerPart(rank, arena, config.load_timeout_of(tier))
        return lambda namespace: open_medium(tier, namespace, worker)

    return {name: opener(tier) for name, tier in config.slower.items()}


def disk_index(config: DiskTierConfig, setting: Setting) -> DiskIndex:
    """Index of the disk tier.

    Raises:
        TierConfigurationError: the directory or the size cannot be used.
    """
    options = _disk_options(config, max(_chunk_bytes(setting.layout)), setting.burst_bytes)
    return DiskIndex(config.path, setting.fingerprint, options)


def disk_medium(config: DiskTierConfig, namespace: bytes, rank: int) -> TierMedium:
    """Medium of the disk tier for one rank. It creates no files: the index does."""
    return DiskMedium(config.path, namespace, rank, _disk_options(config))


def _disk_options(config: DiskTierConfig, largest_chunk_bytes: int = 0, burst_bytes: int = 0) -> DiskOptions:
    return DiskOptions(
        capacity_bytes=config.capacity,
        largest_chunk_bytes=largest_chunk_bytes,
        burst_bytes=burst_bytes,
        fsync=Fsync(config.fsync),
        direct=config.direct,
    )


def _chunk_bytes(layout: CacheLayout) -> list[int]:
    return [layout.largest_chunk_bytes(group) for group in layout.spec.stored_groups]
