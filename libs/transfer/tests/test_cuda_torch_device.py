"""`TorchCudaDevice` with torch's streams and events replaced by nothing and the kernels by their simulation.

It shows that the glue hands over what the kernels expect: tables, tile counts, columns of a batch. Without a GPU
nothing more can be shown; tests/gpu runs the same jobs on one.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from kernel_simulation import SimulationMissingError, load, simulate_checksums
from played_device import SMALL

from hybridkv.transfer import CopyRuns, JobId
from hybridkv.transfer.cuda import CudaError, InlineCudaCopyEngine, MemoryKind, driver, torch_device
from hybridkv.transfer.cuda.torch_device import TorchCudaDevice


class Stream:
    cuda_stream = 77

    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait_event(self, event: object) -> None:
        assert isinstance(event, Event)


class Event:
    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking

    def record(self, stream: object) -> None:
        assert isinstance(stream, Stream)

    def synchronize(self) -> None:
        assert self.blocking


class SimulatedKernels:
    """The operators of csrc/cuda/torch_ops.cc, on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.calls: list[str] = []

    def load_kernels(self) -> None:
        self.calls.append("load_kernels")

    def copy_fragments(
        self, table: torch.Tensor, num_tiles: int, tile_bytes: int, num_blocks: int, stream: int
    ) -> None:
        assert stream == Stream.cuda_stream
        assert table.dtype == torch.int64
        assert table.is_contiguous()
        assert table.shape[1] == 8
        self.calls.append("copy_fragments")
        self.library.hybridkv_simulate_copy(
            ctypes.c_void_p(table.data_ptr()),
            ctypes.c_uint64(table.shape[0]),
            ctypes.c_uint64(num_tiles),
            ctypes.c_uint64(tile_bytes),
            ctypes.c_uint32(num_blocks * 16),
        )

    def copy_batch(self, sources: torch.Tensor, destinations: torch.Tensor, sizes: torch.Tensor, stream: int) -> None:
        assert stream == Stream.cuda_stream
        self.calls.append("copy_batch")
        for triple in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(*triple)

    def checksums(self, ranges: torch.Tensor, digests: torch.Tensor, num_blocks: int, stream: int) -> None:
        found = simulate_checksums(self.library, [tuple(row) for row in ranges.tolist()])
        words = [(int.from_bytes(one[8:], "big"), int.from_bytes(one[:8], "big")) for one in found]
        digests.copy_(torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64)))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> SimulatedKernels:
    try:
        library = load(tmp_path_factory.mktemp("simulation"))
    except SimulationMissingError as error:
        pytest.skip(str(error))
    made = SimulatedKernels(library)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        Stream=Stream,
        Event=Event,
        current_stream=lambda device: Stream(),
        device=lambda device: contextlib.nullcontext(),
        stream=lambda stream: contextlib.nullcontext(),
    )
    monkeypatch.setattr(torch_device.torch, "cuda", cuda)
    monkeypatch.setattr(torch_device.torch, "device", lambda *_: SimpleNamespace(index=0))
    real_empty, real_to = torch.empty, torch.Tensor.to

    def empty_on_cpu(shape: int | tuple[int, int], *, dtype: torch.dtype, **kwargs: object) -> torch.Tensor:
        return real_empty(shape, dtype=dtype)

    monkeypatch.setattr(torch_device.torch, "empty", empty_on_cpu)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **kwargs: real_to(self, "cpu"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch_device, "cuda_kernels", lambda: made)
    return made


def host_view(address: int, num_bytes: int, kind: MemoryKind, device: object) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def job(monkeypatch: pytest.MonkeyPatch, size: int, count: int) -> None:
    """Stores `count` pages and compares."""
    cache = np.random.default_rng(1).integers(0, 256, 2 * size * count, dtype=np.uint8)
    arena = np.zeros(size * count, dtype=np.uint8)
    addresses = int(cache.ctypes.data), int(arena.ctypes.data)
    kinds = dict(zip(addresses, (MemoryKind.DEVICE, MemoryKind.PINNED), strict=True))
    monkeypatch.setattr(driver, "memory_kind", lambda address, index: kinds[address])
    device = TorchCudaDevice(0, SMALL)
    engine = InlineCudaCopyEngine(device)
    engine.register(addresses[0], cache.nbytes, "kv cache")
    engine.register(addresses[1], arena.nbytes, "arena")
    runs = CopyRuns.of([(addresses[0] + 2 * size * i, addresses[1] + size * i, size) for i in range(count)])
    engine.submit(JobId(1), runs)
    [result] = engine.poll()
    assert result.failure is None, result.failure
    assert np.array_equal(arena.reshape(count, size), cache.reshape(count, 2, size)[:, 0])


def test_small_pages_are_staged(kernels: SimulatedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, 512, 60)
    assert set(kernels.calls) == {"load_kernels", "copy_fragments", "copy_batch"}


def test_large_pages_are_one_batch(kernels: SimulatedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, SMALL.large_run_bytes, 10)
    assert kernels.calls == ["load_kernels", "copy_batch"]


def test_few_bytes_are_copied_by_the_kernel(kernels: SimulatedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, 64, 4)
    assert kernels.calls == ["load_kernels", "copy_fragments"]


def test_a_table_that_does_not_fit_gets_memory_of_its_own(
    kernels: SimulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_device, "TABLE_ROWS", 1)
    job(monkeypatch, 512, 61)
    assert kernels.calls.count("copy_fragments") > 1


def test_without_kernels_torch_copies(kernels: SimulatedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "cuda_kernels", lambda: None)
    monkeypatch.setattr(torch_device, "_view", host_view)
    job(monkeypatch, 512, 60)
    assert kernels.calls == []


def test_checksums_are_those_of_the_host(kernels: SimulatedKernels) -> None:
    data = np.random.default_rng(2).integers(0, 256, 10_000, dtype=np.uint8)
    ranges = [(0, 4096), (100, 17), (4096, 5000)]
    table = np.array([(int(data.ctypes.data) + start, size) for start, size in ranges], dtype=np.int64)
    wanted = [xxhash.xxh3_128(data[start : start + size].tobytes()).digest() for start, size in ranges]
    assert TorchCudaDevice(0, SMALL).checksums(table) == wanted


def test_torchs_errors_name_the_call(kernels: SimulatedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = TorchCudaDevice(0, SMALL)
    monkeypatch.setattr(torch_device.torch.cuda, "current_stream", broken)
    with pytest.raises(CudaError, match="record on the caller's stream: CUDA error: an illegal memory access"):
        device.caller_event()
