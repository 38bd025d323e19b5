"""In which order the chunks of one path are worth something: which others each of them needs, and which may go first.

A path is a request's chunks from its first token on. What is copied elsewhere in `path_order` can be resumed at every
moment; what is given up in the reverse of it can be resumed as far as nothing is missing. Where a chunk lies, and
whether it is there, others know.
"""

from collections.abc import Iterable
from operator import itemgetter

from hybridkv.planner.coverage import needed_ends
from hybridkv.planner.groups import CacheSpec, GroupKind

Part = tuple[int, int]
"""A group's part of a chunk, or of a tail: the group's index, and the token at which it ends."""
_BY_END_AND_GROUP = itemgetter(1, 0)
"""A path is put in order at every eighth of its growth: three times as fast as a function would be."""


def path_order(spec: CacheSpec, parts: Iterable[Part]) -> list[Part]:
    """Parts of one path from its beginning on, each behind everything that it needs; its reverse is how they may go.

    By position over all groups: without its beginning an end is worth nothing, whatever its group. At one position the
    full prefix comes first, because a state or a window is of use only with it.
    """
    order = sorted(range(len(spec.groups)), key=lambda index: spec.groups[index].kind is not GroupKind.FULL)
    if order == list(range(len(order))):
        return sorted(parts, key=_BY_END_AND_GROUP)
    place = {group_index: number for number, group_index in enumerate(order)}
    return sorted(parts, key=lambda part: (part[1], place[part[0]]))


def needed_parts(spec: CacheSpec, num_tokens: int, computed_tokens: int) -> list[Part]:
    """The parts that a load to a boundary reads, in the order in which they should outlive each other: full prefixes
    first, each from its beginning, because a state or a window is of use only with them.

    Args:
        spec: the model's groups.
        num_tokens: the boundary: a multiple of `spec.boundary_tokens`.
        computed_tokens: the prefix that the engine holds itself.
    """
    groups = sorted(spec.stored_groups, key=lambda index: spec.groups[index].kind is not GroupKind.FULL)
    return [(index, end) for index in groups for end in needed_ends(spec, index, num_tokens, computed_tokens)]


def needed_before(spec: CacheSpec, group_index: int, end_token: int) -> tuple[Part, ...]:
    """The parts without which this one is worth nothing, as far as they do not follow from each other.

    Of every FULL group one: for a FULL group's part the chunk before it, for any other the chunk that ends where it
    does. Parts whose content is final only later, because a drafter computes them from the next token, are left out in
    favour of the ones before them. Empty at the beginning of a path, and where there is no FULL group.

    Raises:
        ValueError: there is no such group, or it is never stored, or no part ends there.
    """
    if group_index not in spec.stored_groups:
        raise ValueError(f"group_index must be one of the stored groups {spec.stored_groups}, got {group_index}")
    if end_token <= 0 or end_token % spec.boundary_tokens:
        raise ValueError(f"end_token must be a positive multiple of {spec.boundary_tokens}, got {end_token}")
    group, chunk = spec.groups[group_index], spec.chunk_tokens
    before = (end_token - 1) // chunk * chunk
    final_tokens = end_token + group.lookahead_tokens
    needed = []
    is_full = group_index in spec.full_groups
    for index in spec.full_groups:
        other = spec.groups[index]
        end = before if is_full or other.lookahead_tokens > group.lookahead_tokens else end_token
        while end > 0 and end + other.lookahead_tokens > final_tokens:
            end -= chunk
        if end > 0:
            needed.append((index, end))
    return tuple(needed)
