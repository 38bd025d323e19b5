"""Manifest reader: checks the size before the body, and the seal before decoding.

A manifest with a wrong seal is read once more by a range request. If that fails too, this host does not read that
version for a while. Nothing is deleted: another host may read it without errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from hybridkv.tiers.object.bodies import ObjectBody, ReadMemoryLimit, read_body
from hybridkv.tiers.object.format.manifest import is_sealed
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.options import ObjectOptions

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)

MAX_REQUESTS = 64
"""Concurrent requests of the scheduler to the store."""

K = TypeVar("K")
V = TypeVar("V")


class Quarantine(Generic[K, V]):
    """Entries that this host found bad. They expire and are not shared: the fault may be in this host's reads.

    Args:
        max_entries: limit; the oldest entry goes first.
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


class ManifestReader:
    """Reads manifests. Used on one event loop.

    Args:
        store: the store.
        seals: seals of the fleet.
        options: limits.
        clock: seconds.
    """

    def __init__(self, store: Store, seals: Seals, options: ObjectOptions, clock: Callable[[], float]) -> None:
        self._store = store
        self._seals = seals
        self._options = options
        self._room = ReadMemoryLimit(max(options.reading_bytes, options.manifest_bytes))
        self.requests = asyncio.Semaphore(MAX_REQUESTS)
        """Limits concurrent requests to the store."""
        self._bad: Quarantine[str, str] = Quarantine(options.max_open_keys, options.bad_s, clock)
        """ETag of the version that is not read again, by object name. No store has empty ETags."""

    def distrust(self, name: str, tag: str | None) -> None:
        """Do not read this version again for a while: its content is unusable, even if its seal is right."""
        log = logger.debug if self._bad else logger.warning
        log("a manifest in the object store is not what this fleet writes; this host leaves it alone: %s", name)
        self._bad.add(name, tag or "")

    def trust(self, name: str) -> None:
        """A manifest was rewritten, or read without errors."""
        self._bad.release(name)

    async def read(self, name: str, *, is_again: bool = False) -> ObjectBody | None:
        """Read a manifest with a valid seal. None if there is none.

        Args:
            name: name of the object.
            is_again: also read a version that was found bad before.

        Raises:
            Exception: (obstore) the request failed.
        """
        from obstore.exceptions import NotModifiedError

        unlike = None if is_again else self._bad.get(name) or None
        try:
            body, tag = await self._sealed(name, unlike, is_ranged=False)
            if body is None:
                body = await self._sealed_otherwise(name)
        except (FileNotFoundError, NotModifiedError):
            return None
        if body is None:
            self.distrust(name, tag)
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
            return body if holds else None, body.tag

    async def _sealed_otherwise(self, name: str) -> ObjectBody | None:
        try:
            return (await self._sealed(name, None, is_ranged=True))[0]
        except Exception as error:  # an empty object has no range; the first result stands
            logger.debug("a manifest could not be read a second time: %s", type(error).__name__)
            return None
