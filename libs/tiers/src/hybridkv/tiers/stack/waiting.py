"""What stands in the queue of a slower tier, and what can become of it there: values, without a rule among them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hybridkv.tiers.contract import Key
from hybridkv.tiers.stack.order import Batch
from hybridkv.tiers.stack.path import PathPosition


class Gate(enum.Enum):
    """Whether the slower tier may be written to."""

    OPEN = "write"
    PROBE = "write once, and see what comes of it"
    BUSY = "wait: it is being tried, or nothing can be for a moment"
    SHUT = "keep away: what waits is dropped"


class Next(enum.Enum):
    """What to do with the chunk whose turn it is, where it is not dropped."""

    SENT = "it is on its way now"
    GONE = "it is there, or on its way"
    LATER = "wait"
    PARKED = "wait apart, for what it needs"


@dataclass(slots=True, eq=False)
class Waiting:
    """A chunk that is to be copied."""

    number: int
    """What needs others has a greater one."""
    key: Key
    on_path: PathPosition
    num_bytes: int = 0
    """Known when it was first tried."""
    batch: Batch | None = None
    """While that counts it."""
    is_late: bool = False
    is_forgotten: bool = False


@dataclass(frozen=True, slots=True)
class Touch:
    """Keys that are to be the most recently used when what is before them has come."""

    keys: tuple[Key, ...]
