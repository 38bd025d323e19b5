"""Configured tiers, opened for one engine: indexes for its scheduler, media for each worker."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hybridkv.connectors.config import (
    ROOT,
    DiskTierConfig,
    ObjectTierConfig,
    OffloadConfig,
    PeerTierConfig,
    SecondaryTierConfig,
    format_size,
    parse_address,
)
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.hosts import AllowedHosts, is_wildcard, normal_host
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.hashing import Fingerprint
from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.transport import Transport
from hybridkv.peers.transport.nixl_library import require_nixl
from hybridkv.peers.wire import NO_SECRET, read_secret
from hybridkv.tiers import SealedMemory, TierConfigurationError, TierIndex, TierMedium
from hybridkv.tiers import object as object_tier
from hybridkv.tiers import peer as peer_tier
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, Fsync
from hybridkv.tiers.files.directory import require_directory
from hybridkv.tiers.object import SECRET_PURPOSE, ObjectOptions, StoreLocation
from hybridkv.tiers.peer import PeerAddresses, PeerOptions
from hybridkv.tiers.ram import RamIndex, choose_granule_bytes
from hybridkv.tiers.stack import CascadePolicy, SecondaryTier, SecondaryTierOptions, TierStack

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hybridkv")

_OTHERS_MODE = 0o077
_KEY_OF_OPTION = {"capacity_bytes": "capacity"}
"""Configuration key of each tier option that has another name."""


@dataclass(frozen=True, slots=True)
class ArenaSizes:
    """Sizes in bytes: one rank's arena, its granules, and the smallest chunk or tail."""

    rank_bytes: int
    granule_bytes: int
    smallest_chunk_bytes: int = 1


def clock() -> float:
    """Time in seconds, for all deadlines of the connector."""
    return time.monotonic()


