"""Disk that loses power: builds possible contents after the loss from a log of writes and syncs.

A write is durable if a sync of its file began after the write ended and has ended itself. Of everything else any part
may be durable: any sectors of a write, any of a file's sizes, any prefix of the changes to a directory's names since
its last sync. Nothing else is assumed: no order between files or between data and names, and no atomic unit larger than
a sector of 512 bytes. New directories are durable at once, unless configured otherwise.

`power_loss_writer` writes the log. This module knows no record and no index; `power_loss_check` does.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

SECTOR_BYTES = 512
_EVENT = struct.Struct("<IiQQqQ")
_WRITE, _SYNC, _END, _NOTE, _UNKNOWN = range(1, 6)


@dataclass
class Asked:
    """Write or sync in the log. Times are positions in the log."""

    begun: int
    inode: int
    offset: int = 0
    data: bytes = b""
    ended: int | None = None
    result: int = 0

    @property
    def is_sync(self) -> bool:
        return not self.data

    def has_ended(self, time: int) -> bool:
        return self.ended is not None and self.ended <= time


class Note(NamedTuple):
    """Note of the writer, and its time."""

    time: int
    words: tuple[Any, ...]


@dataclass
class Log:
    """Log of a writer, in the order of events."""

    asked: list[Asked]
    notes: list[Note]
    end: int
    """Time after all events."""

    @property
    def said(self) -> list[Note]:
        """Notes of what the writer reported."""
        return [Note(note.time, note.words[1:]) for note in self.notes if note.words[0] == "said"]


def read_log(path: Path) -> Log:
    asked: dict[int, Asked] = {}
    notes = []
    time = 0
    for time, (kind, result, number, inode, offset, data) in enumerate(_events(path.read_bytes())):
        assert kind != _UNKNOWN, f"unknown io_uring operation {result} with flags {offset}: describe it here"
        if kind == _NOTE:
            notes.append(Note(time, tuple(msgspec.json.decode(data))))
        elif kind == _END:
            asked[number].ended, asked[number].result = time, result
        elif kind == _SYNC or data:
            asked[number] = Asked(time, inode, offset, data)
        else:
            asked[number] = Asked(time, -1)  # an empty write
    return Log(list(asked.values()), notes, time + 1)


def _events(data: bytes) -> Iterator[tuple[int, int, int, int, int, bytes]]:
    at = 0
    while at < len(data):
        kind, result, number, inode, offset, num_bytes = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        yield kind, result, number, inode, offset, data[at : at + num_bytes]
        at += num_bytes


class Resize(NamedTuple):
    begun: int
    num_bytes: int


@dataclass
class File:
    """Changes to one inode, in order."""

    done: list[Asked | Resize] = field(default_factory=list)
    syncs: list[Asked] = field(default_factory=list)

    def synced_until(self, time: int) -> int:
        """Writes that ended before this time are durable if power is lost at `time`."""
        return max((sync.begun for sync in self.syncs if sync.has_ended(time) and not sync.result), default=-1)


@dataclass
class Folder:
    """Changes to one directory's names: their time, and the new targets (None: removed)."""

    changes: list[tuple[int, dict[str, File | Folder | None]]] = field(default_factory=list)
    syncs: list[Asked] = field(default_factory=list)
    synced_until = File.synced_until


class Moods:
    """Fate of everything that is not durable for certain: none of it is kept, all, or a random part."""

    NOTHING, ALL, CHANCE = range(3)


