"""Warning if other users can replace a store between two starts, because they may rename a directory above it.

Not an error: the operator is responsible for these directories.
"""

from __future__ import annotations

import logging
import os
import stat

from hybridkv.tiers.files.directory import Directory

logger = logging.getLogger(__name__)

UNKNOWN_USER = 65534
"""User id shown for owners without an id in this user namespace; usually root of the machine."""


def warn_if_replaceable(root: Directory) -> None:
    """Log a warning for the nearest directory above the root in which other users can rename entries. Ignores the
    permissions of groups."""
    path = root.path
    while path != "/":
        path = os.path.dirname(path)
        try:
            found = root.io.stat_name(f"{path.rstrip('/')}/.", root.fd)
        except OSError:
            continue  # not readable by this user
        why = _why_not_safe(found)
        if why is not None:
            logger.warning(
                "%s could be exchanged for another directory between two starts: %s %s; "
                "hint: give the store a parent that only this user or root may write to",
                root.path,
                path,
                why,
            )
            return


def _why_not_safe(found: os.stat_result) -> str | None:
    if found.st_uid not in (0, os.geteuid(), UNKNOWN_USER):
        return f"belongs to user {found.st_uid}"
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        return f"may be written to by everybody (mode {stat.S_IMODE(found.st_mode):o})"
    return None
