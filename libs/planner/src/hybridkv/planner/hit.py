"""The longest prefix that every group can resume, found by asking a tier for as few chunks as possible."""

from collections.abc import Callable

import msgspec

from hybridkv.planner.coverage import needed_ends
from hybridkv.planner.groups import CacheSpec, GroupKind
from hybridkv.planner.lookup import LookupResult

Lookup = Callable[[int, int], LookupResult]
"""`lookup(group_index, end_token)`: is this group's part of the chunk ending there stored?"""

# A state is one key and settles a boundary at once; a window is a few; a full prefix is walked last.
_SCARCE_FIRST = (GroupKind.RECURRENT, GroupKind.CHUNKED, GroupKind.WINDOW, GroupKind.FULL)


class Hit(msgspec.Struct, frozen=True, tag=True):
    """Every group can resume at `num_tokens`, which is more than the engine holds itself."""

    num_tokens: int


class Pending(msgspec.Struct, frozen=True, tag=True):
    """A longer prefix is on its way into the tier: ask again."""

    num_tokens: int


class Miss(msgspec.Struct, frozen=True, tag=True):
    """Nothing beyond what the engine holds.

    Args:
        limiting_group: the group that ruled out the last boundary, None where the request is too short for any.
        reason: in words.
    """

    limiting_group: int | None
    reason: str


def last_boundary(spec: CacheSpec, num_tokens: int) -> int:
    """The last chunk boundary at which a request of `num_tokens` can be resumed: its last token is always computed."""
    lookahead = max(spec.groups[i].lookahead_tokens for i in spec.stored_groups)
    return max(0, num_tokens - max(1, lookahead)) // spec.chunk_tokens * spec.chunk_tokens


def longest_hit(spec: CacheSpec, num_tokens: int, computed_tokens: int, lookup: Lookup) -> Hit | Pending | Miss:
    """The longest boundary at which all groups can resume.

    Every group can only lower the boundary, so the search is a fixpoint from above: it ends when one pass over the
    groups leaves it where it was. No chunk is asked for twice.

    Args:
        spec: the model's groups.
        num_tokens: tokens of the request, of which the last is always recomputed.
        computed_tokens: the prefix that the engine holds itself; a shorter hit than that is a miss.
        lookup: asked for chunk ends that are multiples of `spec.chunk_tokens`.

    Returns:
        Hit or Pending with a boundary above `computed_tokens`, or Miss.

    Raises:
        ValueError: a number of tokens is negative.
    """
    if num_tokens < 0 or computed_tokens < 0:
        raise ValueError(f"tokens must not be negative, got num_tokens={num_tokens}, computed_tokens={computed_tokens}")
    answers: dict[tuple[int, int], LookupResult] = {}

    def ask(group_index: int, end_token: int) -> LookupResult:
        key = (group_index, end_token)
        if key not in answers:
            answers[key] = lookup(group_index, end_token)
        return answers[key]

    order = sorted(spec.stored_groups, key=lambda i: _SCARCE_FIRST.index(spec.groups[i].kind))
    boundary = last_boundary(spec, num_tokens)
    limiting: int | None = None
    settled = False
    while boundary > computed_tokens and not settled:
        settled = True
        for group_index in order:
            lowered = _lower(spec, group_index, boundary, computed_tokens, ask)
            if lowered < boundary:
                boundary, limiting, settled = lowered, group_index, False
                break
    if boundary <= computed_tokens:
        return _miss(spec, num_tokens, computed_tokens, limiting)
    for group_index in order:
        for end_token in needed_ends(spec, group_index, boundary, computed_tokens):
            if ask(group_index, end_token) is LookupResult.PENDING:
                return Pending(boundary)
    return Hit(boundary)


def _lower(spec: CacheSpec, group_index: int, boundary: int, computed_tokens: int, ask: Lookup) -> int:
    """The longest boundary up to `boundary` that this group does not rule out by what it lacks there."""
    ends = needed_ends(spec, group_index, boundary, computed_tokens)
    # A full prefix breaks at its first gap. What the others need lies at the end, so they look there first.
    for end_token in ends if spec.groups[group_index].kind is GroupKind.FULL else reversed(ends):
        if ask(group_index, end_token) is LookupResult.MISS:
            # Every boundary from end_token up to this one needs that chunk too.
            return end_token - spec.chunk_tokens
    return boundary


def _miss(spec: CacheSpec, num_tokens: int, computed_tokens: int, limiting: int | None) -> Miss:
    if limiting is None:
        return Miss(
            None,
            f"{num_tokens} tokens have no boundary of {spec.chunk_tokens} tokens beyond the {computed_tokens} held",
        )
    kind = spec.groups[limiting].kind.name
    return Miss(limiting, f"group {limiting} ({kind}) is not stored beyond the {computed_tokens} tokens held")
