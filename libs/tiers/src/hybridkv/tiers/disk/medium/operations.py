"""What a medium is asked to do, and in which words it fails. Starts no thread."""

from __future__ import annotations

import errno
import logging
from functools import cache
from typing import Literal, NamedTuple

from hybridkv.tiers.contract import Failure, FailureReason, Key, Ticket
from hybridkv.tiers.disk.files.record_io import ShortReadError
from hybridkv.tiers.disk.format.layout import number_of, record_bytes
from hybridkv.tiers.disk.format.record import RecordHeader
from hybridkv.tiers.shortage import is_shortage

logger = logging.getLogger(__name__)

CLOSED = Failure(FailureReason.CLOSED, "the medium was closed")
NO_THREAD = Failure(FailureReason.BUSY, "no thread could be started")


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


def busy(num_waiting: int) -> Failure:
    return Failure(FailureReason.BUSY, f"{num_waiting} operations wait already")
