"""Files of an adapter: a digest of their content, and a signature that shows changes without a read of the content.

The functions keep no state. They block while the file system blocks.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from blake3 import blake3

from hybridkv.connectors.vllm.common.identity.fact_text import text

CONFIG = "adapter_config.json"
_READ = (CONFIG, "adapter_model.*", "new_embeddings.*")
"""Files that an engine reads in an adapter's directory."""
_CHUNK_BYTES = 1 << 20


class NotReadableError(Exception):
    """The files of an adapter are not on this machine, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Status of an adapter's files. A change of a file gives another signature, even if a program restores the file's
    times, except within one clock tick of the change before.

    Args:
        entries: name, device, inode, size, mtime and ctime of the files, of their directory, and of symbolic links on
            their paths.
        changed_ns: latest ctime in `entries`, in nanoseconds since 1970, by the file system's clock.
    """

    entries: tuple[tuple[str, int, int, int, int, int], ...]
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Content:
    """Digest of an adapter's content, and the signature of its files when they were read."""

    digest: bytes
    signature: Signature


def local_directory(path: str) -> Path:
    """Directory in which an engine looks for an adapter.

    Raises:
        NotReadableError: a relative path does not exist on this machine; it may be a name on a hub.
    """
    found = Path(os.path.expanduser(path))
    if not found.is_absolute() and not found.exists():
        raise NotReadableError(f"{path} is not a directory of this machine")
    return Path(os.path.abspath(found))


def signature(path: str) -> Signature:
    """Current signature of an adapter's files.

    Raises:
        NotReadableError: the files do not exist, or access is denied.
    """
    directory = local_directory(path)
    try:
        looked = [(str(link), os.lstat(link)) for link in _links(directory)]
        looked.append((str(directory), os.stat(directory)))
        for name in _names(directory):
            at = directory / name
            looked += [(str(link), os.lstat(link)) for link in _links(at)]
            looked.append((str(at), os.stat(at)))
    except OSError as error:
        raise NotReadableError(f"{path}: {error}") from error
    entries = tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in looked)
    return Signature(entries, max(s.st_ctime_ns for _, s in looked))


def content(path: str, options: object) -> Content:
    """Reads an adapter's files completely.

    Args:
        path: path of the adapter in the request.
        options: other fields of the request's adapter that change how the engine reads the files.

    Raises:
        NotReadableError: the files cannot be read, do not exist, are no known adapter, or changed during the read.
    """
    before = signature(path)
    directory = local_directory(path)
    hasher = blake3(text("adapter", options).encode())
    try:
        names = _names(directory)
        for name in names:
            hasher.update(f"\0{name}\0{os.stat(directory / name).st_size}\0".encode())
            with (directory / name).open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    hasher.update(chunk)
    except OSError as error:
        raise NotReadableError(f"{path}: {error}") from error
    if CONFIG not in names or len(names) < 2:
        raise NotReadableError(f"{path} contains no adapter that hybridkv knows")
    if signature(path) != before:
        raise NotReadableError(f"{path} changed while it was read")
    return Content(hasher.digest(), before)


def _names(directory: Path) -> list[str]:
    """Names of an adapter's files, sorted."""
    return sorted(
        name
        for name in os.listdir(directory)
        if any(fnmatchcase(name, pattern) for pattern in _READ) and stat.S_ISREG(os.stat(directory / name).st_mode)
    )


def _links(path: Path) -> list[Path]:
    """Symbolic links among a path and its parent directories."""
    return [each for each in (*reversed(path.parents), path) if each.is_symlink()]
