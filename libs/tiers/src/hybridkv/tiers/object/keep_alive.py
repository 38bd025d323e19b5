"""Renews manifests and packs in use, if old objects are deleted: after a time to live or above a capacity.

A store counts an object's life from its last write. So an object that is used in the second half of its life is written
again, and an object that is used once in each half stays. Packs are written before the manifest that lists them. When a
manifest is new or renewed, its packs older than a quarter of the time to live are renewed. So a pack is never older
than its manifest by more than a quarter. The oldest pack sets the time of the next check.

Ages are measured by the store's clock. Requests are limited to an average rate. Each engine checks the age of an object
before it renews the object, so one renewal is enough for the fleet.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hybridkv.tiers.object.directory_store import DirectoryStore
from hybridkv.tiers.object.format.manifest import ManifestNode
from hybridkv.tiers.object.names import rank_name
from hybridkv.tiers.object.store import describe

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)

MAX_MANIFESTS = 65_536
"""Limit of remembered manifests. The least recently used are forgotten."""
MAX_PACKS = 65_536
MAX_WAITING = 1024
"""Limit of manifests that wait for a check. Further manifests are dropped and counted; their next use tries again."""
CLOCK_CHECK_S = 3600.0
"""Interval of the comparisons of this host's clock with the store's."""
RETRY_S = 60.0
"""Seconds after which a manifest that could not be renewed is tried again, at its next use."""

Result = TypeVar("Result")
K = TypeVar("K")
V = TypeVar("V")
_NEVER_CHECKED = -float("inf")


@dataclass(slots=True)
class _KnownManifest:
    name: str
    due_s: float = _NEVER_CHECKED
    """Time of the next check of the manifest's age."""
    has_unchecked_packs: bool = False
    """True if the manifest was written or replaced since the last check, and may list old packs."""


class RenewalPace(NamedTuple):
    """Pace of renewals.

    Args:
        time_to_live_s: life of an object after its last write.
        requests_per_s: limit of requests, on average.
    """

    time_to_live_s: float
    requests_per_s: float


class RenewalCounts(NamedTuple):
    """Counts of objects since the start.

    Args:
        renewed: objects that were written again.
        dropped: manifests in use that were not checked, because too many manifests wait.
        failed: manifests that could not be checked or renewed.
    """

    renewed: int = 0
    dropped: int = 0
    failed: int = 0


