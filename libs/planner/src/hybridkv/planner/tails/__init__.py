"""Boundaries inside a chunk: the tails that end there, each group's part of one, all of them or none.

The connector of vLLM sets `CacheSpec.tail_tokens` where the engine hands over states inside blocks. The searches know
tails; the plan of one stands here.
"""

from hybridkv.planner.tails.plan import plan_tail

__all__ = ["plan_tail"]
