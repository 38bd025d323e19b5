"""Says who else could exchange a store for another one between two starts: whoever may rename a directory above it.

A warning, no refusal: what lies above is the operator's, and may be meant so.
"""

from __future__ import annotations

import logging
import os
import stat

from hybridkv.tiers.files.directory import Directory

logger = logging.getLogger(__name__)

UNKNOWN_USER = 65534
"""Who owns what belongs to a user that this user namespace does not know: mostly the machine's root."""


def say_who_could_exchange(root: Directory) -> None:
    """One line in the log, about the nearest directory above the root that others may rename things in."""
    path = root.path
    while path != "/":
        path = os.path.dirname(path)
        try:
            found = root.io.stat_name(f"{path.rstrip('/')}/.", root.fd)
        except OSError:
            continue  # not ours to look at, so not ours to judge
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
