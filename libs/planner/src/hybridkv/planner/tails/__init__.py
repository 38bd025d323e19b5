"""Boundaries inside a chunk: the tails that end there, each group's part of one, all of them or none.

Nothing in the product stores tails yet: `CacheSpec.tail_tokens` is None in every cache of a connector. The searches
know them; the plan of one stands here.
"""

from hybridkv.planner.tails.plan import plan_tail

__all__ = ["plan_tail"]
