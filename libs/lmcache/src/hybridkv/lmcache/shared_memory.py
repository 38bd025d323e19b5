"""Named shared memory that a server maps. Removed on close, or by the next start after a crash.

The name must exist while a server may map it, so it cannot be unlinked early. The owner holds a file lock, which ends
with the process: a segment of this library without a lock has no owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
from pathlib import Path

from hybridkv.lmcache.errors import LMCacheConfigurationError

logger = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")
PREFIX = "hybridkv-lmcache-"


class SharedMemory:
    """One segment.

    Args:
        num_bytes: size; the content is zeros.
        directory: directory of shared memory names.

    Raises:
        LMCacheConfigurationError: not enough shared memory.
    """

    def __init__(self, num_bytes: int, directory: Path = DIRECTORY) -> None:
        sweep(directory)
        self.num_bytes = num_bytes
        self._path = directory / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # a sweep may hold it briefly
            # Allocate now: a failed page allocation later would kill the process that touches it.
            os.posix_fallocate(self._file, 0, num_bytes)
            self._map = mmap.mmap(self._file, num_bytes)
        except OSError as error:
            self._remove()
            raise LMCacheConfigurationError(
                "capacity",
                f"{num_bytes} bytes of shared memory",
                os.strerror(error.errno or 0),
                f"see `df {directory}`",
            ) from None
        self.view = memoryview(self._map)

    @property
    def name(self) -> str:
        """Name for `shm_open`."""
        return f"/{self._path.name}"

    def close(self) -> None:
        """Removes the name, and unmaps the memory unless a view of it is in use. Repeatable."""
        if self._file < 0:
            return
        self._remove()
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._file)
        self._file = -1


def sweep(directory: Path = DIRECTORY) -> int:
    """Removes segments of crashed processes and returns their number. Skips locked segments."""
    removed = 0
    for path in directory.glob(f"{PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or removed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A new segment that is not locked yet is still empty.
            if os.fstat(file).st_size:
                path.unlink()
                removed += 1
                logger.info("removed %s, left by a crashed process", path)
        except OSError:
            pass
        finally:
            os.close(file)
    return removed
