"""Search for the last manifest of a path, and the searches of an engine.

Every started search ends with `LookupAnswered` or `LookupFailed`, also if the store fails or does not answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.bodies import ObjectBody
from hybridkv.tiers.object.client import LookupAnswered, LookupFailed
from hybridkv.tiers.object.format.manifest import ManifestNode
from hybridkv.tiers.object.manifests.epochs import EpochTracker
from hybridkv.tiers.object.manifests.loop import StoreLoop
from hybridkv.tiers.object.manifests.reader import ManifestReader
from hybridkv.tiers.object.names import MANIFEST_EVERY, is_manifest_point, manifest_name, prefix_of
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import PackPlace

MAX_SEARCHING = 32
"""Limit of concurrent searches. Further searches wait."""
MAX_SEARCHING_FOR_STORES = 8
"""Limit of concurrent searches before stores, which are included in `MAX_SEARCHING`."""
MAX_PROBES = 16
"""Limit of manifests read in one round of a search for the last manifest point with a manifest."""
MAX_TAIL_PROBES = 32
"""Limit of manifests read after that manifest point, where a path may have ended at any prefix."""

Found = TypeVar("Found")
Read = Callable[[Sequence[bytes]], Awaitable[Sequence[Found | None]]]
"""Reads the manifests of these prefixes; None for a prefix without one."""


async def find_last(
    prefixes: Sequence[bytes], read: Read[Found], manifest_every: int, max_probes: int, max_tail_probes: int
) -> tuple[bytes, Found] | None:
    """Find the last prefix of a path with a manifest, and this manifest, in few rounds of reads.

    A stored path has manifests at its manifest points, which every reader can compute, and at its end. If a manifest
    point has a manifest, the search assumes that all earlier ones have manifests too, so each round cuts the search
    range. After the last manifest point with a manifest, every prefix up to the next manifest point is a candidate.

    Args:
        prefixes: prefixes of one path, in order.
        read: reads one round of manifests.
        manifest_every: average number of prefixes for one manifest point.
        max_probes: limit of reads in one round.
        max_tail_probes: limit of candidates after that manifest point. The last candidates are read.
    """
    points = [place for place, prefix in enumerate(prefixes) if is_manifest_point(prefix, manifest_every)]
    found: tuple[bytes, Found] | None = None
    low, high = -1, len(points)
    while high - low > 1:
        probes = _spread(low + 1, high, max_probes)
        answers = await read([prefixes[points[probe]] for probe in probes])
        for probe, answer in zip(probes, answers, strict=True):
            if answer is not None:
                low, found = probe, (prefixes[points[probe]], answer)
        high = next((probe for probe in probes if probe > low), high)
    first = points[low] + 1 if low >= 0 else 0
    stop = points[high] if high < len(points) else len(prefixes)
    tail = prefixes[max(first, stop - max_tail_probes) : stop]
    if tail:
        for prefix, answer in zip(tail, await read(tail), strict=True):
            found = (prefix, answer) if answer is not None else found
    return found


def _spread(low: int, high: int, number: int) -> list[int]:
    """Up to `number` evenly spaced integers of [low, high), the last included."""
    width = high - low
    if width <= number:
        return list(range(low, high))
    return [low + (step + 1) * width // number - 1 for step in range(number)]


@dataclass(slots=True)
class _ManifestSearch:
    """One search. Keeps the manifest with the longest prefix that was read, if it is within the size limit."""

    namespace: str
    place: int = -1
    """Position of the longest prefix with a read manifest, among the searched prefixes."""
    body: ObjectBody | None = None


class ManifestSearcher:
    """Searches manifests for the chunks of lookups. Used on one event loop.

    Args:
        options: limits.
        reader: reads manifests.
        epochs: namespace of the manifests.
        loop: event loop of the requests.
        clock: seconds.
        on_read: called with the path of a manifest that was read for a lookup.
        on_ended: called with the answer of each lookup.
    """

    def __init__(
        self,
        options: ObjectOptions,
        reader: ManifestReader,
        epochs: EpochTracker,
        loop: StoreLoop,
        clock: Callable[[], float],
        on_read: Callable[[Sequence[ManifestNode]], None],
        on_ended: Callable[[LookupAnswered | LookupFailed], None],
    ) -> None:
        self._kept_bytes = options.lookup_bytes
        self._reader = reader
        self._epochs = epochs
        self._loop = loop
        self._clock = clock
        self._on_read = on_read
        self._on_ended = on_ended
        self._num_searching = {False: 0, True: 0}
        """Number of running searches of requests (False), and before stores (True)."""
        self._waiting: dict[bool, deque[Callable[[], None]]] = {False: deque(), True: deque()}
        """Searches that have not begun. Requests go first."""

    def begin(self, request: int, keys: Sequence[Key], until_s: float, is_for_store: bool) -> None:
        """Begin a lookup, or queue it if too many run."""
        if not self._has_room(is_for_store):
            self._waiting[is_for_store].append(partial(self.begin, request, keys, until_s, is_for_store))
            return
        self._num_searching[is_for_store] += 1
        self._loop.spawn(self._search(request, keys, until_s, is_for_store))

    def _has_room(self, is_for_store: bool) -> bool:
        num_searching = self._num_searching
        is_full = sum(num_searching.values()) >= MAX_SEARCHING
        return not is_full and not (is_for_store and num_searching[True] >= MAX_SEARCHING_FOR_STORES)

    def drop_waiting(self) -> None:
        """Drop the lookups that have not begun."""
        for waiting in self._waiting.values():
            waiting.clear()

    async def _search(self, request: int, keys: Sequence[Key], until_s: float, is_for_store: bool) -> None:
        answer: LookupAnswered | LookupFailed | None = None
        try:
            left_s = until_s - self._clock()
            if left_s > 0:
                answer = await asyncio.wait_for(self._found(request, keys), left_s)
        except Exception as error:
            if not isinstance(error, TimeoutError):
                self._loop.log_failure("read", error)
        finally:
            self._on_ended(answer or LookupFailed(request, self._clock()))
            self._num_searching[is_for_store] -= 1
            for kind, waiting in self._waiting.items():
                if waiting and self._has_room(kind):
                    waiting.popleft()()

    async def _found(self, request: int, keys: Sequence[Key]) -> LookupAnswered | None:
        namespace = self._epochs.manifest_namespace
        if namespace is None:
            return None
        prefixes = list(dict.fromkeys(map(prefix_of, keys)))
        places_of = {prefix: place for place, prefix in enumerate(prefixes)}
        search = _ManifestSearch(namespace)
        found = await find_last(
            prefixes,
            lambda wanted: self._probe_all(search, {prefix: places_of[prefix] for prefix in wanted}),
            MANIFEST_EVERY,
            MAX_PROBES,
            MAX_TAIL_PROBES,
        )
        self._loop.succeeded()
        places: dict[Key, PackPlace] = {}
        if found is not None:
            source = found[0]
            path = await self._path(search, places_of[source], source)
            if namespace == self._epochs.manifest_namespace:
                self._on_read(path)
            wanted = set(keys)
            for prefix, parts in path:
                for part in parts:
                    if (key := part.tag + prefix) in wanted and not self._reader.is_bad(part):
                        places[key] = PackPlace(part.pack, part.offset, part.num_bytes, source)
        return LookupAnswered(request, places, self._clock())

    async def _probe_all(self, search: _ManifestSearch, wanted: Mapping[bytes, int]) -> list[bool | None]:
        """True for each prefix with a manifest, None for others. An unreadable object counts as missing, since anyone
        may create one. Raises if all reads failed."""
        probes = (self._probe(search, prefix, place) for prefix, place in wanted.items())
        answers = await asyncio.gather(*probes, return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures and len(failures) == len(answers):
            raise failures[0]
        return [None if isinstance(answer, BaseException) else answer for answer in answers]

    async def _probe(self, search: _ManifestSearch, prefix: bytes, place: int) -> bool | None:
        body = await self._reader.read(manifest_name(search.namespace, prefix))
        if body is None or body.data is None:
            return None
        if place > search.place:
            search.place, search.body = place, body if len(body.data) <= self._kept_bytes else None
        return True

    async def _path(self, search: _ManifestSearch, place: int, prefix: bytes) -> list[ManifestNode]:
        """Path of the manifest that a search found. Empty if the manifest is missing or unusable."""
        name = manifest_name(search.namespace, prefix)
        body = search.body if search.place == place else None
        body = body or await self._reader.read(name)
        if body is None:
            return []
        path = self._reader.decoded(name, prefix, body)
        if path is None:
            self._reader.distrust(name, body.etag)
        return path or []
