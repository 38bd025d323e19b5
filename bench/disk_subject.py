"""The disk tier for `disk_tier.py`, with many stores or loads in flight, as in an engine."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybridkv.hashing import Fingerprint, GroupFingerprint, LayerFingerprint
from hybridkv.planner import GroupKind
from hybridkv.tiers import Refusal, Slot, Ticket
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, Fsync
from kits.tiers.inline_janitor import InlineJanitor

POLL_INTERVAL_S = 0.0005
"""An engine polls less often: once in a step."""
RECORDS = (10_000, 100_000, 1_000_000)
SEGMENTS = (1, 100, 4000)
"""Numbers of segments for the CPU time of the scheduler's thread."""
RECORDS_IN_SEGMENT = 16
NUM_TIMED = 1024
DRAIN_TIMEOUT_S = 60.0


def fingerprint() -> Fingerprint:
    """A fingerprint without a real model."""
    layer = LayerFingerprint(name="layer", page_bytes=4096, facts={"dtype": "bfloat16"})
    return Fingerprint(
        facts={"model": "none", "cache_config.cache_dtype": "bfloat16"},
        chunk_tokens=16,
        hash_algorithm="sha256",
        tensor_parallel_size=1,
        groups=(GroupFingerprint(kind=GroupKind.FULL, block_tokens=16, layers=(layer,)),),
    )


class Subject:
    """Index and medium of a disk tier."""

    def __init__(self, index: DiskIndex, medium: DiskMedium) -> None:
        self.index, self.medium = index, medium

    def store(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> float:
        """Stores the chunks. Returns the seconds until all are committed."""
        started_s = time.perf_counter()
        done = 0
        for number, (key, chunk) in enumerate(zip(keys, chunks, strict=True)):
            slot = self.index.reserve(key, len(chunk))
            while not isinstance(slot, Slot):
                # The next segment is not created yet.
                time.sleep(POLL_INTERVAL_S)
                done += self._end(keys, self.index.commit)
                slot = self.index.reserve(key, len(chunk))
            self.medium.store(Ticket(number), key, slot, [chunk])
            done += self._end(keys, self.index.commit)
        self._wait(keys, done, self.index.commit)
        return time.perf_counter() - started_s

    def load(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> float:
        """Loads the chunks. Returns the seconds until all are in memory and verified."""
        started_s = time.perf_counter()
        for number, (key, chunk) in enumerate(zip(keys, chunks, strict=True)):
            slot = self.index.pin(key)
            if slot is None:
                raise RuntimeError(f"chunk {number} is not stored")
            self.medium.load(Ticket(number), key, slot, [chunk])
        self._wait(keys, 0, self.index.unpin)
        return time.perf_counter() - started_s

    def _wait(self, keys: Sequence[bytes], done: int, end: Callable[[bytes], object]) -> None:
        while done < len(keys):
            ended = self._end(keys, end)
            done += ended
            if not ended:
                time.sleep(POLL_INTERVAL_S)

    def _end(self, keys: Sequence[bytes], end: Callable[[bytes], object]) -> int:
        completions = self.medium.poll()
        for completion in completions:
            if completion.failure is not None:
                raise RuntimeError(str(completion.failure))
            end(keys[completion.ticket])
        return len(completions)


@contextmanager
def opened(directory: Path, capacity_bytes: int, max_in_flight: int) -> Iterator[Subject]:
    """A disk tier that calls no fsync."""
    options = DiskOptions(
        capacity_bytes=capacity_bytes,
        max_in_flight=max_in_flight,
        fsync=Fsync.NONE,
        max_queued=1 << 20,
        max_records=100_000,
    )
    index = DiskIndex(str(directory / "tier"), fingerprint(), options)
    medium = DiskMedium(str(directory / "tier"), index.namespace, 0, options)
    try:
        yield Subject(index, medium)
    finally:
        medium.close()
        index.close()


def reopening(root: Path) -> dict[str, dict[str, float]]:
    """Seconds to open a store again by number of records, with its snapshot and without it."""
    found = {}
    for count in RECORDS:
        options = DiskOptions(
            capacity_bytes=count * 16384 + (256 << 20), fsync=Fsync.NONE, max_records=count + 1, max_queued=count + 1
        )
        path = root / f"records-{count}"
        fill(path, options, count)
        found[str(count)] = {"snapshot": reopen_s(path, options, count)}
        for snapshot in path.rglob("snapshot*"):
            snapshot.unlink()
        found[str(count)]["scan"] = reopen_s(path, options, count)
        print(
            f"{count:9,d} records: {found[str(count)]['snapshot']:.2f} s from the snapshot, "
            f"{found[str(count)]['scan']:.2f} s by reading every segment",
            flush=True,
        )
    return found


def fill(path: Path, options: DiskOptions, count: int) -> None:
    """Small records: only their number matters."""
    index = DiskIndex(str(path), fingerprint(), options, janitor=InlineJanitor())
    medium = DiskMedium(str(path), index.namespace, 0, options)
    subject = Subject(index, medium)
    chunk = memoryview(bytearray(64))
    keys = [number.to_bytes(32, "little") for number in range(count)]
    subject.store(keys, [chunk] * count)
    medium.close()
    index.close()


def reopen_s(path: Path, options: DiskOptions, count: int) -> float:
    gc.collect()
    started_s = time.perf_counter()
    index = DiskIndex(str(path), fingerprint(), options)
    seconds = time.perf_counter() - started_s
    if index.num_keys != count:
        raise RuntimeError(f"{index.num_keys} of {count} records were restored")
    index.close()
    return seconds


def scheduler_cpu(root: Path) -> dict[str, float]:
    """CPU microseconds of the calling thread for `reserve` and `commit` of a record, by number of segments.

    Runs without the janitor's thread and without the medium: no byte is written. No record is evicted, because all fit.
    """
    page = 4096
    segment_bytes = 2 * page + RECORDS_IN_SEGMENT * 2 * page
    found = {}
    for segments in SEGMENTS:
        num_stored, path = segments * RECORDS_IN_SEGMENT, str(root / f"scheduler-{segments}")
        options = DiskOptions(
            capacity_bytes=2 * (num_stored + NUM_TIMED) * segment_bytes // RECORDS_IN_SEGMENT + (64 << 20),
            segment_bytes=segment_bytes,
            max_records=num_stored + NUM_TIMED,
            fsync=Fsync.NONE,
        )
        index = DiskIndex(path, fingerprint(), options, janitor=InlineJanitor())
        for number in range(num_stored):
            reserve_and_commit_s(index, number)
        index.close()
        index = DiskIndex(path, fingerprint(), options)
        gc.collect()
        seconds = sum(reserve_and_commit_s(index, num_stored + number) for number in range(NUM_TIMED))
        index.close()
        found[str(segments)] = round(seconds / NUM_TIMED * 1e6, 2)
        print(f"{segments:5,d} segments: {found[str(segments)]:6.2f} us of the scheduler's thread a record", flush=True)
    return found


def reserve_and_commit_s(index: DiskIndex, number: int) -> float:
    """CPU seconds, without the wait for the next segment."""
    key = number.to_bytes(32, "little")
    while True:
        started_s = time.thread_time()
        slot = index.reserve(key, 4000)
        if isinstance(slot, Slot):
            index.commit(key)
            return time.thread_time() - started_s
        if slot is Refusal.PRESENT:
            raise RuntimeError(f"record {number} is already present")
        index.drain(DRAIN_TIMEOUT_S)
