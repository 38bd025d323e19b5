"""The location of a world, and the objects that its processes share."""

from __future__ import annotations

from pathlib import Path
from typing import IO, NamedTuple

from soak.ledger import Log
from soak.sabotage import Sabotage
from soak.small_disk import SmallDisk
from soak.tally import Tally


class WorldContext(NamedTuple):
    """The location of a world, and the objects shared with the process that started this life."""

    base: Path
    """Its directory; the store is in `root` below it."""
    log: Log
    tally: Tally
    stacks: IO[str]
    """Stacks of the threads are written here after a stall."""
    small_disk: SmallDisk | None
    watchdog_s: float
    sabotage: Sabotage
    known: frozenset[str]
    """Kinds of findings that are counted and do not end the run."""

    @property
    def root(self) -> Path:
        return self.base / "root"

    @property
    def image(self) -> Path:
        """The directory that a loss of power left."""
        return self.base / "image"
