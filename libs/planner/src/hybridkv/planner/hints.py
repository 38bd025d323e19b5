"""Hints of a request about its own prefix, and the share of a tier that hints may keep.

The operator's limits take precedence over a hint.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hybridkv.planner.coverage import Part, needed_parts, path_order
from hybridkv.planner.groups import CacheSpec
from hybridkv.planner.hit import Miss, last_boundary, longest_hit
from hybridkv.planner.lookup import Lookup, RangeLookup


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """Hints of one request."""

    store: bool = True
    """False: no chunk of the request is stored."""
    load: bool = True
    """False: the request is not looked up, and loads nothing."""
    keep_seconds: float = 0.0
    """Seconds for which the request's prefix is kept after the end of the request; 0: not kept."""
    prefetch: bool = False
    """True: the request's prefix is promoted before a request waits for it, even if this request is aborted."""
    peers: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of the peers that are looked up first."""


NO_HINTS = Hints()


def keep_in(
    kept_bytes: Sequence[int], more_bytes: Sequence[int], capacities: Sequence[int], keep_share: float
) -> tuple[bool, ...]:
    """Decides for each tier whether it may keep a prefix, in addition to the chunks that it keeps already.

    A tier keeps the whole prefix or nothing of it, because a part is useful only up to a boundary with a state.

    Args:
        kept_bytes: bytes that each tier keeps.
        more_bytes: bytes of the prefix that each tier does not keep yet.
        capacities: bytes of each tier.
        keep_share: share of a tier that may be kept, from 0 to 1.
    """
    return tuple(
        kept + more <= keep_share * capacity
        for kept, more, capacity in zip(kept_bytes, more_bytes, capacities, strict=True)
    )


class Prefetch(msgspec.Struct, frozen=True):
    """Chunks to promote before the same prompt comes again."""

    num_tokens: int
    """Token at which the prompt could resume."""
    parts: tuple[Part, ...]
    """Parts that the load would read, each after the parts that it needs."""
    is_whole: bool
    """True if no further chunk could lengthen the hit."""


def plan_prefetch(spec: CacheSpec, num_tokens: int, lookup: Lookup, ranges: RangeLookup | None = None) -> Prefetch:
    """Plans the promotion of a prefix: all parts of its longest hit in any tier.

    Blocks that the engine holds do not count, because they may be evicted before the request comes. The plan has only
    the last window and the last state.

    Args:
        spec: the model's groups.
        num_tokens: tokens of the request.
        lookup: lookup over all tiers; chunks in flight count as held.
        ranges: the same for many chunks at once, see `longest_hit`.
    """
    answer = longest_hit(spec, num_tokens, 0, lookup, ranges)
    boundary = 0 if isinstance(answer, Miss) else answer.num_tokens
    parts = path_order(spec, needed_parts(spec, boundary, 0))
    return Prefetch(boundary, tuple(parts), boundary == last_boundary(spec, num_tokens))
