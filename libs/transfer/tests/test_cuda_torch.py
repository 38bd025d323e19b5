"""The parts of the torch side that need no GPU: errors for missing components, and the release of memory.

The CUDA runtime is faked where a test needs it; tests/gpu uses the real one.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybridkv.transfer import CopyRuns, TransferError
from hybridkv.transfer.cuda import CopyTuning, CudaError, driver, kernel_device, open_device, pin_existing, pin_memory
from hybridkv.transfer.cuda.device import NUM_PARTS
from hybridkv.transfer.cuda.kernel_device import KernelDevice, load_library
from hybridkv.transfer.pinned import REGISTRATION_BYTES
from hybridkv.transfer.runs import ROW_WORDS

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the test needs a machine without a GPU")


@pytest.fixture(autouse=True)
def fresh_library_cache() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@needs_no_gpu
def test_a_gpu_that_torch_does_not_find_cannot_be_opened() -> None:
    with pytest.raises(CudaError, match=r"sees no GPU cuda:0"):
        open_device(0)


@needs_no_gpu
def test_the_kind_of_an_address_cannot_be_read_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver._driver.cache_clear()
    monkeypatch.setattr(driver.ctypes, "CDLL", _no_library)
    with pytest.raises(CudaError, match=r"libcuda\.so\.1: not found"):
        driver.memory_kind(4096, 0)


def _no_library(name: str) -> None:
    raise OSError("not found")


def test_the_error_for_a_missing_distribution_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hybridkv.cuda_kernels", None)
    with pytest.raises(CudaError, match=r"hybridkv-cuda cannot be loaded: .*; install hybridkv-vllm\[cuda\]"):
        load_library()


def provide(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("hybridkv.cuda_kernels")
    module.library_path = lambda: path  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hybridkv.cuda_kernels", module)


def test_a_broken_library_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libhybridkv_cuda.so"
    broken.write_bytes(b"not a library")
    provide(broken, monkeypatch)
    with pytest.raises(CudaError, match="hybridkv-cuda cannot be loaded: "):
        load_library()


class FakeLibrary:
    """The functions of csrc/cuda/copier.cc, on the CPU."""

    def __init__(self) -> None:
        self.limits: list[int] = []
        self.ranges: list[int] = []
        self.event = 0
        self.closed: list[int] = []
        self.num_waits = 0
        self.failure = b""

    def hybridkv_cuda_interface_version(self) -> int:
        return kernel_device.INTERFACE_VERSION

    def hybridkv_cuda_open(
        self, index: ctypes.c_int32, limits: Any, copier: Any, error: Any, error_bytes: ctypes.c_uint64
    ) -> int:
        self.limits = [index.value, *limits]
        copier._obj.value = 77
        return 0

    def hybridkv_cuda_close(self, copier: ctypes.c_void_p) -> None:
        assert copier.value is not None
        self.closed.append(copier.value)

    def hybridkv_cuda_enqueue(self, copier: ctypes.c_void_p, event: ctypes.c_uint64, *rest: Any) -> int:
        rows, count, ranges, num_ranges, job, error, error_bytes = rest
        job._obj.value = 88
        assert copier.value == 77
        assert error_bytes.value == len(error)
        error.value = self.failure
        self.event = event.value
        self.ranges = words(ranges, 2 * num_ranges.value)
        table = np.array(words(rows, ROW_WORDS * count.value), dtype=np.int64).reshape(-1, ROW_WORDS)
        for source, destination, source_step, destination_step, size, num_runs in table.tolist():
            for run in range(num_runs):
                ctypes.memmove(destination + run * destination_step, source + run * source_step, size)
        return bool(self.failure)

    def hybridkv_cuda_wait(self, job: ctypes.c_void_p, error: Any, error_bytes: ctypes.c_uint64) -> int:
        assert job.value == 88
        self.num_waits += 1
        error.value = self.failure
        return bool(self.failure)


def words(pointer: ctypes.c_void_p, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(pointer.value or 0)) if count else []


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    provide(tmp_path, monkeypatch)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: FakeLibrary())
    monkeypatch.setattr(kernel_device, "INTERFACE_VERSION", 3)
    monkeypatch.setattr(FakeLibrary, "hybridkv_cuda_interface_version", lambda self: 2)
    with pytest.raises(CudaError, match="interface version 2, hybridkv-transfer needs 3: install matching versions"):
        load_library()


def test_a_device_passes_limits_memory_ranges_and_runs_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(kernel_device, "load_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    tuning = CopyTuning(8192, 100, 65536, 2048, 5)
    device = KernelDevice(3, tuning)
    assert library.limits == [3, 8192, 100, 65536 // NUM_PARTS, 2048, REGISTRATION_BYTES, 5]
    memory = np.arange(100, dtype=np.uint8)
    address = int(memory.ctypes.data)
    for begin, num_bytes in ((4096, 100), (4000, 96), (64, 8)):
        device.register(begin, num_bytes)
    event = SimpleNamespace(cuda_event=12)
    runs = CopyRuns.of([(address + 50, address, 10), (address + 70, address + 20, 5)])
    device.enqueue(runs, event).synchronize()  # type: ignore[arg-type]
    assert library.event == 12
    assert library.ranges == [64, 72, 4000, 4196]
    assert memory[:25].tolist() == [*range(50, 60), *range(10, 20), *range(70, 75)]
    job = device.enqueue(CopyRuns.empty(), event)  # type: ignore[arg-type]
    library.failure = b"cudaEventSynchronize: cudaErrorUnknown"
    with pytest.raises(CudaError, match=r"^cudaEventSynchronize: cudaErrorUnknown$"):
        job.synchronize()
    with pytest.raises(CudaError, match=r"^cudaEventSynchronize: cudaErrorUnknown$"):
        device.enqueue(CopyRuns.empty(), event)  # type: ignore[arg-type]
    del device, job
    gc.collect()
    assert library.closed == [77]


def test_an_enqueued_job_waits_when_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(kernel_device, "load_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device = KernelDevice(0, CopyTuning())
    event = SimpleNamespace(cuda_event=12)
    job = device.enqueue(CopyRuns.empty(), event)  # type: ignore[arg-type]
    job.synchronize()
    job.synchronize()
    del job
    gc.collect()
    assert library.num_waits == 1
    device.enqueue(CopyRuns.empty(), event)  # type: ignore[arg-type]
    gc.collect()
    assert library.num_waits == 2 and library.closed == []


class FakeRuntime:
    """Records calls of cudaHostRegister and cudaHostUnregister."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def use_runtime(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: None)


