"""Prefix chain of a request: which storable chunks are stored already, and the position of each chunk in the chain.

`find_stored_prefix` does one lookup for each group instead of one for each chunk, and changes nothing in the tiers.
After a load, or after a hit in the engine's own cache, it finds the whole of a long prefix.

Leading chunks that every tier holds are added to the chain together: they need no copy and no cascade.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK, PrefixChain, StoredChunk, TrackedRequest, add
from hybridkv.planner import CacheSpec, GroupKind, needed_before, path_order, storable_ends
from hybridkv.planner.paths import Part
from hybridkv.tiers.stack import ALONE, PathPosition, TierStack


class StoredPrefix(NamedTuple):
    """Storable chunks of a request that the primary tier holds already, and facts about later chunks."""

    stop_tokens: int
    """All storable chunks that end here or before are in `parts`."""
    parts: list[Part]
    """In `path_order`."""
    keys: list[bytes]
    later_keys: dict[Part, bytes]
    """Keys of storable chunks that end after `stop_tokens`, without those of `absent_groups`."""
    absent_groups: frozenset[int]
    """Groups without a later chunk in the primary tier."""

    def merge_keys(self, spec: CacheSpec, others: Sequence[Part], keys: dict[Part, bytes]) -> list[bytes]:
        """Keys of these chunks and of others of the chain, in `path_order`. `keys` has the keys of the others."""
        if not others:
            return self.keys
        keys = dict(zip(self.parts, self.keys, strict=True)) | keys
        return [keys[part] for part in path_order(spec, [*self.parts, *others])]


def find_stored_prefix(
    spec: CacheSpec,
    stack: TierStack,
    keys: RequestKeys,
    first_token: int,
    last_token: int,
    block_ids: Sequence[Sequence[int]],
) -> StoredPrefix:
    """Finds the storable chunks after `first_token` that are HIT or PENDING in the primary tier, up to the first MISS.

    For a prompt that is stored for the first time it finds nothing and costs two lookups for each group.

    Args:
        spec: the model's groups. RECURRENT groups are skipped, since their states are not in block tables.
        stack: the tiers.
        keys: keys of the request.
        first_token: chunks that end here or before are handled already.
        last_token: in some group, chunks that end after it are not final.
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
            # No known engine leaves holes. If one does, each chunk is looked up by itself.
            return StoredPrefix(first_token, [], [], {}, frozenset())
        group_keys = keys.between(group_index, ends[0] // chunk - 1, ends[-1] // chunk)
        num_held = stack.leading_primary(group_keys)
        if num_held < len(ends):
            stop = min(stop, ends[num_held] - chunk)
        found.append((group_index, ends, group_keys))
    primary, absent = stack.primary_only, set[int]()
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


class PrefixInAllTiers(NamedTuple):
    """Leading chunks of a `StoredPrefix` that every tier held when the store was planned."""

    parts: list[Part]
    """In `path_order`, before all other chunks of the store."""
    keys: list[bytes]
    bytes_before: tuple[int, ...]
    """Bytes of the chain in each secondary tier before these chunks were added."""


NO_PREFIX = PrefixInAllTiers([], [], ())


class ChainBuilder:
    """Adds chunks to the prefix chains of all requests of one connector.

    Args:
        layout: the model's groups.
        stack: the tiers.
    """

    def __init__(self, layout: CacheLayout, stack: TierStack) -> None:
        self._layout = layout
        self._stack = stack
        self.used_bytes: tuple[int, ...] = ()
        """Bytes used in each secondary tier, counted each time that a request stores or reuses a chunk."""

    def add_prefix(
        self, path: PrefixChain, prefix: StoredPrefix, others: list[Part]
    ) -> tuple[PrefixInAllTiers, list[Part]]:
        """Adds the leading chunks that all tiers hold to the chain, up to the first of `others`.

        Returns:
            These chunks, and the rest of `prefix` together with `others`, to be added one by one.
        """
        num_in_all_tiers = self._stack.leading_secondary(prefix.keys)
        if num_in_all_tiers and others:
            first_end = min(end for _, end in others)
            num_in_all_tiers = min(num_in_all_tiers, bisect_left(prefix.parts, first_end, key=itemgetter(1)))
        if not path.keys.keys().isdisjoint(prefix.parts):
            num_in_all_tiers = 0
        in_all_tiers = PrefixInAllTiers(prefix.parts[:num_in_all_tiers], prefix.keys[:num_in_all_tiers], path.num_bytes)
        if num_in_all_tiers:
            costs = self._costs(in_all_tiers.parts)
            self.used_bytes = add(self.used_bytes, costs)
            path.extend(in_all_tiers.parts, in_all_tiers.keys, costs)
        return in_all_tiers, [*prefix.parts[num_in_all_tiers:], *others]

    def evicted_since(self, path: PrefixChain, in_all_tiers: PrefixInAllTiers) -> list[StoredChunk]:
        """Chunks to cascade again, from the first one that a secondary tier lacks by now."""
        num_held = self._stack.leading_secondary(in_all_tiers.keys)
        if num_held == len(in_all_tiers.keys):
            return []
        path_bytes, chunks = in_all_tiers.bytes_before, []
        for place, (part, key) in enumerate(zip(in_all_tiers.parts, in_all_tiers.keys, strict=True)):
            path_bytes = add(path_bytes, self._stack.costs(self._layout.chunk_bytes(*part)))
            needs = needed_before(self._layout.spec, *part)
            if place >= num_held and path.keys.keys() >= set(needs):
                on_path = PathPosition(tuple(path.keys[need] for need in needs), path_bytes)
                chunks.append(StoredChunk(part, key, on_path, False))
        return chunks

    def _costs(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """Bytes that these chunks use in each secondary tier."""
        if not self._stack.slower:
            return ()
        spec, stack, layout = self._layout.spec, self._stack, self._layout
        total = (0,) * len(stack.slower)
        for group_index, number in Counter(map(itemgetter(0), parts)).items():
            if spec.groups[group_index].kind is GroupKind.FULL and group_index not in spec.cut_groups:
                sizes = Counter({layout.chunk_bytes(group_index, spec.chunk_tokens): number})
            else:
                sizes = Counter(layout.chunk_bytes(*part) for part in parts if part[0] == group_index)
            for num_bytes, times in sizes.items():
                total = add(total, tuple(times * cost for cost in stack.costs(num_bytes)))
        return total

    def add_chunks(
        self, tracked: TrackedRequest, parts: Iterable[Part], new: Container[Part], keys: Mapping[Part, bytes]
    ) -> list[StoredChunk]:
        """Adds chunks to the request's chain. Returns them in `path_order`, each with its position.

        Args:
            tracked: the request.
            parts: the chunks.
            new: the chunks among `parts` that are being stored.
            keys: keys of all `parts`.
        """
        spec, path = self._layout.spec, tracked.path
        known, order = path.keys, path_order(spec, parts)
        path.come(order)
        if not self._stack.slower:
            # There is no tier to cascade to.
            ordered_keys = [keys[part] for part in order]
            known.update(zip(order, ordered_keys, strict=True))
            return [StoredChunk(part, key, ALONE, part in new) for part, key in zip(order, ordered_keys, strict=True)]
        request_keys, chunks = tracked.keys(), []
        for part in order:
            key, costs = keys[part], self._stack.costs(self._layout.chunk_bytes(*part))
            self.used_bytes = add(self.used_bytes, costs)
            path_bytes = path.add(part, key, costs)
            needs = tuple(known.get(need) or request_keys.key(*need) for need in needed_before(spec, *part))
            chunks.append(StoredChunk(part, key, PathPosition(needs, path_bytes), part in new))
        return chunks
