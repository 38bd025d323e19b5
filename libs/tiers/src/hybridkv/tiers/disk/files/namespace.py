"""Directory of one namespace: created, opened, locked, and recreated after a removal.

The directory has two locks, see `locks`. `require_own` compares the files on disk with the open files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import weakref
from typing import NamedTuple, Protocol

import msgspec

from hybridkv.hashing import Fingerprint
from hybridkv.tiers.disk.files.locks import NamespaceTakenError, is_same, refused_lock, try_to_lock
from hybridkv.tiers.disk.format.layout import FINGERPRINT_NAME, LOCK_NAME, rank_name, segment_number
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.files.directory import Directory, ForeignFileError, directory_error, open_or_create_root
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.files.path_safety import warn_if_replaceable

logger = logging.getLogger(__name__)

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors of a file or directory that was removed."""
MAX_LOCK_ATTEMPTS = 10


class NamespaceFiles(Protocol):
    """Open directories of a namespace, for readers."""

    @property
    def digest(self) -> bytes: ...

    @property
    def path(self) -> str: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def directory(self) -> Directory: ...

    @property
    def ranks(self) -> list[Directory]: ...


class _OpenNamespace(NamedTuple):
    """Open files of a namespace. `directory` and `lock_fd` hold the two locks; closing them releases the locks."""

    directory: Directory
    lock_fd: int
    ranks: list[Directory]


