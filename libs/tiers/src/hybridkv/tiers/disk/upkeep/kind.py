"""A kind of file work: says in the index's thread which chore is due, and there again what came of it.

It touches only tables, and its chores only files. Each kind stands with its chore in `chores`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from hybridkv.tiers.disk.upkeep.chore import Chore, Ending, ValueT
from hybridkv.tiers.disk.upkeep.state import StoreState

ChoreT = TypeVar("ChoreT", bound=Chore[Any])


class Kind(Generic[ChoreT, ValueT]):
    """One kind of file work of an index. Used in the index's thread only, and touches no file."""

    makes_room: ClassVar[bool] = False
    """Something may be stored when it has ended that could not be before."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def plan(self) -> AnyPiece | None:
        """What is due, None when nothing is. It may rest, unless `plan` itself looks at that."""
        raise NotImplementedError

    def started(self, chore: ChoreT) -> None:
        """It is on its way, or has run already."""

    def refused(self, chore: ChoreT) -> None:
        """It was planned, and the janitor takes nothing more."""

    def ended(self, chore: ChoreT, ending: Ending[ValueT]) -> None:
        """Apply to the tables what came of it."""
        self._state.note(type(chore), ending.error)
        self.apply(chore, ending)

    def apply(self, chore: ChoreT, ending: Ending[ValueT]) -> None:
        """As `ended`, where it was noted whether it failed."""


class Piece(NamedTuple, Generic[ChoreT, ValueT]):
    """A chore that is due, and whose it is."""

    kind: Kind[ChoreT, ValueT]
    chore: ChoreT

    def started(self) -> None:
        self.kind.started(self.chore)

    def refused(self) -> None:
        self.kind.refused(self.chore)

    def ended(self, ending: Ending[ValueT]) -> None:
        self.kind.ended(self.chore, ending)


AnyPiece: TypeAlias = Piece[Any, Any]
