"""Pinned host memory for a device."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hybridkv.transfer import TransferError, pinned
from hybridkv.transfer.pinned import MemoryLimit, commit_pages, map_memory, numa_local_cpus, pin

STEP = 1 << 20
"""Registrations end at multiples of this size in tests that set it."""
KERNEL = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
needs_populate = pytest.mark.skipif(KERNEL < (5, 14), reason="MADV_POPULATE_WRITE needs Linux 5.14")


@pytest.fixture
def cpus() -> set[int]:
    return os.sched_getaffinity(0)


def smaps(address: int) -> dict[str, str]:
    """The entry of /proc/self/smaps for the mapping at an address."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            is_it = start <= address < end
        elif is_it:
            found[first] = rest
    return found


def resident_bytes(memory: np.ndarray) -> int:  # type: ignore[type-arg]
    """The resident bytes of page-aligned memory."""
    pages = (ctypes.c_ubyte * -(-memory.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


class Registrations:
    """Records the pinned ranges. The registration with the number `fails` fails."""

    def __init__(self, fails: int | None = None) -> None:
        self.pinned: dict[int, int] = {}
        self.num_calls = 0
        self._fails = fails

    def register(self, address: int, num_bytes: int) -> None:
        if self.num_calls == self._fails:
            raise TransferError("no more")
        self.num_calls += 1
        self.pinned[address] = num_bytes


def test_a_forked_child_does_not_have_the_memory() -> None:
    memory = map_memory(1 << 20)
    assert "dc" in smaps(int(memory.ctypes.data))["VmFlags:"].split()


def test_memory_is_registered_in_parts_between_multiples(
    cpus: set[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinned, "REGISTRATION_BYTES", STEP)
    caplog.set_level(logging.INFO)
    memory, paper = map_memory(3 * STEP), Registrations()
    start = int(memory.ctypes.data)
    memory = memory[: 2 * STEP + STEP // 2]
    pin(memory, paper.register, paper.pinned.pop, cpus)
    assert list(paper.pinned) == [start, *range((start // STEP + 1) * STEP, start + memory.nbytes, STEP)]
    assert all(first // STEP == (first + num_bytes - 1) // STEP for first, num_bytes in paper.pinned.items())
    assert sum(paper.pinned.values()) == memory.nbytes
    [record] = caplog.records
    assert f"pinned {memory.nbytes} bytes of host memory in {len(paper.pinned)} registrations" in record.getMessage()
    del memory
    assert paper.pinned == {}


def test_a_failed_registration_leaves_none(cpus: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "REGISTRATION_BYTES", STEP)
    memory, paper = map_memory(3 * STEP), Registrations(fails=1)
    start = int(memory.ctypes.data)
    first_bytes = STEP - start % STEP
    with pytest.raises(TransferError, match=f"pinned {first_bytes} bytes of {3 * STEP}, then: no more"):
        pin(memory, paper.register, paper.pinned.pop, cpus)
    assert (paper.num_calls, paper.pinned) == (1, {})
    del memory
    assert paper.pinned == {}


@needs_populate
def test_memory_is_committed_before_it_is_registered(cpus: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_PIECE_BYTES", 16 << 20)
    memory = map_memory(64 << 20)
    assert resident_bytes(memory) == 0
    committed: list[int] = []
    pin(memory, lambda address, num_bytes: committed.append(resident_bytes(memory)), lambda address: None, cpus)
    assert set(committed) == {64 << 20}


def test_memory_that_begins_within_a_page_keeps_its_bytes(cpus: set[int]) -> None:
    memory = map_memory(3 * mmap.PAGESIZE)
    memory[:] = 7
    commit_pages(memory[100:-100], cpus)
    assert (memory == 7).all()


@needs_populate
def test_the_error_for_memory_that_cannot_be_committed_has_its_size(cpus: set[int]) -> None:
    beyond = (ctypes.c_uint8 * (1 << 20)).from_address(0x1000)  # below the lowest address that a process may map
    with pytest.raises(
        TransferError, match=f"1048576 bytes of memory cannot be committed: {os.strerror(errno.ENOMEM)}"
    ):
        commit_pages(np.frombuffer(beyond, dtype=np.uint8), cpus)


def test_registration_works_if_the_kernel_cannot_populate_memory(
    cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_MADV_POPULATE_WRITE", 12345)
    memory, paper = map_memory(1 << 20), Registrations()
    pin(memory, paper.register, paper.pinned.pop, cpus)
    assert sum(paper.pinned.values()) == 1 << 20 and resident_bytes(memory) == 0


def test_threads_that_touch_memory_stay_on_their_cpus(cpus: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, set[int], str]] = []
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, only: asked.append((pid, only, threading.current_thread().name))
    )
    commit_pages(map_memory(4096), {min(cpus)})
    assert asked == [(0, {min(cpus)}, "hybridkv-touch")]


def test_cpus_near_a_gpu_are_the_allowed_cpus_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 8, 9, 40})
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=3)
    directory = tmp_path / "0000:dc:03.0"
    directory.mkdir()
    (directory / "local_cpulist").write_text("8-15,40\n")
    assert numa_local_cpus(gpu, tmp_path) == {8, 9, 40}
    (directory / "local_cpulist").write_text("16-31\n")
    assert numa_local_cpus(gpu, tmp_path) == {1, 8, 9, 40}
    (directory / "local_cpulist").write_text("\n")
    assert numa_local_cpus(gpu, tmp_path) == {1, 8, 9, 40}
    assert numa_local_cpus(gpu, tmp_path / "none") == {1, 8, 9, 40}
    assert numa_local_cpus(SimpleNamespace(), tmp_path) == {1, 8, 9, 40}


def test_more_memory_than_a_control_group_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "memory_limit", lambda: MemoryLimit(Path("/sys/fs/cgroup/pod"), 100_000, 4096))
    with pytest.raises(TransferError, match=r"4097 bytes of memory: 4096 bytes are free of the 100000 of .*/pod"):
        map_memory(4097)
    assert map_memory(4096).nbytes == 4096
