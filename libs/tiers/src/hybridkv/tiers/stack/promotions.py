"""Promotions: choose the secondary tier for each chunk, and reserve space in the primary tier.

Chunks that a request waits for are promoted all or none. Of the prefetched chunks, some may be promoted without the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Refusal, Slot, TierIndex
from hybridkv.tiers.stack.moves import Direction
from hybridkv.tiers.stack.secondary import SecondaryTierState

_PROMOTE, _HIT = Direction.PROMOTE, LookupResult.HIT

_TierChunks: TypeAlias = tuple[SecondaryTierState, Sequence[Key], list[Slot]]
"""A tier, keys of chunks that are pinned in this tier, and their slots."""


class Promotions:
    """Promotions from all secondary tiers.

    Args:
        primary: index of the primary tier.
        tiers: secondary tiers, the nearest first.
        pump_new: sends newly queued cascades. Called before each reservation in the primary tier.
    """

    def __init__(self, primary: TierIndex, tiers: Sequence[SecondaryTierState], pump_new: Callable[[], None]) -> None:
        self._primary = primary
        self._tiers = tiers
        self._pump_new = pump_new

    def promote(self, keys: Sequence[Key]) -> Refusal | None:
        """Promote all of these keys or none, each from the nearest usable tier that holds it. Returns the reason if
        none is promoted: PRESENT if no usable tier holds one of the keys."""
        by_tier = self._pin(keys)
        if by_tier is None:
            return Refusal.PRESENT
        refusal = None
        for tier, _, slots in by_tier:
            refusal = refusal or tier.promote_refusal(sum(slot.num_bytes for slot in slots))
        self._pump_new()
        refusal = refusal or self._plan(by_tier)
        if refusal is not None:
            _unpin(by_tier)
        return refusal

    @property
    def is_prefetching(self) -> bool:
        """True if a prefetch that has not timed out is in flight, and so uses space of the primary tier."""
        return any(tier.in_flight.num_prefetching for tier in self._tiers)

    def prefetch(
        self, key: Key, refusal_of: Callable[[SecondaryTierState, int | None], Refusal | None]
    ) -> int | Refusal:
        """Prefetch one chunk. Returns its number of bytes, or the reason why it cannot be prefetched now: PRESENT if no
        usable tier holds it.

        Args:
            key: key of the chunk.
            refusal_of: returns the reason why a tier must not provide a chunk of this many bytes, else None. Called
                first with None as the size, because only a pin returns the size, and a pin counts as a use.
        """
        source = next((each for each in self._tiers if each.is_usable() and each.index.lookup(key) is _HIT), None)
        if source is None:
            return Refusal.PRESENT
        refusal = refusal_of(source, None)
        if refusal is not None:
            return refusal
        by_tier = self._pin((key,))
        if by_tier is None:
            return Refusal.PRESENT
        tier, _, (slot,) = by_tier[0]
        refusal = refusal_of(tier, slot.num_bytes)
        if refusal is None:
            self._pump_new()
            refusal = self._plan(by_tier, is_prefetch=True)
        if refusal is not None:
            _unpin(by_tier)
            return refusal
        return slot.num_bytes

    def _pin(self, keys: Sequence[Key]) -> list[_TierChunks] | None:
        """Pin each key in the nearest usable tier that holds it; None if no usable tier holds one of them."""
        by_tier: list[_TierChunks] = []
        for tier in self._tiers:
            if not keys:
                break
            if not tier.is_usable():
                continue
            slots = tier.index.pin_all(keys)
            if slots is not None:
                by_tier.append((tier, keys, slots))
                return by_tier
            if len(self._tiers) > 1:
                found = [(key, slot) for key in keys if (slot := tier.index.pin(key)) is not None]
                if found:
                    by_tier.append((tier, [key for key, _ in found], [slot for _, slot in found]))
                    taken = {key for key, _ in found}
                    keys = [key for key in keys if key not in taken]
        if keys:
            _unpin(by_tier)
            return None
        return by_tier

    def _plan(self, by_tier: Sequence[_TierChunks], is_prefetch: bool = False) -> Refusal | None:
        """Reserve all chunks in the primary tier and plan their moves. After a refusal, no chunk stays reserved, and no
        chunk is evicted for the remaining ones."""
        reserved: list[tuple[Key, Slot]] = []
        for _, keys, slots in by_tier:
            for key, secondary in zip(keys, slots, strict=True):
                primary = self._primary.reserve(key, secondary.num_bytes)
                if isinstance(primary, Refusal):
                    for earlier, _ in reserved:
                        self._primary.abort(earlier)
                    return primary
                reserved.append((key, primary))
        given = iter(reserved)
        for tier, _, slots in by_tier:
            for secondary in slots:
                key, primary = next(given)
                tier.plan(_PROMOTE, key, primary, secondary, is_prefetch)
        return None


def _unpin(by_tier: Iterable[_TierChunks]) -> None:
    for tier, keys, _ in by_tier:
        tier.index.unpin_all(keys)
