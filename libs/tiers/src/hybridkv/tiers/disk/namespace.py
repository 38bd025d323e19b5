"""The directory of one namespace, locked by its index: made, opened, found again when somebody removed it.

Also what concerns its neighbours in the same root: why none of them fits, and which go when the root is full.
"""

from __future__ import annotations

import logging
import os

import msgspec

from hybridkv.hashing import Fingerprint
from hybridkv.tiers.disk.directory import Directory, open_root, refused
from hybridkv.tiers.disk.file_io import FileIO
from hybridkv.tiers.disk.names import (
    FINGERPRINT_NAME,
    LOCK_NAME,
    is_namespace,
    rank_name,
)
from hybridkv.tiers.errors import TierConfigurationError

logger = logging.getLogger(__name__)

MAX_LOCK_ATTEMPTS = 10
MAX_DIFFERENCES = 8
"""In one line of the log."""


class Namespace:
    """An open, locked namespace directory and its ranks' directories."""

    def __init__(self, io: FileIO, path: str, fingerprint: Fingerprint) -> None:
        """`TierConfigurationError` when the path cannot be used or another process has the namespace."""
        self.io = io
        self.digest = fingerprint.digest()
        self.num_ranks = fingerprint.tensor_parallel_size
        self._fingerprint = fingerprint
        self.root = open_root(io, path)
        self.directory = self.root
        self.ranks: list[Directory] = []
        self._lock_fd = -1
        try:
            self._open()
        except OSError as error:
            self.close()
            raise refused(path, error) from error
        except TierConfigurationError:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self.digest.hex()

    def _open(self) -> None:
        self.directory = self.root.child(self.name, create=True)
        self._lock()
        if self.directory.read_file(FINGERPRINT_NAME) is None:
            text = msgspec.json.format(msgspec.json.encode(self._fingerprint), indent=1)
            self.directory.write_file(FINGERPRINT_NAME, text, sync=False)
        for rank in range(self.num_ranks):
            self.ranks.append(self.directory.child(rank_name(rank), create=True))

    def _lock(self) -> None:
        for _ in range(MAX_LOCK_ATTEMPTS):
            # Read-only: an open file that may be written to would keep anybody from mounting it read-only.
            fd = self.directory.open_file(LOCK_NAME, os.O_RDONLY | os.O_CREAT)
            if not self.io.lock(fd):
                self.io.close(fd)
                raise self._locked()
            if self._is_current(fd):
                self._lock_fd = fd
                self._sign_lock()
                return
            # Whoever removes a stale namespace had it. Its directory is gone, or about to go.
            self.io.close(fd)
            self.directory.close()
            self.directory = self.root.child(self.name, create=True)
        raise TierConfigurationError("path", "a namespace that nobody removes", f"{self.directory.path}")

    def _sign_lock(self) -> None:
        """Say who has it, and when it was taken."""
        fd = self.directory.open_file(LOCK_NAME, os.O_WRONLY)
        try:
            self.io.truncate(fd, 0)
            self.io.pwritev(fd, [f"{os.getpid()}\n".encode()], 0)
        finally:
            self.io.close(fd)

    def _is_current(self, fd: int) -> bool:
        try:
            there = self.io.stat_name(f"{self.name}/{LOCK_NAME}", self.root.fd)
        except FileNotFoundError:
            return False
        return there.st_ino == self.io.stat(fd).st_ino

    def _locked(self) -> TierConfigurationError:
        try:
            holder = (self.directory.read_file(LOCK_NAME) or b"").decode(errors="replace").strip() or "unknown"
        except OSError:
            holder = "unknown"
        return TierConfigurationError(
            "path",
            "a namespace that no other engine has open",
            f"{self.directory.path}, open in process {holder}",
            hint="give each engine a path of its own, or end the other one",
        )

    def restore(self) -> None:
        """Make directories and lock anew after somebody removed them. `OSError` when that is not possible yet."""
        self._close_directories()
        self.root.close()
        self.root = Directory.root(self.io, self.root.path, create=True)
        try:
            self._open()
        except TierConfigurationError as error:
            raise OSError(0, str(error)) from error

    def is_there(self) -> bool:
        """Whether the path still leads to the directories that are open."""
        try:
            root = Directory.root(self.io, self.root.path, create=False)
        except OSError:
            return False
        try:
            names = [f"{self.name}/{rank_name(rank)}" for rank in range(self.num_ranks)]
            return all(
                self.io.stat_name(name, root.fd).st_ino == self.io.stat(directory.fd).st_ino
                for name, directory in zip(names, self.ranks, strict=True)
            )
        except OSError:
            return False
        finally:
            root.close()

    def close(self) -> None:
        """Give up the lock."""
        self._close_directories()
        self.root.close()

    def _close_directories(self) -> None:
        for directory in self.ranks:
            directory.close()
        self.ranks = []
        if self._lock_fd >= 0:
            self.io.close(self._lock_fd)
            self._lock_fd = -1
        self.directory.close()


