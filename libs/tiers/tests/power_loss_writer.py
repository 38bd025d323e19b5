"""Program that stores, withdraws, clears and evicts with many chunks in flight, and logs all of it.

The library under `LD_PRELOAD` (csrc/tests/file_watch.cc) logs the writes and syncs given to the kernel, by io_uring or
by threads, and the end of each. This program adds the changes to the disk's directories, and its own reports: the
actions that it began and those that were done. Everything is in one log, in one order.

Arguments: a `WriterOrders` as JSON.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import sys
import threading
from typing import Any

import disk_store
import disk_writer
import msgspec

from hybridkv.planner import LookupResult
from hybridkv.tiers import Refusal, Slot, Ticket
from hybridkv.tiers.disk import (
    DiskIndex,
    DiskMedium,
    DiskOptions,
    FileIO,
    Fsync,
    ThreadJanitor,
)
from hybridkv.tiers.disk.medium import disk_medium as medium_module
from hybridkv.tiers.disk.medium.disk_medium import Runner
from hybridkv.tiers.disk.medium.syncer import Syncer
from hybridkv.tiers.native import RecordQueue
from kits.tiers.inline_janitor import InlineJanitor

NUM_RANKS = disk_writer.NUM_RANKS
NUM_AT_ONCE = 6


class WriterOrders(msgspec.Struct):
    """Settings of the writer. `mistake`: a deliberate fault that a check of the log must find."""

    path: str
    log: str
    seed: int
    backend: str
    fsync: Fsync
    is_roomy: bool = True
    num_steps: int = 80
    mistake: str = ""

    @property
    def options(self) -> DiskOptions:
        base = disk_writer.ROOMY_OPTIONS if self.is_roomy else disk_writer.OPTIONS
        return msgspec.structs.replace(base, fsync=self.fsync, fsync_interval_s=0.001, max_in_flight=4)


class Log:
    """Log of the library under `LD_PRELOAD`."""

    def __init__(self, path: str, forgets_syncs: bool) -> None:
        self._library = ctypes.CDLL(None)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._library.file_watch_start(self._fd, forgets_syncs)

    def note(self, *words: object) -> None:
        text = msgspec.json.encode(words)
        self._library.file_watch_note(text, ctypes.c_size_t(len(text)))


class NotingIO(FileIO):
    """Logs each change to directories and sizes after it happened."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._changed = threading.Condition()
        self._num_syncing = 0

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        is_there = dir_fd is not None and _is_there(name, dir_fd)
        fd = super().open(name, flags, mode, dir_fd)
        if flags & os.O_CREAT and not is_there and dir_fd is not None:
            self._log.note("made", os.fstat(dir_fd).st_ino, name, os.fstat(fd).st_ino, False)
        elif flags & os.O_TRUNC:
            self._log.note("resized", os.fstat(fd).st_ino, 0)
        return fd

    def allocate(self, fd: int, num_bytes: int) -> None:
        super().allocate(fd, num_bytes)
        self._log.note("resized", os.fstat(fd).st_ino, os.fstat(fd).st_size)

    def truncate(self, fd: int, num_bytes: int) -> None:
        super().truncate(fd, num_bytes)
        self._log.note("resized", os.fstat(fd).st_ino, num_bytes)

    def make_directory(self, name: str, dir_fd: int | None = None, mode: int = 0o700) -> None:
        super().make_directory(name, dir_fd, mode)
        parent = os.stat(os.path.dirname(name)) if dir_fd is None else os.fstat(dir_fd)
        self._log.note("made", parent.st_ino, os.path.basename(name), os.stat(name, dir_fd=dir_fd).st_ino, True)

    def remove_directory(self, name: str, dir_fd: int) -> None:
        super().remove_directory(name, dir_fd)
        self._log.note("removed", os.fstat(dir_fd).st_ino, name)

    def remove(self, name: str, dir_fd: int) -> None:
        super().remove(name, dir_fd)
        self._log.note("removed", os.fstat(dir_fd).st_ino, name)

    def rename(self, old: str, new: str, dir_fd: int) -> None:
        super().rename(old, new, dir_fd)
        self._log.note("renamed", os.fstat(dir_fd).st_ino, old, new)

    def fdatasync(self, fd: int) -> None:
        with self._changed:
            self._num_syncing += 1
        try:
            super().fdatasync(fd)
        finally:
            with self._changed:
                self._num_syncing -= 1
                self._changed.notify_all()

    def wait_until_synced(self, syncers: list[Syncer]) -> None:
        """Wait until the syncers have nothing to sync. May miss a sync that is about to begin."""
        with self._changed:
            while self._num_syncing or any(syncer._dirty for syncer in syncers):
                self._changed.wait(0.01)  # no notification for deleted files, which are not synced


