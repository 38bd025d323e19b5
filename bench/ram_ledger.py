"""Cost of a key in the index of host memory: time of calls on many keys, and memory.

Measures CPU time of the calling thread for calls on 1,024 keys of 48 bytes in an index of a million keys. Each call
uses other keys than the previous one, so no key is in a cache. Also measures the memory of a separate process with such
an index: when the index is full, and after the same number of further keys, each of which evicts one. `pin_all` and
`reserve_all` create a Python slot for each key. A chunk has 20 granules.

Not measured: creating keys, and copying chunks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridkv.tiers.ram import RamIndex

GRANULE_BYTES = 4096
CHUNK_BYTES = 20 * GRANULE_BYTES
KEYS_A_CALL = 1024
CALLS = 40


def key_of(number: int) -> bytes:
    return b"tag of a group: " + hashlib.sha256(number.to_bytes(8, "little")).digest()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def filled(count: int) -> RamIndex:
    """An index of `count` committed keys, with room for one more. No other object holds the keys."""
    index = RamIndex((count + 1) * CHUNK_BYTES, GRANULE_BYTES, CHUNK_BYTES)
    for first in range(0, count, KEYS_A_CALL):
        keys = [key_of(number) for number in range(first, min(first + KEYS_A_CALL, count))]
        index.reserve_all([(key, CHUNK_BYTES) for key in keys])
        index.commit_all(keys)
    return index


def bytes_a_key(count: int) -> dict[str, float]:
    """Memory of a key in a full index, and after all keys were replaced. Needs a process that has done nothing else."""
    before = resident_bytes()
    index = filled(count)
    assert index.num_keys == count
    full = resident_bytes() - before
    for first in range(count, 2 * count, KEYS_A_CALL):
        keys = [key_of(number) for number in range(first, min(first + KEYS_A_CALL, 2 * count))]
        index.reserve_all([(key, CHUNK_BYTES) for key in keys])
        index.commit_all(keys)
    return {"full": full / count, "after evictions": (resident_bytes() - before) / count}


def ns_a_key(count: int) -> dict[str, float]:
    index = filled(count)
    chosen = random.Random(1).sample(range(count), CALLS * KEYS_A_CALL)
    held = [[key_of(chosen[call * KEYS_A_CALL + at]) for at in range(KEYS_A_CALL)] for call in range(CALLS)]
    new = [[key_of(count + call * KEYS_A_CALL + at) for at in range(KEYS_A_CALL)] for call in range(CALLS)]
    spent: dict[str, list[int]] = {}

    def measure(name: str, call: Callable[[Any], object], batches: Sequence[object]) -> None:
        for batch in batches:
            begun = time.thread_time_ns()
            call(batch)
            spent.setdefault(name, []).append(time.thread_time_ns() - begun)

    measure("leading", index.leading, held)
    measure("last_held, none", index.last_held, new)
    index.reserve(b"pending", CHUNK_BYTES)
    measure("any_pending", index.any_pending, held)
    index.abort(b"pending")
    measure("touch", index.touch, held)
    measure("pin_all", index.pin_all, held)
    measure("unpin_all", index.unpin_all, held)
    measure("reserve_all, evicting", index.reserve_all, [[(key, CHUNK_BYTES) for key in keys] for keys in new])
    measure("commit_all", index.commit_all, new)
    measure("invalidate_all", index.invalidate_all, new)
    begun = time.thread_time_ns()
    index.clear()
    whole = time.thread_time_ns() - begun
    return {name: statistics.median(times) / KEYS_A_CALL for name, times in spent.items()} | {"clear, whole": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=("time", "memory"), help="measure one part in this process")
    options = parser.parse_args()
    if options.measure:
        part = ns_a_key if options.measure == "time" else bytes_a_key
        print(json.dumps(part(options.records)))
        return
    measured = {
        part: json.loads(
            subprocess.run(
                [sys.executable, __file__, "--measure", part, "--records", str(options.records)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for part in ("memory", "time")
    }
    for when, num_bytes in measured["memory"].items():
        print(f"bytes a key, {when}: {num_bytes:.1f}")
    for name, nanoseconds in measured["time"].items():
        print(f"{name:24} {nanoseconds:12.1f} ns")
    if options.json:
        about = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        result = about | {"records": options.records, "measured": measured}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
