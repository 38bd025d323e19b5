"""Which segments lie on disk: what the first pages of every rank's file say. Changes nothing there."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from hybridkv.tiers.disk.files.names import segment_name, segment_number
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.format.layout import LARGEST_FIRST_NUMBER, PAGE_BYTES
from hybridkv.tiers.disk.format.segment import SEGMENT_HEAD_USED_BYTES, decode_seal, decode_segment
from hybridkv.tiers.files.directory import Directory, stops_an_opening

logger = logging.getLogger(__name__)


class FoundSegment(NamedTuple):
    """A segment that every rank has, of the present epoch."""

    number: int
    segment_bytes: int
    end_offset: int
    """Behind its last record, or the segment's size where that is not known."""
    is_sealed: bool


class Header(NamedTuple):
    """What one rank's file of a segment says."""

    epoch: int
    segment_bytes: int
    end_offset: int | None


class NoHeader(enum.Enum):
    """Why there is none. A value."""

    USELESS = "it is not there, or damaged, or of another cache or version"
    UNAVAILABLE = "the file could not be opened, this time"


Row: TypeAlias = Sequence[Header | NoHeader]
"""Of one segment, by rank."""


class Sorted(NamedTuple):
    """Segments by what they are good for."""

    good: list[FoundSegment]
    useless: list[int]
    unavailable: list[int]


def read_headers(namespace: Namespace) -> dict[int, Row]:
    """By number, in order. `OSError` when a directory cannot be read or a file is not ours."""
    found: dict[int, list[Header | NoHeader]] = {}
    for rank, directory in enumerate(namespace.ranks):
        for name in directory.list():
            number = segment_number(name)
            if number is not None:
                row = found.setdefault(number, [NoHeader.USELESS] * namespace.num_ranks)
                row[rank] = _read_header(directory, rank, number, namespace.digest)
    return dict(sorted(found.items()))


def _read_header(directory: Directory, rank: int, number: int, digest: bytes) -> Header | NoHeader:
    try:
        fd = directory.open_file(segment_name(number), os.O_RDONLY)
    except OSError as error:
        if stops_an_opening(error):
            raise
        logger.warning("%s of rank %d cannot be opened: %s", segment_name(number), rank, error)
        return NoHeader.UNAVAILABLE
    try:
        page = read_at(directory, fd, 0, PAGE_BYTES + SEGMENT_HEAD_USED_BYTES)
        header = decode_segment(page)
        if header is None or (header.rank, header.number, header.namespace) != (rank, number, digest):
            return NoHeader.USELESS
        if directory.io.stat(fd).st_size != header.segment_bytes:
            return NoHeader.USELESS
        return Header(header.epoch, header.segment_bytes, decode_seal(page[PAGE_BYTES:], header))
    except OSError as error:
        if stops_an_opening(error):
            raise
        logger.warning("%s of rank %d cannot be read: %s", segment_name(number), rank, error)
        return NoHeader.USELESS
    finally:
        directory.io.close(fd)


def epochs_in(rows: Iterable[Row]) -> list[int]:
    """Of every header."""
    return [header.epoch for row in rows for header in row if isinstance(header, Header)]


def next_number(rows: dict[int, Row], epoch: int) -> int:
    """Behind every segment that somebody made.

    A file without a header says nothing by its name. One of another epoch holds nothing, and where its number is so
    high that an index begins anew it may be what that could not delete.
    """
    made = [
        number
        for number, row in rows.items()
        for header in row
        if isinstance(header, Header) and (header.epoch == epoch or number < LARGEST_FIRST_NUMBER)
    ]
    return max(made, default=-1) + 1


def sort_out(rows: dict[int, Row], epoch: int) -> Sorted:
    """Good is a segment that every rank has, of this epoch."""
    found = Sorted([], [], [])
    for number, row in rows.items():
        whole = [header for header in row if isinstance(header, Header) and header.epoch == epoch]
        if NoHeader.UNAVAILABLE in row:
            found.unavailable.append(number)
        elif len(whole) < len(row):
            found.useless.append(number)
        else:
            ends = [header.end_offset for header in whole]
            size = min(header.segment_bytes for header in whole)
            end = max((end for end in ends if end is not None), default=size)
            found.good.append(FoundSegment(number, size, min(end, size), None not in ends))
    return found


def read_at(directory: Directory, fd: int, offset: int, num_bytes: int) -> bytes:
    """As much as there is."""
    data = memoryview(bytearray(num_bytes))
    done = 0
    while done < num_bytes:
        got = directory.io.preadv(fd, [data[done:]], offset + done)
        if not got:
            break
        done += got
    return bytes(data[:done])
