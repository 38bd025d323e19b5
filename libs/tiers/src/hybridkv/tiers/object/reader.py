"""Reads manifests: their size before their body, their seal before what they say.

A manifest whose seal is wrong is read once more in another way. If that fails too, this host leaves that version of it
alone for a while. It deletes nothing: another host may read it well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from hybridkv.tiers.object.bodies import Body, Room, read_body
from hybridkv.tiers.object.format.manifest import is_sealed
from hybridkv.tiers.object.format.seals import Seals
from hybridkv.tiers.object.names import is_boundary
from hybridkv.tiers.object.options import ObjectOptions

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")


class Quarantine(Generic[K, V]):
    """Bounded; the oldest goes first.

    Args:
        max_entries: of them.
        lasts_s: for so long each stays.
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
        """From now on, once more if it is there."""
        self._entries.pop(key, None)
        if len(self._entries) >= self._max_entries:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = (self._clock() + self._lasts_s, value)

    def get(self, key: K) -> V | None:
        """What was said of it; None where it is not in quarantine."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        until_s, value = entry
        if until_s <= self._clock():
            del self._entries[key]
            return None
        return value

    def release(self, key: K) -> None:
        """It is good again."""
        self._entries.pop(key, None)


Found = TypeVar("Found")
Read = Callable[[Sequence[bytes]], Awaitable[Sequence[Found | None]]]
"""The manifests of these prefixes; None for what has none."""


async def find_last(
    prefixes: Sequence[bytes], read: Read[Found], boundary_every: int, max_probes: int, max_tail_probes: int
) -> tuple[bytes, Found] | None:
    """The last of these prefixes that has a manifest, and that.

    Args:
        prefixes: of one path, in order.
        read: asked for a round at a time.
        boundary_every: one of so many prefixes is a boundary.
        max_probes: in one round.
        max_tail_probes: behind the last boundary, the last ones.
    """
    boundaries = [place for place, prefix in enumerate(prefixes) if is_boundary(prefix, boundary_every)]
    found: tuple[bytes, Found] | None = None
    low, high = -1, len(boundaries)
    while high - low > 1:
        probes = _spread(low + 1, high, max_probes)
        answers = await read([prefixes[boundaries[probe]] for probe in probes])
        for probe, answer in zip(probes, answers, strict=True):
            if answer is not None:
                low, found = probe, (prefixes[boundaries[probe]], answer)
        high = next((probe for probe in probes if probe > low), high)
    first = boundaries[low] + 1 if low >= 0 else 0
    stop = boundaries[high] if high < len(boundaries) else len(prefixes)
    tail = prefixes[max(first, stop - max_tail_probes) : stop]
    if tail:
        for prefix, answer in zip(tail, await read(tail), strict=True):
            found = (prefix, answer) if answer is not None else found
    return found


def _spread(low: int, high: int, number: int) -> list[int]:
    """So many of [low, high), or all of them; the last is among them."""
    width = high - low
    if width <= number:
        return list(range(low, high))
    return [low + (step + 1) * width // number - 1 for step in range(number)]


class ManifestReader:
    """Used on one event loop.

    Args:
        store: that holds them.
        seals: of the fleet.
        options: bounds.
        clock: seconds.
    """

    def __init__(self, store: Store, seals: Seals, options: ObjectOptions, clock: Callable[[], float]) -> None:
        self._store = store
        self._seals = seals
        self._options = options
        self._room = Room(max(options.reading_bytes, options.manifest_bytes))
        self.requests = asyncio.Semaphore(options.max_requests)
        """To the store, at one time."""
        self._bad: Quarantine[str, str] = Quarantine(options.max_asked, options.bad_s, clock)
        """Tags of the versions that are not read again, by name. No store's tag is empty."""

    def distrust(self, name: str, tag: str | None) -> None:
        """Its seal holds or not: this version says nothing that can be used."""
        log = logger.debug if self._bad else logger.warning
        log("a manifest in the object store is not what this fleet writes; this host leaves it alone: %s", name)
        self._bad.add(name, tag or "")

    def trust(self, name: str) -> None:
        """It was written anew."""
        self._bad.release(name)

    async def read(self, name: str, *, is_again: bool = False) -> Body | None:
        """A manifest whose seal holds. None where there is none.

        Args:
            name: of the object.
            is_again: also where this version was found bad before.

        Raises:
            Exception: of obstore, where the store gave no answer.
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

    async def _sealed(self, name: str, unlike: str | None, *, is_ranged: bool) -> tuple[Body | None, str | None]:
        options = self._options
        async with (
            self.requests,
            read_body(
                self._store, name, options.manifest_bytes, self._room, unlike=unlike, is_ranged=is_ranged
            ) as body,
        ):
            holds = body.data is not None and is_sealed(self._seals, name, body.data)
            return body if holds else None, body.tag

    async def _sealed_otherwise(self, name: str) -> Body | None:
        try:
            return (await self._sealed(name, None, is_ranged=True))[0]
        except Exception as error:  # an empty object has no range; the first answer stands
            logger.debug("a manifest could not be read a second time: %s", type(error).__name__)
            return None
