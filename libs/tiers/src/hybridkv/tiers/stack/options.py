"""Options of one secondary tier of a stack."""

from __future__ import annotations

import enum

import msgspec

from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.stack.health import BreakerOptions


class CascadePolicy(enum.StrEnum):
    """Chunks that are copied to a secondary tier."""

    ALL = "all"
    """Every chunk that is committed to the primary tier, except the `primary_only` chunks of `TierStack.commit_all`,
    and every chunk passed to `TierStack.cascade`. So chunks that were promoted from another tier are copied when they
    are reused."""
    REUSED = "reused"
    """Only chunks found in the primary tier by a request that did not store them."""
    NOTHING = "nothing"
    """No chunks: this engine only reads the tier. Other engines fill it."""


class SecondaryTierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one secondary tier. Shares are above 0 and at most 1.

    Args:
        cascades: policy for the chunks that are copied to the tier.
        load_timeout_s: time limit of a move, and of the cascade queue: the queue is dropped after this time without
            progress. The longest `load_timeout_s` of all tiers is the time limit of a waiting promotion lease, and of a
            prefetch.
        async_lookup_timeout_s: time limit of an async lookup, if it is shorter than `load_timeout_s`.
        promoting_share: limit of the bytes of promotions in flight, as a share of the primary tier's capacity. Includes
            timed-out promotions from all tiers; for a lease, does not include prefetches. Without other promotions in
            flight from the tier, there is no limit.
        cascading_share: limit of the bytes of cascades in flight, as a share of the primary tier's capacity. These
            bytes cannot be evicted. A larger chunk is sent alone, as for `arriving_share`.
        arriving_share: limit of the bytes of cascades in flight, as a share of the secondary tier's capacity. These
            bytes cannot be evicted there, and have no eviction order yet.
        max_cascading: limit of cascades in flight. Keep it below the limit of operations of the secondary medium.
        max_prefetching: limit of prefetches in flight. Keep it small: a later promotion for a waiting request is
            executed after them.
        max_waiting: limit of chunks in the cascade queue, about 300 bytes of memory each. If the queue is full, new
            chunks are dropped, and then the chunks that need them: the cascaded prefix ends there.
        breaker: options of the breakers, which stop the use of the tier per direction.
        shortage: backoff after operations that could not be tried, because the process is short of files, memory or
            threads, or a queue is full.
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