def _is_there(name: str, dir_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


class Writer:
    """Performs random actions and reports each. Every report is true when it is sent."""

    def __init__(self, orders: WriterOrders, log: Log) -> None:
        self.orders = orders
        self.random = random.Random(orders.seed)
        self.log = log
        self.clock = disk_store.Clock()
        cache = disk_store.fingerprint(tensor_parallel_size=NUM_RANKS)
        janitor = InlineJanitor() if orders.seed % 2 else ThreadJanitor()
        self.io = NotingIO(log)
        self.index = DiskIndex(orders.path, cache, orders.options, janitor, self.io, self.clock)
        self.media = [
            DiskMedium(orders.path, cache.digest(), rank, orders.options, self.io) for rank in range(NUM_RANKS)
        ]
        self.under_way: dict[int, tuple[bytes, Slot]] = {}
        """By version."""
        self.ranks_left: dict[int, int] = {}
        self.committed: set[bytes] = set()
        self.version = 0

    def say(self, verb: str, kind: str, key: bytes = b"", version: int = 0, address: int = 0) -> None:
        self.log.note("said", verb, kind, key.hex(), version, address)

    def run(self) -> None:
        for _ in range(self.orders.num_steps):
            self.step()
        while self.under_way:
            self.take()
        self.say_evictions()
        self.say("begin", "close")
        for medium in self.media:
            medium.close()
        self.index.close()
        self.say("done", "close")

    def step(self) -> None:
        self.clock.now_s += self.random.choice([0.0, 0.5, 1.0, 3.0])
        verbs = ["put"] * 14 + ["abort"] * 2 + ["settle"] * 2 + ["invalidate", "touch"]
        verbs += ["clear"] * (self.random.random() < 0.2)
        getattr(self, f"do_{self.random.choice(verbs)}")()
        self.say_evictions()

    def say_evictions(self) -> None:
        """Also report that there was none, because the check reads up to the next such report."""
        for key in sorted(self.committed):
            if self.index.lookup(key) is LookupResult.MISS:
                self.committed.discard(key)
                self.say("evicted", "put", key)
        self.say("looked", "for evictions")

    def free_key(self) -> bytes:
        busy = {key for key, _ in self.under_way.values()}
        return self.random.choice([key for key in disk_writer.KEYS if key not in busy])

    def begin(self) -> None:
        key, self.version = self.free_key(), self.version + 1
        chunks = [disk_writer.payload(key, self.version, rank) for rank in range(NUM_RANKS)]
        slot = self.index.reserve(key, len(chunks[0]))
        if slot is Refusal.NO_ROOM:
            assert self.index.drain(disk_store.TIMEOUT_S)
            slot = self.index.reserve(key, len(chunks[0]))
        if not isinstance(slot, Slot):
            return
        self.committed.discard(key)
        self.say("begin", "put", key, self.version, slot.extents[0][0])
        self.under_way[self.version] = key, slot
        self.ranks_left[self.version] = NUM_RANKS
        for medium, chunk in zip(self.media, chunks, strict=True):
            medium.store(Ticket(self.version), key, slot, [chunk])

    def do_put(self) -> None:
        """Begin some stores, and commit those that have ended."""
        for _ in range(self.random.randrange(1, NUM_AT_ONCE)):
            if len(self.under_way) < NUM_AT_ONCE:
                self.begin()
        self.take()

    def take(self) -> None:
        """Wait for one medium, poll all, and commit the chunks that every rank has stored."""
        assert self.random.choice(self.media).drain(disk_store.TIMEOUT_S)
        for medium in self.media:
            for completion in medium.poll():
                assert completion.failure is None, completion
                self.ranks_left[int(completion.ticket)] -= 1
        for version in [version for version, left in self.ranks_left.items() if not left]:
            del self.ranks_left[version]
            self.commit(version)

    def commit(self, version: int) -> None:
        key, slot = self.under_way.pop(version)
        address = slot.extents[0][0]
        if self.index.commit(key):
            self.committed.add(key)
            self.say("done", "put", key, version, address)

    def do_abort(self) -> None:
        self.finish()
        self.begin()
        for medium in self.media:
            disk_store.finish(medium)
        self.ranks_left.clear()
        for version, (key, _) in self.under_way.items():
            self.say("begin", "withdrawal", key)
            self.index.abort(key)
            assert self.index.drain(disk_store.TIMEOUT_S)
            self.say("done", "withdrawal", key, version)
        self.under_way.clear()

    def finish(self) -> None:
        while self.under_way:
            self.take()

    def do_invalidate(self) -> None:
        key = self.free_key()
        self.say("begin", "withdrawal", key)
        if self.index.invalidate(key):
            self.committed.discard(key)
            assert self.index.drain(disk_store.TIMEOUT_S)
            self.say("done", "withdrawal", key)
        else:
            self.say("nothing", "withdrawal", key)

    def do_touch(self) -> None:
        self.index.touch([self.random.choice(disk_writer.KEYS)])

    def do_clear(self) -> None:
        self.finish()
        self.say("begin", "clear")
        self.index.clear()
        self.committed.clear()
        self.say("done", "clear")

    def do_settle(self) -> None:
        """With `fsync: interval`, wait until a sync has covered all commits so far."""
        self.finish()
        if self.orders.fsync is not Fsync.INTERVAL:
            return
        self.say("begin", "settle")
        runners: list[Any] = [medium._runner for medium in self.media]
        self.io.wait_until_synced([runner._sync_thread._syncer for runner in runners])
        self.say("done", "settle")


class EarlyQueue:
    """Record queue that ends stores when they are written, and syncs them only at the next submission."""

    def __init__(self, queue: RecordQueue) -> None:
        self._queue = queue
        self._fds: dict[int, int] = {}
        self._unsynced: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._queue, name)

    def submit(self, tag: int, is_store: bool, fd: int, *rest: Any) -> bool:
        for written in self._unsynced:
            os.fdatasync(written)
            os.close(written)
        self._unsynced.clear()
        if is_store:
            self._fds[tag] = os.dup(fd)
        offset, is_direct, _, header, buffers = rest
        return self._queue.submit(tag, is_store, fd, offset, is_direct, False, header, buffers)

    def take(self) -> list[tuple[int, int, int, bytes, bytes]]:
        taken = self._queue.take()
        self._unsynced += [self._fds.pop(end[0]) for end in taken if end[0] in self._fds]
        return taken


def make_mistake(name: str) -> None:
    """Patch this process for good."""
    if name == "stores are not synced":
        Runner._syncs = property(lambda _: False, lambda _, __: None)  # type: ignore[assignment]
    elif name == "nothing is synced every so often":
        Syncer.written = lambda *_: False  # type: ignore[method-assign, assignment]
    elif name == "stores end before they are synced":
        make_queue = medium_module.RecordQueue
        medium_module.RecordQueue = lambda *sizes: EarlyQueue(make_queue(*sizes))  # type: ignore
    else:
        assert name in ("", "the device forgets"), name


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=WriterOrders)
    medium_module.RecordQueue = functools.partial(RecordQueue, backend=orders.backend)  # type: ignore
    make_mistake(orders.mistake)
    Writer(orders, Log(orders.log, orders.mistake == "the device forgets")).run()


if __name__ == "__main__":
    main()