class KeepAlive:
    """Renewals of one engine. Used on one event loop.

    Args:
        store: the store.
        cache: name of the cache, under which objects are copied.
        world_size: number of ranks with an object in each pack.
        pace: life of an object, and limit of requests.
        read: reads a manifest: the nodes of its path, and its bytes. None if it is missing or unusable.
        clock_ahead: returns the seconds by which the store's clock is ahead of this host's clock.
        clock: seconds, of this host.
    """

    def __init__(
        self,
        store: Store,
        cache: str,
        world_size: int,
        pace: RenewalPace,
        read: Callable[[bytes, str], Awaitable[tuple[Sequence[ManifestNode], bytes] | None]],
        clock_ahead: Callable[[], Awaitable[float]],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._cache = cache
        self._world_size = world_size
        self._half_s = pace.time_to_live_s / 2
        self._quarter_s = pace.time_to_live_s / 4
        self._interval_s = 1 / pace.requests_per_s
        self._next_request_s = 0.0
        self._read = read
        self._clock_ahead = clock_ahead
        self._clock = clock
        self._manifests: OrderedDict[bytes, _KnownManifest] = OrderedDict()
        """By prefix, the least recently used first."""
        self._packs: OrderedDict[str, float] = OrderedDict()
        """Time of the last known write of each pack, for the rank with the oldest object."""
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        self._ahead_s = 0.0
        """Seconds by which the store's clock is ahead of this host's wall clock."""
        self._compared_s = _NEVER_CHECKED
        self.num_renewed = self.num_dropped = self.num_failed = 0
        self._has_logged_failure = False

    @property
    def has_waiting(self) -> bool:
        """True if `renew_waiting` has work."""
        return bool(self._waiting)

    def found(self, prefix: bytes, name: str) -> None:
        """Record a manifest that was read. Its age is unknown."""
        if prefix not in self._manifests:
            _put(self._manifests, prefix, _KnownManifest(name), MAX_MANIFESTS)

    def written(self, prefix: bytes, name: str) -> None:
        """Record a manifest that was written now. Queues a check, because it may list old packs of other engines."""
        _put(self._manifests, prefix, _KnownManifest(name, has_unchecked_packs=True), MAX_MANIFESTS)
        self.use([prefix])

    def stored(self, packs: Iterable[str]) -> None:
        """Record packs that were written now."""
        for pack in packs:
            _put(self._packs, pack, self._clock(), MAX_PACKS)

    def use(self, prefixes: Iterable[bytes]) -> None:
        """Queue the manifests of used prefixes that are due for a check."""
        now_s = self._clock()
        for prefix in prefixes:
            found = self._manifests.get(prefix)
            if found is None or prefix in self._waiting:
                continue
            self._manifests.move_to_end(prefix)
            if found.due_s > now_s:
                continue
            if len(self._waiting) >= MAX_WAITING:
                self.num_dropped += 1
                continue
            self._waiting[prefix] = None

    def clear(self) -> None:
        """Forget everything. Called when another epoch begins."""
        self._manifests.clear()
        self._packs.clear()
        self._waiting.clear()

    async def renew_waiting(self) -> None:
        """Check the manifests that wait, and renew the old ones."""
        while self._waiting:
            prefix, _ = self._waiting.popitem(last=False)
            manifest = self._manifests.get(prefix)
            if manifest is None:
                continue
            try:
                manifest.due_s = await self._renewed(prefix, manifest)
                self._has_logged_failure = False
            except FileNotFoundError:
                self._manifests.pop(prefix, None)
            except Exception as error:
                log = logger.debug if self._has_logged_failure else logger.warning
                log("an object in use could not be kept alive: %s", describe(error))
                self._has_logged_failure = True
                self.num_failed += 1
                manifest.due_s = self._clock() + RETRY_S

    async def _renewed(self, prefix: bytes, manifest: _KnownManifest) -> float:
        """Renew a manifest and its packs if needed. Returns the time of the next check.

        Raises:
            FileNotFoundError: the manifest, or a pack that it lists, is gone. Then the other objects are not renewed.
            Exception: (obstore) a request failed.
        """
        name, now_s = manifest.name, self._clock()
        if now_s - self._compared_s >= CLOCK_CHECK_S:
            self._ahead_s = await self._limited(self._clock_ahead)
            self._compared_s = now_s
        age_s = await self._age_s(name)
        written_s, is_old = now_s - age_s, age_s >= self._half_s
        if age_s < self._quarter_s and not manifest.has_unchecked_packs:
            return written_s + self._quarter_s  # its packs may be older than the manifest by a quarter
        found = await self._limited(lambda: self._read(prefix, name))
        if found is None:
            raise FileNotFoundError(name)
        path, data = found
        from_age_s = self._quarter_s if is_old or manifest.has_unchecked_packs else self._half_s
        oldest_s = now_s
        for pack in dict.fromkeys(part.pack for node in path for part in node.parts):
            oldest_s = min(oldest_s, await self._renew_pack(pack, from_age_s))
        manifest.has_unchecked_packs = False
        if is_old:
            if not await self._renew_manifest(prefix, name, data):
                manifest.has_unchecked_packs = True
                return self._clock()
            written_s = self._clock()
        return min(written_s, oldest_s) + self._half_s

    async def _renew_manifest(self, prefix: bytes, name: str, data: bytes) -> bool:
        """Write a manifest again. False if it was replaced, or is missing, since these bytes were read: the renewal of
        the packs may take minutes."""
        if isinstance(self._store, DirectoryStore):
            await self._renew(name)
            return True
        found = await self._limited(lambda: self._read(prefix, name))
        if found is None or found[1] != data:
            return False
        self._next_request_s += self._interval_s  # the put does not wait, but counts as a request
        await self._store.put_async(name, data, use_multipart=False)
        self.num_renewed += 1
        return True

    async def _renew_pack(self, pack: str, from_age_s: float) -> float:
        """Renew the objects of a pack that are at least this old. Returns the time of the earliest last write, by this
        host's clock."""
        written_s = self._packs.get(pack, _NEVER_CHECKED)
        if self._clock() - written_s < from_age_s:
            return written_s
        oldest_s = self._clock()
        for rank in range(self._world_size):
            name = rank_name(pack, rank)
            age_s = await self._age_s(name)
            if age_s >= from_age_s:
                await self._renew(name)
                age_s = 0.0
            oldest_s = min(oldest_s, self._clock() - age_s)
        _put(self._packs, pack, oldest_s, MAX_PACKS)
        return oldest_s

    async def _renew(self, name: str) -> None:
        """Renew an object: by its file time in a directory, else by two copies in the store, without a download."""
        store = self._store
        if isinstance(store, DirectoryStore):
            await self._limited(lambda: store.renew_async(name))
        else:
            # S3 refuses to copy an object to itself.
            other = f"{self._cache}/renewal/{uuid.uuid4().hex}"
            await self._limited(lambda: store.copy_async(name, other))
            try:
                await self._limited(lambda: store.copy_async(other, name))
            finally:
                await self._limited(lambda: store.delete_async([other]))
        self.num_renewed += 1

    async def _age_s(self, name: str) -> float:
        """Seconds since the last write, by the store's clock."""
        meta = await self._limited(lambda: self._store.head_async(name))
        return max(0.0, time.time() + self._ahead_s - meta["last_modified"].timestamp())

    async def _limited(self, request: Callable[[], Awaitable[Result]]) -> Result:
        """Send a request as soon as the rate permits it."""
        now_s = time.monotonic()
        at_s = self._next_request_s = max(self._next_request_s + self._interval_s, now_s)
        if at_s > now_s:
            await asyncio.sleep(at_s - now_s)
        return await request()

    @property
    def counts(self) -> RenewalCounts:
        """Counts since the start. They never decrease, so another thread may read them."""
        return RenewalCounts(self.num_renewed, self.num_dropped, self.num_failed)


def _put(entries: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    entries[key] = value
    entries.move_to_end(key)
    while len(entries) > most:
        entries.popitem(last=False)
