"""Damage to the files of a store by other processes or a bad disk. The ledger is updated before the damage."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random

from soak.ledger import Log

METADATA = ("snapshot", "changes", "quarantine", "epoch", "namespace.json", "LOCK")


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("*/rank-*/segment-" + "[0-9]" * 10))


def flip_in_segment(root: Path, log: Log, random: Random) -> None:
    found = segments(root)
    if not found:
        return
    path = random.choice(found)
    log.say(f"excused {int(path.name.split('-')[1])}")
    _flip(path, random)


def flip_in_metadata(root: Path, log: Log, random: Random) -> None:
    """Costs chunks that cannot be read any more; in the worst case withdrawn chunks come back."""
    found = [path for path in root.glob("*/*") if path.name in METADATA]
    if not found:
        return
    log.say("damaged")
    path = random.choice(sorted(found))
    # The epoch is stored twice; if both copies are bad, all chunks are dropped on purpose.
    _flip(path, random, 72 if path.name == "epoch" else None)


def _flip(path: Path, random: Random, within: int | None = None) -> None:
    """Change one bit or up to one page, in the first `within` bytes or anywhere."""
    try:
        with path.open("r+b", buffering=0) as file:
            num_bytes = min(os.fstat(file.fileno()).st_size, within or 1 << 40)
            if not num_bytes:
                return
            offset = random.randrange(num_bytes)
            file.seek(offset)
            if random.random() < 0.5:
                before = file.read(1)
                file.seek(offset)
                file.write(bytes([before[0] ^ 1 << random.randrange(8)]))
            else:
                file.write(random.randbytes(min(4096, num_bytes - offset)))
    except OSError:
        return  # it was deleted in the meantime, or is not writable


def scatter_strays(root: Path, log: Log, random: Random) -> None:
    """Create stray files, some with names that the tier uses."""
    places = [root, *root.glob("*"), *root.glob("*/rank-*")]
    names = ["notes.txt", "core.1234", ".nfs0001", "segment-1", "segment-00000000001", "snapshot.old", "rank-x"]
    names += ["lost+found", "segment-0000000001.new", *WRITTEN, *HOSTILE]
    for _ in range(random.randint(1, 4)):
        there = sorted(path for path in places if path.is_dir())
        if not there:
            return  # another trouble has removed all directories
        place = random.choice(there)
        path = place / random.choice(names)
        if path.exists() or path.is_symlink():
            continue
        kind = random.choice(["file", "empty", "directory", "fifo"])
        try:
            if kind == "directory":
                path.mkdir(mode=0o700)
            elif kind == "fifo":
                os.mkfifo(path, 0o600)
            else:
                path.write_bytes(random.randbytes(5000) if kind == "file" else b"")
                path.chmod(0o600)
        except OSError:
            continue


HOSTILE = ("segment-2147483650", "segment-9999999999")
"""Numbers that no segment may have."""
WRITTEN = ("snapshot.new", "changes.new")
"""Temporary names that an engine writes before a rename. An engine does not start if such a name in a namespace is not
a file.
"""


def remove_in_the_way(root: Path) -> bool:
    """Remove what prevents an engine from starting, as an operator would. Returns whether there was something."""
    found = [path for path in root.glob("*/*") if path.name in WRITTEN and not path.is_file()]
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return bool(found)
