"""What of one request is stored, from its beginning on: what is worth something only together, and is kept so.

Each tier gives up what was used longest ago, so a path is made recent as a whole, its end first. That costs a touch a
chunk, so it is done when the path has grown by a part, and once more at the request's end; and before it grows, where
so much came between that it might push out itself, or that its beginning may be gone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


class StoredPart(NamedTuple):
    """A chunk that is stored, or being stored."""

    part: Part
    key: bytes
    on_path: PathPosition
    is_new: bool
    """This store brings it."""


@dataclass(slots=True)
class StoredPath:
    """One request's chunks in every tier. A request that begins anew has another."""

    keys: dict[Part, bytes] = field(default_factory=dict)
    num_bytes: tuple[int, ...] = ()
    """What they take up in each slower tier."""
    num_storing: int = 0
    """Stores that are on their way."""
    is_over: bool = False
    """The request has ended."""
    _num_renewed: int = 0
    _renewed_at_bytes: tuple[int, ...] = ()
    """What all paths together had used then."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing comes any more."""
        return self.is_over and not self.num_storing

    def add(self, part: Part, key: bytes, num_bytes: tuple[int, ...]) -> tuple[int, ...]:
        """One more chunk, to be given in `path_order`. What the path takes up with it."""
        if part not in self.keys:
            self.keys[part] = key
            self.num_bytes = add(self.num_bytes, num_bytes)
        return self.num_bytes

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
        return tuple(key for part, key in self.keys.items() if part[0] in full and part[1] < end_token)

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
        return [self.keys[part] for part in reversed(path_order(spec, self.keys))]
