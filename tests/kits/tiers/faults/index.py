"""`TierIndex` that refuses and loses keys as planned, and otherwise delegates to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import (
    UNSPECIFIED,
    BatchedIndex,
    Extends,
    Key,
    LookupCounts,
    NewChunk,
    Refusal,
    Slot,
    TierCounts,
    TierIndex,
)
from kits.tiers.faults.plan import FaultPlan, Operation, Refuse, Trigger, Vanish


class FaultInjectingIndex:
    """Wraps `inner`. Keeps the contract of `TierIndex`, whatever is planned."""

    def __init__(self, inner: TierIndex, plan: FaultPlan) -> None:
        self._inner = inner
        self._trigger = Trigger(plan)
        self._injected = TierCounts()

    @property
    def capacity_bytes(self) -> int:
        return self._inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._inner.used_bytes

    def cost(self, num_bytes: int) -> int:
        return self._inner.cost(num_bytes)

    @property
    def num_keys(self) -> int:
        return self._inner.num_keys

    @property
    def generation(self) -> int:
        return self._inner.generation

    @property
    def has_async_lookups(self) -> bool:
        return self._inner.has_async_lookups

    def start_lookup(self, keys: Iterable[Key], deadline_s: float) -> None:
        self._inner.start_lookup(keys, deadline_s)

    @property
    def lookup_counts(self) -> LookupCounts:
        return self._inner.lookup_counts

    @property
    def answer_s(self) -> float:
        return self._inner.answer_s

    def lacks(self, key: Key) -> bool:
        return self._inner.lacks(key)

    def lookup(self, key: Key) -> LookupResult:
        return self._inner.lookup(key)

    def leading(self, keys: Iterable[Key]) -> int:
        return self._inner.leading(keys)

    def last_held(self, keys: Sequence[Key]) -> int | None:
        return self._inner.last_held(keys)

    def any_pending(self, keys: Iterable[Key]) -> bool:
        return self._inner.any_pending(keys)

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        self._inner.touch(keys, extends)

    def prepare_stores(self, keys: Sequence[Key]) -> None:
        """As the inner index, if it is batched."""
        if isinstance(self._inner, BatchedIndex):
            self._inner.prepare_stores(keys)

    def end_batch(self) -> None:
        """As the inner index, if it is batched."""
        if isinstance(self._inner, BatchedIndex):
            self._inner.end_batch()

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        action = self._trigger.action(Operation.RESERVE, key)
        if isinstance(action, Refuse):
            self._injected = self._injected.merge(TierCounts(refusals={action.refusal: 1}))
            return action.refusal
        return self._inner.reserve(key, num_bytes, extends)

    def reserve_all(self, chunks: Sequence[NewChunk]) -> list[Slot | Refusal]:
        return [self.reserve(*chunk) for chunk in chunks]

    def commit(self, key: Key) -> bool:
        self._vanish(Operation.COMMIT, key)
        return self._inner.commit(key)

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        return [self.commit(key) for key in keys]

    def abort(self, key: Key) -> None:
        self._inner.abort(key)

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        return self._inner.invalidate(key, reason)

    def pin(self, key: Key) -> Slot | None:
        self._vanish(Operation.PIN, key)
        return self._inner.pin(key)

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        for key in keys:
            self._vanish(Operation.PIN, key)
        return self._inner.pin_all(keys)

    def unpin(self, key: Key) -> None:
        self._inner.unpin(key)

    def unpin_all(self, keys: Iterable[Key]) -> None:
        self._inner.unpin_all(keys)

    def clear(self) -> int:
        return self._inner.clear()

    def take_counts(self) -> TierCounts:
        counts, self._injected = self._inner.take_counts().merge(self._injected), TierCounts()
        return counts

    def close(self) -> None:
        self._inner.close()

    def _vanish(self, operation: Operation, key: Key) -> None:
        if isinstance(self._trigger.action(operation, key), Vanish):
            self._inner.invalidate(key)
