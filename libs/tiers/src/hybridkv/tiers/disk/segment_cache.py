"""Keeps a rank's segment files open for its medium, a bounded number of them, and finds their directory.

The index makes directories and files, perhaps after the medium was built, perhaps anew after somebody removed them.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from hybridkv.tiers.disk.directory import Directory
from hybridkv.tiers.disk.file_io import FileIO
from hybridkv.tiers.disk.names import rank_name, segment_name


class _Open:
    __slots__ = ("fd", "is_direct", "is_forgotten", "num_users")

    def __init__(self, fd: int, is_direct: bool) -> None:
        self.fd = fd
        self.is_direct = is_direct
        self.num_users = 0
        self.is_forgotten = False


class SegmentCache:
    """Open segments of one rank. Several threads may use it at once."""

    def __init__(self, io: FileIO, path: str, namespace: bytes, rank: int, max_open: int) -> None:
        self._io = io
        self._names = (path, namespace.hex(), rank_name(rank))
        self._max_open = max_open
        self._lock = threading.Lock()
        self._directory_lock = threading.Lock()
        self._directory: Directory | None = None
        self._open: OrderedDict[int, _Open] = OrderedDict()

    @contextmanager
    def opened(self, number: int, is_direct: bool) -> Iterator[int]:
        """A descriptor to read from and write to, as long as the block lasts. `OSError` when there is none."""
        segment = self._acquire(number, is_direct)
        try:
            yield segment.fd
        finally:
            self._release(segment)

    def _acquire(self, number: int, is_direct: bool) -> _Open:
        with self._lock:
            segment = self._open.get(number)
            if segment is not None and segment.is_direct == is_direct:
                self._open.move_to_end(number)
                segment.num_users += 1
                return segment
        # Outside of the lock: a device that stands still must not stop who finds his file open.
        segment = _Open(self._open_file(number, is_direct), is_direct)
        segment.num_users = 1
        with self._lock:
            self._forget(self._open.pop(number, None))
            self._open[number] = segment
            while len(self._open) > self._max_open:
                self._forget(self._open.popitem(last=False)[1])
        return segment

    def _release(self, segment: _Open) -> None:
        with self._lock:
            segment.num_users -= 1
            self._close_if_idle(segment)

    def forget(self, number: int) -> bool:
        """Open this segment anew when it is wanted again. False when it was not open."""
        with self._lock:
            segment = self._open.pop(number, None)
            self._forget(segment)
        return segment is not None

    def close(self) -> None:
        """Close what nobody uses now, the rest when nobody does any more."""
        with self._lock:
            for segment in self._open.values():
                self._forget(segment)
            self._open.clear()
        if self._directory_lock.acquire(timeout=1.0):
            try:
                if self._directory is not None:
                    self._directory.close()
                    self._directory = None
            finally:
                self._directory_lock.release()

    def _forget(self, segment: _Open | None) -> None:
        if segment is not None:
            segment.is_forgotten = True
            self._close_if_idle(segment)

    def _close_if_idle(self, segment: _Open) -> None:
        if segment.is_forgotten and not segment.num_users:
            self._io.close(segment.fd)

    def _open_file(self, number: int, is_direct: bool) -> int:
        flags = os.O_DIRECT if is_direct else 0
        with self._directory_lock:
            if self._directory is not None:
                try:
                    return _open_segment(self._directory, number, flags)
                except FileNotFoundError:
                    pass  # perhaps the directory was removed and made anew
            self._find_directory()
            assert self._directory is not None
            return _open_segment(self._directory, number, flags)

    def _find_directory(self) -> None:
        path, *names = self._names
        found = Directory.root(self._io, path, create=False)
        for name in names:
            try:
                child = found.child(name, create=False)
            finally:
                found.close()
            found = child
        former, self._directory = self._directory, found
        if former is not None:
            former.close()


def _open_segment(directory: Directory, number: int, flags: int) -> int:
    try:
        return directory.open_file(segment_name(number), flags | os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        return directory.open_file(segment_name(number), flags | os.O_RDONLY)
