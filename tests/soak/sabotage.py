"""Negative controls: the harness imitates a bad tier, and the soak must notice it."""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path
from random import Random

from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason
from soak.damage import segments
from soak.engine import Engine
from soak.ledger import Ledger, Log

_random = Random(1)


class Sabotage(StrEnum):
    """The sabotage; `EXPECTED` has the kind of finding that it must cause."""

    NONE = "none"
    FLIP = "flip"
    """A byte is wrong although its checksum matches."""
    FORGET = "forget"
    """A segment is deleted between two lives."""
    UNDO_CLEAR = "undo-clear"
    """A clear has no effect."""
    UNSYNCED = "unsynced"
    """Syncs do nothing before a loss of power."""
    DESTROY = "destroy"
    """An intact chunk is withdrawn."""
    MISCOUNT = "miscount"
    """A chunk is not offered, and nothing reports that."""
    LEAK_DESCRIPTOR = "leak-descriptor"
    LEAK_MEMORY = "leak-memory"
    """A chunk in host memory stays pinned."""
    HANG = "hang"
    """A step does not end."""
    CRASH = "crash"
    """The process ends unexpectedly."""

    def tamper(self, key: bytes, rank: int, found: bytearray) -> bytearray:
        """Possibly change loaded bytes."""
        if self is Sabotage.FLIP and _random.random() < 0.05:
            found[_random.randrange(len(found))] ^= 1 << _random.randrange(8)
        return found

    def before_life(self, root: Path, ledger: Ledger) -> None:
        """Called between two lives."""
        if self is Sabotage.FORGET and ledger.must:
            segment = next(reversed(ledger.must.values()))
            for path in segments(root):
                if int(path.name.split("-")[1]) == segment:
                    path.unlink()

    def at_step(self, engine: Engine, log: Log) -> None:
        """Called after each step."""
        held = [key for key in log.ledger.must if engine.primary.lookup(key) is LookupResult.HIT]
        if self is Sabotage.UNDO_CLEAR and held:
            log.say("cleared")
        elif self is Sabotage.DESTROY and held:
            engine.far.invalidate(held[0], FailureReason.CHECKSUM)
        elif self is Sabotage.MISCOUNT and held:
            log.ledger.must[b"a key that nobody stored"] = 0
        elif self is Sabotage.LEAK_DESCRIPTOR:
            os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        elif self is Sabotage.LEAK_MEMORY and held:
            engine.primary.pin(held[0])
        elif self is Sabotage.HANG:
            time.sleep(3600.0)
        elif self is Sabotage.CRASH:
            os._exit(9)


EXPECTED = {
    Sabotage.FLIP: "wrong bytes",
    Sabotage.FORGET: "lost",
    Sabotage.UNDO_CLEAR: "undead",
    Sabotage.UNSYNCED: "lost",
    Sabotage.DESTROY: "destroyed",
    Sabotage.MISCOUNT: "lost",
    Sabotage.LEAK_DESCRIPTOR: "leaked",
    Sabotage.LEAK_MEMORY: "leaked",
    Sabotage.HANG: "stalled",
    Sabotage.CRASH: "crashed",
}
