"""A fast tier over a slow one: what is promoted, what cascades, who waits, and for how long."""

from hybridkv.tiers.stack.breaker import Breaker, BreakerOptions, BreakerState
from hybridkv.tiers.stack.hold import Hold, HoldFailure
from hybridkv.tiers.stack.mover import TierMover
from hybridkv.tiers.stack.moves import Direction, MoveOutcome, StackCounts, TierMove
from hybridkv.tiers.stack.options import StackOptions
from hybridkv.tiers.stack.stack import TierStack

__all__ = [
    "Breaker",
    "BreakerOptions",
    "BreakerState",
    "Direction",
    "Hold",
    "HoldFailure",
    "MoveOutcome",
    "StackCounts",
    "StackOptions",
    "TierMove",
    "TierMover",
    "TierStack",
]
