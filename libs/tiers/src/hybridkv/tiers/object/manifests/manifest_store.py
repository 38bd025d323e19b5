"""Manifest store: the `ObjectClient` of the scheduler. Finds manifests, writes new ones, replaces bad ones.

It deletes nothing: a manifest that this host cannot read may be readable by another. An engine replaces a bad manifest
once it has stored all chunks that the manifest lists.

One thread with an event loop does all requests; the engine's thread queues work and takes events. Every lookup ends
with `LookupAnswered` or `LookupFailed`, whatever the store does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridkv.tiers.contract import Key
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.object.bodies import ObjectBody
from hybridkv.tiers.object.client import EpochChanged, LookupAnswered, LookupFailed, News, StoreCounts
from hybridkv.tiers.object.directory_store import DirectoryStore
from hybridkv.tiers.object.format.manifest import (
    MAX_PARTS,
    ManifestNode,
    ManifestPart,
    decode_manifest,
    encode_manifest,
    is_of_another_version,
)
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.keep_alive import KeepAlive, RenewalCounts, RenewalPace
from hybridkv.tiers.object.manifests.epochs import begin_epoch, current_epoch, next_epoch
from hybridkv.tiers.object.manifests.paths import MAX_NODES, Paths
from hybridkv.tiers.object.manifests.reader import ManifestReader, Quarantine
from hybridkv.tiers.object.manifests.search import MAX_PROBES, MAX_TAIL_PROBES, find_last
from hybridkv.tiers.object.names import BOUNDARY_EVERY, is_boundary, manifest_name, namespace_of, prefix_of
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import PackPlace, Stored
from hybridkv.tiers.object.store import clock_ahead_s, describe, prove
from hybridkv.tiers.object.sweeping import CapacitySweeper
from hybridkv.tiers.threads import DaemonPool

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)

MAX_SEARCHING = 32
"""Concurrent searches; others wait."""
MAX_UNPUBLISHED = 1024
"""Path ends without a manifest yet, because an earlier part is unknown."""
USE_INTERVAL_S = 60.0
"""A use of one path is reported at most once in so long."""
MAX_USED = 4096
"""Paths with a remembered report."""
_NUM_THREADS = 3
_SWEEP_PAUSE = 20
"""Sweeps take at most one part in so many of the time."""
_LOCAL_RENEWALS = 50
"""A directory takes so many times as many renewals a second as a server."""
_MIN_JOIN_S = 1.0
"""Minimum time for cancelled tasks to end."""


@dataclass(frozen=True, slots=True)
class Collection:
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


@dataclass(slots=True)
class _ManifestSearch:
    """One search. Keeps the last manifest that it read."""

    namespace: str
    place: int = -1
    """Position of the prefix of `body` among the searched prefixes."""
    body: ObjectBody | None = None


class ManifestStore:
    """Manifest store of one engine.

    Args:
        collection: the cache in the store.
        options: limits.
        clock: clock of the index.
    """

    def __init__(self, collection: Collection, options: ObjectOptions, clock: Callable[[], float]) -> None:
        self._store = collection.store
        self._seals = collection.seals
        self._cache = collection.cache
        self._world_size = collection.world_size
        self._options = options
        self._clock = clock
        self._epoch = 0
        self.namespace: str | None = None
        """Namespace of new packs. A reset changes it at once, on the engine's thread."""
        self._namespace: str | None = None
        """Namespace of manifests. Changes in the step of the loop that forgets the old epoch."""
        self._epoch_lock = threading.Lock()
        """For `_epoch` and `namespace`, which both threads change."""
        self.takes_objects = False
        self.events: deque[News] = deque()
        self._opened: Future[None] = Future()
        self._paths = Paths(MAX_NODES)
        self._reader = ManifestReader(collection.store, collection.seals, options, clock)
        self._bad: Quarantine[tuple[str, int], bool] = Quarantine(options.max_open_keys, options.bad_s, clock)
        """Places with wrong or missing bytes."""
        self._keep_alive: KeepAlive | None = None
        if options.renewal_life_s is not None:
            self._keep_alive = self._new_keep_alive(options.renewal_life_s)
        self._renewal: asyncio.Task[None] | None = None
        self._sweeper: CapacitySweeper | None = None
        self._sweeping: asyncio.Task[None] | None = None
        if options.capacity_bytes is not None:
            self._sweeper = self._new_sweeper(options.capacity_bytes)
        self._num_duplicates = 0
        self._taken = StoreCounts()
        """Counts at the last `take_counts`."""
        self._used: OrderedDict[Key, float] = OrderedDict()
        """When the last reported use of each path was, by the first of the keys."""
        self._unpublished: dict[bytes, None] = {}
        """Ends of paths without a manifest yet: an earlier part is unknown, or the write failed. The oldest first."""
        self._num_searching = 0
        self._waiting: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._work: set[asyncio.Task[None]] = set()
        self._searches: set[asyncio.Task[None]] = set()
        self._follower: asyncio.Task[None] | None = None
        """Task that follows epochs until `close`."""
        self._is_closed = False
        self._has_complained = False
        self._is_only_read = False
        """The log says that the store is read-only."""
        self._pool = DaemonPool(_NUM_THREADS, "hybridkv-object-calls")
        """For blocking calls; coroutines of obstore need no thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="hybridkv-object-index", daemon=True)
        self._thread.start()

    def _new_keep_alive(self, life_s: float) -> KeepAlive:
        per_s = self._options.renewals_per_s * (_LOCAL_RENEWALS if isinstance(self._store, DirectoryStore) else 1)
        pace = RenewalPace(life_s, per_s)
        return KeepAlive(
            self._store, self._cache, self._world_size, pace, self._manifest_bytes, self._clock_ahead, self._clock
        )

    def _new_sweeper(self, capacity_bytes: int) -> CapacitySweeper:
        if not isinstance(self._store, DirectoryStore):
            raise TierConfigurationError("capacity_bytes", "a file: URL", "a store with expiry rules of its own")
        clock_ahead = partial(clock_ahead_s, self._store, self._cache)
        return CapacitySweeper(self._store, capacity_bytes, clock_ahead, lambda: self._is_closed)

    # On the engine's thread.

    def open(self) -> None:
        """Wait for the check of the store, for `opening_timeout_s` at most. The check continues after that.

        Raises:
            TierConfigurationError: the store lacks a needed feature, or denies access.

        """
        self._post(self._follow)
        try:
            self._opened.result(self._options.opening_timeout_s)
        except FutureTimeoutError:
            logger.warning("the object store is not reached yet: nothing is found or stored there until it is")

    def send_lookup(self, request: int, keys: Sequence[Key], until_s: float) -> bool:
        if self._is_closed or self.namespace is None:
            return False
        self._post(lambda: self._begin_search(partial(self._search, request, tuple(keys), until_s)))
        return True

    def publish(self, stored: Sequence[Stored]) -> None:
        self._post(lambda: self._publish(stored))

    def use(self, keys: Sequence[Key]) -> None:
        life_s, now_s = self._options.renewal_life_s, self._clock()
        if life_s is None or not self.takes_objects:
            return
        if now_s - self._used.get(keys[0], -math.inf) < min(USE_INTERVAL_S, life_s / 16):
            return
        self._used[keys[0]] = now_s
        self._used.move_to_end(keys[0])
        if len(self._used) > MAX_USED:
            self._used.popitem(last=False)
        self._post(lambda: self._use(dict.fromkeys(map(prefix_of, keys))))

    def take_counts(self) -> StoreCounts:
        renewals = self._keep_alive.counts if self._keep_alive is not None else RenewalCounts()
        sweeper = self._sweeper
        swept = (sweeper.num_swept, sweeper.num_failed) if sweeper is not None else (0, 0)
        counts = StoreCounts(self._num_duplicates, *renewals, *swept)
        taken, self._taken = self._taken, counts
        return StoreCounts(*(now - before for now, before in zip(counts, taken, strict=True)))

    def retract(self, key: Key, place: PackPlace) -> None:
        self._post(lambda: self._retract(key, place))

    def clear(self, *, is_for_all: bool) -> None:
        if not is_for_all or self.namespace is None:
            self._post(self._forget)
            return
        with self._epoch_lock:
            epoch = self._epoch = next_epoch(self._epoch, time.time())
            self.namespace = namespace_of(self._cache, epoch)
        self._post(lambda: self._reset(epoch))

    def close(self) -> None:
        """Close. Manifests being written get `close_timeout_s` to finish."""
        if self._is_closed:
            return
        self._is_closed = True
        done = threading.Event()
        self._post(lambda: self._finish(done), is_last=True)
        end_s = time.monotonic() + self._options.close_timeout_s
        done.wait(self._options.close_timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(max(_MIN_JOIN_S, end_s - time.monotonic()))
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _post(self, work: Callable[[], None], *, is_last: bool = False) -> None:
        if is_last or not self._is_closed:
            self._loop.call_soon_threadsafe(work)

    # On the thread of this store.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in self._work:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._work, return_exceptions=True))
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _finish(self, done: threading.Event) -> None:
        async def wait() -> None:
            useless = {asyncio.current_task(), self._follower, self._renewal, self._sweeping, *self._searches}
            await asyncio.gather(*(task for task in self._work if task not in useless), return_exceptions=True)
            done.set()

        self._waiting.clear()
        self._do(wait())

    def _forget(self) -> None:
        self._paths.clear()
        self._unpublished.clear()
        if self._keep_alive is not None:
            self._keep_alive.clear()

    def _complain(self, doing: str, error: Exception) -> None:
        """Log a failure at warning level once, until a request succeeds. Further failures are counted."""
        log = logger.debug if self._has_complained else logger.warning
        log("the object store could not be %s: %s", doing, describe(error))
        self._has_complained = True

    # Epochs.

    def _follow(self) -> None:
        self._follower = self._do(self._follow_epochs())
        if self._sweeper is not None:
            self._sweeping = self._do(self._sweep(self._sweeper))

    async def _sweep(self, sweeper: CapacitySweeper) -> None:
        """Keep the directory within its bound until `close`, also while the disk is full and takes no objects."""
        while not self._is_closed:
            took_s = 0.0
            is_reached = self._namespace is not None
            if is_reached:
                began_s = time.monotonic()
                try:
                    await asyncio.wrap_future(self._pool.submit(sweeper.sweep))
                except Exception as error:
                    self._complain("swept", error)
                took_s = time.monotonic() - began_s
            first_s = self._options.sweep_s if is_reached else self._options.first_retry_s
            await asyncio.sleep(max(first_s, _SWEEP_PAUSE * took_s))

    async def _follow_epochs(self) -> None:
        """Check the store as soon as it can be reached, then poll the epoch. Runs until `close`: a store that is
        recovering may refuse a request once and accept it a second later."""
        options, retry_s = self._options, self._options.first_retry_s
        while not self._is_closed:
            try:
                if not self.takes_objects:
                    self._note(await self._prove())
                epoch = await current_epoch(self._store, self._seals, self._cache, time.time())
                self._enter(epoch)
                if epoch < self._epoch:  # the mark expired or was overwritten
                    await self._begin_epoch(self._epoch)
            except Exception as error:
                if isinstance(error, TierConfigurationError) and not self._opened.done():
                    self._opened.set_exception(error)
                self._complain("reached", error)
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

    async def _prove(self) -> str | None:
        """Reason why the store cannot be written, or None. Raises if it cannot be used, unless it was read before."""
        try:
            return await asyncio.wrap_future(self._pool.submit(prove, self._store, self._cache))
        except TierConfigurationError as error:
            if self._namespace is None:
                raise
            return str(error)

    def _enter(self, epoch: int) -> None:
        is_first = self._namespace is None
        with self._epoch_lock:
            if not is_first and epoch <= self._epoch:
                return
            self._epoch = epoch
            self.namespace = self._namespace = namespace_of(self._cache, epoch)
        if is_first:
            self._has_complained = False
            if not self._opened.done():
                self._opened.set_result(None)
        else:
            logger.info("another engine began epoch %d of this cache: earlier chunks are not found any more", epoch)
            self._forget()
            self.events.append(EpochChanged(self._clock()))

    def _reset(self, epoch: int) -> None:
        """This engine began an epoch."""
        if epoch == self._epoch:  # else a later one began meanwhile
            self._namespace = namespace_of(self._cache, epoch)
            self._do(self._begin_epoch(epoch))
        self._forget()

    # Searches.

    def _begin_search(self, search: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._num_searching >= MAX_SEARCHING:
            self._waiting.append(search)
            return
        self._num_searching += 1
        task = self._do(search())
        self._searches.add(task)
        task.add_done_callback(self._searches.discard)

    def _end_search(self) -> None:
        self._num_searching -= 1
        if self._waiting:
            self._begin_search(self._waiting.popleft())

    async def _search(self, request: int, keys: Sequence[Key], until_s: float) -> None:
        news: LookupAnswered | LookupFailed | None = None
        try:
            left_s = until_s - self._clock()
            if left_s > 0:
                news = await asyncio.wait_for(self._found(request, keys), left_s)
        except Exception as error:
            if not isinstance(error, TimeoutError):
                self._complain("read", error)
        finally:
            self.events.append(news or LookupFailed(request, self._clock()))
            self._end_search()

    async def _found(self, request: int, keys: Sequence[Key]) -> LookupAnswered | None:
        namespace = self._namespace
        if namespace is None:
            return None
        prefixes = list(dict.fromkeys(map(prefix_of, keys)))
        places_of = {prefix: place for place, prefix in enumerate(prefixes)}
        lookup = _ManifestSearch(namespace)
        found = await find_last(
            prefixes,
            lambda wanted: self._probe_all(lookup, {prefix: places_of[prefix] for prefix in wanted}),
            BOUNDARY_EVERY,
            MAX_PROBES,
            MAX_TAIL_PROBES,
        )
        self._has_complained = False
        places: dict[Key, PackPlace] = {}
        if found is not None:
            source = found[0]
            path = await self._path(lookup, places_of[source], source)
            if namespace == self._namespace:
                self._paths.learn(path, self._is_bad)
                self._on_read([node.prefix for node in path])
            wanted = set(keys)
            for prefix, parts in path:
                for part in parts:
                    if (key := part.tag + prefix) in wanted and not self._is_bad(part):
                        places[key] = PackPlace(part.pack, part.offset, part.num_bytes, source)
        return LookupAnswered(request, places, self._clock())

    async def _probe_all(self, lookup: _ManifestSearch, wanted: Mapping[bytes, int]) -> list[bool | None]:
        """Whether these prefixes have manifests. One unreadable object counts as missing, since anyone may create one.
        Raises if all reads failed."""
        probes = (self._probe(lookup, prefix, place) for prefix, place in wanted.items())
        answers = await asyncio.gather(*probes, return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures and len(failures) == len(answers):
            raise failures[0]
        return [None if isinstance(answer, BaseException) else answer for answer in answers]

    async def _probe(self, lookup: _ManifestSearch, prefix: bytes, place: int) -> bool | None:
        body = await self._reader.read(manifest_name(lookup.namespace, prefix))
        if body is None or body.data is None:
            return None
        if place > lookup.place:
            lookup.place, lookup.body = place, body if len(body.data) <= self._options.lookup_bytes else None
        return True

    async def _path(self, lookup: _ManifestSearch, place: int, prefix: bytes) -> list[ManifestNode]:
        """Path of the manifest that a lookup found. Empty if the manifest is unusable."""
        name = manifest_name(lookup.namespace, prefix)
        body = lookup.body if lookup.place == place else None
        body = body or await self._reader.read(name)
        if body is None:
            return []
        path = self._decoded(name, prefix, body)
        if path is None:
            self._reader.distrust(name, body.tag)
        return path or []

    def _decoded(self, name: str, prefix: bytes, body: ObjectBody) -> list[ManifestNode] | None:
        path = decode_manifest(self._seals, name, self._world_size, body.data or b"")
        if path is None or path[-1:] == [] or path[-1].prefix != prefix:
            return None
        return path if _is_all_in(path, name.partition("/")[0]) else None

    def _is_bad(self, part: ManifestPart) -> bool:
        return (part.pack, part.offset) in self._bad

    # Keeping alive.

    def _on_read(self, path: Sequence[bytes]) -> None:
        """The manifest of the last of these prefixes was read for a request. Each boundary before it has one too."""
        if self._keep_alive is None or self._namespace is None or not path:
            return
        used = [prefix for prefix in path[:-1] if is_boundary(prefix, BOUNDARY_EVERY)]
        used.append(path[-1])
        for prefix in used:
            self._keep_alive.found(prefix, manifest_name(self._namespace, prefix))
        self._use(used)

    def _use(self, prefixes: Iterable[bytes]) -> None:
        assert self._keep_alive is not None
        self._keep_alive.use(prefixes)
        self._renew()

    def _renew(self) -> None:
        """Start the renewals that wait, unless they run already."""
        assert self._keep_alive is not None
        is_running = self._renewal is not None and not self._renewal.done()
        if self._keep_alive.has_waiting and self.takes_objects and not is_running:
            self._renewal = self._do(self._keep_alive.renew_waiting())

    async def _clock_ahead(self) -> float:
        return await asyncio.wrap_future(self._pool.submit(clock_ahead_s, self._store, self._cache))

    async def _manifest_bytes(self, prefix: bytes, name: str) -> tuple[list[ManifestNode], bytes] | None:
        """Path of a manifest, and its bytes. None if it is missing or unusable."""
        body = await self._reader.read(name)
        if body is None or body.data is None:
            return None
        path = self._decoded(name, prefix, body)
        return None if path is None else (path, body.data)

    # Manifests.

    def _publish(self, stored: Sequence[Stored]) -> None:
        """Write manifests. Chunks of an epoch that ended are left out: a store may end after a reset."""
        namespace = self._namespace
        if namespace is None:
            return
        stored = [each for each in stored if _is_in(each.place.pack, namespace)]
        if self._keep_alive is not None:
            self._keep_alive.stored({each.place.pack for each in stored})
        own = {each.key: each.place.pack for each in stored}
        ends = self._paths.ends(self._paths.add(stored), BOUNDARY_EVERY)
        waiting, self._unpublished = self._unpublished, {}
        for prefix in (*waiting, *ends):
            path = self._paths.up_to(prefix)
            if path is None:
                self._unpublished[prefix] = None
            elif _is_all_in(path, namespace):
                self._do(self._put(prefix, manifest_name(namespace, prefix), path, own))
        while len(self._unpublished) > MAX_UNPUBLISHED:
            del self._unpublished[next(iter(self._unpublished))]

    async def _put(self, prefix: bytes, name: str, path: list[ManifestNode], own: dict[Key, str]) -> None:
        """Write a manifest. An existing one is kept if its writer had stored the same path, unless it is bad.

        Args:
            prefix: the last prefix of the path.
            name: name of the object.
            path: the path.
            own: packs of the chunks that were stored now. Those that others had stored are counted and removed.
        """
        from obstore.exceptions import AlreadyExistsError

        data = encode_manifest(self._seals, name, self._world_size, path)
        if len(data) > self._options.manifest_bytes or sum(len(node.parts) for node in path) > MAX_PARTS:
            logger.debug("a path of %d chunks is too long for a manifest", len(path))
            return
        try:
            try:
                async with self._reader.requests:
                    await self._store.put_async(name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                if not await self._is_worse(prefix, name, path, own):
                    self._on_read([prefix])
                    return
                async with self._reader.requests:
                    await self._store.put_async(name, data, use_multipart=False)
            self._reader.trust(name)
            if self._keep_alive is not None:
                self._keep_alive.written(prefix, name)
                self._renew()
        except Exception as error:
            self._complain("written to", error)
            self._unpublished[prefix] = None  # retried with the next store

    async def _is_worse(self, prefix: bytes, name: str, path: list[ManifestNode], own: dict[Key, str]) -> bool:
        """Whether this path should replace the existing manifest: that one is invalid, or lists no chunk that this path
        lacks, and either a bad place or fewer chunks. One of another version is kept."""
        body = await self._reader.read(name, is_again=True)
        standing = None if body is None else self._decoded(name, prefix, body)
        if standing is None:
            return body is None or not is_of_another_version(body.data or b"")
        listed = {(node.prefix, part.tag) for node in path for part in node.parts}
        standing_listed = {(node.prefix, part.tag) for node in standing for part in node.parts}
        if any(self._is_bad(part) for node in standing for part in node.parts):
            return standing_listed <= listed
        for node in standing:
            for part in node.parts:
                if own.get(part.tag + node.prefix, part.pack) != part.pack:
                    del own[part.tag + node.prefix]
                    self._num_duplicates += 1
        return standing_listed < listed

    def _retract(self, key: Key, place: PackPlace) -> None:
        """Stop offering a place. Manifests that list it are replaced when the chunk is stored again."""
        self._bad.add((place.pack, place.offset), True)
        self._paths.forget(key, place.pack)
        if not place.source:
            return
        for end in self._paths.behind(prefix_of(key), place.source, BOUNDARY_EVERY):
            self._unpublished[end] = None

    async def _begin_epoch(self, epoch: int) -> None:
        try:
            await begin_epoch(self._store, self._seals, self._cache, epoch)
        except Exception as error:
            self._complain("reset", error)


def _is_in(pack: str, namespace: str) -> bool:
    return pack.startswith(f"{namespace}/")


def _is_all_in(path: Sequence[ManifestNode], namespace: str) -> bool:
    """Whether a path lists packs of this namespace alone."""
    return all(_is_in(pack, namespace) for pack in {part.pack for node in path for part in node.parts})
