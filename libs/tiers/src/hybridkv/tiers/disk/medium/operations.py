"""What a medium is asked to do, in which words it fails, and how Python carries it out. Starts no thread."""

from __future__ import annotations

import errno
import logging
from functools import cache, partial
from typing import Literal, NamedTuple

from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, Ticket
from hybridkv.tiers.disk.files.record_io import FilePosition, RecordReader, RecordWriter, Scratch, ShortReadError
from hybridkv.tiers.disk.format.checksum import checksum_of
from hybridkv.tiers.disk.format.layout import number_of, offset_of, record_bytes
from hybridkv.tiers.disk.format.record import RecordHeader, encode_record, verify
from hybridkv.tiers.disk.medium.segment_cache import SegmentCache
from hybridkv.tiers.disk.options import DiskOptions, Fsync
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.shortage import is_shortage

logger = logging.getLogger(__name__)


class Operation(NamedTuple):
    """One store or load."""

    ticket: Ticket
    key: Key
    address: int
    num_bytes: int
    views: list[memoryview]
    is_store: bool

    def continues(self, before: Operation) -> bool:
        """Whether its record begins where the other one's ends, in the same segment."""
        follows = self.address == before.address + record_bytes(before.num_bytes)
        return follows and number_of(self.address) == number_of(before.address)


class DirectMode:
    """Whether segment files are opened with O_DIRECT: as the options say, until the file system says no."""

    def __init__(self, direct: bool | Literal["auto"]) -> None:
        self._may_fall_back = direct == "auto"
        self.is_on = direct is not False

    def falls_back(self, error: OSError) -> bool:
        """Whether to try again through the page cache, now and for ever."""
        if error.errno != errno.EINVAL or not self._may_fall_back:
            return False
        if self.is_on:
            logger.info("this file system has no O_DIRECT (%s): the disk tier goes through the page cache", error)
        self.is_on = False
        return True


class Headers:
    """Headers of the records of one rank."""

    def __init__(self, namespace: bytes, rank: int) -> None:
        self._namespace = namespace
        self._rank = rank

    def of(self, operation: Operation, payload_checksum: bytes) -> RecordHeader:
        return RecordHeader(
            self._rank, operation.address, operation.num_bytes, self._namespace, payload_checksum, operation.key
        )


class RecordExecutor:
    """Carries out a run of adjacent stores or loads in one segment. Used by every thread of a medium."""

    def __init__(
        self, io: FileIO, cache: SegmentCache, headers: Headers, options: DiskOptions, direct: DirectMode
    ) -> None:
        self._io = io
        self._cache = cache
        self._headers = headers
        self._batch_bytes = options.batch_bytes
        self._syncs = options.fsync is Fsync.ALWAYS
        self._direct = direct

    def run(self, batch: list[Operation], scratch: Scratch) -> list[Completion]:
        """One completion for each operation of a run that is all stores or all loads."""
        is_direct = self._direct.is_on
        try:
            if batch[0].is_store:
                return self._store(batch, scratch, is_direct)
            return self._load(batch, scratch, is_direct)
        except OSError as error:
            if is_direct and self._direct.falls_back(error):
                return self.run(batch, scratch)
            if len(batch) > 1:  # one bad place must not fail its neighbours
                return [completion for operation in batch for completion in self.run([operation], scratch)]
            if not is_shortage(error):
                self._cache.forget(number_of(batch[0].address))
            return [Completion(batch[0].ticket, failure_of(batch[0], error))]
        except MemoryError as error:
            return [Completion(operation.ticket, failure_of(operation, error)) for operation in batch]
        except Exception as error:  # a thread that ends would leave everybody waiting
            logger.exception("a disk operation could not be carried out")
            failure = Failure(FailureReason.IO, f"{type(error).__name__}: {error}")
            return [Completion(operation.ticket, failure) for operation in batch]

    def _store(self, batch: list[Operation], scratch: Scratch, is_direct: bool) -> list[Completion]:
        first = batch[0]
        completions = []
        with self._cache.opened(number_of(first.address), is_direct) as segment:
            num_failed = segment.syncs.num_failed
            position = FilePosition(self._io, segment.fd, offset_of(first.address), is_direct)
            writer = RecordWriter(position, scratch, self._batch_bytes)
            for operation in batch:
                payload_checksum = checksum_of(operation.views)
                writer.add(encode_record(self._headers.of(operation, payload_checksum)), operation.views)
                completions.append(Completion(operation.ticket, checksum=payload_checksum))
            writer.flush()
            if self._syncs:
                segment.syncs.sync(partial(self._io.fdatasync, segment.fd), num_failed)
        return completions

    def _load(self, batch: list[Operation], scratch: Scratch, is_direct: bool) -> list[Completion]:
        first = batch[0]
        with self._cache.opened(number_of(first.address), is_direct) as segment:
            position = FilePosition(self._io, segment.fd, offset_of(first.address), is_direct)
            reader = RecordReader(position, scratch, self._batch_bytes)
            for operation in batch:
                reader.add(operation.views)
            reader.flush()
        return [self._verified(operation, page) for operation, page in zip(batch, reader.headers, strict=True)]

    def _verified(self, operation: Operation, page: bytes) -> Completion:
        expected = self._headers.of(operation, b"")
        failure, payload_checksum = verify(expected, page, operation.views)
        return Completion(operation.ticket, failure, payload_checksum)


def failure_of(operation: Operation, error: OSError | MemoryError) -> Failure:
    """In words, what the system said to an operation. What this process lacks says nothing about what is stored."""
    where = f"segment {number_of(operation.address)}"
    if isinstance(error, (FileNotFoundError, ShortReadError)) and not operation.is_store:
        return Failure(FailureReason.MISSING, f"{where}: {error.strerror}")
    number, words = (error.errno, error.strerror) if isinstance(error, OSError) else (errno.ENOMEM, None)
    name = errno.errorcode.get(number or 0, type(error).__name__)
    detail = f"{where}: {name}: {words or error}"
    if not is_shortage(error):
        return Failure(FailureReason.IO, detail)
    _say_what_is_short(name)
    return Failure(FailureReason.BUSY, detail)


@cache
def _say_what_is_short(name: str) -> None:
    """Once in a process."""
    logger.warning(
        "this process runs short (%s): the disk tier leaves alone what it cannot try, and loses nothing by it; "
        "hint: look at the limits of open files, threads and memory",
        name,
    )
