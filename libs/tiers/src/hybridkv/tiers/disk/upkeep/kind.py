"""A kind of file work: says in the index's thread which job is due, and there again what came of it.

It touches only tables, and its jobs only files. Each kind stands with its job in `jobs`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from hybridkv.tiers.disk.upkeep.job import Ending, Job, ValueT
from hybridkv.tiers.disk.upkeep.state import StoreState

JobT = TypeVar("JobT", bound=Job[Any])


class Kind(Generic[JobT, ValueT]):
    """One kind of file work of an index. Used in the index's thread only, and touches no file."""

    makes_room: ClassVar[bool] = False
    """Something may be stored when it has ended that could not be before."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def plan(self) -> AnyPiece | None:
        """What is due, None when nothing is. It may rest, unless `plan` itself looks at that."""
        raise NotImplementedError

    def started(self, job: JobT) -> None:
        """It is on its way, or has run already."""

    def refused(self, job: JobT) -> None:
        """It was planned, and the janitor takes nothing more."""

    def ended(self, job: JobT, ending: Ending[ValueT]) -> None:
        """Apply to the tables what came of it."""
        self._state.note(type(job), ending.error)
        self.apply(job, ending)

    def apply(self, job: JobT, ending: Ending[ValueT]) -> None:
        """As `ended`, where it was noted whether it failed."""


class Piece(NamedTuple, Generic[JobT, ValueT]):
    """A job that is due, and whose it is."""

    kind: Kind[JobT, ValueT]
    job: JobT

    def started(self) -> None:
        self.kind.started(self.job)

    def refused(self) -> None:
        self.kind.refused(self.job)

    def ended(self, ending: Ending[ValueT]) -> None:
        self.kind.ended(self.job, ending)


AnyPiece: TypeAlias = Piece[Any, Any]
