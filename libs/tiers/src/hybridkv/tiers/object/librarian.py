"""Speaks with the store for the scheduler's half: finds manifests, writes new ones, deletes bad ones. A `Courier`.

One thread with an event loop does all of it; the engine's thread leaves work and takes answers. A search is a few
rounds of reads at one time. Whatever the store does, every question has an answer in the end, if only that there is
none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridkv.tiers.contract import Key
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.object.courier import Found, Moved, News, Unanswered
from hybridkv.tiers.object.epochs import begin_epoch, current_epoch
from hybridkv.tiers.object.format.manifest import Node, decode_manifest, encode_manifest
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.known import PackPlace
from hybridkv.tiers.object.names import manifest_name, namespace_of, prefix_of
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import Stored
from hybridkv.tiers.object.paths import Paths
from hybridkv.tiers.object.search import find_last
from hybridkv.tiers.object.store import first_line, prove

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Collection:
    """What one cache of a fleet has in a store.

    Args:
        store: opened.
        seals: of the fleet.
        cache: name of all that it ever stores.
        world_size: ranks that each have their part.
    """

    store: ObjectStore
    seals: Seals
    cache: str
    world_size: int


class Librarian:
    """Of one engine.

    Args:
        collection: what it looks after.
        options: bounds.
        clock: the index's.
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
        self.news: deque[News] = deque()
        self._opened: Future[None] = Future()
        self._paths = Paths(options.max_nodes)
        self._unpublished: dict[bytes, None] = {}
        """Ends of paths of which something before is not known yet, or whose manifest could not be written. The oldest
        first."""
        self._num_searching = 0
        self._waiting: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._work: set[asyncio.Task[None]] = set()
        self._searches: set[asyncio.Task[None]] = set()
        self._requests = asyncio.Semaphore(options.max_requests)
        self._follower: asyncio.Task[None] | None = None
        """Works as long as the engine lives."""
        self._is_closed = False
        self._has_complained = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="hybridkv-object-index", daemon=True)
        self._thread.start()

    # On the engine's thread.

    def open(self) -> None:
        """Wait until the store is proved, for `opening_timeout_s` at most: it goes on behind that.

        Raises:
            TierConfigurationError: the store does not do what is needed of it, or lets nobody in.
        """
        self._post(self._follow)
        try:
            self._opened.result(self._options.opening_timeout_s)
        except FutureTimeoutError:
            logger.warning("the object store is not reached yet: nothing is found or stored there until it is")

    def ask(self, request: int, keys: Sequence[Key], until_s: float) -> bool:
        if self._is_closed or self.namespace is None:
            return False
        self._post(lambda: self._begin_search(partial(self._search, request, tuple(keys), until_s)))
        return True

    def publish(self, stored: Sequence[Stored]) -> None:
        self._post(lambda: self._publish(stored))

    def retract(self, key: Key, place: PackPlace) -> None:
        self._post(lambda: self._retract(key, place))

    def clear(self, *, is_for_all: bool) -> None:
        if is_for_all and self.namespace is not None:
            self._epoch += 1
            self.namespace = namespace_of(self._cache, self._epoch)
            epoch = self._epoch
            self._post(lambda: self._begin(self._begin_epoch(epoch)))
        self._post(self._forget)

    def close(self) -> None:
        """What is being published has `close_timeout_s` for it."""
        if self._is_closed:
            return
        self._is_closed = True
        done = threading.Event()
        self._post(lambda: self._finish(done), is_last=True)
        done.wait(self._options.close_timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._options.close_timeout_s)

    def _post(self, work: Callable[[], None], *, is_last: bool = False) -> None:
        if is_last or not self._is_closed:
            self._loop.call_soon_threadsafe(work)

    # On the librarian's.

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

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._do(work)

    def _finish(self, done: threading.Event) -> None:
        async def wait() -> None:
            useless = {asyncio.current_task(), self._follower, *self._searches}
            await asyncio.gather(*(task for task in self._work if task not in useless), return_exceptions=True)
            done.set()

        self._waiting.clear()
        self._do(wait())

    def _forget(self) -> None:
        self._paths.clear()
        self._unpublished.clear()

    def _complain(self, doing: str, error: Exception) -> None:
        """Once while it lasts: what follows from it is counted."""
        log = logger.debug if self._has_complained else logger.warning
        log("the object store did not let itself be %s: %s", doing, first_line(error))
        self._has_complained = True

    # Epochs.

    def _follow(self) -> None:
        self._follower = self._do(self._follow_epochs())

    async def _follow_epochs(self) -> None:
        """Prove the store, as soon as it is reached, and look again and again which epoch it is."""
        options, retry_s = self._options, self._options.first_retry_s
        while not self._is_closed:
            try:
                if self.namespace is None:
                    await asyncio.to_thread(prove, self._store, self._cache)
                epoch = await asyncio.to_thread(current_epoch, self._store, self._cache)
            except TierConfigurationError as error:
                if not self._opened.done():
                    self._opened.set_exception(error)
                logger.error("the object store cannot be used: %s", error)
                return
            except Exception as error:
                self._complain("reached", error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, options.last_retry_s)
                continue
            self._enter(epoch)
            retry_s = options.first_retry_s
            await asyncio.sleep(options.epoch_check_s)

    def _enter(self, epoch: int) -> None:
        if self.namespace is None:
            self._epoch = epoch
            self.namespace = namespace_of(self._cache, epoch)
            self._opened.set_result(None)
        elif epoch > self._epoch:
            logger.info("somebody has begun epoch %d of this cache: what was stored before is found no more", epoch)
            self._epoch = epoch
            self.namespace = namespace_of(self._cache, epoch)
            self._forget()
            self.news.append(Moved(self._clock()))

    # Searches.

    def _begin_search(self, search: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._num_searching >= self._options.max_searching:
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
        news: Found | Unanswered | None = None
        try:
            left_s = until_s - self._clock()
            if left_s > 0:
                news = await asyncio.wait_for(self._found(request, keys), left_s)
        except Exception as error:
            if not isinstance(error, TimeoutError):
                self._complain("read", error)
        finally:
            self.news.append(news or Unanswered(request, self._clock()))
            self._end_search()

    async def _found(self, request: int, keys: Sequence[Key]) -> Found | None:
        options, namespace = self._options, self.namespace
        if namespace is None:
            return None
        prefixes = list(dict.fromkeys(map(prefix_of, keys)))
        found = await find_last(
            prefixes,
            partial(self._read_all, namespace),
            options.boundary_every,
            options.max_probes,
            options.max_tail_probes,
        )
        self._has_complained = False
        places: dict[Key, PackPlace] = {}
        if found is not None:
            source, path = found
            if namespace == self.namespace:
                self._paths.learn(path)
            wanted = set(keys)
            for prefix, parts in path:
                for tag, pack, offset, num_bytes in parts:
                    if (key := tag + prefix) in wanted:
                        places[key] = PackPlace(pack, offset, num_bytes, source)
        return Found(request, places, self._clock())

    async def _read_all(self, namespace: str, prefixes: Sequence[bytes]) -> list[list[Node] | None]:
        return await asyncio.gather(*(self._read(namespace, prefix) for prefix in prefixes))

    async def _read(self, namespace: str, prefix: bytes) -> list[Node] | None:
        """The path that a manifest names. None where there is none, or none that is to be believed."""
        import obstore

        name = manifest_name(namespace, prefix)
        try:
            async with self._requests:
                answer = await obstore.get_async(self._store, name)
                if answer.meta["size"] > self._options.manifest_bytes:
                    return None
                data = (await answer.bytes_async()).to_bytes()
        except FileNotFoundError:
            return None
        path = decode_manifest(self._seals, name, self._world_size, data)
        if path is None or path[-1:] == [] or path[-1].prefix != prefix:
            logger.warning("a manifest in the object store is not what this fleet writes, and is deleted: %s", name)
            await self._delete_object(name)
            return None
        return path

    # Manifests.

    def _publish(self, stored: Sequence[Stored]) -> None:
        if self.namespace is None:
            return
        ends = self._paths.ends(self._paths.add(stored), self._options.boundary_every)
        waiting, self._unpublished = self._unpublished, {}
        for prefix in (*waiting, *ends):
            path = self._paths.up_to(prefix)
            if path is None:
                self._unpublished[prefix] = None
            else:
                name = manifest_name(self.namespace, prefix)
                self._do(self._put(prefix, name, encode_manifest(self._seals, name, self._world_size, path)))
        while len(self._unpublished) > self._options.max_unpublished:
            del self._unpublished[next(iter(self._unpublished))]

    async def _put(self, prefix: bytes, name: str, data: bytes) -> None:
        """What is there already says as much: it was put by somebody who had all of it."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            async with self._requests:
                await obstore.put_async(self._store, name, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            pass
        except Exception as error:
            self._complain("written to", error)
            self._unpublished[prefix] = None  # with what is stored next

    def _retract(self, key: Key, place: PackPlace) -> None:
        self._paths.forget(key, place.pack)
        if place.source:
            self._do(self._delete(place.source))

    async def _delete(self, source: bytes) -> None:
        if self.namespace is not None:
            await self._delete_object(manifest_name(self.namespace, source))

    async def _delete_object(self, name: str) -> None:
        import obstore

        try:
            await obstore.delete_async(self._store, [name])
        except FileNotFoundError:
            pass
        except Exception as error:  # whoever may not delete reads it again, and believes it as little
            self._complain("cleaned", error)

    async def _begin_epoch(self, epoch: int) -> None:
        try:
            await asyncio.to_thread(begin_epoch, self._store, self._cache, epoch)
        except Exception as error:
            self._complain("reset", error)
