"""Renews the manifests and packs that this engine uses, if old objects are deleted: after a time to live or above a
capacity."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.directory_store import DirectoryStore
from hybridkv.tiers.object.format.manifest import ManifestNode
from hybridkv.tiers.object.keep_alive import KeepAlive, RenewalCounts, RenewalPace
from hybridkv.tiers.object.manifests.epochs import EpochTracker
from hybridkv.tiers.object.manifests.loop import StoreLoop
from hybridkv.tiers.object.manifests.reader import ManifestReader, StoredCache
from hybridkv.tiers.object.names import MANIFEST_EVERY, is_manifest_point, manifest_name
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.store import clock_ahead_s

USE_INTERVAL_S = 60.0
"""Minimum seconds between two reports of the use of one path. A sixteenth of the objects' life if that is shorter."""
MAX_USED = 4096
"""Paths with a remembered report."""
_DIRECTORY_RATE_FACTOR = 50
"""Factor on `renewals_per_s` for a directory."""


class ManifestRenewer:
    """Reports uses to a `KeepAlive`, and runs its renewals. Does nothing if objects live forever.

    Args:
        stored_cache: the cache in the store.
        options: limits.
        reader: reads manifests.
        epochs: namespace of the manifests.
        loop: event loop of the requests.
        clock: seconds.
    """

    def __init__(
        self,
        stored_cache: StoredCache,
        options: ObjectOptions,
        reader: ManifestReader,
        epochs: EpochTracker,
        loop: StoreLoop,
        clock: Callable[[], float],
    ) -> None:
        self._store = stored_cache.store
        self._cache = stored_cache.cache
        self._life_s = options.renewal_life_s
        self._reader = reader
        self._epochs = epochs
        self._loop = loop
        self._clock = clock
        self._used: OrderedDict[Key, float] = OrderedDict()
        """Time of the last reported use of each path, by the first of its reported keys."""
        self._renewal_task: asyncio.Task[None] | None = None
        self._keep_alive: KeepAlive | None = None
        if self._life_s is not None:
            is_local = isinstance(stored_cache.store, DirectoryStore)
            pace = RenewalPace(self._life_s, options.renewals_per_s * (_DIRECTORY_RATE_FACTOR if is_local else 1))
            self._keep_alive = KeepAlive(
                self._store, self._cache, stored_cache.world_size, pace, self._manifest_bytes, self._clock_ahead, clock
            )

    # On the engine's thread.

    def take_due_use(self, key: Key) -> bool:
        """Returns True if the caller must report a use of the path now, and records the time of this report.

        Args:
            key: the first of the reported keys.
        """
        now_s = self._clock()
        if self._life_s is None or not self._epochs.takes_objects:
            return False
        if now_s - self._used.get(key, -math.inf) < min(USE_INTERVAL_S, self._life_s / 16):
            return False
        self._used[key] = now_s
        self._used.move_to_end(key)
        if len(self._used) > MAX_USED:
            self._used.popitem(last=False)
        return True

    @property
    def counts(self) -> RenewalCounts:
        """Counts since the start."""
        return self._keep_alive.counts if self._keep_alive is not None else RenewalCounts()

    # On the loop.

    def use(self, prefixes: Iterable[bytes]) -> None:
        """Record a use of the manifests of these prefixes."""
        if self._keep_alive is not None:
            self._keep_alive.use(prefixes)
            self._renew()

    def on_read(self, path: Sequence[bytes]) -> None:
        """Record that the manifest of the last prefix was read. The prefixes before it that `is_manifest_point` selects
        have manifests too."""
        namespace = self._epochs.manifest_namespace
        if self._keep_alive is None or namespace is None or not path:
            return
        used = [prefix for prefix in path[:-1] if is_manifest_point(prefix, MANIFEST_EVERY)]
        used.append(path[-1])
        for prefix in used:
            self._keep_alive.found(prefix, manifest_name(namespace, prefix))
        self.use(used)

    def on_stored(self, packs: set[str]) -> None:
        """Record packs that were written."""
        if self._keep_alive is not None:
            self._keep_alive.stored(packs)

    def on_written(self, prefix: bytes, name: str) -> None:
        """Record a manifest that was written. One of an earlier epoch is ignored, because it is not read any more."""
        namespace = self._epochs.manifest_namespace
        if self._keep_alive is not None and namespace is not None and name == manifest_name(namespace, prefix):
            self._keep_alive.written(prefix, name)
            self._renew()

    def clear(self) -> None:
        """Forget all manifests."""
        if self._keep_alive is not None:
            self._keep_alive.clear()

    def _renew(self) -> None:
        """Start the waiting renewals, unless they run already."""
        assert self._keep_alive is not None
        is_running = self._renewal_task is not None and not self._renewal_task.done()
        if self._keep_alive.has_waiting and self._epochs.takes_objects and not is_running:
            self._renewal_task = self._loop.spawn(self._keep_alive.renew_waiting())

    async def _clock_ahead(self) -> float:
        return await self._loop.call(clock_ahead_s, self._store, self._cache)

    async def _manifest_bytes(self, prefix: bytes, name: str) -> tuple[list[ManifestNode], bytes] | None:
        """Nodes of the manifest's path, and the manifest's bytes. None if the manifest is missing or unusable."""
        body = await self._reader.read(name)
        if body is None or body.data is None:
            return None
        path = self._reader.decoded(name, prefix, body)
        return None if path is None else (path, body.data)
