"""Bounded cache of open segment files of one rank. Also finds and opens the rank's directory.

The index creates directories and files, maybe after the medium was built, and creates them again after a removal.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from hybridkv.tiers.disk.format.layout import rank_name, segment_name
from hybridkv.tiers.disk.options import DiskOptions
from hybridkv.tiers.files.directory import Directory
from hybridkv.tiers.files.file_io import FileIO

logger = logging.getLogger(__name__)


class DirectMode:
    """Mode of file opens. With `"auto"`, O_DIRECT is used until the file system refuses it. `True` never falls back."""

    def __init__(self, direct: bool | Literal["auto"]) -> None:
        self._may_fall_back = direct == "auto"
        self.is_on = direct is not False

    def falls_back(self, error: OSError) -> bool:
        """With `"auto"`: if the error is EINVAL, turns O_DIRECT off and returns True. Otherwise returns False."""
        if error.errno != errno.EINVAL or not self._may_fall_back:
            return False
        if self.is_on:
            logger.info("this file system has no O_DIRECT (%s): the disk tier goes through the page cache", error)
        self.is_on = False
        return True


class OpenSegment:
    """An open segment file with a count of users."""

    def __init__(self, fd: int, is_direct: bool) -> None:
        self.fd = fd
        self.is_direct = is_direct
        self.num_users = 0
        self.is_forgotten = False


class SegmentCache:
    """Open segment files of one rank. Any thread may use the cache."""

    def __init__(self, io: FileIO, path: str, namespace: bytes, rank: int, options: DiskOptions) -> None:
        self._io = io
        self._names = (path, namespace.hex(), rank_name(rank))
        self._max_open = options.max_open_files
        self.direct = DirectMode(options.direct)
        self._lock = threading.Lock()
        self._directory_lock = threading.Lock()
        self._directory: Directory | None = None
        self._open: OrderedDict[int, OpenSegment] = OrderedDict()
        self._fds_to_close: list[int] = []

    @contextmanager
    def opened(self, number: int) -> Iterator[OpenSegment]:
        """Context manager: segment with an open file. `OSError` if the file cannot be opened."""
        segment = self.acquire(number)
        try:
            yield segment
        finally:
            self.release(segment)

    def acquire_open(self, number: int) -> OpenSegment | None:
        """The segment if its file is open in the present O_DIRECT mode, else None. Call `release` afterwards."""
        with self._lock:
            segment = self._open.get(number)
            if segment is None or segment.is_direct != self.direct.is_on:
                return None
            self._open.move_to_end(number)
            segment.num_users += 1
            return segment

    def acquire(self, number: int) -> OpenSegment:
        """Segment with an open file. Call `release` afterwards. `OSError` if the file cannot be opened."""
        segment = self.acquire_open(number)
        if segment is not None:
            return segment
        # Open without `_lock`: a blocked device must not delay users of open files.
        is_direct = self.direct.is_on
        segment = OpenSegment(self._open_file(number, is_direct), is_direct)
        segment.num_users = 1
        with self._lock:
            self._forget(self._open.pop(number, None))
            self._open[number] = segment
            while len(self._open) > self._max_open:
                self._forget(self._open.popitem(last=False)[1])
        return segment

    def release(self, segment: OpenSegment) -> None:
        """Undo `acquire`."""
        with self._lock:
            segment.num_users -= 1
            self._queue_close_if_idle(segment)

    def forget(self, number: int) -> bool:
        """Remove a segment from the cache: the next use opens the file again. False if it was not open."""
        with self._lock:
            segment = self._open.pop(number, None)
            self._forget(segment)
        return segment is not None

    def close(self) -> None:
        """Close the directory and files without users. Other files stay open until `release` and `close_forgotten`."""
        with self._lock:
            for segment in self._open.values():
                self._forget(segment)
            self._open.clear()
        self.close_forgotten()
        if self._directory_lock.acquire(timeout=1.0):
            try:
                if self._directory is not None:
                    self._directory.close()
                    self._directory = None
            finally:
                self._directory_lock.release()

    def _forget(self, segment: OpenSegment | None) -> None:
        if segment is not None:
            segment.is_forgotten = True
            self._queue_close_if_idle(segment)

    def _queue_close_if_idle(self, segment: OpenSegment) -> None:
        if segment.is_forgotten and not segment.num_users:
            self._fds_to_close.append(segment.fd)

    def close_forgotten(self) -> None:
        """Close the files that left the cache and have no users. May wait for a device."""
        with self._lock:
            fds, self._fds_to_close = self._fds_to_close, []
        for fd in fds:
            try:
                self._io.close(fd)
            except OSError as error:  # the system closes the descriptor even on an error
                logger.warning("a segment could not be closed: %s", error)

    def _open_file(self, number: int, is_direct: bool) -> int:
        flags = os.O_DIRECT if is_direct else 0
        with self._directory_lock:
            if self._directory is not None:
                try:
                    return _open_segment(self._directory, number, flags)
                except FileNotFoundError:
                    pass  # the directory may have been recreated
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
