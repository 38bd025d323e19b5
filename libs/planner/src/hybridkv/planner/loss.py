"""What a hit could have been, had every group held as much as the FULL ones.

A FULL group holds a prefix; a state or a window is there at some boundaries only, so those groups are what shortens
hits. Measured after a hit was settled, for whoever runs the engine to see; it decides nothing.
"""

import msgspec

from hybridkv.planner.coverage import needed_ends
from hybridkv.planner.groups import CacheSpec, GroupKind
from hybridkv.planner.hit import last_boundary
from hybridkv.planner.lookup import Lookup, RangeLookup, is_held
from hybridkv.planner.scan import Scan


class Loss(msgspec.Struct, frozen=True):
    """How far the FULL groups reach beyond the boundary at which a request is resumed.

    Args:
        resumed_tokens: that boundary, or what the engine holds where there is none.
        full_tokens: the last boundary before which every FULL group holds everything; `resumed_tokens` or more.
        limiting_group: the group that is in the way at the first boundary beyond `resumed_tokens` that the FULL groups
            hold, None where nothing is lost. Of several, the one that settles a boundary with the fewest chunks.
    """

    resumed_tokens: int
    full_tokens: int
    limiting_group: int | None

    @property
    def lost_tokens(self) -> int:
        return self.full_tokens - self.resumed_tokens if self.limiting_group is not None else 0


def measure_loss(
    spec: CacheSpec,
    num_tokens: int,
    computed_tokens: int,
    resumed_tokens: int,
    lookup: Lookup,
    ranges: RangeLookup | None = None,
) -> Loss:
    """What limits a request, given where it is resumed. Asks for the FULL chunks beyond that, up to the first missing.

    Args:
        spec: the model's groups. Without a FULL group nothing is ever lost by this measure.
        num_tokens: tokens of the request, as they were given to `longest_hit`.
        computed_tokens: the prefix that the engine holds itself.
        resumed_tokens: the boundary of the hit, `computed_tokens` for a miss.
        lookup: what `longest_hit` asked. Pending counts as held.
        ranges: where the tier can answer about many chunks at once.

    Raises:
        ValueError: the request is resumed before what the engine holds, or after its end.
    """
    if not 0 <= computed_tokens <= resumed_tokens <= num_tokens:
        raise ValueError(
            f"expected 0 <= computed_tokens <= resumed_tokens <= num_tokens, "
            f"got {computed_tokens}, {resumed_tokens}, {num_tokens}"
        )
    full = _full_tokens(spec, num_tokens, resumed_tokens, lookup, ranges or Scan(spec, lookup))
    limiting = None
    if full > resumed_tokens:
        following = _next_full(spec, resumed_tokens, full, lookup)
        limiting = _in_the_way(spec, following, computed_tokens, lookup)
    return Loss(resumed_tokens, full, limiting)


def _full_groups(spec: CacheSpec) -> list[int]:
    return [index for index in spec.stored_groups if spec.groups[index].kind is GroupKind.FULL]


def _next_full(spec: CacheSpec, resumed_tokens: int, full_tokens: int, lookup: Lookup) -> int:
    """The first boundary beyond `resumed_tokens` that every FULL group holds, given that `full_tokens` is the last."""
    full_groups, step = _full_groups(spec), spec.boundary_tokens
    boundary = (resumed_tokens // step + 1) * step
    while (
        boundary < full_tokens
        and boundary % spec.chunk_tokens
        and not all(is_held(lookup(index, boundary)) for index in full_groups)
    ):
        boundary += step
    return boundary


def _full_tokens(spec: CacheSpec, num_tokens: int, resumed_tokens: int, lookup: Lookup, ranges: RangeLookup) -> int:
    full_groups = _full_groups(spec)
    last, chunk, step = last_boundary(spec, num_tokens), spec.chunk_tokens, spec.boundary_tokens
    if not full_groups or last <= resumed_tokens:
        return resumed_tokens
    start = resumed_tokens // chunk * chunk
    end = last // chunk * chunk
    for index in full_groups:
        if end > start:
            end = start + ranges.held(index, start + chunk, end) * chunk
    tails = range(min(last, end + chunk - step), max(end, resumed_tokens), -step)
    for tail in tails:
        if all(is_held(lookup(index, tail)) for index in full_groups):
            return tail
    return max(resumed_tokens, end)


def _in_the_way(spec: CacheSpec, boundary: int, computed_tokens: int, lookup: Lookup) -> int | None:
    for index in spec.scarce_first:
        if spec.groups[index].kind is GroupKind.FULL:
            continue
        ends = needed_ends(spec, index, boundary, computed_tokens)
        if not all(is_held(lookup(index, end)) for end in reversed(ends)):
            return index
    return None
