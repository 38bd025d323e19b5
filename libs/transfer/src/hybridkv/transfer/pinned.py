"""Pinned host memory, which a device reads and writes directly. The caller passes the functions that register it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hybridkv.transfer.runs import TransferError

logger = logging.getLogger(__name__)

REGISTRATION_BYTES: Final = 64 << 30
"""Memory is cut at addresses that are multiples of this, and each part is registered. CUDA rejects a registration of
512 GiB or more.

CUDA copies only within one registration, but a slot can cross the border between two. So engines that copy with CUDA or
ROCm cut runs at the same multiples (`CopyRuns.cut_at_multiples`). They do not need the list of registrations.
"""
MAX_THREADS: Final = 16
"""Limit of the threads that touch memory."""
_PIECE_BYTES = 256 << 20
"""Limit of the bytes that one call touches."""
_MADV_POPULATE_WRITE = 23
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def map_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Map page-aligned memory: uint8, zeroed, in huge pages if possible. Freed with the last view.

    A forked child does not inherit the memory. Otherwise the first write of the parent would move the page to other
    memory, and the device would still use the old page.

    Raises:
        ValueError: `num_bytes` is below 1.
        TransferError: the memory is not available, or a control group has fewer free bytes (the kernel would kill the
            process).
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes: expected a number >= 1, got {num_bytes}")
    limit = memory_limit()
    if limit is not None and num_bytes > limit.free_bytes:
        rest = f"{limit.free_bytes} bytes are free of the {limit.num_bytes} of the control group {limit.directory}"
        raise TransferError(f"{num_bytes} bytes of memory: {rest}")
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise TransferError(f"mmap of {num_bytes} bytes: {error}") from error
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin, and for the GPU to look up
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(mapping, dtype=np.uint8)


def numa_local_cpus(properties: Any, devices: Path = _PCI_DEVICES) -> set[int]:
    """CPUs that this thread may use on the NUMA node of a GPU. All CPUs that this thread may use, if the node is
    unknown or has none of them.

    Args:
        properties: torch's properties of the GPU.
        devices: directory of PCI devices in sysfs.
    """
    allowed = os.sched_getaffinity(0)
    try:
        name = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        parts = [part.split("-") for part in (devices / name / "local_cpulist").read_text().split(",")]
        near = {cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)}
    except (AttributeError, OSError, ValueError):  # an older torch, or a container without /sys
        return allowed
    return near & allowed or allowed


def pin(
    memory: npt.NDArray[np.uint8],
    register: Callable[[int, int], None],
    unregister: Callable[[int], object],
    cpus: set[int],
) -> None:
    """Pin memory until the array and all its views are freed. The operating system commits all of it now.

    Threads touch the memory first, in parallel; registration then takes a tenth of the time. New pages come from the
    NUMA node of `cpus` while that node has free memory.

    Args:
        memory: contiguous array, and no view of another one: views would keep only the other one alive, not the pin.
        register: pins (address, num_bytes), or raises `TransferError`. Called once for each part of `memory` between
            multiples of `REGISTRATION_BYTES`.
        unregister: unpins a part by its address.
        cpus: CPUs of the threads that touch the memory.

    Raises:
        TransferError: the memory cannot be pinned; then no part of it is pinned.
    """
    began_s = time.monotonic()
    commit_pages(memory, cpus)
    start = int(memory.ctypes.data)
    end = start + memory.nbytes
    borders = range((start // REGISTRATION_BYTES + 1) * REGISTRATION_BYTES, end, REGISTRATION_BYTES)
    with contextlib.ExitStack() as pinned:
        for first, last in itertools.pairwise((start, *borders, end)):
            try:
                register(first, last - first)
            except TransferError as error:
                raise TransferError(f"pinned {first - start} bytes of {memory.nbytes}, then: {error}") from error
            pinned.callback(unregister, first)
        # The owner of the memory is an argument, so that the memory is freed after the registration ends.
        weakref.finalize(memory, _unregister, pinned.pop_all(), memory.base)
    seconds = time.monotonic() - began_s
    logger.info("pinned %d bytes of host memory in %d registrations: %.2f s", end - start, len(borders) + 1, seconds)


def commit_pages(memory: npt.NDArray[np.uint8], cpus: set[int]) -> None:
    """Commit memory now, by threads on these CPUs. Does nothing before Linux 5.14.

    Raises:
        TransferError: the memory is not available.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start = int(memory.ctypes.data)
    end = start + memory.nbytes
    pieces = range(start - start % mmap.PAGESIZE, end, _PIECE_BYTES)
    num_threads = min(MAX_THREADS, len(cpus), len(pieces))
    failures: list[int] = []

    def populate(mine: range) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)  # of this thread only
        for first in mine:
            if madvise(first, min(_PIECE_BYTES, end - first), _MADV_POPULATE_WRITE) != 0:
                failures.append(ctypes.get_errno())
                return

    threads = [
        threading.Thread(target=populate, args=(pieces[number::num_threads],), name="hybridkv-touch", daemon=True)
        for number in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for code in failures:
        # Any other code: the kernel does not support this call. The registration commits the memory then.
        if code in (errno.ENOMEM, errno.EFAULT):
            raise TransferError(f"{memory.nbytes} bytes of memory cannot be committed: {os.strerror(code)}")


def _unregister(pinned: contextlib.ExitStack, owner: Any) -> None:
    # At process exit the device may be closed already; the memory is freed with the process.
    pinned.close()


_CgroupFiles = tuple[str, str, str]
"""File of the limit, file of the usage, and prefix of the keys in memory.stat."""
_V2: _CgroupFiles = ("memory.max", "memory.current", "")
_V1: _CgroupFiles = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory limit of the control group `directory`, in bytes. Cached files count as free."""

    directory: Path
    num_bytes: int
    free_bytes: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The limit with the fewest free bytes, of this process's control group and its parents. None without a readable
    limit.

    Reads both versions of control groups. `root` contains the directories `proc` and `sys`.
    """
    limits = [_read_limit(directory, names) for directory, names in _cgroup_directories(root)]
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.free_bytes, default=None)


def _cgroup_directories(root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = mount, _V2
        elif "memory" in controllers.split(","):
            top, names = mount / "memory", _V1
        else:
            continue
        directory = top / path.lstrip("/")
        # A container can see the host's path. Then only the top directory exists.
        for each in (directory, *directory.parents):
            if each.is_relative_to(top):
                yield each, names


def _read_limit(directory: Path, names: _CgroupFiles) -> MemoryLimit | None:
    limit_name, used_name, prefix = names
    try:
        num_bytes = int((directory / limit_name).read_text())
        used_bytes = int((directory / used_name).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        file_bytes = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
    except (OSError, ValueError, KeyError):  # no such file, or "max"
        return None
    return MemoryLimit(directory, num_bytes, num_bytes - used_bytes + file_bytes)
