"""The locks of a namespace: taken or refused with who has them, and let go where a fork would keep them.

There are two: of the directory, which nobody can delete without what is in it, and which cleaners of old files respect;
and of LOCK in it, for file systems that cannot lock directories.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from typing import Protocol

from hybridkv.tiers.disk.files.lock_holder import find_holder
from hybridkv.tiers.disk.files.names import LOCK_NAME
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.files.directory import Directory


class TakenError(OSError):
    """Another engine has the namespace, or had it meanwhile: what this one knows of it is not true any more."""

    def __init__(self, path: str) -> None:
        super().__init__(
            errno.EBUSY,
            "another engine has it or had it: nothing is written or deleted here any more, and what can be loaded is; "
            "hint: end the other engine, and start this one again",
            path,
        )


def try_to_lock(directory: Directory) -> bool:
    """False when somebody has the directory locked. True also where directories cannot be locked."""
    try:
        return directory.io.lock(directory.fd)
    except OSError:
        return True


def refused_lock(directory: Directory, fd: int) -> TierConfigurationError:
    """Says who has it. `fd`: of what cannot be locked."""
    try:
        named = (directory.read_file(LOCK_NAME) or b"").decode(errors="replace").strip()
    except OSError:
        named = ""
    holder = find_holder(directory.io.stat(fd), int(named) if named.isdecimal() else None)
    if holder is not None:
        words = f"process {holder.pid} ({holder.command})"
    else:
        words = f"process {named or 'unknown'}, which cannot be seen from here"
    return TierConfigurationError(
        "path",
        "a namespace that no other engine has open",
        f"{directory.path}, open in {words}",
        hint="give each engine a path of its own, or end the other one",
    )


def is_same(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether both are of one file."""
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


class HoldsLock(Protocol):
    """Has a lock open."""

    def let_go(self) -> None:
        """In a forked child: what is open here is the parent's, and its lock must end with the parent."""
        ...


_holders: weakref.WeakSet[HoldsLock] = weakref.WeakSet()
"""Of this process. A fork copies descriptors, and a lock lasts as long as any copy of its descriptor."""


def end_in_forked_children(holder: HoldsLock) -> None:
    """No child that is forked from now on keeps its lock."""
    _holders.add(holder)


def _let_go_in_a_forked_child() -> None:
    for holder in list(_holders):
        with contextlib.suppress(OSError):  # the descriptor is closed all the same
            holder.let_go()


os.register_at_fork(after_in_child=_let_go_in_a_forked_child)