def test_pinned_memory_is_released_with_its_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    use_runtime(runtime, monkeypatch)
    memory = pin_memory(100_000)
    assert runtime.pinned == {int(memory.ctypes.data): 100_000}
    part = memory[:4096][10:20]
    del memory
    gc.collect()
    part[:] = 7
    assert len(runtime.pinned) == 1
    del part
    gc.collect()
    assert runtime.pinned == {}


def test_existing_memory_stays_pinned_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    use_runtime(runtime, monkeypatch)
    owner = bytearray(5000)
    memory = np.frombuffer(owner, dtype=np.uint8)
    pin_existing(memory)
    assert runtime.pinned == {int(memory.ctypes.data): 5000}
    part = memory[:4000].reshape(4, 1000)
    del memory
    gc.collect()
    assert len(runtime.pinned) == 1
    del part
    gc.collect()
    assert runtime.pinned == {}


def test_the_error_for_memory_that_cannot_be_pinned_names_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    use_runtime(FakeRuntime(code=2), monkeypatch)
    with pytest.raises(
        TransferError, match="pinned 0 bytes of 4096, then: cudaHostRegister of 4096 bytes: cudaError 2"
    ):
        pin_memory(4096)


@needs_no_gpu
def test_memory_is_not_pinned_without_a_gpu() -> None:
    with pytest.raises(CudaError, match=r"^torch .*: "):
        pin_memory(4096)


def test_a_request_for_no_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="num_bytes: expected a number >= 1"):
        pin_memory(0)
