"""Where a world is, and what its processes share."""

from __future__ import annotations

from pathlib import Path
from typing import IO, NamedTuple

from soak.ledger import Log
from soak.sabotage import Sabotage
from soak.small_disk import SmallDisk
from soak.tally import Tally


class WorldContext(NamedTuple):
    """Where a world is, and what is shared with whoever started this life."""

    base: Path
    """Its own directory; `root` below it is the store's."""
    log: Log
    tally: Tally
    stacks: IO[str]
    """Where threads are dumped when they stand still."""
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
        """What a loss of power left."""
        return self.base / "image"