class Namespace:
    """Open, locked directory of a namespace, with the directories of its ranks."""

    def __init__(self, io: FileIO, path: str, fingerprint: Fingerprint, syncs: bool = True) -> None:
        """Open or create the directory, and lock it. `TierConfigurationError` if the path cannot be used or an engine
        has the namespace open already.

        `syncs`: sync directories, so that a power loss does not remove them.
        """
        self.io = io
        self._syncs = syncs
        self.digest = fingerprint.digest()
        self.num_ranks = fingerprint.tensor_parallel_size
        self._fingerprint = fingerprint
        self.is_recreated = False
        """True after `restore`. The caller writes the epoch file, and then resets this flag."""
        self._has_logged_loss = False
        self._is_taken_over = False
        self.root = open_or_create_root(io, path)
        self._opened: _OpenNamespace | None = None
        try:
            self._opened = self._open(self.root)
        except OSError as error:
            self.root.close()
            raise directory_error(path, error) from error
        except TierConfigurationError:
            self.root.close()
            raise
        warn_if_replaceable(self.root)
        _open_namespaces.add(self)

    @property
    def name(self) -> str:
        return self.digest.hex()

    @property
    def path(self) -> str:
        return f"{self.root.path}/{self.name}"

    @property
    def directory(self) -> Directory:
        """Directory of the namespace. `OSError` if it is not open."""
        return self._require().directory

    @property
    def ranks(self) -> list[Directory]:
        """One directory for each rank. `OSError` if they are not open."""
        return self._require().ranks

    def _require(self) -> _OpenNamespace:
        if self._opened is None:
            raise OSError(errno.ENOENT, "is not open", self.path)
        return self._opened

    def _open(self, root: Directory) -> _OpenNamespace:
        directory, lock_fd = self._lock(root)
        opened = _OpenNamespace(directory, lock_fd, [])
        try:
            self._describe(directory)
            for rank in range(self.num_ranks):
                opened.ranks.append(directory.child(rank_name(rank), create=True))
        except OSError:
            self._close(opened)
            raise
        if self._syncs:
            self._sync(directory, root)
        return opened

    def _sync(self, directory: Directory, root: Directory) -> None:
        """Sync the store's parent, root and namespace directories, also if they existed already: an earlier engine may
        not have synced them."""
        try:
            self.io.fsync(directory.fd)
            self.io.fsync(root.fd)
            parent = self.io.open(f"{os.path.dirname(root.path)}/.", os.O_RDONLY | os.O_DIRECTORY)
            try:
                self.io.fsync(parent)
            finally:
                self.io.close(parent)
        except OSError as error:
            logger.warning("the directories of %s could not be synced: %s", directory.path, error)

    def _lock(self, root: Directory) -> tuple[Directory, int]:
        """Open the namespace's directory and lock it. Reuses this engine's lock if it is on the same file."""
        for _ in range(MAX_LOCK_ATTEMPTS):
            directory = root.child(self.name, create=True)
            fd = -1
            try:
                if self._opened is not None and self._is_current(root, self._opened.lock_fd):
                    return directory, self._opened.lock_fd
                # Lock the directory before LOCK, so that a refused engine creates no LOCK. The engine that holds the
                # directory's lock would treat a new LOCK as the lock of another engine.
                if not self._lock_directory(directory):
                    raise refused_lock(directory, directory.fd)
                # Open read-only: a file open for writing prevents a read-only remount.
                fd = directory.open_file(LOCK_NAME, os.O_RDONLY | os.O_CREAT)
                if not self.io.lock(fd):
                    raise refused_lock(directory, fd)
                if self._is_current(root, fd):
                    return directory, fd
            except (OSError, TierConfigurationError):
                self._close_lock(fd)
                directory.close()
                raise
            # The locked file is not at the path any more. Another process deletes stale namespaces: it has removed this
            # directory, or removes it soon. Try again with a new directory.
            self.io.close(fd)
            directory.close()
        raise TierConfigurationError("path", "a directory that no other process removes", self.path)

    def _lock_directory(self, directory: Directory) -> bool:
        """Lock the directory. False if another engine has locked it. True also if the directory cannot be locked, or
        this engine has the lock already."""
        if self._opened is not None and is_same(self.io.stat(directory.fd), self.io.stat(self._opened.directory.fd)):
            return True
        return try_to_lock(directory)

    def _is_current(self, root: Directory, fd: int) -> bool:
        try:
            found = self.io.stat_name(f"{self.name}/{LOCK_NAME}", root.fd)
        except FileNotFoundError:
            return False
        return is_same(found, self.io.stat(fd))

    def _describe(self, directory: Directory) -> None:
        """Write process id and fingerprint, for operators. Logs failures and does not raise, except
        `ForeignFileError`."""
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

    def require_own(self) -> None:
        """Check that this engine may write and delete here: the path leads to the open directory, and the lock and the
        directories of the ranks exist.

        Recreates a deleted lock. Raises `FileNotFoundError` if a directory was removed or moved, and
        `NamespaceTakenError` if another engine may have had the namespace open; after that, every call raises
        `NamespaceTakenError`.
        """
        opened = self._require()
        if self._is_taken_over:
            raise NamespaceTakenError(self.path)
        mine = self.io.stat(opened.lock_fd)
        here = self._find(LOCK_NAME, opened.directory.fd)
        if here is None:
            self._recreate_lock(opened)
        elif not is_same(here, mine):
            self._is_taken_over = True
            raise NamespaceTakenError(self.path)
        elif not self._leads_to(self.io.stat(opened.directory.fd)):
            raise FileNotFoundError(errno.ENOENT, "was moved away", self.path)
        # A rank's directory may be removed alone. Writes to open segments do not detect that.
        for rank, directory in enumerate(opened.ranks):
            found = self._find(rank_name(rank), opened.directory.fd)
            if found is None or not is_same(found, self.io.stat(directory.fd)):
                raise FileNotFoundError(errno.ENOENT, "was removed", directory.path)

    def _leads_to(self, directory: os.stat_result) -> bool:
        """True if the path leads to this directory, or if the parent cannot be read.

        The file `LOCK` alone is no proof: a copy made with hard links has the same file.
        """
        try:
            found = self._find(f"{self.path}/.", self.root.fd)
        except OSError:
            return True
        return found is not None and is_same(found, directory)

    def _find(self, name: str, dir_fd: int) -> os.stat_result | None:
        try:
            return self.io.stat_name(name, dir_fd)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _recreate_lock(self, opened: _OpenNamespace) -> None:
        if not self.io.stat(opened.directory.fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "was removed", self.path)
        try:
            fd = opened.directory.open_file(LOCK_NAME, os.O_RDONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError as error:
            self._is_taken_over = True
            raise NamespaceTakenError(self.path) from error
        if not self.io.lock(fd):
            self.io.close(fd)
            self._is_taken_over = True
            raise NamespaceTakenError(self.path)
        self._opened = opened._replace(lock_fd=fd)
        self.io.close(opened.lock_fd)
        self._describe(opened.directory)
        logger.warning(
            "%s/%s was deleted; made anew. hint: keep programs that delete old files away from the directory",
            self.path,
            LOCK_NAME,
        )

    def restore(self) -> None:
        """Recreate removed directories and the lock. `OSError` if that is not possible yet, `NamespaceTakenError` if
        another engine may have had the namespace open.

        The old directories stay open until this call succeeds.
        """
        if not self._has_logged_loss:
            logger.warning("%s was removed; making it anew", self.path)
            self._has_logged_loss = True
        root = Directory.root(self.io, self.root.path, create=True)
        try:
            opened = self._open(root)
        except TierConfigurationError as error:
            root.close()
            raise OSError(errno.EBUSY, str(error)) from error
        except OSError:
            root.close()
            raise
        try:
            self._is_taken_over = self._belongs_to_other(opened)
        except OSError:
            self._close(opened)
            root.close()
            raise
        if self._is_taken_over:
            self._close(opened)
            root.close()
            raise NamespaceTakenError(self.path)
        former_root, former, self.root, self._opened = self.root, self._opened, root, opened
        self.is_recreated = True
        self._has_logged_loss = False
        if former is not None:
            self._close(former)
        former_root.close()
        try_to_lock(opened.directory)  # if the directory is the same, closing its old descriptor released its lock

    def _belongs_to_other(self, opened: _OpenNamespace) -> bool:
        """True if the newly opened directory holds segments and is not this engine's former directory."""
        stat, former = self.io.stat, self._opened
        # A copy made with hard links has the same LOCK in another directory.
        has_lock = former is not None and opened.lock_fd == former.lock_fd
        if former is not None and has_lock and is_same(stat(opened.directory.fd), stat(former.directory.fd)):
            return False
        return any(segment_number(name) is not None for rank in opened.ranks for name in rank.list())

    def is_present(self) -> bool:
        """True if the path still leads to the open directories; then a later removal is logged again. `OSError` if this
        process cannot read them."""
        try:
            root = Directory.root(self.io, self.root.path, create=False)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return False
        try:
            names = [f"{self.name}/{rank_name(rank)}" for rank in range(self.num_ranks)]
            is_present = all(
                is_same(self.io.stat_name(name, root.fd), self.io.stat(directory.fd))
                for name, directory in zip(names, self.ranks, strict=True)
            )
        except OSError as error:
            if error.errno not in GONE:
                raise
            return False
        finally:
            root.close()
        self._has_logged_loss = self._has_logged_loss and not is_present
        return is_present

    def close(self) -> None:
        """Close the directories and release the lock."""
        former, self._opened = self._opened, None
        if former is not None:
            self._close(former)
        self.root.close()

    def _close(self, opened: _OpenNamespace) -> None:
        """Close the directories, and the lock unless `_opened` uses the same descriptor."""
        for directory in (*opened.ranks, opened.directory):
            directory.close()
        self._close_lock(opened.lock_fd)

    def _close_lock(self, fd: int) -> None:
        if fd >= 0 and (self._opened is None or fd != self._opened.lock_fd):
            self.io.close(fd)

    def release_in_child(self) -> None:
        """Close all descriptors except the root's, in a forked child. Otherwise the child would keep the lock after the
        end of the parent."""
        former, self._opened = self._opened, None
        if former is not None:
            self._close(former)


_open_namespaces: weakref.WeakSet[Namespace] = weakref.WeakSet()
"""Namespaces of this process, closed ones included. A fork copies descriptors, and a lock exists as long as any copy of
its descriptor."""


def _release_in_forked_child() -> None:
    for namespace in list(_open_namespaces):
        with contextlib.suppress(OSError):  # the system closes the descriptor even on an error
            namespace.release_in_child()


os.register_at_fork(after_in_child=_release_in_forked_child)
