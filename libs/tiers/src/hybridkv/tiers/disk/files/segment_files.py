"""Operations on segment files, on all ranks: create, seal, copy records, delete.

Runs in the janitor's thread; `make_room` also runs at the start of an index. Errors are `OSError`s.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from typing import NamedTuple

from hybridkv.tiers.contract import FailureReason, Key
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.files.other_files import delete_stalest, other_bytes
from hybridkv.tiers.disk.format.layout import (
    LARGEST_NUMBER,
    PAGE_BYTES,
    number_of,
    offset_of,
    record_bytes,
    segment_name,
)
from hybridkv.tiers.disk.format.segment import (
    RECORD_HEAD_BYTES,
    RecordHeader,
    SegmentHeader,
    encode_record,
    encode_seal,
    encode_segment,
    verify,
)
from hybridkv.tiers.files.directory import Directory, read_into, write_all


class Relocation(NamedTuple):
    """Copy of one record by compaction: source, target and size."""

    key: Key
    old_address: int
    new_address: int
    payload_bytes: int


class SegmentFiles:
    """Segment files of one namespace.

    Args:
        namespace: open namespace.
        capacity_bytes: limit of all files below the root.
        syncs: True: new data is synced before other data on disk refers to it.
    """

    def __init__(self, namespace: Namespace, capacity_bytes: int, syncs: bool) -> None:
        self._namespace = namespace
        self._capacity_bytes = capacity_bytes
        self._syncs = syncs
        self._num_deleted_namespaces = 0

    def create(self, number: int, epoch: int, segment_bytes: int, own_bytes: int) -> None:
        """Create a segment on every rank and allocate its space. First calls `make_room`. `own_bytes`: size of this
        namespace, the new segment included."""
        if number > LARGEST_NUMBER:
            raise OSError(errno.EOVERFLOW, "the numbers of segments are used up; the next start begins anew")
        self.make_room(own_bytes)
        made: list[Directory] = []
        try:
            for rank, directory in enumerate(self._namespace.ranks):
                made.append(directory)
                self._create(directory, SegmentHeader(rank, number, epoch, segment_bytes, self._namespace.digest))
        except OSError:
            for directory in made:
                self._discard(directory, number)
            raise

    def _create(self, directory: Directory, header: SegmentHeader) -> None:
        io = directory.io
        fd = directory.open_file(segment_name(header.number), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            io.allocate(fd, header.segment_bytes)
            write_all(io, fd, encode_segment(header), 0)
            if self._syncs:
                io.fsync(fd)
                io.fsync(directory.fd)
        finally:
            io.close(fd)

    def make_room(self, own_bytes: int) -> None:
        """Delete stale namespaces until `own_bytes` and the other namespaces fit into the capacity. Error EDQUOT if
        they do not fit."""
        while other_bytes(self._namespace) + own_bytes > self._capacity_bytes:
            if not delete_stalest(self._namespace):
                words = "caches that are open, or files that are not the tier's, take up the rest of the capacity"
                raise OSError(errno.EDQUOT, words)
            self._num_deleted_namespaces += 1

    def take_deleted_namespaces(self) -> int:
        """Number of namespaces deleted since the last call."""
        taken, self._num_deleted_namespaces = self._num_deleted_namespaces, 0
        return taken

    def seal(self, number: int, epoch: int, end_offset: int) -> None:
        """Write the seal on every rank: each record of the segment is whole or withdrawn."""
        for rank, directory in enumerate(self._namespace.ranks):
            with_size = SegmentHeader(rank, number, epoch, 0, self._namespace.digest)
            fd = directory.open_file(segment_name(number), os.O_RDWR)
            try:
                if self._syncs:
                    directory.io.fdatasync(fd)
                write_all(directory.io, fd, encode_seal(with_size, end_offset), PAGE_BYTES)
            finally:
                directory.io.close(fd)

    def drop(self, number: int) -> None:
        """Delete a segment on every rank. Frees the space even while a medium has the file open.

        Keeps the bytes of a file that has another hard link.
        """
        self._namespace.require_own()
        for directory in self._namespace.ranks:
            self._drop(directory, number)

    def _drop(self, directory: Directory, number: int) -> None:
        try:
            fd = directory.open_file(segment_name(number), os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            directory.remove_file(segment_name(number))
            # Another hard link is a copy that a user made.
            if not directory.io.stat(fd).st_nlink:
                directory.io.truncate(fd, 0)
        finally:
            directory.io.close(fd)

    def _discard(self, directory: Directory, number: int) -> None:
        """Delete one rank's file of a partly created segment. Unlike `drop`, ignores errors and opens no file."""
        with contextlib.suppress(OSError):
            directory.remove_file(segment_name(number))

    def copy(self, relocations: Iterable[Relocation]) -> list[tuple[Relocation, FailureReason | None]]:
        """Verify and copy records on every rank. Returns the failure of each record; None if it was copied."""
        failures: dict[Relocation, FailureReason | None] = dict.fromkeys(relocations)
        memory = memoryview(bytearray(max(record_bytes(relocation.payload_bytes) for relocation in failures)))
        for rank, directory in enumerate(self._namespace.ranks):
            with _OpenFiles(directory) as open_file:
                for relocation, failure in failures.items():
                    if failure is None:
                        failures[relocation] = self._try_copy(relocation, rank, open_file, memory)
                if self._syncs:
                    open_file.sync()
        return list(failures.items())

    def _try_copy(
        self, relocation: Relocation, rank: int, open_file: _OpenFiles, memory: memoryview
    ) -> FailureReason | None:
        """`_copy` with EIO as a failure of this record. Every other `OSError` ends the whole copy."""
        try:
            return self._copy(relocation, rank, open_file, memory)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return FailureReason.IO

    def _copy(
        self, relocation: Relocation, rank: int, open_file: _OpenFiles, memory: memoryview
    ) -> FailureReason | None:
        io, end = self._namespace.io, PAGE_BYTES + relocation.payload_bytes
        record = memory[: record_bytes(relocation.payload_bytes)]
        page, payload, padding = record[:PAGE_BYTES], record[PAGE_BYTES:end], record[end:]
        source = open_file(number_of(relocation.old_address))
        if read_into(io, source, [record[:end]], offset_of(relocation.old_address)) < end:
            return FailureReason.MISSING
        digest = self._namespace.digest
        header = RecordHeader(rank, relocation.old_address, relocation.payload_bytes, digest, b"", relocation.key)
        failure, checksum = verify(header, bytes(page[:RECORD_HEAD_BYTES]), [payload])
        if failure is not None or checksum is None:
            return failure.reason if failure else FailureReason.IO
        moved = header._replace(address=relocation.new_address, payload_checksum=checksum)
        page[:] = encode_record(moved).ljust(PAGE_BYTES, b"\0")
        padding[:] = bytes(len(padding))
        write_all(io, open_file(number_of(relocation.new_address)), record, offset_of(relocation.new_address))
        return None


class _OpenFiles:
    """Open segment files of one rank, for the duration of a copy."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._fds: dict[int, int] = {}

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in self._fds.values():
            self._directory.io.close(fd)

    def __call__(self, number: int) -> int:
        if number not in self._fds:
            self._fds[number] = self._directory.open_file(segment_name(number), os.O_RDWR)
        return self._fds[number]

    def sync(self) -> None:
        for fd in self._fds.values():
            self._directory.io.fdatasync(fd)
