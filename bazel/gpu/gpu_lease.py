"""A pytest plugin that leases HYBRIDKV_TEST_GPUS GPUs for this process and hides all others from it.

A lease is a lock on /dev/shm/hybridkv-gpu-leases/<uuid>: all Bazel sandboxes of a machine share that folder and can
write to it. The lease ends with the process, even if the process crashes.
"""

import fcntl
import os
import pathlib
import subprocess
import time
from typing import IO

import pytest

LEASES = pathlib.Path("/dev/shm/hybridkv-gpu-leases")
_held: list[IO[str]] = []


def _gpu_uuids() -> list[str]:
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], check=True, capture_output=True, text=True
    )
    return listing.stdout.split()


def _open_lock(uuid: str) -> IO[str]:
    """Opens a lock file that all users of the machine can open, whatever the umask of the first user."""
    umask = os.umask(0)
    try:
        LEASES.mkdir(mode=0o777, exist_ok=True)
        # A lock needs read access only, so a file made with another user's umask works too.
        return os.fdopen(os.open(LEASES / uuid, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
    finally:
        os.umask(umask)


def _lease(uuids: list[str], wanted: int) -> list[str]:
    taken: list[tuple[str, IO[str]]] = []
    for uuid in uuids:
        lock = _open_lock(uuid)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        taken.append((uuid, lock))
        if len(taken) == wanted:
            _held.extend(lock for _, lock in taken)
            return [uuid for uuid, _ in taken]
    for _, lock in taken:
        lock.close()
    return []


def pytest_configure(config: pytest.Config) -> None:
    wanted = int(os.environ["HYBRIDKV_TEST_GPUS"])
    uuids = _gpu_uuids()
    if len(uuids) < wanted:
        raise RuntimeError(f"this test needs {wanted} GPUs, but nvidia-smi lists {len(uuids)}")
    while not (leased := _lease(uuids, wanted)):
        time.sleep(0.2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(leased)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    print("leased", os.environ["CUDA_VISIBLE_DEVICES"])
