"""What is withdrawn, and how much of it the journal on disk knows. Touches no file: it says what is to be written."""

from __future__ import annotations

from hybridkv.tiers.disk.format.journal import Withdrawal, digest_of
from hybridkv.tiers.disk.records import Record
from hybridkv.tiers.disk.tables.withdrawals import Withdrawals
from hybridkv.tiers.disk.upkeep.work import Append, Job, Rewrite


class Quarantine:
    """The withdrawn records of one namespace, at most `max_entries` of them."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries = Withdrawals(max_entries)
        self._pending: list[Withdrawal] = []
        self._num_in_file = 0
        self._must_rewrite = True

    @property
    def has_pending(self) -> bool:
        """Whether the journal lacks something."""
        return bool(self._pending)

    def restore(self, entry: Withdrawal) -> None:
        """One that an opening found in the journal."""
        self._entries.add(entry)

    def add(self, record: Record, bound: int) -> int:
        """Withdraw what lies under the record's key below `bound`. How many had to be forgotten for it."""
        entry = Withdrawal(digest_of(record.key), bound, record.address)
        if len(self._pending) < self._max_entries:
            self._pending.append(entry)
        else:
            self._must_rewrite = True
        return self._entries.add(entry)

    def keep(self, first_address: int) -> None:
        """Nothing lies before this address any more."""
        self._entries.keep(first_address)

    def job(self) -> Job | None:
        """What is to be written, None when the journal lacks nothing."""
        if not self._pending:
            return None
        is_long = self._num_in_file + len(self._pending) > 2 * self._max_entries
        if self._must_rewrite or is_long:
            return Rewrite(tuple(self._entries.all()))
        return Append(self._num_in_file, tuple(self._pending))

    def started(self, job: Append | Rewrite) -> None:
        """This job of `job` will be run."""
        self._pending.clear()
        self._must_rewrite = False
        self._num_in_file = len(job.entries) + (job.num_before if isinstance(job, Append) else 0)

    def failed(self, job: Append | Rewrite) -> None:
        """It could not be written: all of it again, later."""
        self.lost()
        self._pending.extend(job.entries[-1:])

    def lost(self) -> None:
        """The journal is not on disk any more."""
        self._must_rewrite = True
