"""Shared memory that a process holds. Names do not tell: tests share the directory, and pids are reused."""

from __future__ import annotations

import os
from pathlib import Path

from hybridkv.lmcache.pool import DIRECTORY, PREFIX


def segments_of(process: int) -> set[Path]:
    """Segments of the library that a process has open and that still have their names."""
    found = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            path = Path(os.readlink(descriptor))
        except OSError:
            continue  # closed meanwhile
        if path.parent == DIRECTORY and path.name.startswith(PREFIX) and path.exists():
            found.add(path)
    return found
