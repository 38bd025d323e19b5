"""Epochs of a cache: mark, number and namespace of the current epoch. Chunks of earlier epochs are not found."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.object.bodies import ReadMemoryLimit, read_body
from hybridkv.tiers.object.format.epoch import EPOCH_MARK_BYTES, decode_epoch, encode_epoch
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.manifests.loop import StoreLoop
from hybridkv.tiers.object.manifests.reader import StoredCache
from hybridkv.tiers.object.names import epoch_name, namespace_of
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.store import check_store

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)

# The number of an epoch is the second in which it began, by the clock of the host that began it.
FARTHEST_AHEAD_S = 86_400
"""A mark that is further in the future is ignored. Clocks of hosts differ by less."""


def next_epoch(epoch: int, now_s: float) -> int:
    """Number of the epoch that begins now, after `epoch`."""
    return max(epoch + 1, int(now_s))


async def current_epoch(store: Store, seals: Seals, cache: str, now_s: float) -> int:
    """Number of the current epoch, read from its mark. 0 if there is no valid mark.

    Raises:
        Exception: (obstore) the request failed.
    """
    name = epoch_name(cache)
    try:
        async with read_body(store, name, EPOCH_MARK_BYTES, ReadMemoryLimit(EPOCH_MARK_BYTES)) as body:
            epoch = decode_epoch(seals, name, body.data) if body.data is not None else None
    except FileNotFoundError:
        return 0
    return epoch if epoch is not None and epoch <= now_s + FARTHEST_AHEAD_S else 0


async def begin_epoch(store: Store, seals: Seals, cache: str, epoch: int) -> None:
    """Write the mark of an epoch. If two engines write at the same time and the mark of the earlier epoch stays, the
    engine with the later epoch writes its mark again at its next check."""
    name = epoch_name(cache)
    await store.put_async(name, encode_epoch(seals, name, epoch), use_multipart=False)


class EpochTracker:
    """Tracks the current epoch of a cache, and whether the store can be written.

    Args:
        stored_cache: the cache in the store.
        options: limits.
        loop: event loop of the requests.
        on_changed: called on the loop when another engine has begun an epoch.
    """

    def __init__(
        self, stored_cache: StoredCache, options: ObjectOptions, loop: StoreLoop, on_changed: Callable[[], None]
    ) -> None:
        self._store = stored_cache.store
        self._seals = stored_cache.seals
        self._cache = stored_cache.cache
        self._options = options
        self._loop = loop
        self._on_changed = on_changed
        self._epoch = 0
        self.namespace: str | None = None
        """Namespace of new packs; None until the store was reached. A reset changes it at once, on the engine's
        thread."""
        self.manifest_namespace: str | None = None
        """Namespace of manifests. Changes in the step of the loop that forgets the old epoch."""
        self._must_begin_next = False
        """True if a reset came before the store was reached."""
        self._is_written = True
        """False if the mark of the last reset of this engine was never in the store."""
        self._writing = asyncio.Lock()
        self._lock = threading.Lock()
        """Protects the attributes above but `manifest_namespace`: both threads change them."""
        self.takes_objects = False
        self._opened: Future[None] = Future()
        self._is_only_read = False
        """True if the last logged change is that the store is read-only."""

    # On the engine's thread.

    def wait_until_opened(self, timeout_s: float) -> None:
        """Wait until the store was checked. A timeout is only logged.

        Raises:
            TierConfigurationError: the store lacks a needed feature, or denies access.
        """
        try:
            self._opened.result(timeout_s)
        except FutureTimeoutError:
            logger.warning("the object store is not reached yet: nothing is found or stored there until it is")

    def begin_next(self) -> int | None:
        """Switch new packs to a new epoch, and return its number. Call `reset` on the loop afterwards. None if the
        store was not reached yet: then the epoch begins when it is reached."""
        with self._lock:
            self._is_written = False
            if self.namespace is None:
                self._must_begin_next = True
                return None
            epoch = self._epoch = next_epoch(self._epoch, time.time())
            self.namespace = namespace_of(self._cache, epoch)
        return epoch

    def warn_of_lost_reset(self) -> None:
        """Log a warning if the mark of the last reset was never written. Call after the loop has ended."""
        if not self._is_written:
            logger.warning("a reset is not in the object store: other engines still find chunks of before the reset")

    # On the loop.

    def reset(self, epoch: int) -> None:
        """Switch manifests to an epoch that this engine began, and write its mark."""
        if epoch == self._epoch:  # else a later epoch began meanwhile
            self.manifest_namespace = namespace_of(self._cache, epoch)
            self._loop.spawn(self._begin_epoch(epoch), is_write=True)

    async def follow(self) -> None:
        """Check the store as soon as it can be reached, then poll the epoch. Runs until `close`, also after errors: a
        recovering store may refuse a request, and accept it a second later."""
        options, retry_s = self._options, self._options.first_retry_s
        while not self._loop.is_closed:
            try:
                if not self.takes_objects:
                    self._note(await self._check_store())
                epoch = await current_epoch(self._store, self._seals, self._cache, time.time())
                self._enter(epoch)
                if epoch < self._epoch:  # a new epoch began, or the mark expired or was overwritten
                    await self._loop.spawn(self._begin_epoch(self._epoch), is_write=True)
            except Exception as error:
                if isinstance(error, TierConfigurationError) and not self._opened.done():
                    self._opened.set_exception(error)
                self._loop.log_failure("reached", error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, options.last_retry_s)
                continue
            if self.takes_objects:
                retry_s = options.first_retry_s
                await asyncio.sleep(options.epoch_check_s)
            else:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, options.last_retry_s)

    def _note(self, refused: str | None) -> None:
        """Record whether the store can be written. Logs one line for each change."""
        self.takes_objects = refused is None
        if self.takes_objects and self._is_only_read:
            logger.info("the object store can be written again")
        elif not self.takes_objects and not self._is_only_read:
            logger.warning("the object store cannot be written, so it is only read: %s", refused)
        self._is_only_read = not self.takes_objects

    async def _check_store(self) -> str | None:
        """Reason why the store cannot be written, or None. Raises if it cannot be used and was never read."""
        try:
            return await self._loop.call(check_store, self._store, self._cache)
        except TierConfigurationError as error:
            if self.manifest_namespace is None:
                raise
            return str(error)

    def _enter(self, epoch: int) -> None:
        is_first = self.manifest_namespace is None
        with self._lock:
            if not is_first:
                # The mark is in the store, or another engine's later epoch hides the same chunks.
                self._is_written = self._is_written or epoch >= self._epoch
                if epoch <= self._epoch:
                    return
            if is_first and self._must_begin_next:
                epoch = next_epoch(epoch, time.time())
            self._epoch = epoch
            self.namespace = self.manifest_namespace = namespace_of(self._cache, epoch)
        if is_first:
            self._loop.succeeded()
            if not self._opened.done():
                self._opened.set_result(None)
        else:
            logger.info("another engine began epoch %d of this cache: earlier chunks are not found any more", epoch)
            self._on_changed()

    async def _begin_epoch(self, epoch: int) -> None:
        """Write the mark of an epoch of this engine, one mark at a time, so that the latest is written last."""
        async with self._writing:
            if epoch != self._epoch:
                return  # a later epoch has its own write
            try:
                await begin_epoch(self._store, self._seals, self._cache, epoch)
            except Exception as error:
                self._loop.log_failure("reset", error)
                return
        with self._lock:
            self._is_written = self._is_written or epoch == self._epoch
