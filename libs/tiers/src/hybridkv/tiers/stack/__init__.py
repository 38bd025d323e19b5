"""Stack: a primary tier over secondary tiers. Promotions, cascades, prefetches, leases and deadlines."""

from hybridkv.tiers.stack.health import Breaker, BreakerOptions, BreakerState
from hybridkv.tiers.stack.leases import LeaseFailure, PromotionLease
from hybridkv.tiers.stack.mover import TierMover
from hybridkv.tiers.stack.moves import (
    Direction,
    MoveCounts,
    MoveOutcome,
    MoveResult,
    PrefetchBytes,
    PrefetchResult,
    StackCounts,
    TierMove,
)
from hybridkv.tiers.stack.options import CascadePolicy, SecondaryTierOptions
from hybridkv.tiers.stack.secondary import SecondaryTier
from hybridkv.tiers.stack.stack import TierStack

__all__ = [
    "Breaker",
    "BreakerOptions",
    "BreakerState",
    "CascadePolicy",
    "Direction",
    "LeaseFailure",
    "MoveCounts",
    "MoveOutcome",
    "MoveResult",
    "PrefetchBytes",
    "PrefetchResult",
    "PromotionLease",
    "SecondaryTier",
    "SecondaryTierOptions",
    "StackCounts",
    "TierMove",
    "TierMover",
    "TierStack",
]
