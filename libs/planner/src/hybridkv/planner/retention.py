"""In which order what one path holds may go, where states say how far it can be resumed.

`path_order` says which chunks need which. Here is what that leaves open in a model with RECURRENT groups, whose path
can be resumed only where it has a state: states that a newer one has taken the place of are of little use, and what
lies behind the deepest state is of none until somebody computes it again, and stores it again. Where bytes lie, and
what other paths do with them, the caller knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from hybridkv.planner.groups import CacheSpec, GroupKind
from hybridkv.planner.paths import Part, path_order


class Retention(NamedTuple):
    """All parts of one path, in the order in which they may go."""

    superseded: tuple[Part, ...]
    """States whose place a deeper one of the same path has taken: before everything else."""
    beyond: tuple[Part, ...]
    """What no state of the path can use, and no other path has: behind these, and before what others hold."""
    rest: tuple[Part, ...]
    """In its turn, from the end on: a state that can be used protects its prefix."""


def deepest_state(spec: CacheSpec, parts: Iterable[Part]) -> int:
    """The last token after which every RECURRENT group has its state among these parts; 0 where there is none, and
    where the model has no such group."""
    ends = [set[int]() for _ in spec.recurrent_groups]
    place = {group_index: number for number, group_index in enumerate(spec.recurrent_groups)}
    for group_index, end_token in parts:
        if group_index in place:
            ends[place[group_index]].add(end_token)
    return max(set.intersection(*ends), default=0) if ends else 0


def retain(
    spec: CacheSpec,
    parts: Collection[Part],
    superseded: Collection[Part] = (),
    own: Collection[Part] = (),
    resumed_tokens: int = 0,
) -> Retention:
    """What of a path that is over may go first.

    Args:
        spec: the model's groups. Without a RECURRENT one everything is `rest`.
        parts: what the path holds.
        superseded: states that gave way to a newer one. One that is as deep as all others did not.
        own: parts that this path brought and no other has met since, so that no state of another needs them.
        resumed_tokens: where the path was resumed: there is a state of its own for that, here or elsewhere.
    """
    superseded, own = frozenset(superseded), frozenset(own)
    order = path_order(spec, parts)
    if not spec.recurrent_groups:
        return Retention((), (), tuple(reversed(order)))
    deepest = deepest_state(spec, (part for part in parts if part not in superseded))
    # One that gave way to nothing that is there can still be used.
    useful_tokens = max(deepest_state(spec, parts), resumed_tokens)
    first: list[Part] = []
    behind: list[Part] = []
    rest: list[Part] = []
    for part in order:
        group_index, end_token = part
        is_state = spec.groups[group_index].kind is GroupKind.RECURRENT
        if is_state and part in superseded and end_token < deepest:
            first.append(part)
        elif part in own and part not in superseded and _begins_behind(spec, part, useful_tokens):
            behind.append(part)
        else:
            rest.append(part)
    return Retention(tuple(first), tuple(reversed(behind)), tuple(reversed(rest)))


def _begins_behind(spec: CacheSpec, part: Part, num_tokens: int) -> bool:
    """Whether nothing of it is read by whoever resumes there."""
    group_index, end_token = part
    if spec.groups[group_index].kind is GroupKind.RECURRENT:
        return end_token > num_tokens
    return (end_token - 1) // spec.chunk_tokens * spec.chunk_tokens >= num_tokens
