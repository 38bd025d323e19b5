"""Object store in a directory: the subset of obstore's interface that this tier uses. Follows no symbolic link.

An object is a file, written under a temporary name and then linked or renamed. The directory belongs to one user, like
the directory of the disk tier, or is shared. In a shared directory, links and special files are refused too, and only
content sealed with the fleet's secret can be trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.files.directory import (
    Directory,
    ForeignFileError,
    directory_error,
    joined_pieces,
    read_into,
    root_path,
    write_all,
)
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.files.path_safety import warn_if_replaceable
from hybridkv.tiers.object.names import is_owner
from hybridkv.tiers.threads import DaemonPool

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"[0-9A-Za-z_-]{1,128}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.new$")
_LOCK_NAME = "sweep.lock"
_MAX_LEVELS = 4
"""Depth of the directories of an object."""
_PACK_SLASHES = 3
"""Slashes in the name of a pack's object. Only a pack has its own directory, which is removed with its last object."""
_LIST_BATCH = 256
"""Number of objects in one piece of a list."""
_PIECE_BYTES = 1 << 20
"""Size of one read."""
_FIRST_S, _LAST_S = 0.0, datetime(9999, 12, 31, tzinfo=UTC).timestamp()
"""Range of file times. Other times are reported as the nearer end: a user may set any time, but a `datetime` cannot
express all of them."""
_NUM_THREADS = 16
"""Threads for asynchronous calls."""


