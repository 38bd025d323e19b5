"""Process that stores, evicts, compacts, withdraws and clears until it is killed during a system call.

Through a pipe it reports each action before it starts and after it is done. An action reported as done must hold after
the crash.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import disk_store
import msgspec

from hybridkv.planner import LookupResult
from hybridkv.tiers import Slot, Ticket
from hybridkv.tiers.disk import (
    DiskIndex,
    DiskMedium,
    DiskOptions,
    FileIO,
    Fsync,
    ThreadJanitor,
    maintenance,
)
from kits.tiers.inline_janitor import InlineJanitor

NUM_RANKS = 2
NUM_KEYS = 24
SEGMENT_BYTES = 8192 + 6 * 8192
OPTIONS = DiskOptions(
    capacity_bytes=6 * NUM_RANKS * SEGMENT_BYTES + 270_000,
    segment_bytes=SEGMENT_BYTES,
    fsync=Fsync.NONE,
    max_in_flight=1,
    batch_bytes=1 << 16,
    max_quarantined=64,
    snapshot_interval_s=10.0,
)
ROOMY_OPTIONS = msgspec.structs.replace(OPTIONS, capacity_bytes=96 * NUM_RANKS * SEGMENT_BYTES)
"""Room for everything that a writer stores."""
NUM_STEPS = 120
KEYS = [b"key %d" % number for number in range(NUM_KEYS)]
HELD_KEYS = [b"held %d" % number for number in range(4)]
"""Keys committed many steps after their store."""
JANITOR_NAME = "hybridkv-disk-janitor"
CHORES = ("Create", "Drop", "Copy", "Seal", "WriteEpoch", "Append", "Rewrite", "Save", "Log")


class KillingIO(FileIO):
    """Counts modifying calls and kills the process before, during or after one of them.

    With `on_janitor` it counts only calls of the janitor's thread.
    """

    def __init__(self, kill_at: int, on_janitor: bool, last_words: Callable[[str], None]) -> None:
        self._kill_at = kill_at
        self._on_janitor = on_janitor
        self._last_words = last_words
        self._lock = threading.Lock()
        self.num_calls = 0

    def _count_call(self) -> int:
        """0: continue; 1 to 3: kill before, during or after the call."""
        if self._on_janitor and threading.current_thread().name != JANITOR_NAME:
            return 0
        with self._lock:
            self.num_calls += 1
            return 1 + self._kill_at % 3 if self.num_calls == self._kill_at else 0

    def _die(self) -> None:
        self._last_words(running_job())
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def _around(self, call: Callable[[], object], part: Callable[[], object] | None = None) -> None:
        how = self._count_call()
        if how == 2 and part is not None:
            part()
        if how in (1, 2):
            self._die()
        call()
        if how == 3:
            self._die()

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        done = sum(map(len, buffers))
        pages = random.Random(self.num_calls).randrange(done // 4096 + 1)
        joined = b"".join(buffers) if self.num_calls + 1 == self._kill_at else b""
        self._around(
            lambda: os.pwritev(fd, buffers, offset),
            lambda: write_part(fd, joined, pages, offset),
        )
        return done

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._around(lambda: super(KillingIO, self).allocate(fd, num_bytes), lambda: os.ftruncate(fd, num_bytes // 2))

    def truncate(self, fd: int, num_bytes: int) -> None:
        self._around(lambda: super(KillingIO, self).truncate(fd, num_bytes))

    def remove(self, name: str, dir_fd: int) -> None:
        self._around(lambda: super(KillingIO, self).remove(name, dir_fd))

    def rename(self, old: str, new: str, dir_fd: int) -> None:
        self._around(lambda: super(KillingIO, self).rename(old, new, dir_fd))


def write_part(fd: int, data: bytes, num_pages: int, offset: int) -> None:
    """Write the first pages through another descriptor, because this one may be open with O_DIRECT."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    os.pwrite(other, data[: num_pages * 4096 or len(data) // 2], offset)


def running_job() -> str:
    """Class of the file work that this thread runs now, or "medium" or "index"."""
    frame = sys._getframe()
    while frame is not None:
        name = type(frame.f_locals.get("self")).__name__
        if name in CHORES and os.path.dirname(frame.f_code.co_filename) == os.path.dirname(maintenance.__file__):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return "medium" if threading.current_thread() is not threading.main_thread() else "index"


class Step(NamedTuple):
    """One action of the writer."""

    verb: str
    key: bytes
    version: int


def payload(key: bytes, version: int, rank: int) -> bytes:
    seed = random.Random(f"{key.hex()} {version}")
    num_bytes = seed.choice([1, 100, 4096, 5000, 8192, 12288])
    return seed.randbytes(num_bytes - 1) + bytes([rank])


