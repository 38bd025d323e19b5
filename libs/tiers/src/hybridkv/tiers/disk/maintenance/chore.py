"""One piece of file work, and the state of a store that all kinds of it share.

A `Chore` is a frozen value that runs in the janitor's thread and touches only files. A `Kind` plans chores and applies
their results in the index's thread, and touches only tables. The kinds stand in the other modules of this package.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from hybridkv.tiers.disk.counts import DiskTally
from hybridkv.tiers.disk.files.locks import TakenError
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.files.segment_files import SegmentFiles
from hybridkv.tiers.disk.index.change_log import ChangesFile
from hybridkv.tiers.disk.index.records import RecordTable
from hybridkv.tiers.disk.index.segments import SegmentTable
from hybridkv.tiers.disk.options import DiskOptions, DiskSizes

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


class Retries:
    """One for each kind of chore, `retry_interval_s` long, or for one segment, by its number."""

    def __init__(self, path: str, retry_interval_s: float, clock: Callable[[], float], tally: DiskTally) -> None:
        self._path = path
        self._retry_interval_s = retry_interval_s
        self._clock = clock
        self._tally = tally
        self._until_s: dict[type[Chore[Any]] | int, float] = {}
        self._ended_early: set[type[Chore[Any]]] = set()
        self._failing: dict[str, type[Chore[Any]]] = {}

    def is_resting(self, what: type[Chore[Any]] | int) -> bool:
        return self._until_s.get(what, 0.0) > self._clock()

    @property
    def next_end_s(self) -> float:
        """When the first rest ends."""
        return min(self._until_s.values(), default=float("inf"))

    def failed(self, kind: type[Chore[Any]], error: Exception, numbers: Iterable[int] = ()) -> None:
        """Where segments are named, they rest, and work of this kind on others goes on."""
        number = getattr(error, "errno", None) or 0
        what = f"{kind.__name__.lower()}: {errno.errorcode.get(number, type(error).__name__)}"
        self._tally.fail(what)
        for resting in tuple(numbers) or (kind,):
            self._until_s[resting] = self._clock() + self._retry_interval_s
        if what not in self._failing:
            self._failing[what] = kind
            logger.warning("disk tier in %s: %s: %s", self._path, what, error)

    def end(self, kind: type[Chore[Any]]) -> None:
        """Something changed that may let it succeed: it may be tried now, but once only until it did."""
        if kind not in self._ended_early and self._until_s.pop(kind, None) is not None:
            self._ended_early.add(kind)

    def forget(self, number: int) -> None:
        """There is no such segment any more."""
        self._until_s.pop(number, None)

    def succeeded(self, kind: type[Chore[Any]], is_all_well: bool = True) -> None:
        """`is_all_well`: and none of its segments still rests."""
        self._until_s.pop(kind, None)
        self._ended_early.discard(kind)
        if not is_all_well:
            return
        for what in [what for what, failing in self._failing.items() if failing is kind]:
            del self._failing[what]
            logger.info("disk tier in %s: works again after %s", self._path, what)


_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class Tables(NamedTuple):
    """What an index knows of what it stores."""

    segments: SegmentTable
    records: RecordTable


class Epoch(NamedTuple):
    """Segments of another one hold nothing."""

    number: int
    is_written: bool
    """It is on disk. Before, nothing that names it may be."""


class StoreState:
    """Of one index."""

    def __init__(
        self,
        options: DiskOptions,
        sizes: DiskSizes,
        tables: Tables,
        files: Files,
        epoch: Epoch,
        clock: Callable[[], float],
    ) -> None:
        self.options = options
        self.sizes = sizes
        self.segments, self.records = tables
        self.files = files
        self.clock = clock
        self.tally = DiskTally()
        self.retries = Retries(files.namespace.root.path, options.retry_interval_s, clock, self.tally)
        self.epoch, self.is_epoch_written = epoch
        self.is_snapshot_owed = not files.changes.is_begun
        """What is on disk does not say all: the last one could not be written, or nothing may follow it any more."""
        self.is_lost = False
        """Something that should be on disk is not: perhaps the directory was removed."""
        self.is_taken = False
        """Another engine has the namespace or had it: no file work is done any more, and nothing is stored."""

    def note(
        self, kind: type[Chore[Any]], error: Exception | None, stuck: tuple[int, ...] = (), is_all_well: bool = True
    ) -> None:
        """A chore ended. `stuck`: what failed is these segments alone, and others may be tried; `is_all_well`: none is
        stuck."""
        if error is None:
            self.retries.succeeded(kind, is_all_well)
            return
        self.retries.failed(kind, error, stuck)
        self.is_lost = self.is_lost or getattr(error, "errno", None) in _GONE
        if isinstance(error, TakenError):
            self._end_storing()

    def _end_storing(self) -> None:
        self.is_taken = True
        self.records.log.close()
        self.segments.close_open()
        self.segments.ready.clear()
        self.segments.limit_bytes = 0


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