def path_of(url: str) -> str:
    """Path of a `file:` URL.

    Raises:
        TierConfigurationError: the URL has a host, a query or a fragment.

    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise TierConfigurationError("url", "file:///directory", url, "write ? and # as %3F and %23")
    try:
        return root_path(unquote(parts.path))
    except TierConfigurationError as error:
        raise TierConfigurationError("url", f"file: and {error.expected}", url) from error


class DirectoryStore:
    """Objects in one directory. Thread-safe. Between calls, only a `StoredFile` keeps a file open.

    Raises the errors of obstore: `FileNotFoundError` if there is no object, or the file is no object;
    `AlreadyExistsError` from `put`; `NotModifiedError` from `get`; otherwise `OSError`.

    Args:
        path: path of the directory, from `path_of`; the parent must exist.
        may_be_shared: accept a directory that others own or may write to.
        io: system calls.

    """

    def __init__(self, path: str, may_be_shared: bool, io: FileIO | None = None) -> None:
        self._path = path
        self._may_be_shared = may_be_shared
        self._io = io or FileIO()
        self._pool = DaemonPool(_NUM_THREADS, "hybridkv-object-files")
        self._has_logged_failure = False
        self.num_left_out = 0
        """Number of files and directories of namespaces that lists left out since the start, because they could not be
        opened. Each list counts them again."""

    def check(self) -> None:
        """Create the directory if needed, and warn if other users could replace it.

        Raises:
            TierConfigurationError: the directory cannot be used.

        """
        try:
            root = Directory.root(self._io, self._path, True, self._may_be_shared)
        except OSError as error:
            refusal = directory_error(self._path, error)
            hint = refusal.hint
            if isinstance(error, ForeignFileError) and not self._may_be_shared:
                hint += "; or a secret_file, if users share it"
            raise TierConfigurationError("url", refusal.expected, refusal.got, hint) from error
        try:
            if root.shared_mode is None:
                warn_if_replaceable(root)
        finally:
            root.close()

    # Interface of obstore.

    def put(
        self,
        path: str,
        file: bytes | Sequence[Buffer],
        *,
        mode: Literal["create", "overwrite"] = "overwrite",
        use_multipart: bool = False,
    ) -> None:
        """Write an object atomically. No fsync."""
        from obstore.exceptions import AlreadyExistsError

        pieces = [file] if isinstance(file, bytes) else file
        with self._directory(path, create=True) as (directory, name):
            temporary = f"{name}.{uuid.uuid4().hex}.new"
            fd = directory.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                try:
                    offset = 0
                    for piece in joined_pieces(memoryview(each).cast("B") for each in pieces):
                        write_all(self._io, fd, piece, offset)
                        offset += len(piece)
                finally:
                    self._io.close(fd)
                if mode == "overwrite":
                    self._io.rename(temporary, name, directory.fd)
                else:
                    self._io.link(temporary, name, directory.fd)
            except FileExistsError:
                raise AlreadyExistsError(f"Object at location {path} already exists") from None
            finally:
                with contextlib.suppress(OSError):
                    directory.remove_file(temporary)  # frees space on a full disk

    def get(self, path: str, *, options: Any = None) -> StoredFile:
        """Open an object or a range of it. The bytes are read on iteration.

        Args:
            path: name of the object.
            options: "range": (first byte, end); "if_none_match": ETag of a version that is not wanted.

        """
        from obstore.exceptions import NotModifiedError

        options = options or {}
        try:
            with self._directory(path, create=False) as (directory, name):
                fd = directory.open_file(name, os.O_RDONLY)
        except (ForeignFileError, NotADirectoryError) as error:
            self._log_failure(error)
            raise FileNotFoundError(error.errno, error.strerror, path) from error
        found = StoredFile(self._io, fd, options.get("range"), self._pool)
        if options.get("if_none_match") == found.meta["e_tag"]:
            raise NotModifiedError(path)
        return found

    def head(self, path: str) -> ObjectMeta:
        """Size and time of the last write of an object."""
        return self.get(path).object_meta(path)

    def renew(self, path: str) -> None:
        """Set the time of the last write to now. Another user's object in a shared directory is written again."""
        try:
            with self._directory(path, create=False) as (directory, name):
                fd = directory.open_file(name, os.O_RDONLY)
                try:
                    self._io.set_modified_now(fd)
                finally:
                    self._io.close(fd)
        except PermissionError:
            self.put(path, [*self.get(path)])

    def delete(self, paths: str | Sequence[str]) -> None:
        """Delete objects. Ignores missing ones. Also removes the directory of a pack with its last object."""
        for path in [paths] if isinstance(paths, str) else paths:
            with (
                contextlib.suppress(FileNotFoundError),
                self._directory(path, create=False, is_temporary=_TEMPORARY.search(path) is not None) as (
                    directory,
                    name,
                ),
            ):
                directory.remove_file(name)
            if path.count("/") == _PACK_SLASHES:
                self._remove_directory(path.rpartition("/")[0])

    def list(self) -> Iterator[Sequence[ObjectMeta]]:
        """All objects and temporary files, in no order, in pieces. Links, special files and directories that cannot be
        opened are left out."""
        try:
            root = Directory.root(self._io, self._path, False, self._may_be_shared)
        except FileNotFoundError:
            return
        try:
            found = self._walk(root, "", _MAX_LEVELS)
            while metas := list(islice(found, _LIST_BATCH)):
                yield metas
        finally:
            root.close()

    def _walk(self, directory: Directory, prefix: str, num_levels: int) -> Iterator[ObjectMeta]:
        for name in self._io.scan(directory.fd):
            path = prefix + name
            child = None
            try:
                found = self._io.stat_name(name, directory.fd)
                if stat.S_ISDIR(found.st_mode) and num_levels:
                    child = directory.child(name, create=False)
                meta = _meta(path, found) if stat.S_ISREG(found.st_mode) else None
            except OSError as error:
                is_gone = isinstance(error, (FileNotFoundError, NotADirectoryError, ForeignFileError))
                if not is_gone and is_owner(path.partition("/")[0]):
                    self.num_left_out += 1
                logger.debug("%s: left out of the list: %s", path, error)
                continue
            if meta is not None:
                yield meta
            if child is not None:
                try:
                    yield from self._walk(child, f"{path}/", num_levels - 1)
                finally:
                    child.close()

    def remove_empty_directories(self, before_s: float) -> int:
        """Remove empty directories of packs and namespaces that were last changed before this time, such as those of
        killed engines. Returns the number of removed directories."""
        removed = 0
        try:
            root = Directory.root(self._io, self._path, False, self._may_be_shared)
        except FileNotFoundError:
            return 0
        try:
            for owner in list(self._io.scan(root.fd)):
                if not is_owner(owner):
                    continue
                with contextlib.suppress(OSError):
                    packs = root.child(f"{owner}/p", create=False)
                    try:
                        for name in self._io.scan(packs.fd):
                            removed += self._removed(packs, name, before_s)
                    finally:
                        packs.close()
                for name in (f"{owner}/p", f"{owner}/m", f"{owner}/proof", f"{owner}/renewal", owner):
                    removed += self._removed(root, name, before_s)
        finally:
            root.close()
        return removed

    def _removed(self, directory: Directory, name: str, before_s: float) -> bool:
        try:
            if self._io.stat_name(name, directory.fd).st_mtime >= before_s:
                return False
            self._io.remove_directory(name, directory.fd)
        except OSError:
            return False
        return True

    def _remove_directory(self, path: str) -> None:
        """Remove a directory if it is empty."""
        with contextlib.suppress(OSError), self._directory(path, create=False) as (directory, name):
            self._io.remove_directory(name, directory.fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Lock the directory against other sweepers. False if another process has locked it. If the lock file cannot be
        opened, or the file system has no locks, True without a lock: two sweepers may then delete more objects than
        one."""
        root = Directory.root(self._io, self._path, False, self._may_be_shared)
        try:
            fd = root.open_file(_LOCK_NAME, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            logger.debug("%s/%s cannot be opened: %s", self._path, _LOCK_NAME, error)
            root.close()
            yield True
            return
        try:
            try:
                is_locked = self._io.lock(fd)
            except OSError as error:
                logger.debug("%s/%s cannot be locked: %s", self._path, _LOCK_NAME, error)
                is_locked = True
            yield is_locked
        finally:
            self._io.close(fd)
            root.close()

    def clock_ahead_s(self) -> float:
        """Seconds by which the clock of the file system is ahead of this host's clock. Touches the lock file. Needs no
        space on the disk if the lock file exists.

        Raises:
            OSError: the lock file cannot be created or touched.
        """
        root = Directory.root(self._io, self._path, False, self._may_be_shared)
        try:
            fd = root.open_file(_LOCK_NAME, os.O_RDWR | os.O_CREAT)
            try:
                self._io.set_modified_now(fd)
                now_s = time.time()
                return self._io.stat(fd).st_mtime - now_s
            finally:
                self._io.close(fd)
        finally:
            root.close()

    async def put_async(
        self,
        path: str,
        file: bytes | Sequence[Buffer],
        *,
        mode: Literal["create", "overwrite"] = "overwrite",
        use_multipart: bool = False,
    ) -> None:
        await _result(self._pool, partial(self.put, path, file, mode=mode))

    async def get_async(self, path: str, *, options: Any = None) -> StoredFile:
        found: StoredFile = await _result(self._pool, partial(self.get, path, options=options))
        return found

    async def head_async(self, path: str) -> ObjectMeta:
        found: ObjectMeta = await _result(self._pool, partial(self.head, path))
        return found

    async def delete_async(self, paths: str | Sequence[str]) -> None:
        await _result(self._pool, partial(self.delete, paths))

    async def renew_async(self, path: str) -> None:
        await _result(self._pool, partial(self.renew, path))

    # Files.

    @contextlib.contextmanager
    def _directory(self, path: str, create: bool, is_temporary: bool = False) -> Iterator[tuple[Directory, str]]:
        """Directory of an object, and its file name."""
        *folders, name = path.split("/")
        if not all(map(_is_plain, (*folders, _TEMPORARY.sub("", name) if is_temporary else name))):
            raise FileNotFoundError(0, "is no name of an object", path)
        opened = [Directory.root(self._io, self._path, create, self._may_be_shared)]
        try:
            for folder in folders:
                opened.append(opened[-1].child(folder, create))
            yield opened[-1], name
        finally:
            for directory in opened:
                directory.close()

    def _log_failure(self, error: OSError) -> None:
        """Log a foreign file: the first one as a warning, others at debug level. The file counts as a miss."""
        log = logger.debug if self._has_logged_failure else logger.warning
        log("%s %s: not an object, ignored", error.filename, error.strerror)
        self._has_logged_failure = True


class StoredFile:
    """An opened object, or a range of it. The file is closed when this instance is deleted."""

    def __init__(self, io: FileIO, fd: int, part: tuple[int, int] | None, pool: DaemonPool) -> None:
        self._io = io
        self._fd = fd
        self._pool = pool
        found = io.stat(fd)
        self.meta: Mapping[str, Any] = {
            "size": found.st_size,
            "e_tag": _tag(found),
        }
        """`size` of the whole object in bytes, and `e_tag` of this version."""
        self._found = found
        start, stop = part or (0, found.st_size)
        self._start, self._stop = start, min(stop, found.st_size)
        self._at = start

    def object_meta(self, path: str) -> ObjectMeta:
        """Description of the object under this name."""
        return _meta(path, self._found)

    def stream(self, min_chunk_size: int = 0) -> StoredFile:
        """Iterate over the bytes in pieces. Fewer bytes than the range if the object ends first."""
        return self

    def skip_to(self, offset: int) -> None:
        """Set the offset in the object at which `read_into` begins."""
        self._at = offset

    def read_into(self, views: Sequence[memoryview]) -> int:
        """Fill byte views in order. Returns the number of bytes read: less than the room if the object ends first.

        Faster than iteration, which copies the bytes once more.
        """
        num_bytes = read_into(self._io, self._fd, views, self._at)
        self._at += num_bytes
        return num_bytes

    def __iter__(self) -> Iterator[Buffer]:
        offset = self._start
        while offset < self._stop:
            piece = memoryview(bytearray(min(self._stop - offset, _PIECE_BYTES)))
            num_bytes = self._io.preadv(self._fd, [piece], offset)
            if not num_bytes:
                return
            yield piece[:num_bytes]
            offset += num_bytes

    async def __aiter__(self) -> AsyncIterator[Buffer]:
        pieces = iter(self)
        while (piece := await _result(self._pool, next, pieces, None)) is not None:
            yield piece

    def __del__(self) -> None:
        self._io.close(self._fd)


def _tag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _meta(path: str, found: os.stat_result) -> ObjectMeta:
    modified = datetime.fromtimestamp(min(max(found.st_mtime, _FIRST_S), _LAST_S), UTC)
    return {"path": path, "size": found.st_size, "last_modified": modified, "e_tag": _tag(found), "version": None}


async def _result(pool: DaemonPool, call: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.wrap_future(pool.submit(call, *arguments))


def _is_plain(name: str) -> bool:
    """True if a component of an object name is valid. Names in manifests are untrusted."""
    return _PLAIN.fullmatch(name) is not None
