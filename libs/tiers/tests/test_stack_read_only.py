"""A disk that refuses all stores still serves its chunks, with stores beside each lease."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from disk_stack import Tiers

from hybridkv.planner import LookupResult
from hybridkv.tiers.disk import DiskOptions, Fsync
from hybridkv.tiers.stack import BreakerState, Direction
from kits.plain_disk_medium import PlainDiskMedium

OPTIONS = DiskOptions(capacity_bytes=4 << 20, segment_bytes=128 << 10, fsync=Fsync.NONE, direct=False)
NUM_CHUNKS = 150
STORES_PER_HOLD = 4
"""More in a row than open a breaker, because a request stores its chunks together."""


def stored(tiers: Tiers, num_chunks: int) -> list[bytes]:
    """Store this many chunks; return the keys that the disk still holds."""
    keys = [b"chunk %d" % number for number in range(num_chunks)]
    assert tiers.store(keys) == [None] * num_chunks
    kept = [key for key in keys if tiers.index.lookup(key) is LookupResult.HIT]
    assert len(kept) > 100
    tiers.clear_primary()
    return kept


def served(tiers: Tiers, keys: list[bytes]) -> int:
    """Number of leases that become ready, with some stores beside each and a second between two."""
    num_served = 0
    for number, key in enumerate(keys):
        tiers.store([b"new %d, %d" % (number, part) for part in range(STORES_PER_HOLD)])
        num_served += tiers.serves(key)
        tiers.clock.now_s += 1
        tiers.stack.tick()
    return num_served


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_disk_that_refuses_stores_serves_its_chunks(tmp_path: Path, number: int) -> None:
    tiers = Tiers(tmp_path / "store", OPTIONS, primary_chunks=8, medium_type=PlainDiskMedium)
    keys = stored(tiers, NUM_CHUNKS)
    tiers.io.failing["pwritev"] = number
    assert served(tiers, keys) == len(keys)
    assert tiers.stack.breaker_state(Direction.CASCADE, "disk") is not BreakerState.CLOSED
    counts = tiers.stack.take_counts().moves
    assert counts.breaker_openings.keys() == {"cascade"} and counts.cascades["dropped_open"] > counts.cascades["failed"]
    tiers.io.failing.clear()
    tiers.clock.now_s += 1000
    assert tiers.store([b"a probe", b"newer"]) == [None, None]
    assert tiers.index.lookup(b"newer") is LookupResult.HIT, "it accepts stores again"
    tiers.close()


def test_a_disk_that_fails_reads_opens_the_breaker_of_promotions(tmp_path: Path) -> None:
    """Control for the test before: failed reads do block loads."""
    tiers = Tiers(tmp_path / "store", OPTIONS, primary_chunks=8, medium_type=PlainDiskMedium)
    keys = stored(tiers, NUM_CHUNKS)
    tiers.io.failing["preadv"] = errno.EIO
    assert served(tiers, keys) == 0
    assert tiers.stack.take_counts().moves.breaker_openings.keys() == {"promote"}
    tiers.close()


MOUNTED = """
import pathlib, subprocess, sys
import test_stack_read_only as test
from disk_stack import Tiers
path, num_chunks = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def mount(*options):
    subprocess.run(["mount", *options], check=True)
mount("-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(path))
tiers = Tiers(path, test.OPTIONS, primary_chunks=8)
keys = test.stored(tiers, num_chunks)
tiers.medium.close()  # the system mounts nothing read-only while somebody may write to a file in it
mount("-o", "remount,ro", str(path))
tiers.open_medium()
num_served = test.served(tiers, keys)
print(num_served, len(keys))
assert any(name.endswith("EROFS") for name in tiers.index.take_disk_counts().failures)
tiers.medium.close()
mount("-o", "remount,rw", str(path))
tiers.open_medium()
tiers.clock.now_s += 1000
assert tiers.store([b"a probe", b"newer"]) == [None, None]
tiers.close()
"""


def mounted(path: Path, num_chunks: int) -> tuple[int, int]:
    """Leases that became ready on a file system mounted read-only, and the number of leases."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mounts in a user namespace")
    path.mkdir(mode=0o700)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    arguments = [str(path), str(num_chunks)]
    done = subprocess.run(
        [*namespace, sys.executable, "-c", MOUNTED, *arguments], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    num_served, num_holds = map(int, done.stdout.split())
    return num_served, num_holds


def test_a_read_only_file_system_serves_its_chunks(tmp_path: Path) -> None:
    num_served, num_holds = mounted(tmp_path / "mounted", NUM_CHUNKS)
    assert num_served == num_holds > 100


def test_a_full_read_only_disk_gives_up_few_chunks(tmp_path: Path) -> None:
    num_served, num_holds = mounted(tmp_path / "mounted", 400)
    assert num_holds > 100 and num_served >= num_holds - 2 * 10, "at most two segments of chunks"
