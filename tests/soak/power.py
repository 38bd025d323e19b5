"""The content of a disk after a loss of power: synced data, and an arbitrary part of the rest.

`VolatileIO` makes the real calls and records their changes; `write_image` writes a directory that a loss of power at
this moment could have left. Of data that was not synced, any sectors of any writes may be there. Names and sizes follow
one of two kinds of file system:

- a journaling one keeps changes in order and loses the last of them; any sync keeps all earlier changes;

- one that promises no more than POSIX keeps of a file only the changes covered by the file's own sync, of a directory
those covered by the directory's own sync, and any number of the changes after that.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from soak.system_calls import SoakIO

SECTOR_BYTES = 512


@dataclass(eq=False)
class Change:
    """A change of a file or directory since its last sync.

    Attributes:
        place: position in the order of all changes.
        is_done: whether the call has returned. Syncs do not cover it before that.
        offset, data: bytes written to a file.
        size: the new size of a file; None: unchanged.
        name, node: a name of a directory and its new node; None: the name was removed.
    """

    place: int
    is_done: bool = True
    offset: int = 0
    data: bytes = b""
    size: int | None = None
    name: str = ""
    node: Node | None = None


@dataclass(eq=False)
class Node:
    """A file or directory.

    Attributes:
        entries: the entries of a directory as processes see them; None: this is a file.
        durable: the bytes of a file at its last sync.
        durable_entries: the entries of a directory at its last sync.
    """

    entries: dict[str, Node] | None = None
    durable: bytearray = field(default_factory=bytearray)
    durable_entries: dict[str, Node] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)


class Kept(NamedTuple):
    """How much a loss of power keeps in addition to the synced changes.

    Args:
        place: a journaling file system keeps changes of names and sizes up to this one; None: there is no journal.
        share: the fraction of unsynced sectors that is kept.
    """

    random: Random
    place: int | None
    share: float

    def num_changes(self, changes: list[Change]) -> int:
        """The number of these changes of names and sizes that survive."""
        if self.place is None:
            return self.random.randint(0, len(changes))
        return sum(change.place <= self.place for change in changes)


class VolatileIO(SoakIO):
    """Real files below `base`, with some changes only in caches.

    Args:
        base: the directory; its present content is durable.
        ignores_syncs: whether syncs do nothing, for a negative control.
    """

    def __init__(
        self, base: Path, seed: str, end_at: int, end: Callable[[], None], ignores_syncs: bool = False
    ) -> None:
        super().__init__(seed, end_at, end)
        self._base = str(base)
        self._chooser = Random(f"power {seed}")
        self._has_journal = self._chooser.random() < 0.5
        self._ignores_syncs = ignores_syncs
        self._tree_lock = threading.RLock()
        self._open: dict[int, Node] = {}
        self._num_changes = 0
        self._synced_place = 0
        self._root = _read_tree(base)

    def write_image(self, path: Path) -> None:
        """Write the directory left by a loss of power now. The parent of `path` exists. Calls of other threads never
        return after this.
        """
        chooser = self._chooser
        self._tree_lock.acquire()
        place = chooser.randint(self._synced_place, self._num_changes) if self._has_journal else None
        _write_node(path, self._root, Kept(chooser, place, chooser.choice([0.0, 0.5, 0.95, 1.0])))

    # Calls.

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        with self._tree_lock:
            fd = super().open(name, flags, mode, dir_fd)
            parent, child = self._locate(name, dir_fd)
            node = parent if not child else (parent.entries or {}).get(child)
            if node is None:
                node = Node(entries={} if stat.S_ISDIR(os.fstat(fd).st_mode) else None)
                self._point(parent, child, node)
            elif flags & os.O_TRUNC:
                self._note(node, size=0)
            self._open[fd] = node
            return fd

    def close(self, fd: int) -> None:
        with self._tree_lock:
            self._open.pop(fd, None)
            super().close(fd)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        with self._tree_lock:
            change = self._note(self._open[fd], offset=offset, data=b"".join(buffers), is_done=False)
        done = super().pwritev(fd, buffers, offset)
        change.data, change.is_done = change.data[:done], True
        return done

    def allocate(self, fd: int, num_bytes: int) -> None:
        super().allocate(fd, num_bytes)
        self._note(self._open[fd], size=os.fstat(fd).st_size)

    def truncate(self, fd: int, num_bytes: int) -> None:
        super().truncate(fd, num_bytes)
        self._note(self._open[fd], size=num_bytes)

    # No sync reaches the real device, because its power does not fail.

    def fdatasync(self, fd: int) -> None:
        self._sync(fd, "fdatasync")

    def fsync(self, fd: int) -> None:
        self._sync(fd, "fsync")

    def make_directory(self, name: str, dir_fd: int | None = None, mode: int = 0o700) -> None:
        super().make_directory(name, dir_fd, mode)
        with self._tree_lock:
            self._point(*self._locate(name, dir_fd), Node(entries={}))

    def remove_directory(self, name: str, dir_fd: int) -> None:
        super().remove_directory(name, dir_fd)
        self._point(*self._locate(name, dir_fd), None)

    def remove(self, name: str, dir_fd: int) -> None:
        super().remove(name, dir_fd)
        self._point(*self._locate(name, dir_fd), None)

    def rename(self, old: str, new: str, dir_fd: int) -> None:
        super().rename(old, new, dir_fd)
        with self._tree_lock:
            parent, child = self._locate(old, dir_fd)
            node = (parent.entries or {}).get(child)
            # In this order, a loss of power between the two changes leaves both names, never none.
            self._point(*self._locate(new, dir_fd), node)
            self._point(parent, child, None)

    # Recording of changes.

    def _locate(self, name: str, dir_fd: int | None) -> tuple[Node, str]:
        """The directory that contains a name, and the last part of the name; empty for `base` itself."""
        if dir_fd is None:
            parts = [part for part in os.path.relpath(name, self._base).split("/") if part != "."]
            node = self._root
            if ".." in parts:  # everything above `base` is durable
                return Node(entries={}), ""
        else:
            node, parts = self._open[dir_fd], name.split("/")
        for part in parts[:-1]:
            node = (node.entries or {})[part]
        return node, parts[-1] if parts else ""

    def _note(self, changed: Node, is_done: bool = True, **what: Any) -> Change:
        with self._tree_lock:
            self._num_changes += 1
            change = Change(self._num_changes, is_done, **what)
            changed.changes.append(change)
        return change

    def _point(self, parent: Node, name: str, node: Node | None) -> None:
        with self._tree_lock:
            self._note(parent, name=name, node=node)
            entries = parent.entries if parent.entries is not None else {}
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node

    def _sync(self, fd: int, call: str) -> None:
        with self._tree_lock:
            node, place = self._open[fd], self._num_changes
            covered = [change for change in node.changes if change.is_done]
        self.meet(call)
        if self._ignores_syncs:
            return
        with self._tree_lock:
            self._synced_place = max(self._synced_place, place)
            node.durable_entries = _entries_after(node.durable_entries, covered)
            for change in covered:
                _apply(node.durable, change)
            left = set(map(id, node.changes)).difference(map(id, covered))
            node.changes = [change for change in node.changes if id(change) in left]


def _read_tree(path: Path) -> Node:
    node = Node(entries={})
    assert node.entries is not None
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            node.entries[entry.name] = _read_tree(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            node.entries[entry.name] = Node(durable=bytearray(Path(entry.path).read_bytes()))
    node.durable_entries = dict(node.entries)
    return node


def _apply(content: bytearray, change: Change) -> None:
    if change.size is not None:
        del content[change.size :]
        content.extend(bytes(change.size - len(content)))
    else:
        content.extend(bytes(max(change.offset - len(content), 0)))
        content[change.offset : change.offset + len(change.data)] = change.data


def _entries_after(entries: dict[str, Node], changes: list[Change]) -> dict[str, Node]:
    entries = dict(entries)
    for change in changes:
        if change.node is None:
            entries.pop(change.name, None)
        else:
            entries[change.name] = change.node
    return entries


def _write_node(path: Path, node: Node, kept: Kept) -> None:
    if node.entries is None:
        path.write_bytes(_content_after(node, kept))
        path.chmod(0o600)
        return
    path.mkdir(mode=0o700)
    entries = _entries_after(node.durable_entries, node.changes[: kept.num_changes(node.changes)])
    for name, child in entries.items():
        _write_node(path / name, child, kept)


def _content_after(node: Node, kept: Kept) -> bytes:
    content = bytearray(node.durable)
    sizes = [change for change in node.changes if change.size is not None]
    kept_sizes = sizes[: kept.num_changes(sizes)]
    for change in node.changes:
        if change.size is not None:
            if change in kept_sizes:
                _apply(content, change)
            continue
        for start in range(0, len(change.data), SECTOR_BYTES):
            if kept.random.random() < kept.share:
                sector = change.data[start : start + SECTOR_BYTES]
                _apply(content, Change(0, offset=change.offset + start, data=sector))
    return bytes(content)
