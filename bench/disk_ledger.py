"""Cost of a record in the index of the disk tier: memory, and the time of a start with many records.

Measures, each in a separate process: the memory of records with 48-byte keys that are committed in the table of an
index; the memory of a whole `DiskIndex` that has stored them, and of another one that has opened the closed store, with
its peak during the start; and the time of `DiskIndex(...)` until it answers lookups. A record has one page of payload,
so a million records take 8 GiB of files. Only the heads of segments are written and read.

Not measured: payloads. A start verifies no payload; a load verifies its payload.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ram_ledger import KEYS_A_CALL, key_of, resident_bytes

from hybridkv.hashing import Fingerprint, GroupFingerprint, LayerFingerprint
from hybridkv.tiers import Slot
from hybridkv.tiers.disk import DiskIndex, DiskOptions
from hybridkv.tiers.disk.format.layout import PAGE_BYTES, SEGMENT_HEAD_BYTES, record_bytes
from hybridkv.tiers.disk.index.change_log import ChangeLog
from hybridkv.tiers.disk.index.records import RecordTable
from hybridkv.tiers.disk.index.segments import Segment, SegmentTable
from hybridkv.tiers.disk.options import DiskSizes
from hybridkv.tiers.ledger import KeyState

PAYLOAD_BYTES = PAGE_BYTES
COST = record_bytes(PAYLOAD_BYTES)
RECORDS_A_SEGMENT = 8192
SEGMENT_BYTES = SEGMENT_HEAD_BYTES + RECORDS_A_SEGMENT * COST
FINGERPRINT = Fingerprint(
    facts={"model": "bench"},
    chunk_tokens=128,
    hash_algorithm="sha256",
    tensor_parallel_size=1,
    groups=(
        GroupFingerprint(
            kind="full", block_tokens=16, layers=(LayerFingerprint(name="0", page_bytes=8, facts={"dtype": "u8"}),)
        ),
    ),
)


def bytes_a_record(count: int) -> float:
    """Memory of one record in the table. Needs a process that has done nothing else."""
    num_segments = -(-count // RECORDS_A_SEGMENT)
    sizes = SimpleNamespace(
        segment_room_bytes=SEGMENT_BYTES,
        usable_bytes=num_segments * SEGMENT_BYTES,
        max_records=count,
        num_ranks=1,
        data_bytes=num_segments * SEGMENT_BYTES,
        segment_bytes=SEGMENT_BYTES,
    )
    segments = SegmentTable(cast(DiskSizes, sizes), num_segments)
    for number in range(num_segments):
        segments.add(Segment(number, SEGMENT_BYTES, 0))
    log = ChangeLog()
    log.close()
    before = resident_bytes()
    table = RecordTable(segments, log, cast(DiskSizes, sizes))
    for first in range(0, count, KEYS_A_CALL):
        keys = [key_of(number) for number in range(first, min(first + KEYS_A_CALL, count))]
        for key in keys:
            table.reserve(key, PAYLOAD_BYTES, COST)
        table.commit_all(keys)
    assert table.num_keys == count
    record = table.find(key_of(0))
    assert record is not None and record.state is KeyState.COMMITTED
    return (resident_bytes() - before) / count


def build_store(path: Path, count: int) -> DiskIndex:
    capacity_bytes = int(1.3 * count * COST) + (1 << 30)
    options = DiskOptions(capacity_bytes=capacity_bytes, segment_bytes=SEGMENT_BYTES, max_records=count)
    return DiskIndex(str(path), FINGERPRINT, options)


def peak_bytes() -> int:
    """Peak memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def fill(path: Path, count: int) -> dict[str, Any]:
    """Stores `count` records. Returns the memory of the whole index before it is closed. Needs a new process."""
    before = resident_bytes()
    index = build_store(path, count)
    number = 0
    while number < count:
        if isinstance(index.reserve(key_of(number), PAYLOAD_BYTES), Slot):
            index.commit(key_of(number))
            number += 1
        else:
            index.drain(1.0)
    assert index.drain(60.0) and index.num_keys == count
    result = {"bytes_a_record": (resident_bytes() - before) / count, "records": index.num_keys}
    index.close()
    return result


def reopened(path: Path, count: int) -> dict[str, Any]:
    """Opens the store of `fill`. Returns the time, and the memory of the whole index. Needs a new process."""
    before = resident_bytes()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    index = build_store(path, count)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    index.drain(60.0)
    result = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "records": index.num_keys,
        "bytes_a_record": (resident_bytes() - before) / count,
        "peak_bytes": peak_bytes() - before,
    }
    index.close()
    return result


def measured(part: str, count: int, path: Path | None = None) -> Any:
    """Runs one part in a separate process. Returns its result."""
    words = [sys.executable, __file__, "--measure", part, "--records", str(count)]
    words += ["--path", str(path)] if path else []
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--path", type=Path, help="a directory with 9 GiB of free space for a million records")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=("memory", "fill", "open"), help="measure one part in this process")
    options = parser.parse_args()
    if options.measure == "memory":
        print(json.dumps(bytes_a_record(options.records)))
        return
    if options.measure:
        part = fill if options.measure == "fill" else reopened
        print(json.dumps(part(options.path, options.records)))
        return
    memory = {count: measured("memory", count) for count in (options.records, 10 * options.records)}
    for count, num_bytes in memory.items():
        print(f"{count:>12} records: {num_bytes:.1f} bytes each")
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        store = Path(folder) / "store"
        stored = measured("fill", options.records, store)
        opened = [measured("open", options.records, store) for _ in range(options.rounds)]
    print(f"the whole index, stored: {stored['bytes_a_record']:.1f} bytes a record")
    print(
        f"the whole index, opened: {opened[0]['bytes_a_record']:.1f}, at most {opened[0]['peak_bytes'] / 2**20:.0f} MiB"
    )
    seconds = sorted(each["seconds"] for each in opened)
    print(f"CPU of that: {min(each['cpu_seconds'] for each in opened):.2f} s")
    print(f"opened with {opened[0]['records']} records in {seconds[0]:.2f} to {seconds[-1]:.2f} s")
    if options.json:
        result = {
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "bytes_a_record": memory,
            "stored": stored,
            "opened": opened,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
