"""Pack checks: a manifest may list packs that a sweep has deleted. So the packs of a path are checked before a new
manifest lists them.

Only the existence of the objects is checked. Loads check the bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

from hybridkv.tiers.object.names import rank_name
from hybridkv.tiers.object.store import describe

if TYPE_CHECKING:
    from hybridkv.tiers.object.store import Store

logger = logging.getLogger(__name__)

MAX_CHECKING = 8
"""Limit of concurrent requests of checks: fewer than the threads of a directory, so lookups do not wait for them."""
REMEMBERED_S = 5.0
"""Seconds for which a missing pack counts as missing. After an error, no pack is read for this time."""
MAX_CHECKED = 256
"""Limit of packs that one check reads. Further packs count as present."""
MAX_SEEN = 65_536
"""Limit of remembered packs."""
_ATTEMPTS = 2
"""A pack is missing after this number of reads: a recovering store may miss an object once."""


class PackChecks:
    """Checks of packs, on one event loop. A pack that was stored or seen counts as present for a while.

    Args:
        store: the store.
        world_size: number of ranks with an object in each pack.
        lasts_s: seconds for which a pack counts as present after it was stored or seen.
        clock: seconds.
    """

    def __init__(self, store: Store, world_size: int, lasts_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._world_size = world_size
        self._room = asyncio.Semaphore(MAX_CHECKING)
        self._lasts_s = lasts_s
        self._clock = clock
        self._seen_s: OrderedDict[str, float] = OrderedDict()
        """Time at which each pack was stored or seen, the earliest first."""
        self._missing_s: OrderedDict[str, float] = OrderedDict()
        """Time at which each pack was found missing, the earliest first."""
        self._failed_s: float | None = None
        """Time of the last error."""

    def seen(self, packs: Iterable[str]) -> None:
        """Record packs that were stored or seen now."""
        now_s = self._clock()
        for pack in packs:
            self._seen_s[pack] = now_s
            self._seen_s.move_to_end(pack)
            self._missing_s.pop(pack, None)
        while len(self._seen_s) > MAX_SEEN:
            self._seen_s.popitem(last=False)

    def forget(self, packs: Iterable[str]) -> None:
        """Forget when these packs were stored or seen: they are checked the next time."""
        for pack in packs:
            self._seen_s.pop(pack, None)
            self._missing_s.pop(pack, None)

    async def missing(self, packs: Iterable[str]) -> set[str]:
        """Those of the packs that have no object of some rank. A pack that cannot be read now counts as present.
        After an error, no pack is read for a short time."""
        checked = list(islice((pack for pack in dict.fromkeys(packs) if not self.was_seen(pack)), MAX_CHECKED))
        answers = await asyncio.gather(*map(self._is_missing, checked))
        return {pack for pack, is_missing in zip(checked, answers, strict=True) if is_missing}

    def was_seen(self, pack: str) -> bool:
        """True if the pack was stored or seen a short time ago."""
        seen_s = self._seen_s.get(pack)
        return seen_s is not None and self._clock() - seen_s < self._lasts_s

    def _is_recent(self, time_s: float | None) -> bool:
        return time_s is not None and self._clock() - time_s < REMEMBERED_S

    async def _is_missing(self, pack: str) -> bool:
        async with self._room:
            # Another manifest may have checked the pack while this check waited.
            if self._is_recent(self._missing_s.get(pack)):
                return True
            if self.was_seen(pack) or self._is_recent(self._failed_s):
                return False
            try:
                for rank in range(self._world_size):
                    if not await self._has_object(rank_name(pack, rank)):
                        self._remember_missing(pack)
                        return True
            except Exception as error:
                self._failed_s = self._clock()
                logger.debug("a pack could not be checked: %s", describe(error))
            else:
                self.seen([pack])
            return False

    def _remember_missing(self, pack: str) -> None:
        self._missing_s[pack] = self._clock()
        self._missing_s.move_to_end(pack)
        if len(self._missing_s) > MAX_SEEN:
            self._missing_s.popitem(last=False)

    async def _has_object(self, name: str) -> bool:
        for _ in range(_ATTEMPTS):
            try:
                await self._store.get_async(name, options={"range": (0, 1)})
            except FileNotFoundError:
                continue
            return True
        return False
