"""Chores that write the epoch and the quarantine journal: a restart then offers no cleared or withdrawn records."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.layout import EPOCH_NAME, JOURNAL_NAME
from hybridkv.tiers.disk.format.withdrawals import (
    JOURNAL_ENTRY_BYTES,
    JOURNAL_HEAD_BYTES,
    JournalEntry,
    Withdrawals,
    digest_of,
    encode_epoch,
    encode_journal_entry,
    encode_journal_head,
    next_epoch,
)
from hybridkv.tiers.disk.index.records import Record
from hybridkv.tiers.disk.index.segments import SegmentStage
from hybridkv.tiers.disk.maintenance.chore import (
    AnyDueChore,
    Chore,
    ChoreKind,
    DueChore,
    Ending,
    StoreFiles,
    StoreState,
)
from hybridkv.tiers.files.directory import write_all


@dataclass(frozen=True, slots=True)
class WriteEpoch(Chore[None]):
    epoch: int

    def run(self, files: StoreFiles) -> None:
        data = encode_epoch(self.epoch, files.namespace.digest)
        files.namespace.directory.write_file(EPOCH_NAME, data, sync=True)


class EpochWriter(ChoreKind[WriteEpoch, None]):
    """Writes the epoch. Other files with a new epoch are written only after this file."""

    def plan(self) -> AnyDueChore | None:
        return None if self._state.is_epoch_written else DueChore(self, WriteEpoch(self._state.epoch))

    def begin_next(self) -> None:
        """Begin a new epoch. After a crash before the epoch is on disk, the old epoch is valid again."""
        state, segments = self._state, self._state.segments
        state.epoch = next_epoch(state.epoch)
        state.is_epoch_written = False
        segments.close_open()
        while segments.ready:
            segment = segments.ready.popleft()
            segment.stage = SegmentStage.FULL
            segments.refile(segment)
        state.records.log.drop_until_snapshot()
        state.is_snapshot_wanted = True

    def apply(self, chore: WriteEpoch, ending: Ending[None]) -> None:
        state = self._state
        state.is_epoch_written = state.is_epoch_written or (ending.is_success and chore.epoch == state.epoch)


@dataclass(frozen=True, slots=True)
class Append(Chore[None]):
    """Appends withdrawals after the `num_before` entries of the journal."""

    num_before: int
    entries: tuple[JournalEntry, ...]

    @property
    def num_entries(self) -> int:
        """Number of entries in the journal after this chore."""
        return self.num_before + len(self.entries)

    def run(self, files: StoreFiles) -> None:
        directory = files.namespace.directory
        fd = directory.open_file(JOURNAL_NAME, os.O_RDWR)
        try:
            data = b"".join(map(encode_journal_entry, self.entries))
            write_all(directory.io, fd, data, JOURNAL_HEAD_BYTES + self.num_before * JOURNAL_ENTRY_BYTES)
            if files.syncs:
                directory.io.fdatasync(fd)
        finally:
            directory.io.close(fd)


@dataclass(frozen=True, slots=True)
class Rewrite(Chore[None]):
    """Writes a new journal with exactly these withdrawals."""

    entries: tuple[JournalEntry, ...]

    @property
    def num_entries(self) -> int:
        """Number of entries in the journal after this chore."""
        return len(self.entries)

    def run(self, files: StoreFiles) -> None:
        data = encode_journal_head(files.namespace.digest) + b"".join(map(encode_journal_entry, self.entries))
        files.namespace.directory.write_file(JOURNAL_NAME, data, files.syncs)


AppendOrRewrite: TypeAlias = Append | Rewrite


class JournalWriter(ChoreKind[AppendOrRewrite, None]):
    """Writes the journal of one namespace. Keeps at most `DiskOptions.max_quarantined` withdrawals, the last ones; the
    file has at most twice as many entries.

    Args:
        found: withdrawals that recovery found in the journal.
    """

    def __init__(self, state: StoreState, found: Iterable[JournalEntry]) -> None:
        super().__init__(state)
        self._max_entries = state.options.max_quarantined
        self._entries = Withdrawals(self._max_entries)
        for entry in found:
            self._entries.add(entry)
        self._pending: list[JournalEntry] = []
        self._num_in_file = 0
        self._must_rewrite = True

    @property
    def has_pending(self) -> bool:
        """True if there are withdrawals that no started chore writes."""
        return bool(self._pending)

    def withdraw(self, record: Record) -> None:
        """Queue the withdrawal of a record, so that a restart does not offer it."""
        entry = JournalEntry(digest_of(record.key), self._state.segments.next_address, record.address)
        if len(self._pending) < self._max_entries:
            self._pending.append(entry)
        else:
            self._must_rewrite = True
        self._state.tally.add("withdrawals_forgotten", self._entries.add(entry))

    def quarantine(self, key: Key, reason: str) -> bool:
        """Delete the present record of this key, also for restarts. False if there is none."""
        record = self._state.records.withdraw(key)
        if record is None:
            return False
        self._state.tally.quarantine(reason)
        self.withdraw(record)
        return True

    def drop_below(self, first_address: int) -> None:
        """Drop withdrawals that cover only addresses below this one: no records exist there any more."""
        self._entries.drop_below(first_address)

    def lost(self) -> None:
        """Mark the journal as missing on disk."""
        self._must_rewrite = True

    def plan(self) -> AnyDueChore | None:
        if not self._pending:
            return None
        is_long = self._num_in_file + len(self._pending) > 2 * self._max_entries
        if self._must_rewrite or is_long:
            return DueChore(self, Rewrite(tuple(self._entries.all())))
        return DueChore(self, Append(self._num_in_file, tuple(self._pending)))

    def started(self, chore: AppendOrRewrite) -> None:
        self._pending.clear()
        self._must_rewrite = False
        self._num_in_file = chore.num_entries

    def apply(self, chore: AppendOrRewrite, ending: Ending[None]) -> None:
        if not ending.is_success:  # later, write the whole journal again
            self._must_rewrite = True
            self._pending.extend(chore.entries[-1:])
