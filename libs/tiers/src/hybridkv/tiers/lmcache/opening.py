"""Puts either half of a tier of LMCache's servers together, from an address and what an engine has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.lmcache.connection import Connection, ConnectionOptions, Down, ServerAddress
from hybridkv.lmcache.detection import ServerFacts
from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.geometry import Geometry, demand_server
from hybridkv.lmcache.wire import Registration
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.lmcache.index import LMCacheIndex
from hybridkv.tiers.lmcache.medium import LMCacheMedium
from hybridkv.tiers.lmcache.options import MAX_SIZES, LMCacheOptions
from hybridkv.tiers.lmcache.questioner import Questioner
from hybridkv.tiers.lmcache.records import groups_of
from hybridkv.tiers.lmcache.shelf import Shelf, num_pages

_DEFAULT_OPTIONS = ConnectionOptions()


@dataclass(frozen=True, slots=True)
class Site:
    """A server, and what of a cache lies there.

    Args:
        address: of the server, on this host: it maps the ranks' memory.
        namespace: digest of whose content it is.
        world_size: ranks that each have a part of every chunk.
        sizes: bytes that a part may have.
        connection: how the server is kept in touch with.

    Raises:
        TierConfigurationError: there are too many sizes, or none.
    """

    address: ServerAddress
    namespace: bytes
    world_size: int
    sizes: tuple[int, ...]
    connection: ConnectionOptions = _DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        if not 0 < len(self.sizes) <= MAX_SIZES:
            hint = "each is registered at the server by itself; choose chunk_tokens so that chunks end with blocks"
            raise TierConfigurationError("chunk_tokens", f"chunks of 1 to {MAX_SIZES} sizes", len(self.sizes), hint)


class _OnlyLooks:
    """A `Member` that registers nothing: the scheduler's."""

    alignment_tokens = 1

    def joining(self, facts: ServerFacts, chunk_tokens: int) -> Registration | None:
        demand_server(Geometry(groups_of(1)(chunk_tokens), chunk_tokens), facts)
        return None


def open_index(site: Site, options: LMCacheOptions, clock: Callable[[], float]) -> LMCacheIndex:
    """The scheduler's half.

    A server that is not there is no mistake: nothing is read or stored there until it is.

    Raises:
        TierConfigurationError: there is one that cannot be used.
    """
    connection = Connection(site.address, _OnlyLooks(), site.connection, clock)
    state = connection.wait_ready(options.reach_timeout_s)
    if isinstance(state, Down) and state.refusal is not None:
        connection.close()
        raise _refused(state.refusal)
    courier = Questioner(connection, site.namespace, site.world_size, site.sizes, options, clock)
    return LMCacheIndex(courier, frozenset(site.sizes), options, clock)


def open_medium(site: Site, rank: int, options: LMCacheOptions, clock: Callable[[], float]) -> LMCacheMedium:
    """A rank's half. Waits for no server: moves do, for a while."""
    shelves: dict[int, Shelf] = {}
    share_bytes = options.pool_bytes // len(site.sizes)
    try:
        for num_bytes in site.sizes:
            pages = num_pages(num_bytes, share_bytes, options.max_moving)
            cache = (site.namespace, site.world_size, num_bytes)
            shelves[num_bytes] = Shelf(site.address, cache, pages, site.connection, clock)
        return LMCacheMedium(shelves, rank, options, clock)
    except BaseException:
        for shelf in shelves.values():
            shelf.close()
        raise


def _refused(error: LMCacheConfigurationError) -> TierConfigurationError:
    return TierConfigurationError("url", f"a server whose {error.field} is {error.expected}", error.got, error.hint)
