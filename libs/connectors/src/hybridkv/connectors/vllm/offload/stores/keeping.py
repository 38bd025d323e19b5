"""Prefixes with the hint `keep_seconds`: touches their chunks before a tier would evict them, up to a share of each
tier.

Pins nothing, so a full tier may still evict kept chunks. `planner.hints` decides which prefixes may be kept. This
module records the kept chunks and their deadlines, and decides when to touch them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import or_
from typing import Final, NamedTuple

from hybridkv.connectors.config import KEEP_SHARE
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.requests import PrefixChain
from hybridkv.connectors.vllm.common.stats import RAM, ConnectorMetrics
from hybridkv.planner import LookupResult
from hybridkv.planner.coverage import Part
from hybridkv.planner.hints import keep_in
from hybridkv.tiers.stack import TierStack

CHURN: Final = 8
"""Kept chunks of a tier are touched again after 1/`CHURN` of the tier's keys have changed."""
MAX_KEPT: Final = 65_536
"""Maximum number of kept chunks. A prefix that exceeds it is refused and counted."""
EXPIRE_EVERY_S: Final = 1.0
"""Shortest time between two searches for expired chunks. A search reads all kept chunks."""


class _Kept(NamedTuple):
    costs: tuple[int, ...]
    tiers: tuple[bool, ...]
    """For each tier, whether the chunk is kept there."""
    until_s: float


class Keeper:
    """Kept chunks of one connector.

    Args:
        layout: the model's groups.
        stack: the tiers. Tiers with async lookups keep nothing.
        clock: time in seconds.
        metrics: counts kept and refused prefixes.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        clock: Callable[[], float],
        metrics: ConnectorMetrics,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self.keep_share = KEEP_SHARE
        """Share of each tier for kept chunks."""
        self._clock = clock
        self._metrics = metrics
        own = {name: index for name, index in stack.secondary.items() if not index.has_async_lookups}
        self._tiers = {RAM: stack.primary, **own}
        self._kept: dict[bytes, _Kept] = {}
        self._kept_bytes = [0] * len(self._tiers)
        self._seen = [0] * len(self._tiers)
        """Generation of each tier at the last touch of its kept chunks."""
        self._expires_at_s = float("-inf")

    def keep(self, chain: PrefixChain, seconds: float) -> None:
        """Keeps the prefix of an ended request for `seconds` from now on, in each tier whose share has room for it.

        Host memory keeps only the chunks that it offers now. Chunks that no tier has are not kept. Does nothing if no
        tier has any.
        """
        self._expire()
        until_s = self._clock() + seconds
        nowhere = (False,) * len(self._tiers)
        chunks = {
            key: self._kept.get(key) or _Kept(self._costs(part), nowhere, until_s)
            for part, key in chain.keys.items()
            if any(index.lookup(key) is not LookupResult.MISS for index in self._tiers.values())
        }
        if not chunks:
            return
        in_ram = {key for key in chunks if self._stack.primary.lookup(key) is LookupResult.HIT}
        more = [
            sum(chunk.costs[tier] for key, chunk in chunks.items() if not chunk.tiers[tier] and (tier or key in in_ram))
            for tier in range(len(self._tiers))
        ]
        capacities = [index.capacity_bytes for index in self._tiers.values()]
        fits = keep_in(self._kept_bytes, more, capacities, self.keep_share)
        if len(self._kept) + sum(key not in self._kept for key in chunks) > MAX_KEPT:
            fits = nowhere
        for tier, (name, is_kept) in enumerate(zip(self._tiers, fits, strict=True)):
            self._metrics.kept(name, is_kept)
            self._kept_bytes[tier] += more[tier] * is_kept
        for key, chunk in chunks.items():
            tiers = tuple(map(or_, chunk.tiers, (fits[0] and key in in_ram, *fits[1:])))
            if any(tiers):
                self._kept[key] = _Kept(chunk.costs, tiers, max(chunk.until_s, until_s))

    @property
    def ram_bytes_left(self) -> int:
        """Bytes of host memory on one rank that are left for kept chunks."""
        return max(0, int(self.keep_share * self._stack.primary.capacity_bytes) - self._kept_bytes[0])

    def _costs(self, part: Part) -> tuple[int, ...]:
        num_bytes = self._layout.chunk_bytes(*part)
        return tuple(index.cost(num_bytes) for index in self._tiers.values())

    def _expire(self) -> None:
        now_s = self._clock()
        if now_s < self._expires_at_s:
            return
        self._expires_at_s = now_s + EXPIRE_EVERY_S
        for key in [key for key, kept in self._kept.items() if kept.until_s <= now_s]:
            kept = self._kept.pop(key)
            for tier, cost in enumerate(kept.costs):
                self._kept_bytes[tier] -= cost * kept.tiers[tier]

    def renew(self) -> None:
        """Touches the kept chunks in tiers with enough changed keys; see `CHURN`. Called once in each step."""
        if not self._kept:
            return
        is_due = [
            kept_bytes > 0 and index.generation != seen and (index.generation - seen) * CHURN >= index.num_keys
            for index, kept_bytes, seen in zip(self._tiers.values(), self._kept_bytes, self._seen, strict=True)
        ]
        if not any(is_due):
            return
        self._expire()
        for tier, (name, index) in enumerate(self._tiers.items()):
            if is_due[tier]:
                keys = self._from_the_end(tier)
                if name == RAM:
                    self._stack.touch_primary(keys)
                else:
                    index.touch(keys)
                self._seen[tier] = index.generation

    def _from_the_end(self, tier: int) -> list[bytes]:
        """Kept keys of a tier, the end of each prefix first: a touch makes the last key the most recently used."""
        return [key for key, kept in reversed(self._kept.items()) if kept.tiers[tier]]

    def record(self, num_ranks: int) -> None:
        """Updates the metrics of the kept bytes."""
        for name, num_bytes in zip(self._tiers, self._kept_bytes, strict=True):
            self._metrics.kept_bytes(name, num_bytes * num_ranks)

    def forget(self) -> None:
        """Drops all kept chunks, after the tiers were cleared."""
        self._kept.clear()
        self._kept_bytes = [0] * len(self._tiers)
