"""A request's claim on chunks: all of them stay in the fast tier, or come there, until the claim is released."""

from __future__ import annotations

import enum

import msgspec

from hybridkv.tiers.contract import Key


class HoldFailure(enum.StrEnum):
    """Why a claim came to nothing."""

    TIMEOUT = "timeout"
    """The slow tier took longer than allowed."""
    LOST = "lost"
    """A chunk could not be promoted, or was withdrawn."""


class Hold(msgspec.Struct):
    """Made by `TierStack.acquire`, ended by `TierStack.release`."""

    owner: str
    since_s: float
    pinned: list[Key] = []
    """In the fast tier, protected."""
    waiting: set[Key] = set()
    """On their way there."""
    source: str = ""
    """The slowest tier that something was promoted from for it; the nearest where others had it promoted."""
    failure: HoldFailure | None = None
    """Once set, the hold protects nothing."""

    @property
    def is_ready(self) -> bool:
        return not self.waiting and self.failure is None
