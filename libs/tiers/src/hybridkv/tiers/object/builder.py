"""Either half of the tier from a URL and a secret."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.index import ObjectIndex
from hybridkv.tiers.object.manifest_store import Collection, ManifestStore
from hybridkv.tiers.object.medium import ObjectMedium
from hybridkv.tiers.object.names import cache_name
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.store import is_directory, open_object_store

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Depot:
    """A fleet's part of an object store.

    Args:
        url: of the store, with the prefix under which everything is.
        settings: of the client, by obstore's names.
        secret: that all engines of the fleet share; empty where all who may write there are trusted.
    """

    url: str
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret: bytes = field(default=b"", repr=False)

    @property
    def seals(self) -> Seals:
        """Of the fleet."""
        return Seals(self.secret)

    def open(self, options: ObjectOptions) -> Store:
        """The store itself.

        Raises:
            TierConfigurationError: it cannot be opened.
        """
        return open_object_store(self.url, dict(self.settings), options, has_secret=bool(self.secret))


def open_index(
    depot: Depot,
    fingerprint: bytes,
    world_size: int,
    options: ObjectOptions,
    clock: Callable[[], float],
    *,
    clears_all: bool = False,
) -> ObjectIndex:
    """The scheduler's half. Proves first that the store does what is needed of it; where it is not reached, later.

    Args:
        depot: where.
        fingerprint: its digest: whose content it is.
        world_size: ranks that each have their part of every chunk.
        options: bounds.
        clock: seconds.
        clears_all: whether a reset is for the whole fleet.

    Raises:
        TierConfigurationError: the store cannot be used.
    """
    if not depot.secret and not is_directory(depot.url):
        logger.warning(
            "%s is used without a secret: everybody who may write there can make this engine load other bytes, and "
            "everybody who may read there can find out which prompts were stored; hint: give all engines of the fleet "
            "the same secret_file",
            depot.url,
        )
    cache = cache_name(depot.secret, fingerprint, options.boundary_every)
    client = ManifestStore(Collection(depot.open(options), depot.seals, cache, world_size), options, clock)
    try:
        client.open()
    except BaseException:
        client.close()
        raise
    return ObjectIndex(client, options, clock, clears_all=clears_all)


def open_medium(depot: Depot, rank: int, options: ObjectOptions) -> ObjectMedium:
    """A rank's half. Reaches no store before something moves."""
    return ObjectMedium(lambda: depot.open(options), depot.seals, rank, options)
