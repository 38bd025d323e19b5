"""Puts chunks of requests on their paths, and says where each stands among those that are used together.

What all tiers have already goes there as a whole: nothing is to be done about it but to remember it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.requests import StoredPart, StoredPath, TrackedRequest, add
from hybridkv.connectors.vllm.offload.met import Met
from hybridkv.planner import GroupKind, needed_before, path_order
from hybridkv.planner.paths import Part
from hybridkv.tiers.stack import ALONE, PathPosition, TierStack


class Whole(NamedTuple):
    """What was met together, and all tiers had."""

    parts: list[Part]
    """In the order of the path, before whatever else a store is about."""
    keys: list[bytes]
    bytes_before: tuple[int, ...]
    """What the path took up in each slower tier without them."""


NOTHING_MET = Whole([], [], ())


class Placing:
    """Of the requests of one connector.

    Args:
        layout: the model's groups.
        stack: the tiers.
    """

    def __init__(self, layout: CacheLayout, stack: TierStack) -> None:
        self._layout = layout
        self._stack = stack
        self.used_bytes: tuple[int, ...] = ()
        """Of each slower tier, by all requests, each time that they stored or met a chunk."""

    def meet(self, path: StoredPath, met: Met, others: list[Part]) -> tuple[Whole, list[Part]]:
        """Puts on the path what was met as a whole: what all tiers have, up to the first of the others. That, and all
        the rest, which is looked at one by one."""
        num_whole = self._stack.leading_below(met.keys)
        if num_whole and others:
            first_end = min(end for _, end in others)
            num_whole = min(num_whole, bisect_left(met.parts, first_end, key=itemgetter(1)))
        if not path.keys.keys().isdisjoint(met.parts):
            num_whole = 0
        whole = Whole(met.parts[:num_whole], met.keys[:num_whole], path.num_bytes)
        if num_whole:
            costs = self._costs(whole.parts)
            self.used_bytes = add(self.used_bytes, costs)
            path.extend(whole.parts, whole.keys, costs)
        return whole, [*met.parts[num_whole:], *others]

    def lacking(self, path: StoredPath, whole: Whole) -> list[StoredPart]:
        """What of this some slower tier lacks by now, from the first such chunk on."""
        num_held = self._stack.leading_below(whole.keys)
        if num_held == len(whole.keys):
            return []
        path_bytes, chunks = whole.bytes_before, []
        for place, (part, key) in enumerate(zip(whole.parts, whole.keys, strict=True)):
            path_bytes = add(path_bytes, self._stack.costs(self._layout.chunk_bytes(*part)))
            needs = needed_before(self._layout.spec, *part)
            if place >= num_held and path.keys.keys() >= set(needs):
                on_path = PathPosition(tuple(path.keys[need] for need in needs), path_bytes)
                chunks.append(StoredPart(part, key, on_path, False))
        return chunks

    def _costs(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """What whole chunks take up in each slower tier together."""
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

    def place(
        self, tracked: TrackedRequest, parts: Iterable[Part], new: Container[Part], keys: Mapping[Part, bytes]
    ) -> list[StoredPart]:
        """Chunks of a request, from its beginning on, each with what it needs to be worth anything.

        Args:
            tracked: the request.
            parts: the chunks.
            new: those of them that are being stored.
            keys: of all that is not met as a whole.
        """
        spec, path = self._layout.spec, tracked.path
        known, order = path.keys, path_order(spec, parts)
        path.come(order)
        if not self._stack.slower:
            # Nothing goes from here to anywhere.
            of_order = [keys[part] for part in order]
            known.update(zip(order, of_order, strict=True))
            return [StoredPart(part, key, ALONE, part in new) for part, key in zip(order, of_order, strict=True)]
        derived, chunks = tracked.keys(), []
        for part in order:
            key, costs = keys[part], self._stack.costs(self._layout.chunk_bytes(*part))
            self.used_bytes = add(self.used_bytes, costs)
            path_bytes = path.add(part, key, costs)
            needs = tuple(known.get(need) or derived.key(*need) for need in needed_before(spec, *part))
            chunks.append(StoredPart(part, key, PathPosition(needs, path_bytes), part in new))
        return chunks
