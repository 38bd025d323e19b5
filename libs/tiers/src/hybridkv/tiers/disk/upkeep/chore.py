"""What is to be done with files, as a value. It runs in the janitor's thread, and touches nothing but files."""

from __future__ import annotations

import logging
from typing import ClassVar, Generic, NamedTuple, TypeVar

from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.files.segment_files import SegmentFiles
from hybridkv.tiers.disk.upkeep.changes_file import ChangesFile

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")


class Files(NamedTuple):
    """What chores work with."""

    namespace: Namespace
    segments: SegmentFiles
    changes: ChangesFile
    syncs: bool


class Chore(Generic[ValueT]):
    """A frozen value. Its class is the name of what failed, in the counts and in the log."""

    __slots__ = ()

    needs_own: ClassVar[bool] = True
    """It writes or deletes in the directory, so that has to be this engine's still."""

    def run(self, files: Files) -> ValueT:
        """In the janitor's thread. `OSError` as the system says."""
        raise NotImplementedError

    def fail(self, files: Files) -> None:
        """In the janitor's thread: it was not run to its end, perhaps not even begun."""


class Ending(NamedTuple, Generic[ValueT]):
    """How a chore ended: with what `run` gave back, or with what the system said."""

    value: ValueT | None
    error: Exception | None

    @property
    def is_done(self) -> bool:
        return self.error is None


def run(chore: Chore[ValueT], files: Files) -> Ending[ValueT]:
    """Never raises."""
    try:
        if chore.needs_own:
            files.namespace.require_own()
        return Ending(chore.run(files), None)
    except Exception as error:  # a janitor that dies would take nothing more
        chore.fail(files)
        if not isinstance(error, OSError):
            logger.exception("file work of the disk tier went wrong")
        return Ending(None, error)
