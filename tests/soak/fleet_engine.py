"""One simulated engine of a fleet: host memory over an object store, in its own process.

Until it is terminated, it requests prompts, loads stored chunks, checks every byte and stores the missing chunks. Each
second it writes a line of JSON with its counts to stdout.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import patience
from blake3 import blake3

from hybridkv.planner import LookupResult
from hybridkv.tiers import Refusal, Slot
from hybridkv.tiers.object import ObjectOptions, StoreLocation, open_index, open_medium
from hybridkv.tiers.ram import RamArena, RamIndex
from hybridkv.tiers.stack import (
    BreakerOptions,
    MoveOutcome,
    SecondaryTier,
    SecondaryTierOptions,
    TierMover,
    TierStack,
)

FINGERPRINT = bytes(range(32))
CHUNK_BYTES = 4096
NEAR_CHUNKS = 40
"""So few that almost every hit comes from the store."""
NUM_PATHS = 80
TAG = b"f" * 16
LOAD_TIMEOUT_S = patience.seconds(1.0)
OPTIONS = ObjectOptions(
    missing_s=0.1,
    found_s=3.0,
    bad_s=5.0,
    first_retry_s=0.1,
    last_retry_s=1.0,
    epoch_check_s=1.0,
    request_timeout_s=patience.seconds(0.2),
    connect_timeout_s=patience.seconds(0.1),
    opening_timeout_s=patience.seconds(0.1),
)
SLOWER = SecondaryTierOptions(
    async_lookup_timeout_s=patience.seconds(0.5),
    load_timeout_s=LOAD_TIMEOUT_S,
    breaker=BreakerOptions(failures=3, first_backoff_s=0.1, max_backoff_s=0.5),
)


def path_of(number: int) -> list[bytes]:
    """The keys of a prompt. Groups of six prompts share their first chunks."""
    length = 12 + number * 7 % 13
    seeds = [f"{number % (NUM_PATHS // 6) if step < 6 else number} {step}" for step in range(length)]
    return [TAG + blake3(seed.encode()).digest() for seed in seeds]


def chunk_of(key: bytes) -> bytes:
    """The bytes that every engine stores under a key."""
    return (key * (CHUNK_BYTES // len(key) + 1))[:CHUNK_BYTES]


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class FleetEngine:
    """See the module.

    Args:
        depot: the location of the fleet's store.
        seed: determines the order of prompts.
    """

    def __init__(self, depot: StoreLocation, seed: int) -> None:
        self._random = Random(seed)
        self.most_bytes = 0
        """The largest resident memory so far."""
        self.counts = {"asked": 0, "restored": 0, "wrong": 0, "failed loads": 0, "steps": 0}
        index = open_index(depot, FINGERPRINT, 1, OPTIONS, time.monotonic)
        near_bytes = NEAR_CHUNKS * CHUNK_BYTES
        self._stack = TierStack(
            RamIndex(near_bytes, CHUNK_BYTES), [SecondaryTier("object", index, SLOWER)], 1, time.monotonic
        )
        self._arena = RamArena(near_bytes, CHUNK_BYTES)
        self._mover = TierMover(self._arena, {"object": open_medium(depot, 0, OPTIONS)}, time.monotonic)

    def step(self) -> None:
        """Serve one prompt."""
        keys = path_of(self._random.randrange(NUM_PATHS))
        stack = self._stack
        stack.start_lookup(keys)
        self._wait(lambda: not stack.any_pending(keys))
        held = next((at for at, key in enumerate(keys) if stack.lookup(key) is not LookupResult.HIT), len(keys))
        restored = held if held and self._load(keys[:held]) else 0
        self.counts["asked"] += len(keys)
        self.counts["restored"] += restored
        self.counts["steps"] += 1
        self._store(keys, restored)

    def _load(self, keys: list[bytes]) -> bool:
        stack = self._stack
        hold = stack.acquire("prompt", keys)
        if isinstance(hold, Refusal):
            return False
        self._wait(lambda: (hold := stack.lease("prompt")) is None or not hold.waiting or hold.failure is not None)
        hold = stack.lease("prompt")
        slots = stack.pin_all(keys) if hold is not None and hold.failure is None and not hold.waiting else None
        if hold is not None:
            stack.release("prompt")
        if slots is None:
            self.counts["failed loads"] += 1
            return False
        for key, slot in zip(keys, slots, strict=True):
            self.counts["wrong"] += b"".join(bytes(view) for view in self._arena.views(slot)) != chunk_of(key)
        stack.unpin_all(keys)
        return True

    def _store(self, keys: list[bytes], first: int) -> None:
        for at in range(first, len(keys)):
            extends = tuple(keys[at - 1 : at]) if at else ()
            slot = self._stack.reserve(keys[at], CHUNK_BYTES, extends)
            if not isinstance(slot, Slot):
                continue
            data, begin = chunk_of(keys[at]), 0
            for view in self._arena.views(slot):
                view[:] = data[begin : begin + len(view)]
                begin += len(view)
            self._arena.seal_all([(keys[at], slot)])
            self._stack.commit(keys[at], extends)
        self._wait(lambda: not self._stack.has_live_moves())

    def _wait(self, is_over: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 2 * LOAD_TIMEOUT_S
        self.most_bytes = max(self.most_bytes, rss_bytes())
        while True:
            self._mover.start(self._stack.take_moves())
            for move, failure, _ in self._mover.poll():
                self._stack.on_move(move.move_id, MoveOutcome(1, failure))
            self._stack.tick()
            if is_over() or time.monotonic() > until_s:
                self.most_bytes = max(self.most_bytes, rss_bytes())
                return
            time.sleep(0.001)

    def close(self) -> None:
        self._mover.close(2.0)
        self._stack.close()
        self._arena.close()


def main() -> None:
    orders: dict[str, Any] = json.loads(sys.argv[1])
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    engine = FleetEngine(StoreLocation("s3://fleet", orders["settings"], orders["secret"].encode()), orders["seed"])
    reported_s, before = time.monotonic(), 0
    while not ended.is_set():
        engine.step()
        if not before and engine.counts["steps"] >= 20:
            before = engine.most_bytes
        if time.monotonic() - reported_s >= 1.0:
            reported_s = time.monotonic()
            grown = engine.most_bytes - before if before else 0
            print(json.dumps({**engine.counts, "grown": grown}), flush=True)
    engine.close()
    os.write(1, b'{"is_closed": 1}\n')


if __name__ == "__main__":
    main()
