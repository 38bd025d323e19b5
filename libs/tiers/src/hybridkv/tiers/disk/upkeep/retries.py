"""What failed lately: counted, said once in the log, and left alone for a while. Decides nothing else."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from typing import Any

from hybridkv.tiers.disk.counts import DiskTally
from hybridkv.tiers.disk.upkeep.chore import Chore

logger = logging.getLogger(__name__)


class Retries:
    """One for each kind of chore, `retry_interval_s` long, or for one segment, by its number."""

    def __init__(self, path: str, retry_interval_s: float, clock: Callable[[], float], tally: DiskTally) -> None:
        self._path = path
        self._retry_interval_s = retry_interval_s
        self._clock = clock
        self._tally = tally
        self._until_s: dict[type[Chore[Any]] | int, float] = {}
        self._ended_early: set[type[Chore[Any]]] = set()
        self._failing: dict[str, type[Chore[Any]]] = {}

    def is_resting(self, what: type[Chore[Any]] | int) -> bool:
        return self._until_s.get(what, 0.0) > self._clock()

    @property
    def next_end_s(self) -> float:
        """When the first rest ends."""
        return min(self._until_s.values(), default=float("inf"))

    def failed(self, kind: type[Chore[Any]], error: Exception, numbers: Iterable[int] = ()) -> None:
        """Where segments are named, they rest, and work of this kind on others goes on."""
        number = getattr(error, "errno", None) or 0
        what = f"{kind.__name__.lower()}: {errno.errorcode.get(number, type(error).__name__)}"
        self._tally.fail(what)
        for resting in tuple(numbers) or (kind,):
            self._until_s[resting] = self._clock() + self._retry_interval_s
        if what not in self._failing:
            self._failing[what] = kind
            logger.warning("disk tier in %s: %s: %s", self._path, what, error)

    def end(self, kind: type[Chore[Any]]) -> None:
        """Something changed that may let it succeed: it may be tried now, but once only until it did."""
        if kind not in self._ended_early and self._until_s.pop(kind, None) is not None:
            self._ended_early.add(kind)

    def forget(self, number: int) -> None:
        """There is no such segment any more."""
        self._until_s.pop(number, None)

    def succeeded(self, kind: type[Chore[Any]], is_all_well: bool = True) -> None:
        """`is_all_well`: and none of its segments still rests."""
        self._until_s.pop(kind, None)
        self._ended_early.discard(kind)
        if not is_all_well:
            return
        for what in [what for what, failing in self._failing.items() if failing is kind]:
            del self._failing[what]
            logger.info("disk tier in %s: works again after %s", self._path, what)
