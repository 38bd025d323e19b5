"""What a rank's copies go by and come to, wherever they lead: what the workers of the connectors have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hybridkv.connectors.vllm.messages import LoadFailure, StepOutcome, StoreOutcome
from hybridkv.tiers.stack import MoveOutcome
from hybridkv.transfer import CopyEngine


@dataclass(frozen=True, slots=True)
class CopyPaths:
    """How bytes get into and out of the engine's memory.

    Args:
        stores: carries out stores.
        loads: carries out loads; the same engine as `stores`, or one that copies on the calling thread.
        load_timeout_s: a load that has not begun by then fails, and the request is computed instead.
        clock: seconds.
    """

    stores: CopyEngine
    loads: CopyEngine
    load_timeout_s: float
    clock: Callable[[], float]

    def engines(self) -> tuple[CopyEngine, ...]:
        return (self.stores, self.loads) if self.stores is not self.loads else (self.stores,)


@dataclass(slots=True)
class LoadResults:
    """Loads that ended since the last step; a failed one is in both sets."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Outcomes:
    """Collects what ended on this rank, for the engine and for the scheduler's half."""

    def __init__(self) -> None:
        self._outcome = StepOutcome()
        self._results = LoadResults()
        self._facts: dict[str, str] | None = None

    def stored(self, store_id: int, failure: str | None, reason: str | None) -> None:
        """A store ended; `reason` is why it failed, in one word."""
        self._outcome.stores[store_id] = StoreOutcome(1, failure, reason)

    def loaded(self, request_id: str, failures: Sequence[LoadFailure]) -> None:
        """A load ended, well where there is no failure."""
        self._results.finished.add(request_id)
        if failures:
            self._results.failed.add(request_id)
            self._outcome.load_failures[request_id] = tuple(failures)

    def moved(self, moves: Mapping[int, MoveOutcome]) -> None:
        """Moves between the tiers ended."""
        self._outcome.moves.update(moves)

    def tell(self, facts: dict[str, str]) -> None:
        """What the scheduler must hear before it opens what outlives the engine."""
        self._facts = facts

    def take_facts(self) -> dict[str, str] | None:
        """What the scheduler has not been told yet."""
        facts, self._facts = self._facts, None
        return facts

    def take_results(self) -> LoadResults:
        """What the engine must hear."""
        results, self._results = self._results, LoadResults()
        return results

    def take_outcome(self) -> StepOutcome | None:
        """What the scheduler must hear, None if nothing."""
        outcome, self._outcome = self._outcome, StepOutcome()
        return None if outcome.is_empty else outcome
