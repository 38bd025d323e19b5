"""A store in a directory: the methods of obstore's stores that this tier calls, by calls of the system that follow no
link. Knows neither packs nor manifests.

An object is a file that is written beside its name and then linked to it. A directory is its user's own, as the disk
tier's is, or shared: then links and special files are refused all the same, and only what is sealed with the fleet's
secret can be believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.files.directory import Directory, ForeignFileError, joined_pieces, refused, root_path, write_all
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.files.path_safety import say_who_could_exchange
from hybridkv.tiers.threads import DaemonPool

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"[0-9A-Za-z_-]{1,128}")
_PIECE_BYTES = 1 << 20
"""Read at once."""
_NUM_THREADS = 16
"""For the calls of an event loop."""


def path_of(url: str) -> str:
    """The directory that a URL names.

    Raises:
        TierConfigurationError: it names a host, or more than a path.
    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise TierConfigurationError("url", "file:///directory", url, "write ? and # as %3F and %23")
    try:
        return root_path(unquote(parts.path))
    except TierConfigurationError as error:
        raise TierConfigurationError("url", f"file: and {error.expected}", url) from error


class DirectoryStore:
    """Objects in one directory. Any thread may use it. Keeps nothing open between two calls.

    Errors are those of obstore: `FileNotFoundError` where there is no object, also where something else lies there;
    `AlreadyExistsError` of a put; else the system's `OSError`.

    Args:
        path: of the directory, as `path_of` gives it; its parent must be there.
        may_be_shared: take a directory that others own or may write to.
        io: the calls of the system.
    """

    def __init__(self, path: str, may_be_shared: bool, io: FileIO | None = None) -> None:
        self._path = path
        self._may_be_shared = may_be_shared
        self._io = io or FileIO()
        self._pool = DaemonPool(_NUM_THREADS, "hybridkv-object-files")
        self._has_complained = False

    def check(self) -> None:
        """Make the directory where there is none, and say who else could exchange it.

        Raises:
            TierConfigurationError: it cannot be used.
        """
        try:
            root = Directory.root(self._io, self._path, True, self._may_be_shared)
        except OSError as error:
            refusal = refused(self._path, error)
            hint = refusal.hint
            if isinstance(error, ForeignFileError) and not self._may_be_shared:
                hint += "; or a secret_file, if users share it"
            raise TierConfigurationError("url", refusal.expected, refusal.got, hint) from error
        try:
            if root.shared_mode is None:
                say_who_could_exchange(root)
        finally:
            root.close()

    # As obstore has them.

    def put(
        self,
        path: str,
        file: bytes | Sequence[Buffer],
        *,
        mode: Literal["create", "overwrite"] = "overwrite",
        use_multipart: bool = False,
    ) -> None:
        """Make an object, whole or not at all. It is not forced to the disk."""
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
                    directory.remove_file(temporary)  # a full disk needs the room

    def get(self, path: str, *, options: Any = None) -> StoredFile:
        """An object, or a part of it: its bytes are read when they are asked for.

        Args:
            path: its name.
            options: "range": the first byte and the one behind the last; "if_none_match": a version that is not wanted.
        """
        from obstore.exceptions import NotModifiedError

        options = options or {}
        try:
            with self._directory(path, create=False) as (directory, name):
                fd = directory.open_file(name, os.O_RDONLY)
        except (ForeignFileError, NotADirectoryError) as error:
            self._complain(error)
            raise FileNotFoundError(error.errno, error.strerror, path) from error
        found = StoredFile(self._io, fd, options.get("range"), self._pool)
        if options.get("if_none_match") == found.meta["e_tag"]:
            raise NotModifiedError(path)
        return found

    def delete(self, paths: str | Sequence[str]) -> None:
        for path in [paths] if isinstance(paths, str) else paths:
            with contextlib.suppress(FileNotFoundError), self._directory(path, create=False) as (directory, name):
                directory.remove_file(name)

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

    # Where it lies.

    @contextlib.contextmanager
    def _directory(self, path: str, create: bool) -> Iterator[tuple[Directory, str]]:
        """The directory of an object, and its name there."""
        *folders, name = path.split("/")
        if not all(map(_is_plain, (*folders, name))):
            raise FileNotFoundError(0, "is no name of an object", path)
        opened = [Directory.root(self._io, self._path, create, self._may_be_shared)]
        try:
            for folder in folders:
                opened.append(opened[-1].child(folder, create))
            yield opened[-1], name
        finally:
            for directory in opened:
                directory.close()

    def _complain(self, error: OSError) -> None:
        """Once: everything behind it is a miss."""
        log = logger.debug if self._has_complained else logger.warning
        log("%s %s: it is no object, and is left alone", error.filename, error.strerror)
        self._has_complained = True


class StoredFile:
    """An object that was opened, or a part of it. Its file is closed with it."""

    def __init__(self, io: FileIO, fd: int, part: tuple[int, int] | None, pool: DaemonPool) -> None:
        self._io = io
        self._fd = fd
        self._pool = pool
        found = io.stat(fd)
        self.meta: Mapping[str, Any] = {
            "size": found.st_size,
            "e_tag": f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}",
        }
        """"size": of the whole object, in bytes. "e_tag": of this version of it."""
        start, stop = part or (0, found.st_size)
        self._start, self._stop = start, min(stop, found.st_size)

    def stream(self, min_chunk_size: int = 0) -> StoredFile:
        """The bytes in order, a piece at a time; fewer than asked for where the object ends before."""
        return self

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

    def bytes(self) -> Buffer:
        return b"".join(self)

    async def bytes_async(self) -> Buffer:
        data: Buffer = await _result(self._pool, self.bytes)
        return data

    def __del__(self) -> None:
        self._io.close(self._fd)


async def _result(pool: DaemonPool, call: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.wrap_future(pool.submit(call, *arguments))


def _is_plain(name: str) -> bool:
    """Whether a part of an object's name may be one of ours. Who writes a manifest may have put anything there."""
    return _PLAIN.fullmatch(name) is not None
