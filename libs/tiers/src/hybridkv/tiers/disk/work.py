"""File work of the index as values: what shall be done, and what came of it. Runs on the janitor.

A job is planned from the state of the index, in the index's thread. It touches only files. Its result is applied there
again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridkv.tiers.contract import FailureReason, Key
from hybridkv.tiers.disk import epoch as epoch_file
from hybridkv.tiers.disk import journal, snapshot
from hybridkv.tiers.disk.change_log import Cut
from hybridkv.tiers.disk.changes_file import ChangesFile
from hybridkv.tiers.disk.directory import write_all
from hybridkv.tiers.disk.names import EPOCH_NAME, JOURNAL_NAME, SNAPSHOT_NAME, segment_number
from hybridkv.tiers.disk.namespace import Namespace
from hybridkv.tiers.disk.records import Record, State
from hybridkv.tiers.disk.segment_files import Move, SegmentFiles

logger = logging.getLogger(__name__)

RECORDS_AT_A_TIME = 2048
"""That a snapshot looks at between two lists that it makes."""

Numbers: TypeAlias = npt.NDArray[np.uint64]


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


class Source(NamedTuple):
    """Where a snapshot finds its records, while the index goes on using both.

    A list of keys only grows, and what is read of a record is true when it is read: it is committed, at an address that
    the snapshot speaks for or behind it. No step takes long without letting the index's thread run.
    """

    by_key: Mapping[Key, Record]
    key_lists: Sequence[Sequence[Key]]
    """Of each segment. A key may stand in several, or belong to no record any more."""

    def committed(self) -> tuple[list[Key], Numbers, Numbers]:
        """Keys, addresses and payload bytes, least recently used first."""
        seen: set[Key] = set()
        keys: list[Key] = []
        columns = [np.empty((0, 3), dtype=np.uint64)]
        for key_list in self.key_lists:
            for start in range(0, len(key_list), RECORDS_AT_A_TIME):
                rows = []
                for key in key_list[start : start + RECORDS_AT_A_TIME]:
                    record = self.by_key.get(key)
                    if record is not None and record.state is State.COMMITTED and key not in seen:
                        seen.add(key)
                        keys.append(key)
                        rows.append((record.last_used, record.address, record.payload_bytes))
                columns.append(np.array(rows, dtype=np.uint64).reshape(-1, 3))
        table = np.concatenate(columns)
        order = np.argsort(table[:, 0], kind="stable")
        return [keys[position] for position in order.tolist()], table[order, 1], table[order, 2]


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

    def run(self, files: Files) -> object:
        try:
            self._write(files)
        except Exception:
            self.cut.is_cancelled = True
            raise
        return None

    def _write(self, files: Files) -> None:
        keys, addresses, sizes = self.source.committed()
        while True:
            saved = snapshot.Snapshot(*self[:5], keys, addresses, sizes)
            data = snapshot.encode(saved, files.namespace.digest)
            if len(data) <= self.max_bytes or not keys:
                break
            half = len(keys) // 2 + 1
            keys, addresses, sizes = keys[half:], addresses[half:], sizes[half:]
        directory, digest = files.namespace.directory, files.namespace.digest
        files.namespace.require_own()  # it took a while
        directory.write_file(SNAPSHOT_NAME, data, files.syncs)
        files.changes.begin(directory, digest, snapshot.checksum_of(data), self.cut)


class Log(NamedTuple):
    """Write down what happened since the last snapshot, as far as that was not done yet."""

    is_beside: bool
    """It waits while other work goes on, and is none of the pieces that go one by one."""

    def run(self, files: Files) -> bool:
        """Whether a snapshot is wanted instead."""
        return files.changes.append(files.namespace.directory)


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
    except OSError as error:
        return Outcome(job, None, error)
    except Exception as error:  # a janitor that dies would take nothing more
        logger.exception("file work of the disk tier went wrong")
        return Outcome(job, None, error)
