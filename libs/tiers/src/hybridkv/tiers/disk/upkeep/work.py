"""File work of the index as values: what shall be done, and what came of it. Runs on the janitor.

A job is planned from the state of the index, in the index's thread. It touches only files. Its result is applied there
again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from hybridkv.tiers.contract import FailureReason
from hybridkv.tiers.disk.files.directory import write_all
from hybridkv.tiers.disk.files.names import EPOCH_NAME, JOURNAL_NAME, SNAPSHOT_NAME, segment_number
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.files.segment_files import Move, SegmentFiles
from hybridkv.tiers.disk.format import epoch as epoch_file
from hybridkv.tiers.disk.format import journal, snapshot
from hybridkv.tiers.disk.tables.change_log import Cut, GivenUpError
from hybridkv.tiers.disk.upkeep.changes_file import ChangesFile
from hybridkv.tiers.disk.upkeep.snapshot_source import Source

logger = logging.getLogger(__name__)


class Files(NamedTuple):
    """What jobs work with."""

    namespace: Namespace
    segments: SegmentFiles
    changes: ChangesFile
    syncs: bool


class Create(NamedTuple):
    number: int
    epoch: int
    segment_bytes: int
    own_bytes: int

    def run(self, files: Files) -> object:
        files.segments.create(self.number, self.epoch, self.segment_bytes, self.own_bytes)
        return None


class DropError(OSError):
    """Some segments could not be deleted."""

    def __init__(self, first: OSError, left: tuple[int, ...]) -> None:
        super().__init__(first.errno, first.strerror, first.filename)
        self.left = left


class Drop(NamedTuple):
    """Each for itself: one that cannot be deleted keeps no other one."""

    numbers: tuple[int, ...]

    def run(self, files: Files) -> object:
        errors: dict[int, OSError] = {}
        for number in self.numbers:
            try:
                files.segments.drop(number)
            except OSError as error:
                errors[number] = error
        if errors:
            raise DropError(next(iter(errors.values())), tuple(errors))
        return None


class Copy(NamedTuple):
    number: int
    moves: tuple[Move, ...]

    def run(self, files: Files) -> list[tuple[Move, FailureReason | None]]:
        return files.segments.copy(self.moves)


class Seal(NamedTuple):
    number: int
    epoch: int
    end_offset: int

    def run(self, files: Files) -> object:
        files.segments.seal(self.number, self.epoch, self.end_offset)
        return None


class WriteEpoch(NamedTuple):
    epoch: int

    def run(self, files: Files) -> object:
        data = epoch_file.encode(self.epoch, files.namespace.digest)
        files.namespace.directory.write_file(EPOCH_NAME, data, sync=True)
        return None


class Append(NamedTuple):
    """Withdrawals behind the `num_before` that the journal holds."""

    num_before: int
    entries: tuple[journal.Withdrawal, ...]

    def run(self, files: Files) -> object:
        directory = files.namespace.directory
        fd = directory.open_file(JOURNAL_NAME, os.O_RDWR)
        try:
            data = b"".join(map(journal.encode_entry, self.entries))
            write_all(directory.io, fd, data, journal.HEAD_BYTES + self.num_before * journal.ENTRY_BYTES)
            if files.syncs:
                directory.io.fdatasync(fd)
        finally:
            directory.io.close(fd)
        return None


class Rewrite(NamedTuple):
    """A journal of exactly these withdrawals."""

    entries: tuple[journal.Withdrawal, ...]

    def run(self, files: Files) -> object:
        data = journal.encode_head(files.namespace.digest) + b"".join(map(journal.encode_entry, self.entries))
        files.namespace.directory.write_file(JOURNAL_NAME, data, files.syncs)
        return None


class Save(NamedTuple):
    """A snapshot of at most `max_bytes`: of the most recently used records, if it cannot name all."""

    epoch: int
    scan_from: int
    next_number: int
    next_address: int
    pending: tuple[int, ...]
    source: Source
    max_bytes: int
    cut: Cut
    """Where the index was when this was planned."""

    def run(self, files: Files) -> bool:
        """Whether it was written; not when it was not wanted any more."""
        try:
            self._write(files)
        except GivenUpError:
            return False
        return True

    def fail(self, files: Files) -> None:
        """It was not written, perhaps not even begun: nothing waits for it any more."""
        self.cut.is_cancelled = True

    def _write(self, files: Files) -> None:
        directory, digest = files.namespace.directory, files.namespace.digest
        encoding = self._encoding(digest)
        directory.write_pieces(SNAPSHOT_NAME, self._wanted(encoding.pieces(), files.namespace), files.syncs)
        files.changes.begin(directory, digest, encoding.checksum, self.cut)

    def _encoding(self, namespace: bytes) -> snapshot.Encoding:
        found = self.source.committed(self.cut)
        while True:
            saved = snapshot.Snapshot(*self[:5], found.keys, found.addresses, found.payload_bytes)
            encoding = snapshot.Encoding(saved, namespace)
            if encoding.num_bytes <= self.max_bytes or not found.keys:
                return encoding
            found = found.last((len(found.keys) - 1) // 2)

    def _wanted(self, pieces: Iterator[bytes], namespace: Namespace) -> Iterator[bytes]:
        namespace.require_own()  # it took a while to get here, and does until the last one is written
        for piece in pieces:
            self.cut.require_wanted()
            yield piece
        namespace.require_own()


class Log(NamedTuple):
    """Write down what happened since the last snapshot, as far as that was not done yet."""

    is_beside: bool
    """It waits while other work goes on, and is none of the pieces that go one by one."""

    def run(self, files: Files) -> bool:
        """Whether a snapshot is wanted instead."""
        return files.changes.append(files.namespace.directory)

    def fail(self, files: Files) -> None:
        """It was not written, perhaps not even begun: another one may be."""
        files.changes.miss()


class Restore(NamedTuple):
    """Make the directories anew if somebody removed them."""

    epoch: int

    def run(self, files: Files) -> set[int] | None:
        """The segments that every rank has now; None when nothing was removed."""
        namespace = files.namespace
        if not namespace.is_there():
            namespace.restore()
        if not namespace.is_anew:
            return None
        WriteEpoch(self.epoch).run(files)
        numbers = [{segment_number(name) for name in directory.list()} for directory in namespace.ranks]
        namespace.is_anew = False
        return {number for number in set.intersection(*numbers) if number is not None}


Job: TypeAlias = Create | Drop | Copy | Seal | WriteEpoch | Append | Rewrite | Save | Log | Restore


class Outcome(NamedTuple):
    """How a job ended: with what `run` gave back, or with what the system said."""

    job: Job
    value: object
    error: Exception | None


def run(job: Job, files: Files) -> Outcome:
    """Never raises."""
    try:
        if not isinstance(job, Restore):
            files.namespace.require_own()
        return Outcome(job, job.run(files), None)
    except Exception as error:  # a janitor that dies would take nothing more
        if isinstance(job, (Save, Log)):
            job.fail(files)
        if not isinstance(error, OSError):
            logger.exception("file work of the disk tier went wrong")
        return Outcome(job, None, error)
