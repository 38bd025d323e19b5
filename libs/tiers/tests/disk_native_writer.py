"""Program that stores many chunks at once through the native extension until it is killed.

It prints each store that it begins, and then each that it committed. Arguments: the path of the store.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys

import disk_store

from hybridkv.tiers import Slot, Ticket
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, Fsync

NUM_RANKS = 2
NUM_RECORDS = 800
NUM_AT_ONCE = 12
RANKS = {"tensor_parallel_size": NUM_RANKS}
OPTIONS = DiskOptions(
    capacity_bytes=64 << 20, segment_bytes=1 << 20, fsync=Fsync.NONE, max_quarantined=64, snapshot_interval_s=0.05
)
"""Room for all records, so that nothing is evicted, and frequent snapshots."""


def key_of(number: int) -> bytes:
    return b"key %d" % number


def payload(number: int, rank: int) -> bytes:
    seed = random.Random(number)
    return seed.randbytes(seed.choice([1, 4096, 9000, 40_000])) + bytes([rank])


def say(words: str) -> None:
    os.write(1, f"{words}\n".encode())


class Writer:
    """Keeps `NUM_AT_ONCE` stores in flight: it begins the next one before it commits one."""

    def __init__(self, path: str) -> None:
        cache = disk_store.fingerprint(**RANKS)
        self.index = DiskIndex(path, cache, OPTIONS)
        self.media = [DiskMedium(path, cache.digest(), rank, OPTIONS) for rank in range(NUM_RANKS)]
        self.ranks_left: dict[int, int] = {}
        self.next_number = 0

    def begin(self) -> None:
        number, key = self.next_number, key_of(self.next_number)
        self.next_number += 1
        chunks = [payload(number, rank) for rank in range(NUM_RANKS)]
        while not isinstance(slot := self.index.reserve(key, len(chunks[0])), Slot):
            assert self.index.drain(disk_store.TIMEOUT_S), slot
        say(f"begin {number}")
        self.ranks_left[number] = NUM_RANKS
        for medium, chunk in zip(self.media, chunks, strict=True):
            medium.store(Ticket(number), key, slot, [chunk])

    def run(self) -> None:
        for _ in range(NUM_AT_ONCE):
            self.begin()
        for medium in itertools.cycle(self.media):
            for completion in medium.poll():
                assert completion.failure is None, completion
                self.ended(int(completion.ticket))
            if self.next_number >= NUM_RECORDS:
                return

    def ended(self, number: int) -> None:
        self.ranks_left[number] -= 1
        if not self.ranks_left[number]:
            self.begin()
            assert self.index.commit(key_of(number))
            say(f"commit {number}")


if __name__ == "__main__":
    Writer(sys.argv[1]).run()
    say("end")
    signal.pause()
