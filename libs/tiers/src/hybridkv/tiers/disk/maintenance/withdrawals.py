"""Writes the epoch and the quarantine journal, so that no restart offers what was cleared or withdrawn."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.layout import EPOCH_NAME, JOURNAL_NAME
from hybridkv.tiers.disk.format.withdrawals import (
    JOURNAL_HEAD_BYTES,
    WITHDRAWAL_BYTES,
    Withdrawal,
    Withdrawals,
    digest_of,
    encode_epoch,
    encode_journal_head,
    encode_withdrawal,
    next_epoch,
)
from hybridkv.tiers.disk.index.records import Record
from hybridkv.tiers.disk.index.segments import Stage
from hybridkv.tiers.disk.maintenance.chore import AnyPiece, Chore, Ending, Files, Kind, Piece, StoreState
from hybridkv.tiers.files.directory import write_all


@dataclass(frozen=True, slots=True)
class WriteEpoch(Chore[None]):
    epoch: int

    def run(self, files: Files) -> None:
        data = encode_epoch(self.epoch, files.namespace.digest)
        files.namespace.directory.write_file(EPOCH_NAME, data, sync=True)


class EpochWriter(Kind[WriteEpoch, None]):
    """Nothing that names an epoch is written before it has."""

    def plan(self) -> AnyPiece | None:
        return None if self._state.is_epoch_written else Piece(self, WriteEpoch(self._state.epoch))

    def begin_next(self) -> None:
        """Nothing that is on disk now may be offered again. Not true after a crash before that is written."""
        state, segments = self._state, self._state.segments
        state.epoch = next_epoch(state.epoch)
        state.is_epoch_written = False
        segments.close_open()
        while segments.ready:
            segment = segments.ready.popleft()
            segment.stage = Stage.FULL
            segments.refile(segment)
        state.records.log.give_up()
        state.is_snapshot_owed = True

    def apply(self, chore: WriteEpoch, ending: Ending[None]) -> None:
        state = self._state
        state.is_epoch_written = state.is_epoch_written or (ending.is_done and chore.epoch == state.epoch)


@dataclass(frozen=True, slots=True)
class Append(Chore[None]):
    """Withdrawals behind the `num_before` that the journal holds."""

    num_before: int
    entries: tuple[Withdrawal, ...]

    @property
    def num_entries(self) -> int:
        """Of the journal, behind it."""
        return self.num_before + len(self.entries)

    def run(self, files: Files) -> None:
        directory = files.namespace.directory
        fd = directory.open_file(JOURNAL_NAME, os.O_RDWR)
        try:
            data = b"".join(map(encode_withdrawal, self.entries))
            write_all(directory.io, fd, data, JOURNAL_HEAD_BYTES + self.num_before * WITHDRAWAL_BYTES)
            if files.syncs:
                directory.io.fdatasync(fd)
        finally:
            directory.io.close(fd)


@dataclass(frozen=True, slots=True)
class Rewrite(Chore[None]):
    """A journal of exactly these withdrawals."""

    entries: tuple[Withdrawal, ...]

    @property
    def num_entries(self) -> int:
        """Of the journal, behind it."""
        return len(self.entries)

    def run(self, files: Files) -> None:
        data = encode_journal_head(files.namespace.digest) + b"".join(map(encode_withdrawal, self.entries))
        files.namespace.directory.write_file(JOURNAL_NAME, data, files.syncs)


AppendOrRewrite: TypeAlias = Append | Rewrite


class JournalWriter(Kind[AppendOrRewrite, None]):
    """Of one namespace, at most `DiskOptions.max_quarantined` withdrawals.

    Args:
        found: what an opening found in the journal.
    """

    def __init__(self, state: StoreState, found: Iterable[Withdrawal]) -> None:
        super().__init__(state)
        self._max_entries = state.options.max_quarantined
        self._entries = Withdrawals(self._max_entries)
        for entry in found:
            self._entries.add(entry)
        self._pending: list[Withdrawal] = []
        self._num_in_file = 0
        self._must_rewrite = True

    @property
    def has_pending(self) -> bool:
        """Whether the journal lacks something."""
        return bool(self._pending)

    def withdraw(self, record: Record) -> None:
        """Remember across restarts that what lies under the record's key now may not be offered."""
        entry = Withdrawal(digest_of(record.key), self._state.segments.next_address, record.address)
        if len(self._pending) < self._max_entries:
            self._pending.append(entry)
        else:
            self._must_rewrite = True
        self._state.tally.add("withdrawals_forgotten", self._entries.add(entry))

    def quarantine(self, key: Key, reason: str) -> bool:
        """Never offer what is stored under this key again. False when nothing is."""
        record = self._state.records.withdraw(key)
        if record is None:
            return False
        self._state.tally.quarantine(reason)
        self.withdraw(record)
        return True

    def keep(self, first_address: int) -> None:
        """Nothing lies before this address any more."""
        self._entries.keep(first_address)

    def lost(self) -> None:
        """The journal is not on disk any more."""
        self._must_rewrite = True

    def plan(self) -> AnyPiece | None:
        if not self._pending:
            return None
        is_long = self._num_in_file + len(self._pending) > 2 * self._max_entries
        if self._must_rewrite or is_long:
            return Piece(self, Rewrite(tuple(self._entries.all())))
        return Piece(self, Append(self._num_in_file, tuple(self._pending)))

    def started(self, chore: AppendOrRewrite) -> None:
        self._pending.clear()
        self._must_rewrite = False
        self._num_in_file = chore.num_entries

    def apply(self, chore: AppendOrRewrite, ending: Ending[None]) -> None:
        if not ending.is_done:  # all of it again, later
            self._must_rewrite = True
            self._pending.extend(chore.entries[-1:])
