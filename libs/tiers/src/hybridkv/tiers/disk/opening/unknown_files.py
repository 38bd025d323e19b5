"""What lies in a store's directories and is none of its files: said once by an opening, and left alone.

Files that an end left half written are the store's own, and removed. Judges names, and beside the namespace what is no
directory; a file of the store that is of another kind, or another user's, is refused by whoever opens it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterable

from hybridkv.tiers.disk.files.names import (
    WRITTEN_NAMES,
    is_namespace,
    is_namespace_file,
    rank_name,
    segment_number,
)
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.files.directory import Directory, stops_an_opening, temporary_name

logger = logging.getLogger(__name__)

MAX_NAMES = 8
MAX_NAME_CHARACTERS = 80
"""Of one directory and of one name, in one line of the log."""
_OF_FILE_SYSTEMS = ("lost+found",)


def say_unknown_files(namespace: Namespace) -> None:
    """One line in the log for each directory that holds something unknown. `OSError` when one cannot be read."""
    ranks = {rank_name(rank) for rank in range(namespace.num_ranks)}
    root = namespace.root
    _say(root, lambda name: name in _OF_FILE_SYSTEMS or (is_namespace(name) and _may_be_directory(root, name)))
    _say(namespace.directory, lambda name: is_namespace_file(name) or name in ranks)
    for directory in namespace.ranks:
        _say(directory, lambda name: segment_number(name) is not None)


def _may_be_directory(directory: Directory, name: str) -> bool:
    """True also where nobody can tell: it went meanwhile, say."""
    try:
        return stat.S_ISDIR(directory.io.stat_name(name, directory.fd).st_mode)
    except OSError:
        return True


def _say(directory: Directory, is_known: Callable[[str], bool]) -> None:
    unknown = sorted(name for name in directory.list() if not is_known(name))
    if unknown:
        logger.warning("%s holds what is not the disk tier's, left alone: %s", directory.path, _words(unknown))


def _words(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(ascii(name[:MAX_NAME_CHARACTERS]) for name in names[:MAX_NAMES]) + more


def remove_leftovers(directory: Directory, names: Iterable[str] = WRITTEN_NAMES) -> None:
    """Remove what was being written when an earlier process ended. `OSError` when one is not a file of ours."""
    for name in map(temporary_name, names):
        try:
            directory.io.close(directory.open_file(name, os.O_RDONLY))
            directory.remove_file(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            if stops_an_opening(error):
                raise
            logger.warning("%s/%s cannot be removed: %s", directory.path, name, error)
