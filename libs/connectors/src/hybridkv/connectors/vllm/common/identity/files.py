"""Files of an adapter: their content, and a signature that shows changes without reading them.

Functions here keep no state, and may block as long as the file system does.
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
    """Status of the files: every change gives another signature, even if a program restores their times.

    Args:
        entries: name, device, inode, size, mtime and ctime of the files, their directory and the links to them.
        changed_ns: latest ctime, in nanoseconds of the file system's clock since 1970.
    """

    entries: tuple[tuple[str, int, int, int, int, int], ...]
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Content:
    """Content of the files while they have this signature."""

    digest: bytes
    signature: Signature


def local_directory(path: str) -> Path:
    """Directory in which an engine looks for an adapter.

    Raises:
        NotReadableError: the path is not on this machine, so it is a name on a hub.
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
        path: path in the request.
        options: other fields of the request that change how the engine reads the files.

    Raises:
        NotReadableError: the files cannot be read, there are none, or they changed meanwhile.
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
    """Symbolic links on the way to a path, including the path itself."""
    return [each for each in (*reversed(path.parents), path) if each.is_symlink()]