def say_what_differs(namespace: Namespace, fingerprint: Fingerprint) -> None:
    """One line in the log when the root holds other caches but not this one: in what the nearest of them differs."""
    nearest: tuple[str, ...] | None = None
    for name in namespace.root.list():
        if not is_namespace(name) or name == namespace.name:
            continue
        found = _fingerprint_in(namespace.root, name)
        differences = fingerprint.diff(found) if found is not None else ()
        if differences and (nearest is None or len(differences) < len(nearest)):
            nearest = differences
    if nearest is not None:
        more = f" and {len(nearest) - MAX_DIFFERENCES} more" if len(nearest) > MAX_DIFFERENCES else ""
        words = "; ".join(nearest[:MAX_DIFFERENCES])
        logger.info("%s holds no cache for this engine; the nearest differs: %s%s", namespace.root.path, words, more)


def _fingerprint_in(root: Directory, name: str) -> Fingerprint | None:
    try:
        directory = root.child(name, create=False)
    except OSError:
        return None
    try:
        data = directory.read_file(FINGERPRINT_NAME)
        return None if data is None else msgspec.json.decode(data, type=Fingerprint)
    except (OSError, msgspec.DecodeError):
        return None
    finally:
        directory.close()


def other_bytes(namespace: Namespace) -> int:
    """What the other namespaces of the root take up on disk."""
    total = 0
    for name in namespace.root.list():
        if is_namespace(name) and name != namespace.name:
            total += _bytes_of(namespace.root, name)
    return total


def delete_stalest(namespace: Namespace) -> bool:
    """Delete the namespace that was opened longest ago, among those that nobody has open. False when there is none."""
    root = namespace.root
    stale: list[tuple[int, str]] = []
    for name in root.list():
        if not is_namespace(name) or name == namespace.name:
            continue
        try:
            stale.append((root.io.stat_name(f"{name}/{LOCK_NAME}", root.fd).st_mtime_ns, name))
        except FileNotFoundError:
            stale.append((0, name))
    return any(_delete(root, name) for _, name in sorted(stale))


def _bytes_of(root: Directory, name: str) -> int:
    try:
        directory = root.child(name, create=False)
    except OSError:
        return 0
    try:
        return directory.disk_bytes()
    except OSError:
        return 0
    finally:
        directory.close()


def _delete(root: Directory, name: str) -> bool:
    """Delete a whole namespace, unless somebody has it open."""
    try:
        directory = root.child(name, create=False)
    except OSError:
        return False
    lock_fd = -1
    try:
        lock_fd = directory.open_file(LOCK_NAME, os.O_RDWR | os.O_CREAT)
        if not root.io.lock(lock_fd):
            return False
        logger.info("deleting the stale cache %s to make room in %s", name[:12], root.path)
        empty(directory, keep=LOCK_NAME)
        directory.remove_file(LOCK_NAME)
        root.io.remove_directory(name, root.fd)
        return True
    except OSError as error:
        logger.warning("the stale cache %s could not be deleted: %s", name[:12], error)
        return False
    finally:
        if lock_fd >= 0:
            root.io.close(lock_fd)
        directory.close()


def empty(directory: Directory, keep: str = "") -> None:
    """Remove the files of a directory of ours, and its directories of ours."""
    for name in directory.list():
        if name == keep:
            continue
        try:
            directory.remove_file(name)
        except (IsADirectoryError, PermissionError):
            child = directory.child(name, create=False)
            try:
                empty(child)
            finally:
                child.close()
            directory.io.remove_directory(name, directory.fd)
