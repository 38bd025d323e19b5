"""Files and directories of a store that do not belong to the open namespace.

Logs differences to other namespaces, and unknown files; deletes stale namespaces if the store is full; removes
half-written files of an earlier process.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable

import msgspec

from hybridkv.hashing import Fingerprint
from hybridkv.tiers.disk.files.locks import try_to_lock
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.format.layout import (
    FINGERPRINT_NAME,
    LOCK_NAME,
    WRITTEN_NAMES,
    is_namespace,
    is_namespace_file,
    rank_name,
    rank_number,
    segment_number,
)
from hybridkv.tiers.errors import is_shortage
from hybridkv.tiers.files.directory import Directory, is_fatal_at_open, temporary_name

logger = logging.getLogger(__name__)


MAX_DIFFERENCES = 8
MAX_DIFFERENCE_CHARACTERS = 500
"""Largest number of differences in one log line, and length of each."""


def log_differences(namespace: Namespace, fingerprint: Fingerprint) -> None:
    """Log the differences between this namespace and the most similar other namespace of the root, if there is one."""
    nearest: tuple[str, ...] | None = None
    for name in namespace.root.list():
        if not is_namespace(name) or name == namespace.name:
            continue
        differences = _differences(namespace.root, name, fingerprint)
        if differences and (nearest is None or len(differences) < len(nearest)):
            nearest = differences
    if nearest is not None:
        more = f" and {len(nearest) - MAX_DIFFERENCES} more" if len(nearest) > MAX_DIFFERENCES else ""
        words = "; ".join(_printable(difference) for difference in nearest[:MAX_DIFFERENCES])
        logger.info("%s holds no cache for this engine; the nearest differs: %s%s", namespace.root.path, words, more)


def _differences(root: Directory, name: str, fingerprint: Fingerprint) -> tuple[str, ...]:
    """Differences of two fingerprints. Empty if the other file is missing, has invalid contents or cannot be
    compared."""
    try:
        found = _fingerprint_in(root, name)
        return () if found is None or _has_long_names(found) else fingerprint.diff(found)
    except (ValueError, OverflowError, RecursionError):
        return ()


def _has_long_names(found: Fingerprint) -> bool:
    """True if a fact has a very long name: not written by this library, and slow to compare."""
    facts = [found.facts, *(layer.facts for group in found.groups for layer in group.layers)]
    return any(len(name) > MAX_DIFFERENCE_CHARACTERS for names in facts for name in names)


def _printable(words: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in words[:MAX_DIFFERENCE_CHARACTERS])


def _fingerprint_in(root: Directory, name: str) -> Fingerprint | None:
    try:
        directory = root.child(name, create=False)
    except OSError:
        return None
    try:
        data = directory.read_file(FINGERPRINT_NAME)
        return None if data is None else msgspec.json.decode(data, type=Fingerprint)
    except OSError:
        return None
    finally:
        directory.close()


def other_bytes(namespace: Namespace) -> int:
    """Bytes of the other namespaces on disk; a namespace that cannot be read counts as 0. `OSError` if the root cannot
    be read or this process is short of a resource."""
    total = 0
    for name in namespace.root.list():
        if is_namespace(name) and name != namespace.name:
            total += _bytes_of(namespace.root, name)
    return total


def delete_stalest(namespace: Namespace) -> bool:
    """Delete the least recently opened namespace that no engine has open. False if none could be deleted.

    Skips files and other users' directories with the name of a namespace.
    """
    root = namespace.root
    stale: list[tuple[int, str]] = []
    for name in root.list():
        if not is_namespace(name) or name == namespace.name:
            continue
        try:
            stale.append((root.io.stat_name(f"{name}/{LOCK_NAME}", root.fd).st_mtime_ns, name))
        except FileNotFoundError:
            stale.append((0, name))
        except OSError as error:
            if is_shortage(error):
                raise
            logger.debug("%s is no cache that could be deleted: %s", name[:12], error)
    return any(delete_namespace(root, name) for _, name in sorted(stale))


def _bytes_of(root: Directory, name: str) -> int:
    try:
        directory = root.child(name, create=False)
    except OSError as error:
        if is_shortage(error):
            raise
        return 0
    try:
        return directory.disk_bytes()
    except OSError as error:
        if is_shortage(error):
            raise
        return 0
    finally:
        directory.close()


def delete_namespace(root: Directory, name: str) -> bool:
    """Delete a namespace unless an engine has it open. False if nothing was deleted, or if an error (logged) ended the
    deletion, maybe after some files.

    Does not delete unknown files and their directories.
    """
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
        num_removed = _remove_ours(directory)
        directory.remove_file(LOCK_NAME)
        is_gone = _remove_if_empty(root, name)
        if num_removed or is_gone:
            logger.info("deleted the cache %s in %s", name[:12], root.path)
        return num_removed > 0 or is_gone
    except OSError as error:
        logger.warning("the cache %s could not be deleted: %s", name[:12], error)
        return False
    finally:
        if lock_fd >= 0:
            root.io.close(lock_fd)
        directory.close()


def _remove_ours(directory: Directory) -> int:
    """Remove the known files of a namespace, except its lock. Returns the number of removed files."""
    num_removed = 0
    for name in directory.list():
        if rank_number(name) is not None:
            num_removed += _remove_rank(directory, name)
        elif is_namespace_file(name) and name != LOCK_NAME:
            directory.remove_file(name)
            num_removed += 1
    return num_removed


def _remove_rank(directory: Directory, name: str) -> int:
    child = directory.child(name, create=False)
    try:
        segments = [name for name in child.list() if segment_number(name) is not None]
        for segment in segments:
            child.remove_file(segment)
    finally:
        child.close()
    _remove_if_empty(directory, name)
    return len(segments)


def _remove_if_empty(directory: Directory, name: str) -> bool:
    try:
        directory.io.remove_directory(name, directory.fd)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


MAX_NAMES = 8
MAX_NAME_CHARACTERS = 80
"""Largest number of names in one log line, and length of each."""
_OF_FILE_SYSTEMS = ("lost+found",)


def log_unknown_files(namespace: Namespace) -> None:
    """Log one line for each directory with unknown entries. `OSError` if a directory cannot be read."""
    ranks = {rank_name(rank) for rank in range(namespace.num_ranks)}
    root = namespace.root
    _log_unknown(root, lambda name: name in _OF_FILE_SYSTEMS or (is_namespace(name) and _may_be_directory(root, name)))
    _log_unknown(namespace.directory, lambda name: is_namespace_file(name) or name in ranks)
    for directory in namespace.ranks:
        _log_unknown(directory, lambda name: segment_number(name) is not None)


def _may_be_directory(directory: Directory, name: str) -> bool:
    """True if the entry is a directory, or cannot be examined."""
    try:
        return stat.S_ISDIR(directory.io.stat_name(name, directory.fd).st_mode)
    except OSError:
        return True


def _log_unknown(directory: Directory, is_known: Callable[[str], bool]) -> None:
    unknown = sorted(name for name in directory.list() if not is_known(name))
    if unknown:
        logger.warning("%s holds what is not the disk tier's, left alone: %s", directory.path, _words(unknown))


def _words(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(ascii(name[:MAX_NAME_CHARACTERS]) for name in names[:MAX_NAMES]) + more


def remove_leftovers(directory: Directory) -> None:
    """Remove half-written files of an earlier process. `OSError` if such a file is not this user's own, or this process
    is short of a resource."""
    for name in map(temporary_name, WRITTEN_NAMES):
        try:
            directory.io.close(directory.open_file(name, os.O_RDONLY))
            directory.remove_file(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            if is_fatal_at_open(error):
                raise
            logger.warning("%s/%s cannot be removed: %s", directory.path, name, error)
