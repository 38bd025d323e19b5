"""Manifest store: lookup client of an `ObjectIndex`, on the scheduler. Its parts find, write and renew manifests.

One thread with an event loop sends all requests. The engine's thread queues work and takes events.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hybridkv.tiers.contract import Key
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.object.client import ClientEvent, EpochChanged, StoreCounts
from hybridkv.tiers.object.directory_store import DirectoryStore
from hybridkv.tiers.object.format.manifest import ManifestNode
from hybridkv.tiers.object.manifests.epochs import EpochTracker
from hybridkv.tiers.object.manifests.loop import StoreLoop
from hybridkv.tiers.object.manifests.reader import ManifestReader, StoredCache
from hybridkv.tiers.object.manifests.renewer import ManifestRenewer
from hybridkv.tiers.object.manifests.search import ManifestSearcher
from hybridkv.tiers.object.manifests.writer import ManifestWriter
from hybridkv.tiers.object.names import prefix_of
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import PackPlace, Stored
from hybridkv.tiers.object.store import clock_ahead_s
from hybridkv.tiers.object.sweeping import CapacitySweeper

_SWEEP_PAUSE = 20
"""Pause after a sweep, as a multiple of its duration: sweeps take at most 1/20 of the time."""


class ManifestStore:
    """Manifest store of one engine: the `LookupClient` of an `ObjectIndex`.

    Args:
        stored_cache: the cache in the store.
        options: limits.
        clock: clock of the index.

    Raises:
        TierConfigurationError: `capacity_bytes` is set for a store that is not a directory.
    """

    def __init__(self, stored_cache: StoredCache, options: ObjectOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self.events: deque[ClientEvent] = deque()
        self._sweeper: CapacitySweeper | None = None
        if options.capacity_bytes is not None:
            self._sweeper = self._new_sweeper(stored_cache, options.capacity_bytes)
        self._loop = StoreLoop()
        self._reader = ManifestReader(stored_cache, options, clock)
        self._epochs = EpochTracker(stored_cache, options, self._loop, self._on_epoch_changed)
        self._renewer = ManifestRenewer(stored_cache, options, self._reader, self._epochs, self._loop, clock)
        self._writer = ManifestWriter(stored_cache, options, self._reader, self._renewer, self._epochs, self._loop)
        self._searcher = ManifestSearcher(
            options, self._reader, self._epochs, self._loop, clock, self._on_read, self.events.append
        )
        self._taken = StoreCounts()
        """Counts at the last `take_counts`."""

    def _new_sweeper(self, stored_cache: StoredCache, capacity_bytes: int) -> CapacitySweeper:
        if not isinstance(stored_cache.store, DirectoryStore):
            raise TierConfigurationError("capacity_bytes", "a file: URL", "a store with expiry rules of its own")
        clock_ahead = partial(clock_ahead_s, stored_cache.store, stored_cache.cache)
        return CapacitySweeper(stored_cache.store, capacity_bytes, clock_ahead, lambda: self._loop.is_closed)

    # On the engine's thread.

    @property
    def namespace(self) -> str | None:
        """Name prefix of the current epoch. None until the store was reached; until then, no chunk can be stored."""
        return self._epochs.namespace

    @property
    def takes_objects(self) -> bool:
        """True after a check found that the store can be written, even if the store becomes full later. False if the
        store was full or the credentials are read-only; lookups still work."""
        return self._epochs.takes_objects

    def open(self) -> None:
        """Start to follow the epochs, and to sweep a limited directory. Waits for the check of the store, for
        `opening_timeout_s` at most; the check continues after that.

        Raises:
            TierConfigurationError: the store lacks a needed feature, or denies access.

        """
        self._loop.post(self._follow)
        self._epochs.wait_until_opened(self._options.opening_timeout_s)

    def send_lookup(self, request: int, keys: Sequence[Key], until_s: float, *, is_for_store: bool = False) -> bool:
        """Start a lookup of keys in prefix order. False if it cannot be sent; then no answer comes.

        Lookups above the limit wait. Of these, lookups of requests start before lookups for a store (`is_for_store`).
        """
        if self._loop.is_closed or self.namespace is None:
            return False
        self._loop.post(partial(self._searcher.begin, request, tuple(keys), until_s, is_for_store))
        return True

    def publish(self, stored: Sequence[Stored]) -> None:
        """Write manifests for these stored chunks, so that other engines find them."""
        self._loop.post(lambda: self._writer.publish(stored))

    def use(self, keys: Sequence[Key]) -> None:
        """Report a use of keys of one path, so that their objects stay alive. Called at each use."""
        if self._renewer.take_due_use(keys[0]):
            self._loop.post(lambda: self._renewer.use(dict.fromkeys(map(prefix_of, keys))))

    def take_counts(self) -> StoreCounts:
        """Counts since the last call."""
        sweeper = self._sweeper
        swept = (sweeper.num_swept, sweeper.num_failed) if sweeper is not None else (0, 0)
        counts = StoreCounts(self._writer.num_duplicates, *self._renewer.counts, *swept)
        taken, self._taken = self._taken, counts
        return StoreCounts(*(now - before for now, before in zip(counts, taken, strict=True)))

    def retract(self, key: Key, place: PackPlace) -> None:
        """Report missing or wrong bytes. Later lookups do not return this place for a while. Manifests that list it are
        replaced after the chunk is stored again."""
        self._loop.post(lambda: self._writer.retract(key, place))

    def clear(self, *, is_for_all: bool) -> None:
        """Forget all chunks. If `is_for_all`, begin a new epoch, so that no engine finds the chunks stored until now.
        If the store was not reached yet, the epoch begins when it is reached."""
        epoch = self._epochs.begin_next() if is_for_all else None
        self._loop.post(self._forget if epoch is None else partial(self._reset, epoch))

    def close(self) -> None:
        """Close. Manifests and marks being written get `close_timeout_s` to finish. Logs a warning if a
        reset has no mark then."""
        self._loop.post(self._searcher.drop_waiting)
        self._loop.close(self._options.close_timeout_s)
        self._epochs.warn_of_lost_reset()

    # On the loop.

    def _follow(self) -> None:
        self._loop.spawn(self._epochs.follow())
        if self._sweeper is not None:
            self._loop.spawn(self._sweep(self._sweeper))

    async def _sweep(self, sweeper: CapacitySweeper) -> None:
        """Keep the directory below its limit until `close`, also while the disk is full and accepts no objects."""
        while not self._loop.is_closed:
            took_s = 0.0
            is_reached = self._epochs.manifest_namespace is not None
            if is_reached:
                began_s = time.monotonic()
                try:
                    await self._loop.call(sweeper.sweep)
                except Exception as error:
                    self._loop.log_failure("swept", error)
                took_s = time.monotonic() - began_s
            first_s = self._options.sweep_s if is_reached else self._options.first_retry_s
            await asyncio.sleep(max(first_s, _SWEEP_PAUSE * took_s))

    def _on_read(self, path: Sequence[ManifestNode]) -> None:
        self._writer.learn(path)
        self._renewer.on_read([node.prefix for node in path])

    def _on_epoch_changed(self) -> None:
        self._forget()
        self.events.append(EpochChanged(self._clock()))

    def _reset(self, epoch: int) -> None:
        self._epochs.reset(epoch)
        self._forget()

    def _forget(self) -> None:
        self._writer.clear()
        self._renewer.clear()
