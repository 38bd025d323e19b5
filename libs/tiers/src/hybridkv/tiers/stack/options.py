"""Options of one secondary tier of a stack."""

from __future__ import annotations

import enum

import msgspec

from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.stack.health import BreakerOptions


class CascadePolicy(enum.StrEnum):
    """Chunks that are copied to a secondary tier."""

    ALL = "all"
    """Every chunk that is stored in the primary tier, and every chunk found there and offered again. The latter copies
    chunks that were promoted from another tier, once they are reused."""
    REUSED = "reused"
    """Only chunks found in the primary tier by a request that did not store them."""
    NOTHING = "nothing"
    """None: the tier is only read. Others fill it."""


class SecondaryTierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one secondary tier. Shares are above 0 and at most 1.

    Args:
        cascades: which chunks are copied to the tier.
        load_timeout_s: limit on the wait of a promotion lease and on a move; also how long chunks wait in the cascade
            queue while no cascade succeeds.
        async_lookup_timeout_s: deadline of an async lookup.
        promoting_share: of the primary tier's capacity: bytes of promotions in flight, including timed-out promotions
            from all tiers.
        cascading_share: of the primary tier's capacity: bytes of cascades in flight. They cannot be evicted.
        arriving_share: of the secondary tier's capacity: bytes of cascades in flight. They cannot be evicted there, and
            have no eviction order yet.
        max_cascading: cascades in flight; fewer than the secondary medium accepts at once.
        max_prefetching: prefetches in flight. A promotion that a request waits for queues after them, so keep it small.
        max_waiting: chunks in the cascade queue. When it is full, new chunks are dropped with those that need them, so
            a prefix in the queue ends there. About 300 bytes of memory for each chunk.
        breaker: when to stop using the tier, per direction.
        shortage: backoff when nothing could be tried, because the process is short of files, memory or threads.
    """

    cascades: CascadePolicy = CascadePolicy.ALL
    load_timeout_s: float = 30.0
    async_lookup_timeout_s: float = 1.0
    promoting_share: float = 0.5
    cascading_share: float = 0.25
    arriving_share: float = 0.015625
    max_cascading: int = 1024
    max_prefetching: int = 8
    max_waiting: int = 65_536
    breaker: BreakerOptions = BreakerOptions()
    shortage: BreakerOptions = BreakerOptions(failures=1, first_backoff_s=0.05, max_backoff_s=5.0)

    def __post_init__(self) -> None:
        for name in ("load_timeout_s", "async_lookup_timeout_s"):
            if not getattr(self, name) > 0:
                raise TierConfigurationError(name, "seconds above 0", getattr(self, name))
        for name in ("promoting_share", "cascading_share", "arriving_share"):
            if not 0 < getattr(self, name) <= 1:
                raise TierConfigurationError(name, "a share above 0, at most 1", getattr(self, name))
        for name in ("max_cascading", "max_prefetching", "max_waiting"):
            if not getattr(self, name) > 0:
                raise TierConfigurationError(name, "a number > 0", getattr(self, name))
