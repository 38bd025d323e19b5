"""Counts of one slower tier on their way into `MoveCounts`. Decides nothing."""

from __future__ import annotations

from hybridkv.tiers.contract import Failure
from hybridkv.tiers.stack.moves import Direction, MoveCounts, MoveResult


class MoveTally:
    """A mutable `MoveCounts`."""

    def __init__(self) -> None:
        self.results: dict[Direction, dict[MoveResult, int]] = {direction: {} for direction in Direction}
        self.num_bytes = dict.fromkeys(Direction, 0)
        self.failures: dict[str, int] = {}

    def moved(
        self, direction: Direction, result: MoveResult, num_bytes: int = 0, failure: Failure | None = None
    ) -> None:
        results = self.results[direction]
        results[result] = results.get(result, 0) + 1
        if failure is not None:
            reason = str(failure.reason)
            self.failures[reason] = self.failures.get(reason, 0) + 1
        else:
            self.num_bytes[direction] += num_bytes

    def as_counts(self, breaker_openings: dict[Direction, int]) -> MoveCounts:
        """What was counted, with how often the breakers opened meanwhile."""
        return MoveCounts(
            promotions=self.results[Direction.PROMOTE],
            cascades=self.results[Direction.CASCADE],
            promoted_bytes=self.num_bytes[Direction.PROMOTE],
            cascaded_bytes=self.num_bytes[Direction.CASCADE],
            failures=self.failures,
            breaker_openings=breaker_openings,
        )
