"""Manifest reader: checks the size before the body, and the seal before decoding.

A manifest with a wrong seal is read once more by a range request. If that fails too, this host does not read that
version for a while. The manifest is not deleted, because another host may read it without errors.

A manifest of another model, layout or secret is never read: the object's name contains the fingerprint (`names.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.bodies import ObjectBody, ReadMemoryLimit, read_body
from hybridkv.tiers.object.format.manifest import ManifestNode, ManifestPart, decode_manifest, is_sealed
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.manifests.pack_checks import PackChecks
from hybridkv.tiers.object.options import ObjectOptions

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)

MAX_REQUESTS = 64
"""Limit of concurrent reads and writes of manifests, without renewals."""

K = TypeVar("K")
V = TypeVar("V")


class Quarantine(Generic[K, V]):
    """Entries that this host found bad. They expire and are not shared: the fault may be in this host's reads.

    Args:
        max_entries: limit of entries. The oldest entry is removed first.
        lasts_s: lifetime of an entry.
        clock: seconds.
    """

    def __init__(self, max_entries: int, lasts_s: float, clock: Callable[[], float]) -> None:
        self._max_entries = max_entries
        self._lasts_s = lasts_s
        self._clock = clock
        self._entries: dict[K, tuple[float, V]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def add(self, key: K, value: V) -> None:
        """Add an entry, or restart its lifetime."""
        self._entries.pop(key, None)
        if len(self._entries) >= self._max_entries:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = (self._clock() + self._lasts_s, value)

    def get(self, key: K) -> V | None:
        """Value of an entry; None if the key is not in quarantine."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        until_s, value = entry
        if until_s <= self._clock():
            del self._entries[key]
            return None
        return value

    def release(self, key: K) -> None:
        """Remove an entry."""
        self._entries.pop(key, None)


@dataclass(frozen=True, slots=True)
class StoredCache:
    """One cache of a fleet in a store.

    Args:
        store: the opened store.
        seals: seals of the fleet.
        cache: name of the cache, the same in all epochs.
        world_size: number of ranks; each stores its part of every chunk.
    """

    store: Store
    seals: Seals
    cache: str
    world_size: int


class ManifestReader:
    """Reads manifests. Keeps lists of bad versions of manifests and bad places of chunks. Used on one event loop.

    Args:
        stored_cache: the cache in the store.
        options: limits.
        clock: seconds.
    """

    def __init__(self, stored_cache: StoredCache, options: ObjectOptions, clock: Callable[[], float]) -> None:
        self._store = stored_cache.store
        self._seals = stored_cache.seals
        self._world_size = stored_cache.world_size
        self._options = options
        self._room = ReadMemoryLimit(max(options.reading_bytes, options.manifest_bytes))
        self.requests = asyncio.Semaphore(MAX_REQUESTS)
        """Limits concurrent reads and writes of manifests."""
        lives = [options.found_s]
        lives += [options.renewal_life_s / 4] if options.renewal_life_s is not None else []
        self.packs = PackChecks(self._store, self._world_size, min(lives), clock)
        """Checks packs before a manifest lists them."""
        self._bad: Quarantine[str, str] = Quarantine(options.max_open_keys, options.bad_s, clock)
        """ETag of the version that is not read again, by object name. Empty if the store has no ETags; then the object
        is read again."""
        self._bad_places: Quarantine[tuple[str, int], bool] = Quarantine(options.max_open_keys, options.bad_s, clock)
        """Places with wrong or missing bytes, by pack and offset."""

    def distrust(self, name: str, etag: str | None) -> None:
        """Do not read this version again for a while: its content is unusable, even if its seal is right."""
        log = logger.debug if self._bad else logger.warning
        log("a manifest in the object store is not what this fleet writes; this host leaves it alone: %s", name)
        self._bad.add(name, etag or "")

    def trust(self, name: str) -> None:
        """Undo `distrust`, because a manifest was rewritten, or read without errors."""
        self._bad.release(name)

    def distrust_place(self, pack: str, offset: int) -> None:
        """Do not offer a place for a while: its bytes are wrong or missing."""
        self._bad_places.add((pack, offset), True)

    def distrust_pack(self, path: Iterable[ManifestNode], pack: str) -> list[Key]:
        """Do not offer the chunks of a path in a missing pack for a while. Returns their keys."""
        keys = []
        for node in path:
            for part in node.parts:
                if part.pack == pack:
                    self.distrust_place(pack, part.offset)
                    keys.append(part.tag + node.prefix)
        return keys

    def is_bad(self, part: ManifestPart) -> bool:
        """True if a part is in a place that is not offered."""
        return (part.pack, part.offset) in self._bad_places

    def decoded(self, name: str, prefix: bytes, body: ObjectBody) -> list[ManifestNode] | None:
        """Nodes of the path of a manifest that was read. None if the manifest is unusable: it cannot be decoded, ends
        at another prefix, or lists packs of another namespace."""
        path = decode_manifest(self._seals, name, self._world_size, body.data or b"")
        if path is None or path[-1:] == [] or path[-1].prefix != prefix:
            return None
        return path if is_all_in(path, name.partition("/")[0]) else None

    async def read(self, name: str, *, is_again: bool = False) -> ObjectBody | None:
        """Read a manifest. None if it is missing, has no valid seal, or is a version that was found bad before. Trusts
        or distrusts the version that was read.

        Args:
            name: name of the object.
            is_again: also read a version that was found bad before.

        Raises:
            Exception: (obstore) the request failed.
        """
        from obstore.exceptions import NotModifiedError

        unlike = None if is_again else self._bad.get(name) or None
        try:
            body, etag = await self._sealed(name, unlike, is_ranged=False)
            if body is None:
                body = await self._sealed_otherwise(name)
        except (FileNotFoundError, NotModifiedError):
            return None
        if body is None:
            self.distrust(name, etag)
        else:
            self.trust(name)
        return body

    async def _sealed(self, name: str, unlike: str | None, *, is_ranged: bool) -> tuple[ObjectBody | None, str | None]:
        options = self._options
        async with (
            self.requests,
            read_body(
                self._store, name, options.manifest_bytes, self._room, unlike=unlike, is_ranged=is_ranged
            ) as body,
        ):
            holds = body.data is not None and is_sealed(self._seals, name, body.data)
            return body if holds else None, body.etag

    async def _sealed_otherwise(self, name: str) -> ObjectBody | None:
        try:
            return (await self._sealed(name, None, is_ranged=True))[0]
        except Exception as error:  # an empty object has no range; the first result stands
            logger.debug("a manifest could not be read a second time: %s", type(error).__name__)
            return None


def is_in(pack: str, namespace: str) -> bool:
    """True if a pack belongs to a namespace."""
    return pack.startswith(f"{namespace}/")


def is_all_in(path: Sequence[ManifestNode], namespace: str) -> bool:
    """True if a path lists only packs of this namespace."""
    return all(is_in(pack, namespace) for pack in packs_in(path))


def packs_in(path: Iterable[ManifestNode]) -> list[str]:
    """Packs that a path lists, in order."""
    return list(dict.fromkeys(part.pack for node in path for part in node.parts))