def arena_sizes(config: OffloadConfig, layout: CacheLayout) -> ArenaSizes:
    """Sizes of each rank's part of host memory.

    Raises:
        ConfigurationError: the capacity has no room for one chunk, or is larger than the host's memory.
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
    _require_memory(capacity)
    # Nothing is stored if no group needs content at a boundary, as when each attention chunk ends there. Then there is
    # no chunk size.
    smallest_chunk_bytes = next(iter(layout.chunk_sizes()), granule)
    return ArenaSizes(capacity // layout.world_size // granule * granule, granule, smallest_chunk_bytes)


def require_host(config: OffloadConfig) -> None:
    """Checks that this host has the files, libraries and memory that the tiers need. Creates nothing.

    Raises:
        ConfigurationError: one of them is missing, or cannot be used.
    """
    _require_memory(config.ram.capacity)
    for name, tier in config.secondary.items():
        try:
            match tier:
                case DiskTierConfig():
                    require_directory(tier.path)
                case PeerTierConfig():
                    _require_nixl()
                    _peer_addresses(tier)
                case ObjectTierConfig():
                    _store_location(tier).require_host()
        except TierConfigurationError as error:
            raise _of_tier(config, name, error) from error


def _require_memory(num_bytes: int) -> None:
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > available:
        raise ConfigurationError(
            f"{ROOT}.tiers[0].capacity",
            f"at most the {format_size(available)} of this host",
            format_size(num_bytes),
            "lower it",
        )


def build_stack(config: OffloadConfig, layout: CacheLayout, fingerprint: Fingerprint, sizes: ArenaSizes) -> TierStack:
    """Stack of all tiers, for the scheduler.

    Raises:
        ConfigurationError: a tier cannot be opened.
    """
    try:
        primary = RamIndex(sizes.rank_bytes, sizes.granule_bytes, sizes.smallest_chunk_bytes)
    except TierConfigurationError as error:
        raise _of_tier(config, "ram", error) from error
    logger.info(
        "HybridOffloadConnector: host memory: index of at most %d records takes at most %.1f MiB",
        primary.max_keys,
        primary.max_index_bytes / 2**20,
    )
    secondary = secondary_tiers(config, layout, fingerprint, primary)
    return TierStack(primary, secondary, layout.world_size, clock)


def secondary_tiers(
    config: OffloadConfig, layout: CacheLayout, fingerprint: Fingerprint, primary: RamIndex
) -> list[SecondaryTier]:
    """Secondary tiers, with open indexes. `primary` is the index of host memory.

    Raises:
        ConfigurationError: a tier cannot be opened.
    """
    secondary = []
    for name, tier in config.secondary.items():
        options = SecondaryTierOptions(
            cascades=CascadePolicy(tier.cascade),
            load_timeout_s=config.load_timeout_of(tier),
            async_lookup_timeout_s=config.lookup_timeout_of(tier),
        )
        burst_bytes = int(options.cascading_share * primary.capacity_bytes) * layout.world_size
        try:
            index = open_index(tier, layout, fingerprint, primary, burst_bytes, options.load_timeout_s)
        except TierConfigurationError as error:
            raise _of_tier(config, name, error) from error
        secondary.append(SecondaryTier(name, index, options))
    return secondary


def _of_tier(config: OffloadConfig, name: str, error: TierConfigurationError) -> ConfigurationError:
    of_all = error.field in OffloadConfig.__struct_fields__
    path = f"{ROOT if of_all else config.path_of(name)}.{_KEY_OF_OPTION.get(error.field, error.field)}"
    return ConfigurationError(path, error.expected, repr(error.got), error.hint)


def open_index(
    tier: SecondaryTierConfig,
    layout: CacheLayout,
    fingerprint: Fingerprint,
    primary: RamIndex,
    burst_bytes: int,
    load_timeout_s: float,
) -> TierIndex:
    """Opens the index of a secondary tier.

    Args:
        tier: configuration of the tier.
        layout: the engine's groups.
        fingerprint: identity of the stored content.
        primary: index of the primary tier. Peers look up its keys.
        burst_bytes: most bytes of cascades in flight to the tier at one time, over all ranks.
        load_timeout_s: timeout of a load from the tier.

    Raises:
        TierConfigurationError: the tier cannot be opened. `field` is the name of a tier option; `_of_tier` turns it
            into a configuration key.
    """
    match tier:
        case DiskTierConfig():
            disk_options = _disk_options(tier, max(_chunk_bytes(layout)), burst_bytes)
            return DiskIndex(tier.path, fingerprint, disk_options)
        case PeerTierConfig():
            _require_nixl()
            peer_options = _peer_options(load_timeout_s)
            return peer_tier.open_index(_peer_addresses(tier), primary, fingerprint, peer_options, clock)
        case ObjectTierConfig():
            object_options = msgspec.structs.replace(
                _object_options(tier, load_timeout_s),
                store_bytes_per_s=_share(tier.store_bytes_per_second, layout.world_size),
                store_packs_per_s=_share(tier.store_requests_per_second, layout.world_size),
            )
            return object_tier.open_index(
                _store_location(tier),
                fingerprint.digest(),
                layout.world_size,
                object_options,
                clock,
                clears_all=tier.resets == "fleet",
            )
    raise AssertionError(f"no index for {type(tier).__name__}")


def open_medium(
    tier: SecondaryTierConfig, namespace: bytes, rank: int, arena: SealedMemory, load_timeout_s: float
) -> TierMedium:
    """Opens the medium of a secondary tier for one worker.

    Args:
        tier: configuration of the tier.
        namespace: namespace of the content.
        rank: rank of the worker.
        arena: the worker's part of the primary tier. Peers read it.
        load_timeout_s: timeout of a load from the tier.

    Raises:
        TierConfigurationError: as in `open_index`.
    """
    match tier:
        case DiskTierConfig():
            return DiskMedium(tier.path, namespace, rank, _disk_options(tier))
        case PeerTierConfig():
            peer_options = _peer_options(load_timeout_s)
            return peer_tier.open_medium(_peer_addresses(tier), arena, namespace, rank, peer_options, clock)
        case ObjectTierConfig():
            return object_tier.open_medium(_store_location(tier), rank, _object_options(tier, load_timeout_s))
    raise AssertionError(f"no medium for {type(tier).__name__}")


def require_own_directory(config: OffloadConfig, vllm_config: VllmConfig) -> None:
    """Checks that all workers can use the directory or address of a tier, and that no other engine shares it.

    Raises:
        ConfigurationError: the engine has workers on several hosts, or belongs to a group of data-parallel engines.
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
                size
                if size != 1
                else f"rank {rank} of data-parallel engines on this host that share one configuration",
                f"its {what} belongs to one engine; use an object tier or host memory alone, or start each engine by "
                f"itself with its own {what}",
            )


