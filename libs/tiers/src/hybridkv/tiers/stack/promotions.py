"""Bringing chunks up: which tier gives which of them, and their space in the fast one. All that somebody waits for or
none of it; what nobody waits for one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Refusal, Slot, TierIndex
from hybridkv.tiers.stack.moves import Direction
from hybridkv.tiers.stack.secondary import Level

_PROMOTE, _HIT = Direction.PROMOTE, LookupResult.HIT

_Part: TypeAlias = tuple[Level, Sequence[Key], list[Slot]]
"""Chunks that one tier gives, pinned there, and where they lie."""


class Promotions:
    """The way up of all slower tiers.

    Args:
        near: index of the fast tier.
        levels: the others, the nearest first.
        pump_news: sends down what is to go before anything else comes into the fast tier.
    """

    def __init__(self, near: TierIndex, levels: Sequence[Level], pump_news: Callable[[], None]) -> None:
        self._near = near
        self._levels = levels
        self._pump_news = pump_news

    def promote(self, keys: Sequence[Key]) -> Refusal | None:
        """All of them or none, each from the nearest tier that holds it."""
        parts = self._pin_below(keys)
        if parts is None:
            return Refusal.PRESENT
        refusal = None
        for level, _, slots in parts:
            refusal = refusal or level.why_not_promote(sum(slot.num_bytes for slot in slots))
        self._pump_news()
        refusal = refusal or self._plan_promotions(parts)
        if refusal is not None:
            _unpin_below(parts)
        return refusal

    @property
    def is_prefetching(self) -> bool:
        """Whether something keeps space of the fast tier that nobody waited for when it began, and is not late."""
        return any(level.traffic.num_prefetching for level in self._levels)

    def bring(self, key: Key, why_not: Callable[[Level, int | None], Refusal | None]) -> int | Refusal:
        """One chunk that nobody waits for. Its bytes, or why it cannot come now.

        Args:
            key: of the chunk.
            why_not: asked of the tier that would give it, and its bytes; at first without them (None), since to learn
                them is a use of the chunk there.
        """
        source = next((each for each in self._levels if each.is_asked() and each.index.lookup(key) is _HIT), None)
        if source is None:
            return Refusal.PRESENT
        refusal = why_not(source, None)
        if refusal is not None:
            return refusal
        parts = self._pin_below((key,))
        if parts is None:
            return Refusal.PRESENT
        level, _, (far,) = parts[0]
        refusal = why_not(level, far.num_bytes)
        if refusal is None:
            self._pump_news()
            refusal = self._plan_promotions(parts, is_prefetch=True)
        if refusal is not None:
            _unpin_below(parts)
            return refusal
        return far.num_bytes

    def _pin_below(self, keys: Sequence[Key]) -> list[_Part] | None:
        """Which tier gives which of them, and where they lie there; None when one is nowhere that may be asked."""
        parts: list[_Part] = []
        for level in self._levels:
            if not keys:
                break
            if not level.is_asked():
                continue
            slots = level.index.pin_all(keys)
            if slots is not None:
                parts.append((level, keys, slots))
                return parts
            if len(self._levels) > 1:
                found = [(key, slot) for key in keys if (slot := level.index.pin(key)) is not None]
                if found:
                    parts.append((level, [key for key, _ in found], [slot for _, slot in found]))
                    taken = {key for key, _ in found}
                    keys = [key for key in keys if key not in taken]
        if keys:
            _unpin_below(parts)
            return None
        return parts

    def _plan_promotions(self, parts: Sequence[_Part], is_prefetch: bool = False) -> Refusal | None:
        """All of them, or why one has no space in the fast tier, which then gives up nothing for those behind it."""
        reserved: list[tuple[Key, Slot]] = []
        for _, keys, slots in parts:
            for key, far in zip(keys, slots, strict=True):
                near = self._near.reserve(key, far.num_bytes)
                if isinstance(near, Refusal):
                    for earlier, _ in reserved:
                        self._near.abort(earlier)
                    return near
                reserved.append((key, near))
        given = iter(reserved)
        for level, _, slots in parts:
            for far in slots:
                key, near = next(given)
                level.plan(_PROMOTE, key, near, far, is_prefetch)
        return None


def _unpin_below(parts: Iterable[_Part]) -> None:
    for level, keys, _ in parts:
        level.index.unpin_all(keys)
