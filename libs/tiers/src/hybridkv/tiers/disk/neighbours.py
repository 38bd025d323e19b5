"""The other namespaces in the root of an open one: why none of them fits, and which go when the root is full."""

from __future__ import annotations

import logging
import os

import msgspec

from hybridkv.hashing import Fingerprint
from hybridkv.tiers.disk.directory import Directory
from hybridkv.tiers.disk.names import FINGERPRINT_NAME, LOCK_NAME, is_namespace
from hybridkv.tiers.disk.namespace import Namespace, try_to_lock

logger = logging.getLogger(__name__)

MAX_DIFFERENCES = 8
"""In one line of the log."""


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
        if not try_to_lock(directory):
            return False
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
