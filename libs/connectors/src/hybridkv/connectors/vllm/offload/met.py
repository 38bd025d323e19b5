"""What of a request a tier has already, found by one question for each group and not by one for each chunk.

Behind a load, or where the engine resumed by itself, that is all of a long prefix. It changes nothing in the tiers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from hybridkv.connectors.vllm.common.lookups import RequestKeys
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK
from hybridkv.planner import CacheSpec, GroupKind, path_order, storable_ends
from hybridkv.planner.paths import Part
from hybridkv.tiers.stack import TierStack


class Met(NamedTuple):
    """Chunks that could be stored, and are; and what is known of those behind them."""

    stop_tokens: int
    """There is no other that ends here or before, and could be stored."""
    parts: list[Part]
    """In the order of their path."""
    keys: list[bytes]
    behind: dict[Part, bytes]
    """The keys of chunks that end behind it and could be stored, as far as they were asked about and not absent."""
    absent: frozenset[int]
    """Groups of which the fast tier holds none of those."""

    def keys_among(self, spec: CacheSpec, others: Sequence[Part], keys: dict[Part, bytes]) -> list[bytes]:
        """Their keys and those of others of the path, in its order."""
        if not others:
            return self.keys
        keys = dict(zip(self.parts, self.keys, strict=True)) | keys
        return [keys[part] for part in path_order(spec, [*self.parts, *others])]


def find_met(
    spec: CacheSpec,
    stack: TierStack,
    keys: RequestKeys,
    first_token: int,
    last_token: int,
    block_ids: Sequence[Sequence[int]],
) -> Met:
    """What the fast tier holds, or is about to, of the chunks behind a token, up to the first that it lacks.

    Of a prompt that is stored for the first time this is nothing, which costs two questions a group.

    Args:
        spec: the model's groups. A RECURRENT one is passed over: its states are no matter of tables.
        stack: the tiers.
        keys: of the request.
        first_token: chunks that end here or before have been seen to.
        last_token: those that end behind it are not final, in some group.
        block_ids: for every group of `spec`, the request's block table.
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
            # No engine is known that leaves holes; whoever does has each chunk looked at.
            return Met(first_token, [], [], {}, frozenset())
        of_group = keys.between(group_index, ends[0] // chunk - 1, ends[-1] // chunk)
        num_held = stack.leading_near(of_group)
        if num_held < len(ends):
            stop = min(stop, ends[num_held] - chunk)
        found.append((group_index, ends, of_group))
    near, absent = stack.only_near, set[int]()
    parts: list[Part] = []
    key_of: dict[Part, bytes] = {}
    behind: dict[Part, bytes] = {}
    for group_index, ends, of_group in found:
        num_met = len(ends) if stop >= ends[-1] else bisect_right(ends, stop)
        of_parts = list(zip(repeat(group_index), ends[:num_met], strict=False))
        parts += of_parts
        key_of.update(zip(of_parts, of_group, strict=False))
        if num_met < len(ends):
            of_rest = of_group[num_met:]
            if near.last_held(of_rest) is None:
                absent.add(group_index)
            else:
                behind.update(zip(zip(repeat(group_index), ends[num_met:], strict=False), of_rest, strict=True))
    if len(found) > 1:
        parts = path_order(spec, parts)
    return Met(stop, parts, [key_of[part] for part in parts], behind, frozenset(absent))
