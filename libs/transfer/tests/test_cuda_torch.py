"""The parts of the torch side that need no GPU: what is said when something is missing, and who gives memory back.

CUDA's runtime is played where it is named; tests/gpu runs the real one.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from hybridkv.transfer import TransferError
from hybridkv.transfer.cuda import CudaError, MemoryKind, driver, open_device, pin_existing, pin_memory
from hybridkv.transfer.cuda.extension import cuda_kernels
from hybridkv.transfer.cuda.torch_device import _view

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this is what happens without a GPU")


@pytest.fixture(autouse=True)
def looks_anew() -> Iterator[None]:
    cuda_kernels.cache_clear()
    yield
    cuda_kernels.cache_clear()


@needs_no_gpu
def test_a_gpu_that_torch_does_not_see_cannot_be_opened() -> None:
    with pytest.raises(CudaError, match=r"sees no GPU cuda:0"):
        open_device(0)


@needs_no_gpu
def test_an_address_cannot_be_judged_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver._driver.cache_clear()
    monkeypatch.setattr(driver.ctypes, "CDLL", _no_library)
    with pytest.raises(CudaError, match=r"libcuda\.so\.1: not found"):
        driver.memory_kind(4096, 0)


def _no_library(name: str) -> None:
    raise OSError("not found")


def test_missing_kernels_are_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "hybridkv.cuda_kernels", None)
    with caplog.at_level(logging.WARNING, "hybridkv.transfer.cuda.extension"):
        assert cuda_kernels() is None
        assert cuda_kernels() is None
    [record] = caplog.records
    assert record.getMessage().startswith("hybridkv-cuda is not installed")


def test_kernels_that_torch_cannot_load_are_reported_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "libhybridkv_cuda.so"
    broken.write_bytes(b"not a library")
    module = ModuleType("hybridkv.cuda_kernels")
    module.library_path = lambda: broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hybridkv.cuda_kernels", module)
    assert cuda_kernels() is None
    [record] = caplog.records
    assert record.getMessage().startswith("hybridkv-cuda cannot be loaded into torch")


def test_kernels_of_another_version_are_reported_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = ModuleType("hybridkv.cuda_kernels")
    module.library_path = lambda: "unused"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hybridkv.cuda_kernels", module)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    newer = ModuleType("hybridkv_cuda")
    newer.interface_version = lambda: 2  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.ops, "hybridkv_cuda", newer, raising=False)
    assert cuda_kernels() is None
    assert "interface version 2" in caplog.records[0].getMessage()


def test_host_memory_is_seen_where_it_lies() -> None:
    memory = np.arange(100, dtype=np.uint8)
    view = _view(int(memory.ctypes.data), 100, MemoryKind.PINNED, torch.device("cpu"))
    view[10:20].copy_(view[50:60])
    assert memory[10:20].tolist() == list(range(50, 60))


class PlayedRuntime:
    """cudaHostRegister and cudaHostUnregister, on paper."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def play(runtime: PlayedRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: None)


def test_pinned_memory_is_given_back_with_its_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PlayedRuntime()
    play(runtime, monkeypatch)
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


def test_memory_that_is_there_already_is_pinned_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PlayedRuntime()
    play(runtime, monkeypatch)
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


def test_memory_that_cannot_be_pinned_is_an_error_with_the_calls_name(monkeypatch: pytest.MonkeyPatch) -> None:
    play(PlayedRuntime(code=2), monkeypatch)
    with pytest.raises(
        TransferError, match="pinned 0 bytes of 4096, then: cudaHostRegister of 4096 bytes: cudaError 2"
    ):
        pin_memory(4096)


@needs_no_gpu
def test_memory_is_not_pinned_without_a_gpu() -> None:
    with pytest.raises(CudaError, match=r"^torch .*: "):
        pin_memory(4096)


def test_no_memory_is_no_request() -> None:
    with pytest.raises(ValueError, match="num_bytes: expected a number >= 1"):
        pin_memory(0)
