"""A small file system in a mount namespace of this process and its children; it disappears with them."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def _require(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@functools.cache
def enter_mount_namespace() -> bool:
    """Whether this process, which must have one thread, may now mount file systems that other processes do not see."""
    user, group = os.geteuid(), os.getegid()
    try:
        if user:
            _require(_libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        else:
            _require(_libc.unshare(CLONE_NEWNS))
        _require(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    except OSError:
        return False
    return True


class SmallDisk:
    """A tmpfs. Raises `OSError` if it cannot be mounted."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self._data = f"size={num_bytes},mode=0700".encode()
        _require(_libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, self._data))

    def make_read_only(self) -> bool:
        """Returns False if a file in it is open for writing."""
        return not _libc.mount(b"tmpfs", bytes(self.path), b"tmpfs", MS_REMOUNT | MS_RDONLY, self._data)

    def make_writable(self) -> None:
        _require(_libc.mount(b"tmpfs", bytes(self.path), b"tmpfs", MS_REMOUNT, self._data))

    def close(self) -> None:
        _require(_libc.umount2(bytes(self.path), 2))
