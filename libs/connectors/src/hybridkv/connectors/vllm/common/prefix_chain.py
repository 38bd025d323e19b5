"""What of one request is stored, from its beginning on: what is worth something only together, and is kept so.

Each tier gives up what was used longest ago, so a path is made recent as a whole, its end first. That costs a touch a
chunk, so it is done when the path has grown by a part, and once more at the request's end; and before it grows, where
so much came between that it might push out itself, or that its beginning may be gone.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from hybridkv.planner import CacheSpec, GroupKind, path_order
from hybridkv.planner.paths import Part
from hybridkv.tiers.stack import PathPosition

GROWTH = 8
"""A path is made recent again when it is longer by this part of its length."""
CHURN = 8
"""And before it grows, when others have used this part of a slower tier since."""


def add(mine: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of each slower tier together. `mine` may be empty: nothing yet."""
    if len(mine) == 1:
        return (mine[0] + more[0],)
    return tuple(map(operator.add, mine, more)) if mine else more


class StoredPart(msgspec.Struct, frozen=True, gc=False):
    """A chunk that is stored, or being stored."""

    part: Part
    key: bytes
    on_path: PathPosition
    is_new: bool
    """This store brings it."""


@dataclass(slots=True, eq=False)
class StoredPath:
    """One request's chunks in every tier. A request that begins anew has another."""

    keys: dict[Part, bytes] = field(default_factory=dict)
    num_bytes: tuple[int, ...] = ()
    """What they take up in each slower tier."""
    num_storing: int = 0
    """Stores that are on their way."""
    is_over: bool = False
    """The request has ended."""
    prompt_tokens: int = sys.maxsize
    """Of the request, as soon as it is computed."""
    keep_seconds: float = 0.0
    """How long it is to be kept from its end on."""
    _last_end: int = 0
    """The deepest end of its chunks."""
    _is_in_order: bool = True
    """Its chunks came in `path_order`, as they do unless a group is behind the others."""
    _num_renewed: int = 0
    _renewed_at_bytes: tuple[int, ...] = ()
    """What all paths together had used then."""

    def __post_init__(self) -> None:
        self._is_in_order = not self.keys

    @property
    def is_complete(self) -> bool:
        """Whether nothing comes any more."""
        return self.is_over and not self.num_storing

    def begin(self, prompt_tokens: int, keep_seconds: float = 0.0) -> None:
        """It begins to be computed."""
        self.prompt_tokens, self.keep_seconds = prompt_tokens, keep_seconds

    def come(self, parts: Sequence[Part]) -> None:
        """These are added next, in `path_order`."""
        if parts:
            self._is_in_order = self._is_in_order and parts[0][1] > self._last_end
            self._last_end = max(self._last_end, parts[-1][1])

    def add(self, part: Part, key: bytes, num_bytes: tuple[int, ...]) -> tuple[int, ...]:
        """One more chunk, of those that come. What the path takes up with it."""
        if part not in self.keys:
            self.keys[part] = key
            self.num_bytes = add(self.num_bytes, num_bytes)
        return self.num_bytes

    def extend(self, parts: Sequence[Part], keys: Sequence[bytes], num_bytes: tuple[int, ...]) -> None:
        """More chunks, in `path_order`, and what those of them take up that it does not have."""
        self.come(parts)
        self.keys.update(zip(parts, keys, strict=True))
        self.num_bytes = add(self.num_bytes, num_bytes)

    def drop(self, parts: Sequence[Part]) -> None:
        """These are worth nothing any more. What they take up still counts: it is an upper bound."""
        for part in parts:
            self.keys.pop(part, None)

    def is_overdue(self, used_bytes: Sequence[int], capacities: Sequence[int]) -> bool:
        """Whether it is far from recent by now in a slower tier, given what all paths have used of each, each time that
        they did."""
        if not self._num_renewed:
            return False
        return any(
            (used - renewed_at) * CHURN >= capacity
            for used, renewed_at, capacity in zip(used_bytes, self._renewed_at_bytes, capacities, strict=True)
        )

    def prefix(self, spec: CacheSpec, end_token: int) -> tuple[bytes, ...]:
        """The full prefix before a part that ends there, of every FULL group."""
        full = [index for index in spec.stored_groups if spec.groups[index].kind is GroupKind.FULL]
        chunk = spec.chunk_tokens
        parts = ((part, key) for part, key in self.keys.items() if part[0] in full)
        return tuple(key for (_, end), key in parts if end < end_token and end % chunk == 0)

    def take_renewal(
        self, spec: CacheSpec, used_bytes: tuple[int, ...], is_overdue: bool = False
    ) -> list[bytes] | None:
        """All its keys in the order in which they may go, where it is time to make them recent."""
        grown = len(self.keys) - self._num_renewed
        if not is_overdue and (not grown or (not self.is_complete and grown * GROWTH < self._num_renewed)):
            return None
        self._num_renewed, self._renewed_at_bytes = len(self.keys), used_bytes
        return self.order(spec)

    def order(self, spec: CacheSpec) -> list[bytes]:
        """All its keys in the order in which they may go."""
        if self._is_in_order:
            return list(self.keys.values())[::-1]
        return [self.keys[part] for part in reversed(path_order(spec, self.keys))]
