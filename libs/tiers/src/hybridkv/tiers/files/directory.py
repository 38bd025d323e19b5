"""Open directories: links are not followed; owner and permissions are checked, unless the store is shared.

All files of a store are opened relative to descriptors of such directories, never by a path that another user could
exchange.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from hybridkv.tiers.errors import TierConfigurationError, is_shortage
from hybridkv.tiers.files.file_io import FileIO

logger = logging.getLogger(__name__)

LARGEST_SMALL_FILE_BYTES = 1 << 20
MAX_LEVELS = 8
"""Largest depth of `disk_bytes`. Stores of this library are two levels deep."""
_MAX_VIEWS = 1024
"""Largest number of buffers in one system call (`IOV_MAX`)."""
_MAX_WRITE_BYTES = 1 << 26
_MIN_PIECE_BYTES = 1 << 17


class ForeignFileError(OSError):
    """An entry of a store is a link or of another wrong type, belongs to another user, or is writable by others. Never
    touched."""


def temporary_name(name: str) -> str:
    """Name of a file while it is written. Then the file is renamed."""
    return f"{name}.new"


def is_fatal_at_open(error: OSError) -> bool:
    """True if a start must fail with this error: the file is not this user's own, or this process is short of a
    resource. Otherwise the unreadable file counts as damaged."""
    return isinstance(error, ForeignFileError) or is_shortage(error)


class Directory:
    """One open directory.

    Args:
        io: system calls.
        path: absolute path, for messages.
        fd: descriptor of the directory; `close` closes it.
        shared_mode: permissions of new directories in a store that users share; new files have the same read
            permissions. None: the store is this user's own, and entries that other users own or may write to
            are refused. Links and special files are always refused.
    """

    def __init__(self, io: FileIO, path: str, fd: int, shared_mode: int | None = None) -> None:
        self.io = io
        self.path = path
        self.fd = fd
        self.shared_mode = shared_mode

    @classmethod
    def root(cls, io: FileIO, path: str, create: bool, may_be_shared: bool = False) -> Directory:
        """Open the directory at an absolute path; its parent must exist.

        Args:
            io: system calls.
            path: absolute path.
            create: create the directory if it does not exist, with permissions for this user alone.
            may_be_shared: treat the directory as shared if another user owns it or others may write to it.

        Raises:
            OSError: the system call failed.
            ForeignFileError: the directory is a link, or not this user's own.
        """
        if create:
            with contextlib.suppress(FileExistsError):
                io.make_directory(path)
        fd = _open_directory(io, path, path, None, is_shared=may_be_shared)
        mode: int | None = None
        if may_be_shared:
            found = io.stat(fd)
            mode = None if _is_own(found) else stat.S_IMODE(found.st_mode)
        return cls(io, path, fd, mode)

    def child(self, name: str, create: bool) -> Directory:
        """Open a directory in this directory. `create`: first create the directory if it does not exist."""
        path, mode = f"{self.path}/{name}", self.shared_mode
        is_new = False
        if create:
            with _named(path), contextlib.suppress(FileExistsError):
                self.io.make_directory(name, self.fd, 0o700 if mode is None else mode)
                is_new = True
        fd = _open_directory(self.io, name, path, self.fd, is_shared=mode is not None)
        if is_new and mode is not None:
            try:
                self.io.change_mode(fd, mode)  # the umask removed bits of the mode
            except OSError:
                self.io.close(fd)
                raise
        return Directory(self.io, path, fd, mode)

    def open_file(self, name: str, flags: int) -> int:
        """Open a regular file in this directory and return its descriptor. `ForeignFileError` for other kinds of files;
        in a store that is not shared, also for files that are not this user's own."""
        path = f"{self.path}/{name}"
        # Check before `open`, because `open` alone may rewind a tape; and after, because the file may have been
        # exchanged.
        self._refuse_other_kinds(name, path)
        try:
            fd = self.io.open(name, flags | os.O_NOFOLLOW, 0o600, self.fd)
        except OSError as error:
            error.filename = path
            self._refuse_other_kinds(name, path)
            raise
        try:
            _require_own(self.io.stat(fd), stat.S_ISREG, path, is_shared=self.shared_mode is not None)
            if flags & os.O_CREAT and self.shared_mode is not None:
                self.io.change_mode(fd, 0o600 | (self.shared_mode & 0o044))
        except OSError:
            self.io.close(fd)
            raise
        return fd

    def _refuse_other_kinds(self, name: str, path: str) -> None:
        """`ForeignFileError` if the entry exists and is not a regular file."""
        try:
            mode = self.io.stat_name(name, self.fd).st_mode
        except OSError:
            return
        if not stat.S_ISREG(mode):
            raise ForeignFileError(0, f"is {_kind_of(mode)}, not a file", path)

    def read_file(self, name: str, max_bytes: int = LARGEST_SMALL_FILE_BYTES) -> bytes | None:
        """Contents of a file. None if the file does not exist, or is larger than `max_bytes` (logs a warning)."""
        try:
            fd = self.open_file(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            num_bytes = self.io.stat(fd).st_size
            if num_bytes > max_bytes:
                words = "%s/%s is ignored: it has %d bytes, the limit is %d"
                logger.warning(words, self.path, name, num_bytes, max_bytes)
                return None
            return read_at(self.io, fd, 0, num_bytes)
        finally:
            self.io.close(fd)

    def write_file(self, name: str, data: bytes, sync: bool) -> None:
        """Replace a file's contents atomically: a crash of the process leaves the old or the new file. With `sync`,
        the same is true for a power loss."""
        self.write_pieces(name, (data,), sync)

    def write_pieces(self, name: str, pieces: Iterable[bytes], sync: bool) -> None:
        """`write_file` from pieces that are not all in memory at once. If the iterator raises, the file does not
        change."""
        temporary = temporary_name(name)
        # Do not reuse a temporary file of a crashed process: it may have a hard link.
        self.remove_file(temporary)
        fd = self.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            offset = 0
            for data in joined_pieces(pieces):
                write_all(self.io, fd, data, offset)
                offset += len(data)
            if sync:
                self.io.fdatasync(fd)
        except Exception:
            with contextlib.suppress(OSError):
                self.remove_file(temporary)  # frees its space
            raise
        finally:
            self.io.close(fd)
        self.io.rename(temporary, name, self.fd)
        if sync:
            self.io.fsync(self.fd)

    def remove_file(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.io.remove(name, self.fd)

    def list(self) -> list[str]:
        with _named(self.path):
            return self.io.list(self.fd)

    def disk_bytes(self, num_levels: int = MAX_LEVELS) -> int:
        """Bytes on disk of this directory and its contents, `num_levels` deep."""
        total = self.io.stat(self.fd).st_blocks * 512
        for name in self.list():
            try:
                found = self.io.stat_name(name, self.fd)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(found.st_mode):
                total += self._child_bytes(name, num_levels - 1) if num_levels else 0
            else:
                total += found.st_blocks * 512
        return total

    def _child_bytes(self, name: str, num_levels: int) -> int:
        try:
            child = self.child(name, create=False)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        try:
            return child.disk_bytes(num_levels)
        finally:
            child.close()

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            self.io.close(fd)


def joined_pieces(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The same bytes in order, in pieces of at least `_MIN_PIECE_BYTES`, except the last piece."""
    waiting: list[bytes | memoryview] = []
    num_bytes = 0
    for piece in pieces:
        waiting.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _MIN_PIECE_BYTES:
            yield b"".join(waiting)
            waiting.clear()
            num_bytes = 0
    if waiting:
        yield b"".join(waiting)


def read_into(io: FileIO, fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill views with bytes of a file, in order. Returns the number of bytes, fewer if the file ends."""
    done = 0
    left = deque(view for view in views if view)
    while left:
        got = io.preadv(fd, list(islice(left, _MAX_VIEWS)), offset + done)
        if not got:
            break
        done += got
        while left and got >= len(left[0]):
            got -= len(left.popleft())
        if got:
            left[0] = left[0][got:]
    return done


def read_at(io: FileIO, fd: int, offset: int, num_bytes: int) -> bytes:
    """Read bytes of a file; fewer if the file ends."""
    data = memoryview(bytearray(num_bytes))
    return bytes(data[: read_into(io, fd, [data], offset)])


def write_all(io: FileIO, fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes, with as many system calls as needed."""
    view = memoryview(data)
    while view:
        done = io.pwritev(fd, [view[:_MAX_WRITE_BYTES]], offset)
        view, offset = view[done:], offset + done


def root_path(path: str) -> str:
    """Normalized path of a store. Removes a final `/.`, because the system would follow a link before it.

    `TierConfigurationError` if the path is not absolute or cannot be encoded.
    """
    if "\0" in path or not os.path.isabs(path):
        raise TierConfigurationError("path", "an absolute path", path)
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise TierConfigurationError("path", f"a path in {error.encoding}", path) from error
    return "/" + os.path.normpath(path).lstrip("/")


def open_or_create_root(io: FileIO, path: str) -> Directory:
    """Open the root of a store; create it if it does not exist. `TierConfigurationError` if it cannot be used."""
    path = root_path(path)
    try:
        return Directory.root(io, path, create=True)
    except OSError as error:
        raise directory_error(path, error) from error


def require_directory(path: str, may_be_shared: bool = False) -> None:
    """Check that a directory can be opened or, if it does not exist, created. Creates nothing.

    Raises:
        TierConfigurationError: the directory cannot be opened or created.
    """
    try:
        Directory.root(FileIO(), root_path(path), create=False, may_be_shared=may_be_shared).close()
    except FileNotFoundError as error:
        parent = os.path.dirname(root_path(path))
        if not os.access(parent, os.R_OK | os.W_OK | os.X_OK):
            raise directory_error(path, error) from error
    except OSError as error:
        raise directory_error(path, error) from error


def directory_error(path: str, error: OSError) -> TierConfigurationError:
    """Error for the operator: a file or directory of a store cannot be used."""
    if isinstance(error, ForeignFileError):
        at = error.filename
        hint = "name a directory that this user alone can write to, and no link"
        return TierConfigurationError("path", "files that are this user's own", f"{at}: {error.strerror}", hint)
    missing = isinstance(error, FileNotFoundError)
    hint = "its parent must exist and be writable" if missing else "name a directory that this user may write to"
    at = os.path.join(path, error.filename) if isinstance(error.filename, str) else path
    got = f"{at}: {error.strerror or error}"
    return TierConfigurationError("path", "a directory that can be used", got, hint)


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Set the filename of an `OSError` to the whole path."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


def _open_directory(io: FileIO, name: str, path: str, dir_fd: int | None, is_shared: bool) -> int:
    try:
        fd = io.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
    except OSError as error:
        error.filename = path
        if os.path.islink(path) if dir_fd is None else _is_link(io, name, dir_fd):
            raise ForeignFileError(error.errno, f"is {_kind_of(stat.S_IFLNK)}", path) from error
        raise
    try:
        _require_own(io.stat(fd), stat.S_ISDIR, path, is_shared)
    except OSError:
        io.close(fd)
        raise
    return fd


def _is_link(io: FileIO, name: str, dir_fd: int) -> bool:
    try:
        return stat.S_ISLNK(io.stat_name(name, dir_fd).st_mode)
    except OSError:
        return False


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


def _kind_of(mode: int) -> str:
    """Kind of a file, for an error text."""
    return _KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


def _is_own(found: os.stat_result) -> bool:
    """True if only this user and root can write to the file or directory."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _require_own(found: os.stat_result, is_kind: object, path: str, is_shared: bool) -> None:
    if not callable(is_kind) or not is_kind(found.st_mode):
        raise ForeignFileError(0, f"is {_kind_of(found.st_mode)}", path)
    if is_shared or _is_own(found):
        return
    if found.st_uid != os.geteuid():
        raise ForeignFileError(0, f"belongs to user {found.st_uid}, not {os.geteuid()}", path)
    raise ForeignFileError(0, f"others may write to it (mode {found.st_mode & 0o777:o})", path)
