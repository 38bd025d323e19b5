"""Chores: units of file work, and the state of a store that all kinds of them share.

A `Chore` is a frozen value that runs in the janitor's thread and touches only files. A `ChoreKind` plans chores and
applies their results in the index's thread, and touches only tables. The other modules of this package hold the kinds.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from hybridkv.tiers.disk.counts import DiskTally
from hybridkv.tiers.disk.files.locks import TakenError
from hybridkv.tiers.disk.files.namespace import GONE, Namespace
from hybridkv.tiers.disk.files.segment_files import SegmentFiles
from hybridkv.tiers.disk.index.change_log import ChangesFile
from hybridkv.tiers.disk.index.records import RecordTable
from hybridkv.tiers.disk.index.segments import SegmentTable
from hybridkv.tiers.disk.options import DiskOptions, DiskSizes

logger = logging.getLogger(__name__)


ValueT = TypeVar("ValueT")


class StoreFiles(NamedTuple):
    """Files of a store, for chores."""

    namespace: Namespace
    segments: SegmentFiles
    changes: ChangesFile
    syncs: bool


class Chore(Generic[ValueT]):
    """Frozen value. Its class name, in lower case, names the work in counts and log."""

    __slots__ = ()

    needs_own: ClassVar[bool] = True
    """It writes or deletes in the directory, which must still be this engine's."""

    def run(self, files: StoreFiles) -> ValueT:
        """Runs in the janitor's thread. Raises `OSError`s of the system."""
        raise NotImplementedError

    def fail(self, files: StoreFiles) -> None:
        """Called in the janitor's thread if the chore did not finish, or did not begin."""


class Ending(NamedTuple, Generic[ValueT]):
    """Result of a chore: the value of `run`, or the error."""

    value: ValueT | None
    error: Exception | None

    @property
    def is_done(self) -> bool:
        return self.error is None


def run(chore: Chore[ValueT], files: StoreFiles) -> Ending[ValueT]:
    """Never raises."""
    try:
        if chore.needs_own:
            files.namespace.require_own()
        return Ending(chore.run(files), None)
    except Exception as error:  # the thread of the janitor must not end
        chore.fail(files)
        if not isinstance(error, OSError):
            logger.exception("bug in the file work of the disk tier")
        return Ending(None, error)


class Retries:
    """Backoff after failures, `retry_interval_s` long, for a kind of chore or for one segment by number."""

    def __init__(self, path: str, retry_interval_s: float, clock: Callable[[], float], tally: DiskTally) -> None:
        self._path = path
        self._retry_interval_s = retry_interval_s
        self._clock = clock
        self._tally = tally
        self._until_s: dict[type[Chore[Any]] | int, float] = {}
        self._ended_early: set[type[Chore[Any]]] = set()
        self._failing: dict[str, type[Chore[Any]]] = {}

    def is_backing_off(self, chore_or_number: type[Chore[Any]] | int) -> bool:
        return self._until_s.get(chore_or_number, 0.0) > self._clock()

    @property
    def next_retry_s(self) -> float:
        """End of the first backoff."""
        return min(self._until_s.values(), default=float("inf"))

    def failed(self, kind: type[Chore[Any]], error: Exception, numbers: Iterable[int] = ()) -> None:
        """With `numbers`, only these segments back off, and the kind continues with others."""
        number = getattr(error, "errno", None) or 0
        problem = f"{kind.__name__.lower()}: {errno.errorcode.get(number, type(error).__name__)}"
        self._tally.fail(problem)
        for resting in tuple(numbers) or (kind,):
            self._until_s[resting] = self._clock() + self._retry_interval_s
        if problem not in self._failing:
            self._failing[problem] = kind
            logger.warning("disk tier in %s: %s: %s", self._path, problem, error)

    def end(self, kind: type[Chore[Any]]) -> None:
        """End the backoff early, because conditions changed. Only once until the kind succeeds."""
        if kind not in self._ended_early and self._until_s.pop(kind, None) is not None:
            self._ended_early.add(kind)

    def forget(self, number: int) -> None:
        """The segment is gone."""
        self._until_s.pop(number, None)

    def succeeded(self, kind: type[Chore[Any]], is_all_well: bool = True) -> None:
        """`is_all_well`: and none of its segments backs off."""
        self._until_s.pop(kind, None)
        self._ended_early.discard(kind)
        if not is_all_well:
            return
        for problem in [problem for problem, failing in self._failing.items() if failing is kind]:
            del self._failing[problem]
            logger.info("disk tier in %s: works again after %s", self._path, problem)


class Tables(NamedTuple):
    """Tables of an index."""

    segments: SegmentTable
    records: RecordTable


class Epoch(NamedTuple):
    """Number of the present epoch. Segments of another one hold nothing."""

    number: int
    is_written: bool
    """It is on disk. Until then, no file that names it may be written."""


class StoreState:
    """State of one store, beside its tables. Used in the index's thread only."""

    def __init__(
        self,
        options: DiskOptions,
        sizes: DiskSizes,
        tables: Tables,
        files: StoreFiles,
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
        self.is_snapshot_wanted = not files.changes.is_begun
        """The files on disk are incomplete: the last snapshot failed, or changes cannot be appended to it."""
        self.is_lost = False
        """A file that should exist may be missing: it or its directory may have been removed."""
        self.is_taken = False
        """Another engine has the namespace, or had it: no more file work, no more stores."""

    def note(
        self, kind: type[Chore[Any]], error: Exception | None, stuck: tuple[int, ...] = (), is_all_well: bool = True
    ) -> None:
        """A chore ended. `stuck`: only these segments failed, and others may be tried. `is_all_well`: no segment is
        stuck."""
        if error is None:
            self.retries.succeeded(kind, is_all_well)
            return
        self.retries.failed(kind, error, stuck)
        self.is_lost = self.is_lost or getattr(error, "errno", None) in GONE
        if isinstance(error, TakenError):
            self._end_storing()

    def _end_storing(self) -> None:
        self.is_taken = True
        self.records.log.close()
        self.segments.close_open()
        self.segments.ready.clear()
        self.segments.limit_bytes = 0


ChoreT = TypeVar("ChoreT", bound=Chore[Any])


class ChoreKind(Generic[ChoreT, ValueT]):
    """One kind of file work of an index. Used in the index's thread only; touches no file."""

    makes_room: ClassVar[bool] = False
    """The end of a chore may allow a store that was impossible before."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def plan(self) -> AnyDueChore | None:
        """The next chore, None if there is none. The caller checks the backoff, unless `plan` does."""
        raise NotImplementedError

    def started(self, chore: ChoreT) -> None:
        """The chore was started, or has run already."""

    def refused(self, chore: ChoreT) -> None:
        """The janitor did not accept the planned chore."""

    def ended(self, chore: ChoreT, ending: Ending[ValueT]) -> None:
        """Apply the result to the tables."""
        self._state.note(type(chore), ending.error)
        self.apply(chore, ending)

    def apply(self, chore: ChoreT, ending: Ending[ValueT]) -> None:
        """`ended` without the bookkeeping of failures."""


class DueChore(NamedTuple, Generic[ChoreT, ValueT]):
    """A due chore and its kind."""

    kind: ChoreKind[ChoreT, ValueT]
    chore: ChoreT

    def started(self) -> None:
        self.kind.started(self.chore)

    def refused(self) -> None:
        self.kind.refused(self.chore)

    def ended(self, ending: Ending[ValueT]) -> None:
        self.kind.ended(self.chore, ending)


AnyDueChore: TypeAlias = DueChore[Any, Any]
