"""A fast tier over a slow one: what is promoted, what cascades, who waits, and for how long."""

from hybridkv.tiers.stack.breaker import Breaker, BreakerOptions, BreakerState
from hybridkv.tiers.stack.cascades import ALONE, PathPlace
from hybridkv.tiers.stack.hold import Hold, HoldFailure
from hybridkv.tiers.stack.mover import TierMover
from hybridkv.tiers.stack.moves import Direction, MoveOutcome, MoveResult, StackCounts, TierMove
from hybridkv.tiers.stack.options import StackOptions
from hybridkv.tiers.stack.stack import TierStack

__all__ = [
    "ALONE",
    "Breaker",
    "BreakerOptions",
    "BreakerState",
    "Direction",
    "Hold",
    "HoldFailure",
    "MoveOutcome",
    "MoveResult",
    "PathPlace",
    "StackCounts",
    "StackOptions",
    "TierMove",
    "TierMover",
    "TierStack",
]
