"""Inspection of a store's directory without its engine: reports namespaces, finds damage, deletes namespaces.

Reads a directory with the code that an engine uses at its start (`recover`). `report` and `verify` take no lock, so
they work beside a running engine. Then numbers may be a few seconds old, and records that the engine deletes meanwhile
may look damaged. Only `delete` changes files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from hybridkv.hashing import Fingerprint
from hybridkv.tiers.contract import Failure, FailureReason
from hybridkv.tiers.disk.files.locks import find_holder
from hybridkv.tiers.disk.files.other_files import delete_namespace
from hybridkv.tiers.disk.format.layout import (
    FINGERPRINT_NAME,
    LOCK_NAME,
    PAGE_BYTES,
    address_of,
    is_namespace,
    number_of,
    offset_of,
    rank_name,
    rank_number,
    segment_name,
)
from hybridkv.tiers.disk.format.segment import RECORD_HEAD_BYTES, RecordHeader, verify
from hybridkv.tiers.disk.index.found import FoundRecord
from hybridkv.tiers.disk.recovery.recovery import recover
from hybridkv.tiers.files.directory import Directory, directory_error, read_at, root_path
from hybridkv.tiers.files.file_io import FileIO

MAX_METADATA_BYTES = 1 << 34
MAX_SNAPSHOT_RECORDS = 1 << 27


class NamespaceReport(msgspec.Struct, frozen=True):
    """One cache of a store's directory.

    Args:
        name: digest of the fingerprint, in hexadecimal.
        holder: process that has the namespace open; "" if /proc shows none.
        facts: facts of the fingerprint; empty if the file is missing or unreadable.
        opened_s: time of the last start, in seconds since 1970; 0 if unknown.
        disk_bytes: space on disk.
        num_records: chunks that a start would offer.
        record_bytes: payload of these chunks, over all ranks.
        num_segments: segments with valid headers on all ranks.
        num_useless_segments: segments that are damaged, cleared, of another version, or not on every rank.
        num_unreadable_segments: segments that this process cannot open.
        num_quarantined: withdrawals in the quarantine journal.
        problem: reason why the namespace cannot be read, with all counts 0; "" if it can be read.
    """

    name: str
    holder: str
    facts: dict[str, str]
    opened_s: float
    disk_bytes: int
    num_records: int = 0
    record_bytes: int = 0
    num_segments: int = 0
    num_useless_segments: int = 0
    num_unreadable_segments: int = 0
    num_quarantined: int = 0
    problem: str = ""


class Damage(NamedTuple):
    """Damaged record: a load would fail."""

    key: bytes
    rank: int
    failure: Failure


class InspectedNamespace:
    """Directory of one namespace, opened for reads.

    Args:
        root: directory of the store.
        name: digest of the fingerprint, in hexadecimal.

    Raises:
        OSError: a directory cannot be opened.
    """

    def __init__(self, root: Directory, name: str) -> None:
        self.digest = bytes.fromhex(name)
        self.path = f"{root.path}/{name}"
        self.directory = root.child(name, create=False)
        self.ranks: list[Directory] = []
        try:
            num_ranks = sum(rank_number(each) is not None for each in self.directory.list())
            for rank in range(num_ranks):
                self.ranks.append(self.directory.child(rank_name(rank), create=False))
        except OSError:
            self.close()
            raise

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def close(self) -> None:
        for directory in [*self.ranks, self.directory]:
            directory.close()


class StoreInspector:
    """Inspector of a store's directory.

    Args:
        path: `path` of the disk tier.
        io: system calls.

    Raises:
        TierConfigurationError: the directory does not exist or cannot be used.
    """

    def __init__(self, path: str, io: FileIO | None = None) -> None:
        path = root_path(path)
        try:
            self._root = Directory.root(io or FileIO(), path, create=False)
        except OSError as error:
            raise directory_error(path, error) from error

    def names(self) -> list[str]:
        """Names of the namespaces, in order of their last start, newest first."""
        names = [name for name in self._root.list() if is_namespace(name)]
        return sorted(names, key=lambda name: (-self._opened_s(name), name))

    def report(self, name: str) -> NamespaceReport:
        """State of one namespace. Raises no `OSError`: see `problem`."""
        opened_s = self._opened_s(name)
        try:
            namespace = InspectedNamespace(self._root, name)
        except OSError as error:
            return NamespaceReport(name, "", {}, opened_s, 0, problem=str(error))
        try:
            disk_bytes, holder = 0, ""
            facts = _facts(namespace)
            try:
                holder = self._holder(name, namespace)
                disk_bytes = namespace.directory.disk_bytes()
                found = recover(namespace, MAX_METADATA_BYTES, MAX_SNAPSHOT_RECORDS)
            except OSError as error:
                return NamespaceReport(name, holder, facts, opened_s, disk_bytes, problem=str(error))
            return NamespaceReport(
                name,
                holder,
                facts,
                opened_s,
                disk_bytes,
                num_records=len(found.records),
                record_bytes=int(found.records.columns()[2].sum()) * namespace.num_ranks,
                num_segments=len(found.segments),
                num_useless_segments=len(found.useless),
                num_unreadable_segments=len(found.unavailable),
                num_quarantined=len(found.withdrawals),
            )
        finally:
            namespace.close()

    def verify(self, name: str) -> Iterator[tuple[int, int, Damage | None]]:
        """Read each record on each rank and compare its checksum.

        Yields:
            Number of records read so far, number of all records (each rank counts), and the damage of this record, or
            None.

        Raises:
            OSError: the namespace cannot be read.
        """
        namespace = InspectedNamespace(self._root, name)
        try:
            found = recover(namespace, MAX_METADATA_BYTES, MAX_SNAPSHOT_RECORDS)
            keys, addresses, payload_bytes = found.records.columns()
            del found
            order = np.argsort(addresses)
            done, total = 0, len(keys) * namespace.num_ranks
            for rank in range(namespace.num_ranks):
                records = (FoundRecord(keys[i], int(addresses[i]), int(payload_bytes[i])) for i in order)
                for damage in _verify_rank(namespace, rank, records):
                    done += 1
                    yield done, total, damage
        finally:
            namespace.close()

    def delete(self, name: str) -> bool:
        """Delete a namespace. False if a process has it open, or nothing could be deleted."""
        return delete_namespace(self._root, name)

    def close(self) -> None:
        self._root.close()

    def _opened_s(self, name: str) -> float:
        try:
            return self._root.io.stat_name(f"{name}/{LOCK_NAME}", self._root.fd).st_mtime
        except OSError:
            return 0.0

    def _holder(self, name: str, namespace: InspectedNamespace) -> str:
        """Process that holds the lock of the directory or of the file LOCK; "" if none is found."""
        stats = [self._root.io.stat(namespace.directory.fd)]
        try:
            stats.append(self._root.io.stat_name(f"{name}/{LOCK_NAME}", self._root.fd))
            named = (namespace.directory.read_file(LOCK_NAME) or b"").decode(errors="replace").strip()
        except OSError:
            named = ""
        for file in stats:
            holder = find_holder(file, int(named) if named.isdecimal() else None)
            if holder is not None and holder.pid != os.getpid():
                return f"process {holder.pid} ({holder.command})"
        return ""


def _facts(namespace: InspectedNamespace) -> dict[str, str]:
    try:
        data = namespace.directory.read_file(FINGERPRINT_NAME)
        return {} if data is None else dict(msgspec.json.decode(data, type=Fingerprint).facts)
    except (OSError, ValueError, OverflowError, RecursionError):
        return {}


def _verify_rank(namespace: InspectedNamespace, rank: int, records: Iterable[FoundRecord]) -> Iterator[Damage | None]:
    directory, number, fd = namespace.ranks[rank], -1, -1
    try:
        for record in records:
            try:
                if number_of(record.address) != number:
                    if fd >= 0:
                        directory.io.close(fd)
                    fd = -1
                    number = number_of(record.address)
                    fd = directory.open_file(segment_name(number), os.O_RDONLY)
                failure = _failure(directory, fd, rank, namespace.digest, record)
            except OSError as error:
                failure = Failure(FailureReason.IO, str(error))
                number = -1
            yield None if failure is None else Damage(record.key, rank, failure)
    finally:
        if fd >= 0:
            directory.io.close(fd)


def _failure(directory: Directory, fd: int, rank: int, digest: bytes, record: FoundRecord) -> Failure | None:
    offset = offset_of(record.address)
    page = read_at(directory.io, fd, offset, RECORD_HEAD_BYTES)
    payload = read_at(directory.io, fd, offset + PAGE_BYTES, record.payload_bytes)
    address = address_of(number_of(record.address), offset)
    expected = RecordHeader(rank, address, record.payload_bytes, digest, b"", record.key)
    return verify(expected, page, [memoryview(payload)])[0]
