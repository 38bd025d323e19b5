"""Moves records between memory and a segment file in few calls: adjacent ones together, aligned where needed.

With O_DIRECT, memory is used directly if every part begins on a page and is whole pages long, except for the end of the
last part; other memory goes through page-aligned memory of the thread, piece by piece. Verifies nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hybridkv.tiers.disk.format.layout import PAGE_BYTES, round_up
from hybridkv.tiers.disk.format.segment import RECORD_HEAD_BYTES
from hybridkv.tiers.disk.medium.disk_medium import ShortReadError
from hybridkv.tiers.files.file_io import FileIO

MAX_PIECES = 1000
"""Per call; the system takes 1024."""
_ZEROS = bytes(PAGE_BYTES)


class Scratch:
    """Page-aligned memory of one thread, allocated in order and freed all at once. `num_bytes`: whole pages."""

    def __init__(self, num_bytes: int) -> None:
        self._view = memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._used = 0

    @property
    def free_bytes(self) -> int:
        return len(self._view) - self._used

    def take(self, num_bytes: int) -> memoryview:
        """Allocates whole pages for `num_bytes`."""
        view = self._view[self._used : self._used + round_up(num_bytes)]
        self._used += len(view)
        return view

    def reset(self) -> None:
        self._used = 0


class FilePosition(NamedTuple):
    """Position at which a run of records begins."""

    io: FileIO
    fd: int
    offset: int
    is_direct: bool


class _Run:
    """A run of bytes in a file that is moved piece by piece, in calls of about `batch_bytes`."""

    def __init__(self, position: FilePosition, scratch: Scratch, batch_bytes: int) -> None:
        self.io, self.fd, self.offset, self.is_direct = position
        self.scratch = scratch
        self.batch_bytes = batch_bytes
        self.pieces: list[memoryview] = []
        self.num_bytes = 0
        scratch.reset()

    def flush(self) -> None:
        """Moves the added pieces. The scratch memory is free again."""
        raise NotImplementedError

    def append(self, piece: memoryview) -> None:
        self.pieces.append(piece)
        self.num_bytes += len(piece)
        if len(self.pieces) >= MAX_PIECES or self.num_bytes >= self.batch_bytes:
            self.flush()

    def page(self) -> memoryview:
        self.room()
        return self.scratch.take(PAGE_BYTES)

    def room(self) -> int:
        """Free scratch memory, at least a page."""
        if self.scratch.free_bytes < PAGE_BYTES:
            self.flush()
        return self.scratch.free_bytes

    def pieces_of(self, payload: Sequence[memoryview]) -> Iterator[tuple[list[memoryview], bool]]:
        """The payload in order, as parts to be moved together, each with whether it must be copied to other memory."""
        if not self.is_direct:
            yield from (([view], False) for view in payload)
        elif is_aligned(payload):
            for view in payload:
                whole = len(view) // PAGE_BYTES * PAGE_BYTES
                if whole:
                    yield [view[:whole]], False
                if whole < len(view):
                    yield [view[whole:]], True
        else:
            rest = list(payload)
            while rest:
                parts, rest = _split(rest, self.room())
                yield parts, True


class RecordWriter(_Run):
    """Writes adjacent records. Call `flush` at the end."""

    def add(self, header: bytes, payload: Sequence[memoryview]) -> None:
        """Adds a record: its header, and the parts of its payload, none empty."""
        page = self.page()
        page[: len(header)] = header
        page[len(header) :] = _ZEROS[len(header) :]
        self.append(page)
        for parts, is_copied in self.pieces_of(payload):
            self.append(self._copied(parts) if is_copied else parts[0])
        spare = -sum(map(len, payload)) % PAGE_BYTES
        if spare and not self.is_direct:
            self.append(memoryview(_ZEROS)[:spare])

    def _copied(self, parts: list[memoryview]) -> memoryview:
        self.room()
        piece = self.scratch.take(sum(map(len, parts)))
        filled = 0
        for part in parts:
            piece[filled : filled + len(part)] = part
            filled += len(part)
        piece[filled:] = _ZEROS[: len(piece) - filled]
        return piece

    def flush(self) -> None:
        pieces = self.pieces
        while pieces:
            done = self.io.pwritev(self.fd, pieces, self.offset)
            self.offset += done
            pieces = _advanced(pieces, done)
        self.pieces, self.num_bytes = [], 0
        self.scratch.reset()


class RecordReader(_Run):
    """Reads adjacent records. `flush` at the end fills the remaining parts."""

    def __init__(self, position: FilePosition, scratch: Scratch, batch_bytes: int) -> None:
        super().__init__(position, scratch, batch_bytes)
        self.headers: list[bytes] = []
        """The beginning of each record's first page, complete after `flush`."""
        self._pages: list[memoryview] = []
        self._copies: list[tuple[memoryview, memoryview]] = []

    def add(self, payload: Sequence[memoryview]) -> None:
        """Adds the next record; its payload goes into these parts, none empty."""
        page = self.page()
        self._pages.append(page)
        self.append(page)
        for parts, is_copied in self.pieces_of(payload):
            self.append(self._copied(parts) if is_copied else parts[0])
        spare = -sum(map(len, payload)) % PAGE_BYTES
        if spare and not self.is_direct:
            self.append(self.page()[:spare])

    def _copied(self, parts: list[memoryview]) -> memoryview:
        self.room()
        piece = self.scratch.take(sum(map(len, parts)))
        filled = 0
        for part in parts:
            self._copies.append((piece[filled : filled + len(part)], part))
            filled += len(part)
        return piece

    def flush(self) -> None:
        pieces = self.pieces
        while pieces:
            done = self.io.preadv(self.fd, pieces, self.offset)
            if not done:
                raise ShortReadError(0, "the file ends before the record does")
            self.offset += done
            pieces = _advanced(pieces, done)
        for bounce, destination in self._copies:
            destination[:] = bounce
        self.headers += [bytes(page[:RECORD_HEAD_BYTES]) for page in self._pages]
        self._pages, self._copies = [], []
        self.pieces, self.num_bytes = [], 0
        self.scratch.reset()


def is_aligned(payload: Sequence[memoryview]) -> bool:
    """Whether O_DIRECT can use this memory, except for the end of the last part."""
    if any(len(view) % PAGE_BYTES for view in payload[:-1]):
        return False
    return not any(np.frombuffer(view, np.uint8).__array_interface__["data"][0] % PAGE_BYTES for view in payload)


def _split(parts: list[memoryview], num_bytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `num_bytes` of the parts (all, if they are fewer), and the rest."""
    for position, part in enumerate(parts):
        if num_bytes <= len(part):
            rest = [part[num_bytes:]] if num_bytes < len(part) else []
            return [*parts[:position], part[:num_bytes]], rest + parts[position + 1 :]
        num_bytes -= len(part)
    return parts, []


def _advanced(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The pieces without their first `num_bytes`."""
    for position, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [piece[num_bytes:], *pieces[position + 1 :]]
        num_bytes -= len(piece)
    return []
