"""A request's hold on chunks: all of them stay in the fast tier, or come there, until it is released."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hybridkv.tiers.contract import Key


class HoldFailure(enum.StrEnum):
    """Why a hold came to nothing."""

    TIMEOUT = "timeout"
    """A slower tier took longer than allowed."""
    LOST = "lost"
    """A chunk could not be promoted, or was withdrawn."""


@dataclass(slots=True)
class Hold:
    """Made by `TierStack.acquire`, ended by `TierStack.release`."""

    owner: str
    since_s: float
    pinned: list[Key] = field(default_factory=list)
    """In the fast tier, protected."""
    waiting: set[Key] = field(default_factory=set)
    """On their way there."""
    source: str = ""
    """The slowest tier that something was promoted from for it; the nearest where others had it promoted."""
    failure: HoldFailure | None = None
    """Once set, the hold protects nothing."""

    @property
    def is_ready(self) -> bool:
        return not self.waiting and self.failure is None
