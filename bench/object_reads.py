"""Reads of the object tier compared with plain obstore, on the same objects: bytes per second and processor time.

    tools/bazel run //bench:object_reads -- [--mebibytes N] [--chunk-kibibytes N...] [--rounds N] [--json FILE]

The tier stores chunks in packs. Then two readers alternate: a new tier reads all chunks into host memory and compares
their checksums (`tier`), and obstore reads the same whole packs with as many threads, without copies or comparisons
(`obstore`). There are two stores: `SeaweedFS`, an object server on the loopback, and `directory`, where both read files
from the page cache; there the tier uses its own code, and obstore its LocalStore. The ratio is the median over rounds
of obstore's time over the tier's in the same round: 1 means equally fast. Processor time is that of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import obstore
from checkpoint_cost import machine, spread, written
from obstore.store import ObjectStore, from_url

from hybridkv.planner import LookupResult
from hybridkv.tiers import Key, Slot, Ticket
from hybridkv.tiers.object import ObjectOptions, ObjectSlot, StoreLocation, open_index, open_medium
from hybridkv.tiers.ram import RamArena, RamIndex
from hybridkv.tiers.stack import MoveOutcome, SecondaryTier, SecondaryTierOptions, TierMover, TierStack
from kits.tiers.object_server import BUCKET, ObjectServer, command

FINGERPRINT = bytes(range(32))
THREADS = 4
"""As many as the reading threads of the tier."""
TIMEOUT_S = 60.0
POLL_S = 0.0005


@contextmanager
def directory(root: Path) -> Iterator[tuple[StoreLocation, ObjectStore]]:
    path = root / "directory"
    path.mkdir(mode=0o700)
    yield StoreLocation(f"file://{path}"), from_url(f"file://{path}")


@contextmanager
def seaweedfs(root: Path) -> Iterator[tuple[StoreLocation, ObjectStore]]:
    weed = command()
    if weed is None:
        raise SystemExit("no SeaweedFS: run it with tools/bazel")
    with ObjectServer(weed, root / "server") as server:
        url, settings = f"s3://{BUCKET}/bench", server.settings()
        plain = from_url(url, **settings, client_options={"allow_http": True})
        yield StoreLocation(url, settings), plain


STORES = {"directory": directory, "SeaweedFS": seaweedfs}


def wait(is_over: Callable[[], bool], event: str) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not is_over():
        if time.monotonic() > until_s:
            raise TimeoutError(event)
        time.sleep(POLL_S)


def store(location: StoreLocation, keys: Sequence[Key], chunk: bytes) -> None:
    """Stores a path of chunks through host memory, like an engine."""
    size = 8 * len(keys) * len(chunk)
    arena = RamArena(size, len(chunk))
    index = open_index(location, FINGERPRINT, 1, ObjectOptions(), time.monotonic)
    medium = open_medium(location, 0, ObjectOptions())
    tier = SecondaryTier("object", index, SecondaryTierOptions(load_timeout_s=TIMEOUT_S))
    stack = TierStack(RamIndex(size, len(chunk)), [tier], 1, time.monotonic)
    mover = TierMover(arena, {"object": medium}, time.monotonic)
    for number, key in enumerate(keys):
        slot = stack.reserve(key, len(chunk))
        assert isinstance(slot, Slot), slot
        for view in arena.views(slot):
            view[:] = chunk
        assert arena.seal_all([(key, slot)]) == [None]
        stack.commit(key, tuple(keys[number - 1 : number]))

    def is_idle() -> bool:
        mover.start(stack.take_moves())
        for move, failure, _ in mover.poll():
            stack.on_move(move.move_id, MoveOutcome(1, failure))
        stack.tick()
        return not stack.has_live_moves() and not stack.num_waiting("object")

    wait(is_idle, "the chunks are not stored")
    assert not any(map(index.lacks, keys)), "a chunk was dropped"
    mover.close(TIMEOUT_S)
    stack.close()
    arena.close()


def read(location: StoreLocation, keys: Sequence[Key], num_bytes: int) -> tuple[float, float, set[str]]:
    """Reads all chunks with a new tier. Returns seconds, processor seconds, and names of the packs."""
    index = open_index(location, FINGERPRINT, 1, ObjectOptions(), time.monotonic)
    medium = open_medium(location, 0, ObjectOptions())
    memory = memoryview(bytearray(len(keys) * num_bytes))
    memory[::4096] = bytes(len(memory[::4096]))  # touch the memory before
    try:
        index.start_lookup(list(keys), time.monotonic() + TIMEOUT_S)
        wait(lambda: not index.any_pending(list(keys)), "the lookup has no answer")
        assert all(index.lookup(key) is LookupResult.HIT for key in keys)
        slots = [index.pin(key) for key in keys]
        began_s, cpu_s, done = time.perf_counter(), time.process_time(), 0
        for number, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            assert isinstance(slot, ObjectSlot)
            medium.load(Ticket(number), key, slot, [memory[number * num_bytes : (number + 1) * num_bytes]])
        medium.flush()
        while done < len(keys):
            ended = medium.poll()
            assert all(each.failure is None for each in ended), ended
            done += len(ended)
            if not ended:
                time.sleep(POLL_S)
        packs = {slot.pack for slot in slots if isinstance(slot, ObjectSlot)}
        return time.perf_counter() - began_s, time.process_time() - cpu_s, packs
    finally:
        medium.close()
        index.close()


def read_plain(plain: ObjectStore, packs: Sequence[str]) -> tuple[float, float]:
    """Reads the packs with obstore. Returns seconds and processor seconds."""

    def get(pack: str) -> int:
        return len(obstore.get(plain, f"{pack}/0").bytes())

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda _: time.sleep(0.01), range(THREADS)))
        began_s, cpu_s = time.perf_counter(), time.process_time()
        total = sum(threads.map(get, packs))
        assert total > 0
        return time.perf_counter() - began_s, time.process_time() - cpu_s


def measure(name: str, num_bytes: int, chunk_bytes: int, num_rounds: int) -> dict[str, Any]:
    # The hash of a prefix decides where manifests are written, so keys need random bits.
    random = Random(0)
    keys = [b"f" * 16 + random.randbytes(16) for _ in range(num_bytes // chunk_bytes)]
    with tempfile.TemporaryDirectory(prefix="object-reads-") as root, STORES[name](Path(root)) as (location, plain):
        store(location, keys, os.urandom(chunk_bytes))
        rounds = []
        for number in range(1 + num_rounds):
            seconds, cpu_s, packs = read(location, keys, chunk_bytes)
            plain_s, plain_cpu_s = read_plain(plain, sorted(packs))
            if number:
                rounds.append((seconds, cpu_s, plain_s, plain_cpu_s))
    columns = list(zip(*rounds, strict=True))
    tier, tier_cpu, alone, alone_cpu = (statistics.median(each) for each in columns)
    return {
        "packs": len(packs),
        "GB/s": {"tier": round(num_bytes / tier / 1e9, 3), "obstore": round(num_bytes / alone / 1e9, 3)},
        "cpu s": {"tier": round(tier_cpu, 4), "obstore": round(alone_cpu, 4)},
        "obstore over tier": spread([plain_s / seconds for seconds, _, plain_s, _ in rounds]),
        "cpu of obstore over tier": spread([plain_s / seconds for _, seconds, _, plain_s in rounds]),
    }


def show(name: str, chunk_bytes: int, found: Mapping[str, Any]) -> None:
    tier, alone = found["GB/s"]["tier"], found["GB/s"]["obstore"]
    print(
        f"{name:10} chunks of {chunk_bytes >> 10:5d} KiB: tier {tier:.2f} GB/s, obstore {alone:.2f}, "
        f"obstore over tier {written(found['obstore over tier'])}, "
        f"processor {written(found['cpu of obstore over tier'])}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Reads of the object tier compared with obstore.")
    parser.add_argument("--stores", nargs="+", choices=tuple(STORES), default=list(STORES))
    parser.add_argument("--mebibytes", type=int, default=64, help="size of all chunks")
    parser.add_argument("--chunk-kibibytes", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    found: dict[str, Any] = {}
    for name in options.stores:
        for kibibytes in options.chunk_kibibytes:
            row = measure(name, options.mebibytes << 20, kibibytes << 10, options.rounds)
            show(name, kibibytes << 10, row)
            found.setdefault(name, {})[str(kibibytes)] = row
    if options.json:
        options.json.write_text(json.dumps({"about": machine(load_before), "stores": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
