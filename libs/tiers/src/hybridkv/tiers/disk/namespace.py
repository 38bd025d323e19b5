"""The directory of one namespace, locked by its index: made, opened, found again when somebody removed it."""

from __future__ import annotations

import errno
import logging
import os
from typing import NamedTuple

import msgspec

from hybridkv.hashing import Fingerprint
from hybridkv.tiers.disk.directory import Directory, ForeignFileError, open_root, refused
from hybridkv.tiers.disk.file_io import FileIO
from hybridkv.tiers.disk.names import FINGERPRINT_NAME, LOCK_NAME, rank_name
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.shortage import is_shortage

logger = logging.getLogger(__name__)

MAX_LOCK_ATTEMPTS = 10


class _Opened(NamedTuple):
    """What is open of a namespace. Closing the lock gives it up."""

    directory: Directory
    lock_fd: int
    ranks: list[Directory]


class Namespace:
    """An open, locked namespace directory and its ranks' directories."""

    def __init__(self, io: FileIO, path: str, fingerprint: Fingerprint) -> None:
        """`TierConfigurationError` when the path cannot be used or another process has the namespace."""
        self.io = io
        self.digest = fingerprint.digest()
        self.num_ranks = fingerprint.tensor_parallel_size
        self._fingerprint = fingerprint
        self.is_anew = False
        """Made anew by `restore`, and nobody has written down yet what has to be there. For its user to take back."""
        self._is_said_lost = False
        self.root = open_root(io, path)
        self._opened: _Opened | None = None
        try:
            self._opened = self._open(self.root)
        except OSError as error:
            self.root.close()
            raise refused(path, error) from error
        except TierConfigurationError:
            self.root.close()
            raise

    @property
    def name(self) -> str:
        return self.digest.hex()

    @property
    def path(self) -> str:
        return f"{self.root.path}/{self.name}"

    @property
    def directory(self) -> Directory:
        """`OSError` when it is not open."""
        return self._require().directory

    @property
    def ranks(self) -> list[Directory]:
        """Of all ranks. `OSError` when they are not open."""
        return self._require().ranks

    def _require(self) -> _Opened:
        if self._opened is None:
            raise OSError(errno.ENOENT, "is not open", self.path)
        return self._opened

    def _open(self, root: Directory) -> _Opened:
        directory, lock_fd = self._lock(root)
        opened = _Opened(directory, lock_fd, [])
        try:
            self._describe(directory)
            for rank in range(self.num_ranks):
                opened.ranks.append(directory.child(rank_name(rank), create=True))
        except OSError:
            self._close(opened)
            raise
        return opened

    def _lock(self, root: Directory) -> tuple[Directory, int]:
        """The namespace's directory, and a descriptor that holds its lock: the one of before where it is the same."""
        for _ in range(MAX_LOCK_ATTEMPTS):
            directory = root.child(self.name, create=True)
            fd = -1
            try:
                if self._opened is not None and self._is_current(root, self._opened.lock_fd):
                    return directory, self._opened.lock_fd
                # Read-only: an open file that may be written to would keep anybody from mounting it read-only.
                fd = directory.open_file(LOCK_NAME, os.O_RDONLY | os.O_CREAT)
                if not self.io.lock(fd):
                    raise _locked(directory)
                if self._is_current(root, fd):
                    return directory, fd
            except (OSError, TierConfigurationError):
                self._close_lock(fd)
                directory.close()
                raise
            # Whoever removes a stale namespace had it. Its directory is gone, or about to go.
            self.io.close(fd)
            directory.close()
        raise TierConfigurationError("path", "a namespace that nobody removes", self.path)

    def _is_current(self, root: Directory, fd: int) -> bool:
        try:
            there = self.io.stat_name(f"{self.name}/{LOCK_NAME}", root.fd)
        except FileNotFoundError:
            return False
        return _is_same(there, self.io.stat(fd))

    def _describe(self, directory: Directory) -> None:
        """Say who has it, and what it is of. For people: what goes wrong with it is no reason to stop."""
        try:
            fd = directory.open_file(LOCK_NAME, os.O_WRONLY)
            try:
                self.io.truncate(fd, 0)
                self.io.pwritev(fd, [f"{os.getpid()}\n".encode()], 0)
            finally:
                self.io.close(fd)
            if directory.read_file(FINGERPRINT_NAME) is None:
                text = msgspec.json.format(msgspec.json.encode(self._fingerprint), indent=1)
                directory.write_file(FINGERPRINT_NAME, text, sync=False)
        except ForeignFileError:
            raise
        except OSError as error:
            logger.warning("%s is not described by its files: %s", directory.path, error)

    def restore(self) -> None:
        """Make directories and lock anew after somebody removed them. `OSError` when that is not possible yet.

        What is open stays open until that worked.
        """
        if not self._is_said_lost:
            logger.warning("%s was removed; making it anew", self.path)
            self._is_said_lost = True
        root = Directory.root(self.io, self.root.path, create=True)
        try:
            opened = self._open(root)
        except TierConfigurationError as error:
            root.close()
            raise OSError(errno.EBUSY, str(error)) from error
        except OSError:
            root.close()
            raise
        former_root, former, self.root, self._opened = self.root, self._opened, root, opened
        self.is_anew = True
        self._is_said_lost = False
        if former is not None:
            self._close(former)
        former_root.close()

    def is_there(self) -> bool:
        """Whether the path still leads to the directories that are open. `OSError` when this process cannot look."""
        try:
            root = Directory.root(self.io, self.root.path, create=False)
        except OSError as error:
            if is_shortage(error):
                raise
            return False
        try:
            names = [f"{self.name}/{rank_name(rank)}" for rank in range(self.num_ranks)]
            is_there = all(
                _is_same(self.io.stat_name(name, root.fd), self.io.stat(directory.fd))
                for name, directory in zip(names, self.ranks, strict=True)
            )
        except OSError as error:
            if is_shortage(error):
                raise
            return False
        finally:
            root.close()
        self._is_said_lost = self._is_said_lost and not is_there
        return is_there

    def close(self) -> None:
        """Give up the lock."""
        former, self._opened = self._opened, None
        if former is not None:
            self._close(former)
        self.root.close()

    def _close(self, opened: _Opened) -> None:
        """But for the lock, where what is open now holds the same."""
        for directory in (*opened.ranks, opened.directory):
            directory.close()
        self._close_lock(opened.lock_fd)

    def _close_lock(self, fd: int) -> None:
        if fd >= 0 and (self._opened is None or fd != self._opened.lock_fd):
            self.io.close(fd)


def _locked(directory: Directory) -> TierConfigurationError:
    try:
        holder = (directory.read_file(LOCK_NAME) or b"").decode(errors="replace").strip() or "unknown"
    except OSError:
        holder = "unknown"
    return TierConfigurationError(
        "path",
        "a namespace that no other engine has open",
        f"{directory.path}, open in process {holder}",
        hint="give each engine a path of its own, or end the other one",
    )


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
