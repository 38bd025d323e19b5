"""Builds the index or a medium of an object tier from a URL and a secret."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.files.directory import require_directory
from hybridkv.tiers.object.directory_store import path_of
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.index import ObjectIndex
from hybridkv.tiers.object.manifests.manifest_store import ManifestStore
from hybridkv.tiers.object.manifests.reader import StoredCache
from hybridkv.tiers.object.medium import ObjectMedium
from hybridkv.tiers.object.names import MANIFEST_EVERY, cache_name
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.store import is_directory, open_object_store

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)

SECRET_PURPOSE = b"object store"
"""Purpose for which a secret is derived from the content of `secret_file`."""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Location of a fleet's objects, and its secret.

    Args:
        url: URL of the store, with the prefix of all object names.
        settings: settings of the client, by obstore's names.
        secret: secret that all engines of the fleet share; empty if every writer is trusted.
    """

    url: str
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret: bytes = field(default=b"", repr=False)

    @property
    def seals(self) -> Seals:
        """Creates and checks the seals of the fleet's objects."""
        return Seals(self.secret)

    def open(self, options: ObjectOptions) -> Store:
        """Open the store.

        Raises:
            TierConfigurationError: the store cannot be opened.
        """
        return open_object_store(self.url, dict(self.settings), options, has_secret=bool(self.secret))

    def require_host(self) -> None:
        """Check the directory; for other URLs, check that obstore can open the URL. Creates and sends nothing.

        Raises:
            TierConfigurationError: the directory cannot be used, or obstore is missing or cannot open the URL.
        """
        if not is_directory(self.url):
            self.open(ObjectOptions())
            return
        try:
            require_directory(path_of(self.url), may_be_shared=bool(self.secret))
        except TierConfigurationError as error:
            raise TierConfigurationError("url", error.expected, error.got, error.hint) from error


def open_index(
    location: StoreLocation,
    fingerprint: bytes,
    world_size: int,
    options: ObjectOptions,
    clock: Callable[[], float],
    *,
    clears_all: bool = False,
) -> ObjectIndex:
    """Build the scheduler's index. Checks first that the store has all needed features. If the store cannot be reached
    now, the check follows later.

    Args:
        location: URL and secret of the store.
        fingerprint: digest of the cache's fingerprint.
        world_size: number of ranks; each stores its part of every chunk.
        options: limits.
        clock: seconds.
        clears_all: True if `clear` applies to the whole fleet.

    Raises:
        TierConfigurationError: the store cannot be used.
    """
    if not location.secret and not is_directory(location.url):
        logger.warning(
            "%s is used without a secret: everyone with write access can make this engine load wrong bytes, and "
            "everyone with read access can find out which prompts were stored; hint: give all engines of the fleet "
            "the same secret_file",
            location.url,
        )
    cache = cache_name(location.secret, fingerprint, MANIFEST_EVERY)
    client = ManifestStore(StoredCache(location.open(options), location.seals, cache, world_size), options, clock)
    try:
        client.open()
    except BaseException:
        client.close()
        raise
    return ObjectIndex(client, options, clock, clears_all=clears_all)


def open_medium(location: StoreLocation, rank: int, options: ObjectOptions) -> ObjectMedium:
    """Build a rank's medium. The medium opens the store at its first load or store."""
    return ObjectMedium(lambda: location.open(options), location.seals, rank, options)
