"""Counts of the disk tier, in addition to `TierCounts`."""

from __future__ import annotations

import msgspec


class DiskCounts(msgspec.Struct, frozen=True):
    """Counts since the last `take_disk_counts`. `merge` adds, so order and grouping do not matter."""

    moved_records: int = 0
    moved_bytes: int = 0
    """Bytes of the moved records, over all ranks, headers included. Divided by the stored bytes: the additional write
    amplification, without copies that were discarded."""
    segments_created: int = 0
    segments_dropped: int = 0
    snapshots: int = 0
    namespaces_deleted: int = 0
    withdrawals_forgotten: int = 0
    """Withdrawn records that a restart may offer again, because more than `max_quarantined` were withdrawn."""
    quarantined: dict[str, int] = {}
    """Records withdrawn by `invalidate` or after a failed copy, by reason. Aborted records are not counted."""
    failures: dict[str, int] = {}
    """Failed file work by chore and error name, for example `create: ENOSPC`."""

    def merge(self, other: DiskCounts) -> DiskCounts:
        return msgspec.structs.replace(
            self, **{name: _add(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__}
        )


def _add(mine: int | dict[str, int], other: int | dict[str, int]) -> int | dict[str, int]:
    if isinstance(mine, dict) and isinstance(other, dict):
        return {name: mine.get(name, 0) + other.get(name, 0) for name in sorted({*mine, *other})}
    assert isinstance(mine, int) and isinstance(other, int)
    return mine + other


class DiskTally:
    """Mutable `DiskCounts`."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._numbers: dict[str, int] = {}
        self._quarantined: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        self._numbers[name] = self._numbers.get(name, 0) + amount

    def quarantine(self, reason: str) -> None:
        self._quarantined[reason] = self._quarantined.get(reason, 0) + 1

    def fail(self, problem: str) -> None:
        self._failures[problem] = self._failures.get(problem, 0) + 1

    def take(self) -> DiskCounts:
        counts = DiskCounts(**self._numbers, quarantined=self._quarantined, failures=self._failures)
        self._reset()
        return counts
