"""Inspects, verifies and clears the directories of disk tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from hybridkv.connectors.config import format_size
from hybridkv.tiers.disk.inspection import NamespaceReport, StoreInspector

MAX_DAMAGES: Final = 1000
"""Maximum number of damaged records that are listed. All are counted."""
SHORT_NAME_LENGTH: Final = 12


class DamagedRecord(msgspec.Struct, frozen=True):
    """A record that a load would refuse: its key in hexadecimal, its rank, and the reason."""

    key: str
    rank: int
    reason: str
    detail: str


class VerifyReport(msgspec.Struct, frozen=True):
    """Result for one namespace.

    Args:
        name: digest of the namespace's fingerprint, in hexadecimal.
        num_records: records to read, over all ranks; all of them were read if there is no `problem`.
        num_damaged: records that a load would refuse.
        damages: the damaged records, at most `MAX_DAMAGES`.
        num_lost_segments: segments that are damaged, cleared, of another version, not on every rank, or unreadable;
            their records were not read.
        problem: reason why the namespace cannot be read; "" if it can be read.
    """

    name: str
    num_records: int
    num_damaged: int
    damages: list[DamagedRecord]
    num_lost_segments: int = 0
    problem: str = ""

    @property
    def is_intact(self) -> bool:
        return not (self.num_damaged or self.num_lost_segments or self.problem)


def inspect(path: str) -> list[NamespaceReport]:
    """All namespaces of a directory, the most recently opened first.

    Raises:
        TierConfigurationError: the directory cannot be used.
    """
    inspector = StoreInspector(path)
    try:
        return [inspector.report(name) for name in inspector.names()]
    finally:
        inspector.close()


def verify(path: str, on_progress: Callable[[str, int, int], None]) -> list[VerifyReport]:
    """Reads each record of each namespace.

    Args:
        path: directory of the disk tier.
        on_progress: called with the name of a namespace, the number of records read, and the number of its records.

    Raises:
        TierConfigurationError: the directory cannot be used.
    """
    inspector = StoreInspector(path)
    try:
        reports = []
        for name in inspector.names():
            num_records = num_damaged = 0
            damages = []
            state = inspector.report(name)
            problem, num_lost = state.problem, state.num_useless_segments + state.num_unreadable_segments
            try:
                for done, total, damage in inspector.verify(name):
                    num_records = total
                    if damage is not None:
                        num_damaged += 1
                        if num_damaged <= MAX_DAMAGES:
                            why = damage.failure
                            damages.append(DamagedRecord(damage.key.hex(), damage.rank, str(why.reason), why.detail))
                    on_progress(name, done, total)
            except OSError as error:
                problem = str(error)
            reports.append(VerifyReport(name, num_records, num_damaged, damages, num_lost, problem))
        return reports
    finally:
        inspector.close()


def not_opened_for(reports: Iterable[NamespaceReport], days: float) -> list[NamespaceReport]:
    """Namespaces that are not open now and were not opened in the last `days` days."""
    since_s = time.time() - days * 86_400
    return [report for report in reports if report.opened_s < since_s and not report.holder]


def garbage(path: str, days: float | None) -> list[NamespaceReport]:
    """Readable namespaces without a chunk, and namespaces not opened for `days` days. Without those that are open now.

    Raises:
        TierConfigurationError: the directory cannot be used.
    """
    reports = [report for report in inspect(path) if not report.holder]
    old = {report.name for report in not_opened_for(reports, days)} if days is not None else set()
    return [report for report in reports if report.name in old or (not report.num_records and not report.problem)]


def clear(path: str, names: Iterable[str]) -> list[str]:
    """Deletes namespaces. Returns the names of namespaces that are open in an engine or cannot be deleted.

    Raises:
        TierConfigurationError: the directory cannot be used.
    """
    inspector = StoreInspector(path)
    try:
        return [name for name in names if not inspector.delete(name)]
    finally:
        inspector.close()


def namespaces_text(reports: Sequence[NamespaceReport]) -> str:
    """Text about namespaces, for people. Shows only the facts that differ between namespaces."""
    if not reports:
        return "no cache"
    facts = dict.fromkeys(fact for report in reports for fact in report.facts)
    differing = [fact for fact in facts if len({report.facts.get(fact) for report in reports}) > 1]
    lines = []
    for report in reports:
        opened = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.opened_s)) if report.opened_s else "unknown"
        lines.append(
            f"{report.name[:SHORT_NAME_LENGTH]}  last opened {opened}  {format_size(report.disk_bytes)} on disk"
        )
        if report.problem:
            lines.append(f"  cannot be read: {report.problem}")
            continue
        lines.append(
            f"  {report.num_records:,} chunks, {format_size(report.record_bytes)}, in {report.num_segments} segments"
        )
        if report.holder:
            lines.append(f"  open in {report.holder}")
        for number, words in (
            (report.num_useless_segments, "segments are damaged, cleared or of another version"),
            (report.num_unreadable_segments, "segments cannot be opened"),
            (report.num_quarantined, "withdrawals in the quarantine journal"),
        ):
            if number:
                lines.append(f"  {number} {words}")
        lines += [f"  {fact}: {report.facts.get(fact, 'unknown')}" for fact in differing]
    return "\n".join(lines)
