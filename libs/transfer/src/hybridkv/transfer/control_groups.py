"""How much memory the control groups of this process still give it: the limit of a container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_Names = tuple[str, str, str]
"""Files with the limit and with what is used, and what keys of memory.stat begin with."""
_V2: _Names = ("memory.max", "memory.current", "")
_V1: _Names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Of the control group `directory`: `free_bytes` of `num_bytes` are free, cached files counted as free."""

    directory: Path
    num_bytes: int
    free_bytes: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The limit that leaves least, of this process's control group and all above it; None where there is none.

    `root` has the directories `proc` and `sys`. Both versions of control groups are read.
    """
    limits = [_limit(directory, names) for directory, names in _directories(root)]
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.free_bytes, default=None)


def _directories(root: Path) -> Iterator[tuple[Path, _Names]]:
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = mount, _V2
        elif "memory" in controllers.split(","):
            top, names = mount / "memory", _V1
        else:
            continue
        directory = top / path.lstrip("/")
        # A container may see the path of the host; then only what lies at the top is there.
        for each in (directory, *directory.parents):
            if each.is_relative_to(top):
                yield each, names


def _limit(directory: Path, names: _Names) -> MemoryLimit | None:
    limit_name, used_name, prefix = names
    try:
        num_bytes = int((directory / limit_name).read_text())
        used_bytes = int((directory / used_name).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        file_bytes = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
    except (OSError, ValueError, KeyError):  # not there, or "max"
        return None
    return MemoryLimit(directory, num_bytes, num_bytes - used_bytes + file_bytes)