class Writer:
    """Performs random actions and reports each through `tell`. Every report is true when it is sent."""

    def __init__(
        self,
        path: Path,
        seed: int,
        options: DiskOptions,
        io: KillingIO,
        janitor: InlineJanitor | ThreadJanitor,
        tell: Callable[[str], None],
    ) -> None:
        self.random = random.Random(seed)
        self.clock = disk_store.Clock()
        cache = disk_store.fingerprint(tensor_parallel_size=NUM_RANKS)
        self.index = DiskIndex(str(path), cache, options, janitor, io, self.clock)
        self.media: list[DiskMedium] = [
            disk_store.make_medium(path, options, io, rank, tensor_parallel_size=NUM_RANKS) for rank in range(NUM_RANKS)
        ]
        self.tell = tell
        self.committed: set[bytes] = set()
        self.held: list[Step] = []
        self.version = 0

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            self.step()
        self.tell_evictions()
        self.tell("begin close - 0")
        for medium in self.media:
            medium.close()
        self.index.close()
        self.tell("done close - 0")

    def gone(self) -> list[bytes]:
        """Committed keys that have been evicted since."""
        # Not `lookup`: it can see an eviction only after the janitor may have logged it.
        return [key for key in list(self.committed) if self.index.lacks(key)]

    def tell_evictions(self) -> None:
        for key in self.gone():
            self.committed.discard(key)
            self.tell(f"evicted {key.hex()}")

    def step(self) -> None:
        self.tell_evictions()
        self.clock.now_s += self.random.choice([0.0, 0.5, 1.0, 3.0])
        self.version += 1
        if self.random.random() < 0.1:
            self.hold_or_release()
            return
        key = self.random.choice(KEYS)
        verbs = ["put"] * 12 + ["abort", "invalidate", "invalidate", "touch"] + ["clear"] * (self.random.random() < 0.1)
        step = Step(self.random.choice(verbs), key, self.version)
        self.tell(f"begin {step.verb} {key.hex()} {step.version}")
        is_done = getattr(self, f"do_{step.verb}")(step)
        self.tell(f"{'done' if is_done else 'nothing'} {step.verb} {key.hex()} {step.version}")

    def hold_or_release(self) -> None:
        """Store a chunk to commit later, or commit such a chunk."""
        if len(self.held) < len(HELD_KEYS) and self.random.random() < 0.5:
            key = next(key for key in HELD_KEYS if key not in {step.key for step in self.held})
            step = Step("put", key, self.version)
            if self.index.lookup(key) is LookupResult.MISS and self.store(
                step, f"begin put {key.hex()} {self.version}"
            ):
                self.held.append(step)
        elif self.held:
            step = self.held.pop(0)
            if self.index.commit(step.key):
                self.committed.add(step.key)
                self.tell(f"done put {step.key.hex()} {step.version}")

    def do_put(self, step: Step) -> bool:
        if not self.store(step):
            return False
        assert self.index.commit(step.key)
        self.committed.add(step.key)
        return True

    def do_abort(self, step: Step) -> bool:
        if not self.store(step):
            return False
        self.index.abort(step.key)
        assert self.index.drain(disk_store.TIMEOUT_S)
        return True

    def store(self, step: Step, words: str = "") -> bool:
        slot = self.index.reserve(step.key, len(payload(step.key, step.version, 0)))
        if not isinstance(slot, Slot):
            return False
        if words:
            self.tell(words)
        for rank, medium in enumerate(self.media):
            medium.store(Ticket(1), step.key, slot, [payload(step.key, step.version, rank)])
        for medium in self.media:
            [completion] = disk_store.finish(medium)
            assert completion.failure is None, completion
        return True

    def do_invalidate(self, step: Step) -> bool:
        is_done = self.index.invalidate(step.key)
        self.committed.discard(step.key)
        assert self.index.drain(disk_store.TIMEOUT_S)
        return is_done

    def do_touch(self, step: Step) -> bool:
        self.index.touch([step.key])
        return True

    def do_clear(self, step: Step) -> bool:
        self.index.clear()
        self.committed.clear()
        return True


def write_until_killed(
    path: Path, seed: int, kill_at: int, on_janitor: bool = False, options: DiskOptions = OPTIONS
) -> tuple[list[str], int]:
    """Run a writer in its own process. Returns its reports, and its number of calls if it was not killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_be_the_writer(path, seed, kill_at, on_janitor, options, writing))
    os.close(writing)
    with os.fdopen(reading) as pipe:
        words = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0, words[-20:]
        return words, int(words.pop().split()[1])
    assert os.WTERMSIG(status) == signal.SIGKILL
    return words, 0


def _be_the_writer(path: Path, seed: int, kill_at: int, on_janitor: bool, options: DiskOptions, writing: int) -> int:
    writers: list[Writer] = []

    def tell(words: str) -> None:
        os.write(writing, f"{words}\n".encode())

    def last_words(chore: str) -> None:
        for key in writers[0].gone() if writers else []:
            tell(f"evicted {key.hex()}")
        tell(f"killed {chore}")

    try:
        io = KillingIO(kill_at, on_janitor, last_words)
        janitor = ThreadJanitor() if on_janitor else InlineJanitor()
        writers.append(Writer(path, seed, options, io, janitor, tell))
        writers[0].run()
        tell(f"calls {io.num_calls}")
    except BaseException as error:
        tell(f"error {type(error).__name__}: {error}")
        return 1
    return 0