def tiers_opened_at_start(config: OffloadConfig) -> frozenset[str]:
    """Names of the tiers that a worker opens before their first move, because other engines read from them."""
    return frozenset(config.secondary) & {"peer"}


def medium_openers(config: OffloadConfig, rank: int, arena: SealedMemory) -> dict[str, Callable[[bytes], TierMedium]]:
    """Functions that open a worker's media of the secondary tiers, by tier name. Each takes the namespace. `arena` is
    the worker's part of the primary tier."""

    def opener(tier: SecondaryTierConfig) -> Callable[[bytes], TierMedium]:
        return lambda namespace: open_medium(tier, namespace, rank, arena, config.load_timeout_of(tier))

    return {name: opener(tier) for name, tier in config.secondary.items()}


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


def _require_nixl() -> None:
    try:
        require_nixl()
    except PeersConfigurationError as error:
        raise TierConfigurationError("type", error.expected, error.got, error.hint) from None


def _peer_options(load_timeout_s: float) -> PeerOptions:
    # A chunk is offered for the first half of its lease, so that a load has the second half.
    return PeerOptions(load_timeout_s=load_timeout_s, lease_s=max(PeerOptions().lease_s, 2 * load_timeout_s))


def _peer_addresses(config: PeerTierConfig) -> PeerAddresses:
    try:
        secret = read_secret(config.secret_file) if config.secret_file is not None else NO_SECRET
    except PeersConfigurationError as error:
        raise TierConfigurationError("secret_file", error.expected, error.got, error.hint) from None
    listen = parse_address(config.listen)
    assert listen is not None
    return PeerAddresses(secret, listen, _listed_peers(config), _nixl_transport)


def _listed_peers(config: PeerTierConfig) -> tuple[tuple[str, int], ...]:
    listed = [peer for peer in map(parse_address, config.peers) if peer is not None]
    return tuple((normal_host(host) or host, port) for host, port in listed)


def hinted_peers(config: PeerTierConfig) -> Callable[[tuple[str, int]], bool]:
    """Returns a function of (host, port): True if hints may name this peer. The peer must be listed, or its host
    allowed. Does not resolve names. A wildcard address is not an allowed host, even in an allowed network."""
    listed, hosts = frozenset(_listed_peers(config)), AllowedHosts(config.allowed_hosts)
    return lambda address: address in listed or (address[0] in hosts and not is_wildcard(address[0]))


def _nixl_transport(agent_name: str) -> Transport:
    # Imported here, because it loads libraries that a process without this tier does not need.
    from hybridkv.peers.transport.nixl import NixlTransport

    return NixlTransport(agent_name)


def _share(number: float | None, world_size: int) -> float | None:
    return None if number is None else number / world_size


def _object_options(config: ObjectTierConfig, load_timeout_s: float) -> ObjectOptions:
    options = ObjectOptions(
        pack_bytes=config.pack, time_to_live_s=config.time_to_live_seconds, capacity_bytes=config.capacity
    )
    # A retry after the load's timeout would occupy a thread for nothing.
    return msgspec.structs.replace(options, request_timeout_s=min(options.request_timeout_s, load_timeout_s))


def _store_location(config: ObjectTierConfig) -> StoreLocation:
    settings = {} if config.credentials_file is None else _read_settings(config.credentials_file)
    settings |= {} if config.endpoint is None else {"endpoint": config.endpoint}
    settings |= {} if config.region is None else {"region": config.region}
    try:
        secret = b"" if config.secret_file is None else read_secret(config.secret_file).derive(SECRET_PURPOSE)
    except PeersConfigurationError as error:
        raise TierConfigurationError("secret_file", error.expected, error.got, error.hint) from None
    return StoreLocation(config.url, settings, secret)


def _read_settings(path: str) -> dict[str, str]:
    """Settings from the credentials file. Errors never quote its content."""
    field, hint = "credentials_file", '{"access_key_id": "...", "secret_access_key": "..."}, and chmod 600'
    try:
        if Path(path).stat().st_mode & _OTHERS_MODE:
            raise TierConfigurationError(field, "a file that only its owner may read", path, "chmod 600 FILE")
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, str])
    except OSError as error:
        raise TierConfigurationError(field, "a file that can be read", f"{path}: {error.strerror}", hint) from None
    except msgspec.DecodeError:
        raise TierConfigurationError(field, "a JSON object of strings", path, hint) from None
