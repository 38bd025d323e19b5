"""System calls of the file-system tiers. Tests replace them to inject faults.

Errors are `OSError`s.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence

_OPENING = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK


class FileIO:
    """System calls. Derive from this class to inject faults."""

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        """Open a file. Does not block, also for pipes and devices. Does not follow a link."""
        fd = os.open(name, flags | _OPENING, mode, dir_fd=dir_fd)
        os.set_blocking(fd, True)  # on a non-blocking file, io_uring returns EAGAIN and does not wait
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        os.posix_fallocate(fd, 0, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def stat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat_name(self, name: str, dir_fd: int) -> os.stat_result:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def list(self, fd: int) -> list[str]:
        return os.listdir(fd)

    def scan(self, fd: int) -> Iterator[str]:
        """Names in a directory, one at a time: a directory may have millions."""
        with os.scandir(fd) as entries:
            for entry in entries:
                yield entry.name

    def make_directory(self, name: str, dir_fd: int | None = None, mode: int = 0o700) -> None:
        os.mkdir(name, mode, dir_fd=dir_fd)

    def change_mode(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def set_modified_now(self, fd: int) -> None:
        """Set the modification time to the present time of the file system."""
        os.utime(fd)

    def remove_directory(self, name: str, dir_fd: int) -> None:
        os.rmdir(name, dir_fd=dir_fd)

    def remove(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def rename(self, old: str, new: str, dir_fd: int) -> None:
        os.rename(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def link(self, old: str, new: str, dir_fd: int) -> None:
        """Create a hard link. `FileExistsError` if the new name exists."""
        os.link(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)

    def lock(self, fd: int) -> bool:
        """Lock the file without waiting; False if another process has locked it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def next_data(self, fd: int, offset: int) -> int:
        """Offset of the next written byte at or after `offset`; the end of the file if there is none. `offset` itself
        if the file system cannot tell."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return os.lseek(fd, 0, os.SEEK_END)
            return offset

    def advise_random(self, fd: int) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
