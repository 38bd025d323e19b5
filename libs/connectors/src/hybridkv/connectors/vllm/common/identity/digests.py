"""Digests of large files: of the whole file, or of a sample that differs between trainings. Cached beside the files.

The sample of a safetensors file is its whole header (name, shape, type and place of every tensor) and some bytes of
every tensor, so it detects a training that changed a single tensor. The sample of another file is bytes at equal
distances. Two files that differ only outside the sampled places have the same digest.

Digests are cached in a file in the model's directory, or in the user's cache directory if the model's directory is not
writable. A cached digest is valid only while device, inode, size and times of its file are unchanged.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from blake3 import blake3

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
CACHE_FILE_NAME = f".hybridkv-digests-v{FORMAT_VERSION}.json"
STEP_BYTES = 1 << 22
TENSOR_SAMPLE_BYTES = 4096
MAX_TENSOR_SAMPLES = 3
FILE_SAMPLES = 4096
"""Maximum of sampled places in a safetensors file, but at least one for every tensor."""
BLOB_SAMPLE_BYTES = 1 << 16
BLOB_SAMPLES = 64
MAX_HEADER_BYTES = 100_000_000
SETTLED_NS = 1_000_000_000
"""Nanoseconds after a change of a file until its digest may be cached: within a tick of the file system's clock, the
file may change again without a change of its times."""


class _CachedDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cached digest of a file, and the status of the file when the file was read."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    digest: str


class _DigestCacheFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format_version: int
    digests: dict[str, _CachedDigest]


class FileDigests:
    """Digests of the files below a directory. A file is read again only if it has changed, or changed recently.

    Args:
        root: the directory.
        mode: "full" or "sampled".
        clock_ns: current time in nanoseconds since 1970.
    """

    def __init__(self, root: Path, mode: str, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._root = root
        self._mode = mode
        self._clock_ns = clock_ns
        self._cache_paths = (root / CACHE_FILE_NAME, _in_user_cache(root))
        self._known: dict[str, _CachedDigest] = {}
        for path in reversed(self._cache_paths):
            self._known |= _read(path)
        self._has_new = False

    def of(self, path: Path) -> tuple[int, str]:
        """Size in bytes, and digest, of a file.

        Raises:
            OSError: the file cannot be read.
        """
        name = f"{self._mode} {path.relative_to(self._root).as_posix()}"
        known = self._known.get(name)
        with path.open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            if known is not None and known == _cached_digest(before, known.digest):
                return known.size, known.digest
            digest = _full(file) if self._mode == "full" else _sampled(file, before.st_size)
            # The digest is not cached if the file changed during the read, or may have changed with equal times.
            is_settled = self._clock_ns() - max(before.st_ctime_ns, before.st_mtime_ns) >= SETTLED_NS
            if is_settled and _cached_digest(os.fstat(file.fileno()), digest) == (
                found := _cached_digest(before, digest)
            ):
                self._known[name] = found
                self._has_new = True
        return before.st_size, digest

    def save(self) -> None:
        """Writes new digests to the cache for the next process. A failure is only logged: the next process reads the
        files again."""
        if not self._has_new:
            return
        there = {name: cached for name, cached in self._known.items() if (self._root / name.partition(" ")[2]).exists()}
        data = msgspec.json.encode(_DigestCacheFile(format_version=FORMAT_VERSION, digests=there))
        errors = []
        for path in self._cache_paths:
            try:
                _write(path, data)
                self._has_new = False
                return
            except OSError as error:
                errors.append(f"{path}: {error.strerror}")
        logger.info(
            "digests of %s are not cached, and are made again at the next start: %s", self._root, "; ".join(errors)
        )


def _cached_digest(status: os.stat_result, digest: str) -> _CachedDigest:
    return _CachedDigest(
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        digest=digest,
    )


def _in_user_cache(root: Path) -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "hybridkv" / "digests" / f"{blake3(str(root.resolve()).encode()).hexdigest(16)}{CACHE_FILE_NAME}"


def _read(path: Path) -> dict[str, _CachedDigest]:
    try:
        cached = msgspec.json.decode(path.read_bytes(), type=_DigestCacheFile)
    except (OSError, msgspec.DecodeError):
        return {}
    return cached.digests if cached.format_version == FORMAT_VERSION else {}


def _write(path: Path, data: bytes) -> None:
    """Writes atomically: readers see the old file or the new one."""
    if path.name != CACHE_FILE_NAME:
        path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f"{CACHE_FILE_NAME}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _full(file: BinaryIO) -> str:
    hasher = blake3()
    file.seek(0)
    while block := file.read(STEP_BYTES):
        hasher.update(block)
    return hasher.hexdigest(16)


def _sampled(file: BinaryIO, size: int) -> str:
    hasher = blake3()
    header = _header(file, size)
    if header is not None:
        hasher.update(header)
    places = _tensor_places(header, size) if header is not None else _even_places(size)
    for offset, length in places:
        file.seek(offset)
        hasher.update(_exactly(file, length))
    return hasher.hexdigest(16)


def _exactly(file: BinaryIO, length: int) -> bytes:
    """Reads `length` bytes, or fewer at the end of the file."""
    data = b""
    while len(data) < length and (more := file.read(length - len(data))):
        data += more
    return data


def _header(file: BinaryIO, size: int) -> bytes | None:
    """Header of a safetensors file, with the 8 bytes of its length; None if this is no safetensors file."""
    if size < 8:
        return None
    start = _exactly(file, 8)
    (length,) = struct.unpack("<Q", start)
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        return None
    body = _exactly(file, length)
    return start + body if body.lstrip()[:1] == b"{" else None


def _tensor_places(header: bytes, size: int) -> list[tuple[int, int]]:
    """Places to read, as (offset, bytes): the start of every tensor; with few tensors also its end, or its middle and
    end."""
    try:
        tensors = list(_tensors(json.loads(header[8:]), len(header), size))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return _even_places(size)
    each = max(1, min(MAX_TENSOR_SAMPLES, FILE_SAMPLES // max(1, len(tensors))))
    places: set[tuple[int, int]] = set()
    for start, end in tensors:
        length = min(TENSOR_SAMPLE_BYTES, end - start)
        room = end - start - length
        places |= {(start + room * i // max(1, each - 1), length) for i in range(each)}
    return sorted(places)


def _tensors(header: dict[str, Any], data: int, size: int) -> Iterator[tuple[int, int]]:
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            if not 0 <= start <= end <= size - data:
                raise ValueError(f"{name} lies outside of its file")
            if start < end:
                yield data + start, data + end


def _even_places(size: int) -> list[tuple[int, int]]:
    """Places at equal distances, as (offset, bytes), and the end of the file, which has the table of an archive."""
    stride = max(BLOB_SAMPLE_BYTES, (size - BLOB_SAMPLE_BYTES) // (BLOB_SAMPLES - 1))
    offsets = sorted({*range(0, size, stride), max(0, size - BLOB_SAMPLE_BYTES)})
    return [(offset, BLOB_SAMPLE_BYTES) for offset in offsets]
