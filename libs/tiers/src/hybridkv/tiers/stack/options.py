"""What may be chosen for each slower tier of a stack."""

from __future__ import annotations

import enum

import msgspec

from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.stack.health import BreakerOptions


class CascadePolicy(enum.StrEnum):
    """What a slower tier is given."""

    ALL = "all"
    """Whatever is stored in the fast tier, and whatever is met there and offered again: so what came up from another
    tier comes too, when somebody has used it."""
    REUSED = "reused"
    """What is met in the fast tier by somebody who did not store it: what is used once alone stays where it is."""
    NOTHING = "nothing"
    """It is only read: somebody else fills it."""


class SlowerTierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds.

    Args:
        cascades: what is copied there.
        load_timeout_s: how long a hold waits for this tier, how long a move counts as alive, and how long chunks wait
            for their way down while nothing comes to its end there.
        ask_timeout_s: how long a tier that answers late has time to say what it holds.
        promoting_share: of the fast tier's capacity, that may be on its way up at one time, late promotions of all
            tiers included.
        cascading_share: of the fast tier's capacity, that may be on its way down at one time; it cannot be evicted.
        arriving_share: the same of the slower tier's capacity: it cannot be evicted there, and has no order of use yet.
        max_cascading: chunks that may be on their way down at one time; fewer than the slow medium takes at once.
        max_prefetching: chunks that may be on their way up at one time for nobody who waits. What somebody then waits
            for comes behind them, so they are few.
        max_waiting: chunks that may wait for their way down. What comes when so many wait is dropped, with all that
            needs it; of a path that has begun to wait that is the end. About 300 bytes of memory each.
        breaker: when to leave the tier alone, in each direction by itself.
        shortage: the same where it could not even be asked, because this process lacks files, memory or threads.
    """

    cascades: CascadePolicy = CascadePolicy.ALL
    load_timeout_s: float = 30.0
    ask_timeout_s: float = 1.0
    promoting_share: float = 0.5
    cascading_share: float = 0.25
    arriving_share: float = 0.015625
    max_cascading: int = 1024
    max_prefetching: int = 8
    max_waiting: int = 65_536
    breaker: BreakerOptions = BreakerOptions()
    shortage: BreakerOptions = BreakerOptions(failures=1, first_pause_s=0.05, longest_pause_s=5.0)

    def __post_init__(self) -> None:
        for name in ("load_timeout_s", "ask_timeout_s"):
            if not getattr(self, name) > 0:
                raise TierConfigurationError(name, "seconds above 0", getattr(self, name))
        for name in ("promoting_share", "cascading_share", "arriving_share"):
            if not 0 < getattr(self, name) <= 1:
                raise TierConfigurationError(name, "a share above 0, at most 1", getattr(self, name))
        for name in ("max_cascading", "max_prefetching", "max_waiting"):
            if not getattr(self, name) > 0:
                raise TierConfigurationError(name, "a number > 0", getattr(self, name))
