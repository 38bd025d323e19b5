"""What a request may say about its own prefix, and how much of a tier all that say so may keep.

A hint is a wish: what it asks for is done as far as it costs others no more than the operator allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hybridkv.planner.groups import CacheSpec
from hybridkv.planner.hit import Miss, last_boundary, longest_hit
from hybridkv.planner.lookup import Lookup, RangeLookup
from hybridkv.planner.paths import Part, needed_parts, path_order


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request."""

    store: bool = True
    """Whether anything of it may be stored."""
    load: bool = True
    """Whether it is looked up, and what is found loaded."""
    keep_seconds: float = 0.0
    """How long its prefix is kept from its end on; 0: as any other."""
    prefetch: bool = False
    """Whether its prefix is brought near before anybody waits for it, whatever becomes of the request."""


NO_HINTS = Hints()


def keep_in(
    kept_bytes: Sequence[int], more_bytes: Sequence[int], capacities: Sequence[int], keep_share: float
) -> tuple[bool, ...]:
    """In which tiers a prefix may be kept, beside what is kept there already.

    All of a prefix or nothing, tier by tier: a part of one is resumed only where it ends in a state.

    Args:
        kept_bytes: what is kept in each tier.
        more_bytes: what of the prefix is not among that.
        capacities: of each tier.
        keep_share: of a tier that may be kept, from 0 to 1.
    """
    return tuple(
        kept + more <= keep_share * capacity
        for kept, more, capacity in zip(kept_bytes, more_bytes, capacities, strict=True)
    )


class Prefetch(msgspec.Struct, frozen=True):
    """What is to be near before a request like this one comes again."""

    num_tokens: int
    """Where it could be resumed."""
    parts: tuple[Part, ...]
    """What it would read for that, each behind what it needs."""
    is_whole: bool
    """It could be resumed no further, whatever else tiers held."""


def plan_prefetch(spec: CacheSpec, num_tokens: int, lookup: Lookup, ranges: RangeLookup | None = None) -> Prefetch:
    """All that a request reads at the deepest boundary at which every group could be resumed, were it near.

    What the engine holds itself does not count: it may be gone when the request comes. Of windows and states there are
    only the last ones, and nothing of what lies beyond that boundary.

    Args:
        spec: the model's groups.
        num_tokens: tokens of the request.
        lookup: of all tiers; what is on its way into one counts as there.
        ranges: the same for many chunks at once, see `longest_hit`.
    """
    answer = longest_hit(spec, num_tokens, 0, lookup, ranges)
    boundary = 0 if isinstance(answer, Miss) else answer.num_tokens
    parts = path_order(spec, needed_parts(spec, boundary, 0))
    return Prefetch(boundary, tuple(parts), boundary == last_boundary(spec, num_tokens))
