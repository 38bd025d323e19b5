"""Mutable counts of an index. Private to this library."""

from hybridkv.tiers.contract import Refusal, TierCounts


class Tally:
    """Mutable `TierCounts` without `answers`."""

    __slots__ = ("aborts", "commits", "evicted_bytes", "evictions", "invalidations", "refusals", "reservations")

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.reservations = 0
        self.commits = 0
        self.aborts = 0
        self.invalidations = 0
        self.evictions = 0
        self.evicted_bytes = 0
        self.refusals: dict[Refusal, int] = {}

    def refuse(self, reason: Refusal) -> Refusal:
        """Count a refusal and return it."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        return reason

    def take(self) -> TierCounts:
        counts = TierCounts(
            reservations=self.reservations,
            commits=self.commits,
            aborts=self.aborts,
            invalidations=self.invalidations,
            evictions=self.evictions,
            evicted_bytes=self.evicted_bytes,
            refusals=self.refusals,
        )
        self._reset()
        return counts
