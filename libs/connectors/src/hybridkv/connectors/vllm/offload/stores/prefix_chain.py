"""Stored prefix of a request: finds the chunks that are stored already, and the keys that each chunk extends.

`find_stored_prefix` does one or two lookups for each group, not one for each chunk, because a long prefix is stored
already after a load, or after a hit in the engine's own cache. It changes nothing in the tiers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from itertools import repeat
from typing import NamedTuple

from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK
from hybridkv.planner import CacheSpec, GroupKind, path_order, storable_ends
from hybridkv.planner.coverage import Part
from hybridkv.tiers import Extends
from hybridkv.tiers.stack import TierStack


class StoredPrefix(NamedTuple):
    """Storable chunks of a request that the primary tier holds already, and facts about later chunks."""

    stop_tokens: int
    """All storable chunks that end here or before, and after the first token of the search, are in `parts`."""
    parts: list[Part]
    """In `path_order`."""
    keys: list[bytes]
    """Keys of `parts`."""
    later_keys: dict[Part, bytes]
    """Keys of storable chunks that end after `stop_tokens`, without those of `absent_groups`."""
    absent_groups: frozenset[int]
    """Groups with later chunks, none of which is in the primary tier."""


def find_stored_prefix(
    spec: CacheSpec,
    stack: TierStack,
    keys: RequestKeys,
    first_token: int,
    last_token: int,
    block_ids: Sequence[Sequence[int]],
) -> StoredPrefix:
    """Finds the storable chunks after `first_token` that are HIT or PENDING in the primary tier, up to the first MISS.

    A prompt that is stored for the first time costs two lookups for each group.

    Args:
        spec: the model's groups. RECURRENT groups are skipped, since their states are not in block tables.
        stack: the tiers.
        keys: keys of the request.
        first_token: chunks that end here or before are handled already.
        last_token: chunks that end after this token are not searched, because some groups may still change there.
        block_ids: the request's block table of every group of `spec`.
    """
    last, chunk = max(first_token, last_token), spec.chunk_tokens
    stop = last
    found: list[tuple[int, range, Sequence[bytes]]] = []
    for group_index in spec.stored_groups:
        if spec.groups[group_index].kind is GroupKind.RECURRENT:
            continue
        ends = storable_ends(spec, group_index, first_token, last, block_ids, NULL_BLOCK)
        if not ends:
            continue
        if not isinstance(ends, range):
            # The block table has holes. No known engine leaves holes. The caller looks up each chunk.
            return StoredPrefix(first_token, [], [], {}, frozenset())
        group_keys = keys.between(group_index, ends[0] // chunk - 1, ends[-1] // chunk)
        num_held = stack.primary.leading(group_keys)
        if num_held < len(ends):
            stop = min(stop, ends[num_held] - chunk)
        found.append((group_index, ends, group_keys))
    primary, absent = stack.primary, set[int]()
    parts: list[Part] = []
    key_of: dict[Part, bytes] = {}
    later_keys: dict[Part, bytes] = {}
    for group_index, ends, group_keys in found:
        num_leading = len(ends) if stop >= ends[-1] else bisect_right(ends, stop)
        leading_parts = list(zip(repeat(group_index), ends[:num_leading], strict=False))
        parts += leading_parts
        key_of.update(zip(leading_parts, group_keys, strict=False))
        if num_leading < len(ends):
            later = group_keys[num_leading:]
            if primary.last_held(later) is None:
                absent.add(group_index)
            else:
                later_keys.update(zip(zip(repeat(group_index), ends[num_leading:], strict=False), later, strict=True))
    if len(found) > 1:
        parts = path_order(spec, parts)
    return StoredPrefix(stop, parts, [key_of[part] for part in parts], later_keys, frozenset(absent))


def extended_keys(
    spec: CacheSpec,
    parts: Sequence[Part],
    keys: Sequence[bytes],
    known: Container[Part] = (),
    before: bytes | None = None,
    trunk: bytes | None = None,
) -> list[Extends]:
    """Keys that each chunk extends: the previous chunk of the path, so that a tier evicts a path from its end; then the
    chunk that it needs. One key if both are the same; none before the first FULL chunk.

    Whole FULL chunks form the trunk. A chunk needs the last FULL chunk before it that ends at the same token; without
    such a chunk, it needs the last chunk of the trunk. The previous chunk may be of any group.

    Args:
        spec: the model's groups.
        parts: chunks in `path_order`.
        keys: keys of `parts`.
        known: parts that the tiers have in a path already. They get no previous chunk, and are not used as one.
        before: key of the last chunk before `parts`, None at the beginning.
        trunk: key of the last chunk of the trunk before `parts`, None at the beginning.
    """
    if len(spec.stored_groups) == 1 and spec.full_groups and spec.tail_tokens is None:
        extends: list[Extends] = [() if trunk is None else (trunk,)]
        return [*extends, *zip(keys[:-1], strict=True)][: len(keys)]
    full, chunk = frozenset(spec.full_groups), spec.chunk_tokens
    extends = []
    needed, last_end = trunk, 0
    for part, key in zip(parts, keys, strict=True):
        group_index, end = part
        if end != last_end:
            needed, last_end = trunk, end
        if needed is None:
            extends.append(())
        elif before is None or before == needed or part in known:
            extends.append((needed,))
        else:
            extends.append((before, needed))
        if part not in known:
            before = key
        if group_index in full:
            needed = key
            if end % chunk == 0:
                trunk = key
    return extends
