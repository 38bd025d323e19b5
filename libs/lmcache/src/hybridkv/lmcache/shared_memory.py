"""A named piece of memory that a server maps: removed when it is given up, and by the next start after a crash.

The name must stay while a server may come to map it, so it cannot be removed early. Its owner holds a lock on it,
which no crash leaves behind: whatever of ours has no lock belongs to nobody.
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
        num_bytes: of it; zeros.
        directory: where names of shared memory lie.

    Raises:
        LMCacheConfigurationError: there is no room for it.
    """

    def __init__(self, num_bytes: int, directory: Path = DIRECTORY) -> None:
        sweep(directory)
        self.num_bytes = num_bytes
        self._path = directory / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # who sweeps may have it for a moment
            # Not sparse: a page that cannot be had later would end the process that touches it.
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
        """As a server opens it."""
        return f"/{self._path.name}"

    def close(self) -> None:
        """Remove the name and give up the mapping, unless somebody still holds a view of it. Repeatable."""
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
    """Remove what crashed processes left; how many there were. Nothing that anybody holds is touched."""
    removed = 0
    for path in directory.glob(f"{PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another's, or gone
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A segment that was made a moment ago and is not locked yet has no bytes yet.
            if os.fstat(file).st_size:
                path.unlink()
                removed += 1
                logger.info("removed %s, which a process that crashed had left", path)
        except OSError:
            pass
        finally:
            os.close(file)
    return removed
