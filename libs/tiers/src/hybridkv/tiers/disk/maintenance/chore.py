"""Chores: units of file work, and the state of a store that all kinds of chores share.

A `Chore` is a frozen value that runs in the janitor's thread and works on files; the only tables that a chore reads are
the change log and, for a snapshot, the records. A `ChoreKind` plans chores and applies their results in the index's
thread, and touches only tables. The other modules of this package define the kinds.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from hybridkv.tiers.disk.counts import DiskTally
from hybridkv.tiers.disk.files.locks import NamespaceTakenError
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
    """One unit of file work: a frozen value. The class name in lower case names the work in counts and logs."""

    __slots__ = ()

    needs_own: ClassVar[bool] = True
    """If True, `Namespace.require_own` is called before `run`. False for a chore that may recreate the directory."""

    def run(self, files: StoreFiles) -> ValueT:
        """Do the work, in the janitor's thread. May raise `OSError`."""
        raise NotImplementedError

    def fail(self, files: StoreFiles) -> None:
        """Called in the janitor's thread if `run` or the check before `run` raised."""


class Ending(NamedTuple, Generic[ValueT]):
    """Result of a chore: the value of `run`, or the error."""

    value: ValueT | None
    error: Exception | None

    @property
    def is_success(self) -> bool:
        return self.error is None


def run(chore: Chore[ValueT], files: StoreFiles) -> Ending[ValueT]:
    """Run a chore in the calling thread. Never raises: an error is part of the result."""
    try:
        if chore.needs_own:
            files.namespace.require_own()
        return Ending(chore.run(files), None)
    except Exception as error:  # the janitor's thread must not end
        chore.fail(files)
        if not isinstance(error, OSError):
            logger.exception("bug in the file work of the disk tier")
        return Ending(None, error)


class Retries:
    """Backoffs after failures, `retry_interval_s` long: for a kind of chore, or for one segment by number."""

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

    def next_retry_s(self, now_s: float) -> float:
        """Clock time, later than `now_s`, at which the next backoff ends; infinity if there is none."""
        return min((until_s for until_s in self._until_s.values() if until_s > now_s), default=float("inf"))

    def failed(self, kind: type[Chore[Any]], error: Exception, numbers: Iterable[int] = ()) -> None:
        """Start a backoff of the kind, count the failure, and log a new problem once. With `numbers`, only these
        segments back off, and the kind continues with other segments."""
        number = getattr(error, "errno", None) or 0
        problem = f"{kind.__name__.lower()}: {errno.errorcode.get(number, type(error).__name__)}"
        self._tally.fail(problem)
        for resting in tuple(numbers) or (kind,):
            self._until_s[resting] = self._clock() + self._retry_interval_s
        if problem not in self._failing:
            self._failing[problem] = kind
            logger.warning("disk tier in %s: %s: %s", self._path, problem, error)

    def end_early(self, kind: type[Chore[Any]]) -> None:
        """End the backoff early, because conditions changed. Works only once until the kind succeeds."""
        if kind not in self._ended_early and self._until_s.pop(kind, None) is not None:
            self._ended_early.add(kind)

    def forget_segment(self, number: int) -> None:
        """End the backoff of a deleted segment."""
        self._until_s.pop(number, None)

    def succeeded(self, kind: type[Chore[Any]], no_segment_is_stuck: bool = True) -> None:
        """End the backoff of the kind. `no_segment_is_stuck`: then logs the end of the kind's problems."""
        self._until_s.pop(kind, None)
        self._ended_early.discard(kind)
        if not no_segment_is_stuck:
            return
        for problem in [problem for problem, failing in self._failing.items() if failing is kind]:
            del self._failing[problem]
            logger.info("disk tier in %s: works again after %s", self._path, problem)


class Tables(NamedTuple):
    """Tables of an index."""

    segments: SegmentTable
    records: RecordTable


class Epoch(NamedTuple):
    """Present epoch. Records in segments of another epoch are not offered."""

    number: int
    is_written: bool
    """True if the epoch is on disk. Before that, no file may contain this epoch."""


class StoreState:
    """State of one store: options, tables, files, epoch, backoffs. Used in the index's thread only."""

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
        """True if the next snapshot does not wait for `snapshot_interval_s`: the last snapshot was not written, or the
        file of changes is half full or cannot be continued."""
        self.may_lack_files = False
        """True if a file or directory of the store may have been removed."""
        self.is_taken_over = False
        """True if another engine has or had the namespace open: no more file work, no more stores."""

    def note(
        self,
        kind: type[Chore[Any]],
        error: Exception | None,
        stuck: tuple[int, ...] = (),
        no_segment_is_stuck: bool = True,
    ) -> None:
        """Update backoffs and flags after the end of a chore. A `NamespaceTakenError` ends all stores and file work.

        `stuck`: only these segments failed, and other segments may be tried. `no_segment_is_stuck`: see
        `Retries.succeeded`.
        """
        if error is None:
            self.retries.succeeded(kind, no_segment_is_stuck)
            return
        self.retries.failed(kind, error, stuck)
        self.may_lack_files = self.may_lack_files or getattr(error, "errno", None) in GONE
        if isinstance(error, NamespaceTakenError):
            self._end_storing()

    def _end_storing(self) -> None:
        self.is_taken_over = True
        self.records.log.close()
        self.segments.close_open()
        self.segments.ready.clear()
        self.segments.limit_bytes = 0


ChoreT = TypeVar("ChoreT", bound=Chore[Any])


class ChoreKind(Generic[ChoreT, ValueT]):
    """One kind of file work of an index. Used in the index's thread only; touches no file."""

    makes_room: ClassVar[bool] = False
    """True if the end of a chore may free space for a store."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def plan(self) -> AnyDueChore | None:
        """Next chore, None if there is none. `plan` may change the tables, for example evict records. `plan` may ignore
        the backoff: then the caller checks the backoff."""
        raise NotImplementedError

    def started(self, chore: ChoreT) -> None:
        """Called after the janitor accepted the planned chore, which may have run already."""

    def refused(self, chore: ChoreT) -> None:
        """Called if the janitor refused the planned chore."""

    def ended(self, chore: ChoreT, ending: Ending[ValueT]) -> None:
        """Update the backoffs, and apply the result to the tables."""
        self._state.note(type(chore), ending.error)
        self.apply(chore, ending)

    def apply(self, chore: ChoreT, ending: Ending[ValueT]) -> None:
        """Apply the result to the tables. Called by `ended`, after `StoreState.note`."""


class DueChore(NamedTuple, Generic[ChoreT, ValueT]):
    """Due chore and its kind."""

    kind: ChoreKind[ChoreT, ValueT]
    chore: ChoreT

    def started(self) -> None:
        self.kind.started(self.chore)

    def refused(self) -> None:
        self.kind.refused(self.chore)

    def ended(self, ending: Ending[ValueT]) -> None:
        self.kind.ended(self.chore, ending)


AnyDueChore: TypeAlias = DueChore[Any, Any]