class Disk:
    """Contents of one directory according to a log.

    Args:
        log: of a writer.
        top: inode of the directory that holds the writer's store.
        keeps_made_directories: also without a sync of the parent directory.
    """

    def __init__(self, log: Log, top: int, keeps_made_directories: bool = True) -> None:
        self.log = log
        self.top = Folder()
        self._keeps_made_directories = keeps_made_directories
        self._of_inode: dict[int, File | Folder] = {top: self.top}
        notes = [(note.time, note) for note in log.notes]
        asked = [(one.begun, one) for one in log.asked]
        for _, happened in sorted([*notes, *asked], key=lambda pair: pair[0]):
            if isinstance(happened, Note):
                self._apply(happened.time, *happened.words)
            elif isinstance(happened, Asked) and happened.inode in self._of_inode:
                at = self._of_inode[happened.inode]
                if happened.is_sync:
                    at.syncs.append(happened)
                else:
                    assert isinstance(at, File)
                    at.done.append(happened)

    def _apply(self, time: int, kind: str, *words: Any) -> None:
        if kind == "resized":
            inode, num_bytes = words
            file = self._of_inode[inode]
            assert isinstance(file, File)
            file.done.append(Resize(time, num_bytes))
        elif kind in ("made", "removed", "renamed"):
            folder = self._of_inode[words[0]]
            assert isinstance(folder, Folder)
            if kind == "made":
                _, name, inode, is_folder = words
                self._of_inode[inode] = Folder() if is_folder else File()
                folder.changes.append((time, {name: self._of_inode[inode]}))
            elif kind == "removed":
                folder.changes.append((time, {words[1]: None}))
            else:
                moved = _names(folder, len(folder.changes))[words[1]]
                folder.changes.append((time, {words[1]: None, words[2]: moved}))

    def is_certain(self, path: tuple[str, ...], start: int, num_bytes: int, since: int) -> int | None:
        """Time at which these bytes of a file, as written before `since`, became durable; None: never.

        Says nothing about the names in the file's path.
        """
        at: File | Folder | None = self.top
        for name in path:
            assert isinstance(at, Folder)
            at = next((found[name] for _, found in at.changes if found.get(name) is not None), None)
        assert isinstance(at, File)
        writes = [
            one
            for one in at.done
            if isinstance(one, Asked)
            and one.begun < since
            and one.offset < start + num_bytes
            and start < one.offset + len(one.data)
        ]
        if any(one.ended is None for one in writes):
            return None
        last = max(one.ended for one in writes if one.ended is not None)
        covering = [sync.ended for sync in at.syncs if sync.begun > last and sync.ended is not None and not sync.result]
        return min(covering, default=None)

    def write_out(self, time: int, mood: int, chooser: random.Random, path: Path) -> None:
        """Write out the contents after a power loss at this time."""
        self._write_folder(self.top, time, mood, chooser, path)

    def _write_folder(self, folder: Folder, time: int, mood: int, chooser: random.Random, path: Path) -> None:
        path.mkdir(mode=0o700)
        until = folder.synced_until(time)
        num_certain = sum(changed < until for changed, _ in folder.changes)
        num_possible = sum(changed <= time for changed, _ in folder.changes)
        chosen = (num_certain, num_possible, chooser.randint(num_certain, num_possible))[mood]
        names = _names(folder, chosen)
        if self._keeps_made_directories:
            made = folder.changes[chosen:num_possible]
            names |= {name: at for _, change in made for name, at in change.items() if isinstance(at, Folder)}
        for name, at in names.items():
            if isinstance(at, Folder):
                self._write_folder(at, time, mood, chooser, path / name)
            elif at is not None:
                _write_file(at, time, mood, chooser, path / name)


def _names(folder: Folder, num_changes: int) -> dict[str, File | Folder | None]:
    names: dict[str, File | Folder | None] = {}
    for _, change in folder.changes[:num_changes]:
        names |= change
    return names


def _write_file(file: File, time: int, mood: int, chooser: random.Random, path: Path) -> None:
    until = file.synced_until(time)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for one in file.done:
            if one.begun > time:
                break
            if isinstance(one, Resize):
                if one.begun < until or mood == Moods.ALL or (mood == Moods.CHANCE and chooser.random() < 0.5):
                    os.truncate(fd, one.num_bytes)
                continue
            if one.result < 0:
                continue
            if one.has_ended(until):
                os.pwrite(fd, one.data[: one.result], one.offset)
            elif mood != Moods.NOTHING:
                for start, end in _parts(one, mood, chooser):
                    os.pwrite(fd, one.data[start:end], one.offset + start)
    finally:
        os.close(fd)


def _parts(one: Asked, mood: int, chooser: random.Random) -> Iterator[tuple[int, int]]:
    """Byte ranges of a write that are kept."""
    size = len(one.data)
    how = "whole" if mood == Moods.ALL else chooser.choice(["nothing", "whole", "beginning", "end", "some", "most"])
    if how in ("whole", "beginning", "end"):
        cut = chooser.randrange(size + 1) // SECTOR_BYTES * SECTOR_BYTES
        yield (0, size) if how == "whole" else (0, cut) if how == "beginning" else (cut, size)
    elif how != "nothing":
        share = 0.5 if how == "some" else 0.95
        for start in range(0, size, SECTOR_BYTES):
            if chooser.random() < share:
                yield start, min(start + SECTOR_BYTES, size)
