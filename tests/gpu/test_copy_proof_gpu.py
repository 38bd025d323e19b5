"""The proof at the start on a real GPU: right copies of both ways pass, and copies without a fence are refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import unavailable

torch = pytest.importorskip("torch", reason="torch is not installed")

from engine_copies import find_engine_copies  # noqa: E402
from lazy_device import LazyDevice  # noqa: E402
from lazy_gpu import LazyGpu  # noqa: E402

from hybridkv.canonical import GroupPages, PageRegion  # noqa: E402
from hybridkv.connectors.errors import ConfigurationError  # noqa: E402
from hybridkv.connectors.vllm.common.copies.devices import (  # noqa: E402
    EngineDevice,
    EngineGpuDevice,
    GpuDevice,
    NativeGpuDevice,
    zero_memory,
)
from hybridkv.connectors.vllm.common.copies.kv_memory import zeros_in  # noqa: E402
from hybridkv.connectors.vllm.common.copies.lowering import RankMemory  # noqa: E402
from hybridkv.connectors.vllm.common.copies.proof import CopyRates, prove_copies  # noqa: E402
from hybridkv.tiers.ram import RamArena  # noqa: E402
from hybridkv.transfer import CopyEngine  # noqa: E402

BLOCKS = 9
GROUPS = {
    0: (1500, 1024),
    2: (16,),
    3: (4096,) * 8,
    4: (32 * 1024,) * 4,
    5: (320 * 1024,) * 2,
    7: (2 * 1024 * 1024,),
}
"""Bytes of a block's page in each layer, of each stored group: small, odd, usual and large ones."""
ARENA_BYTES = 64 << 20


class Paths(NamedTuple):
    stores: CopyEngine
    loads: CopyEngine
    clock: Callable[[], float]


class Rig:
    """Groups of blocks on a device, an arena, and the engines of a worker."""

    def __init__(self, gpu: GpuDevice, device: str, load: str) -> None:
        self.gpu = gpu
        self.arena = RamArena(ARENA_BYTES, 4096, gpu.arena_memory(ARENA_BYTES))
        self.caches = {
            index: torch.from_numpy(
                np.random.default_rng(index).integers(0, 256, len(sizes) * BLOCKS * _stride(sizes), dtype=np.uint8)
            ).to(device)
            for index, sizes in GROUPS.items()
        }
        self.zeros = zero_memory(device)
        self.paths = Paths(*gpu.copy_engines(load), time.monotonic)
        for engine in (self.paths.stores, self.paths.loads):
            for memory in (*self.caches.values(), self.zeros):
                engine.register(memory.data_ptr(), memory.nbytes, "memory")
            engine.register(self.arena.base_address, self.arena.capacity_bytes, "arena")

    def prove(self) -> CopyRates:
        pages = {index: _pages(cache, GROUPS[index]) for index, cache in self.caches.items()}
        memory = RankMemory(pages, {}, zeros_in(self.zeros), self.arena)
        tensors = list(self.caches.values())
        return prove_copies(memory, tensors, self.paths, self.gpu, np.random.default_rng(1))  # type: ignore[arg-type]

    def close(self) -> None:
        for engine in (self.paths.stores, self.paths.loads):
            engine.close()


def _stride(sizes: tuple[int, ...]) -> int:
    return -(-max(sizes) // 512) * 512


def _pages(cache: Any, sizes: tuple[int, ...]) -> GroupPages:
    stride = _stride(sizes)
    regions = [[PageRegion(cache.data_ptr() + i * BLOCKS * stride, stride, size)] for i, size in enumerate(sizes)]
    return GroupPages(regions, BLOCKS)


def proven(gpu: GpuDevice, device: str, load: str) -> CopyRates:
    rig = Rig(gpu, device, load)
    before = [cache.clone() for cache in rig.caches.values()]
    try:
        rates = rig.prove()
    finally:
        rig.close()
    assert all(torch.equal(*pair) for pair in zip(before, rig.caches.values(), strict=True))
    assert rates.page_sizes == tuple(sorted({size for sizes in GROUPS.values() for size in sizes}))
    assert not rates.untested_fences
    return rates


def test_the_rig_is_right_on_a_device_of_the_cpu() -> None:
    """Needs no GPU."""
    proven(LazyGpu(LazyDevice(random.Random(1).randrange)), "cpu", "async")


@pytest.fixture
def _a_gpu() -> None:
    if not torch.cuda.is_available():
        unavailable(f"torch {torch.__version__} sees no GPU")


def native() -> GpuDevice:
    return NativeGpuDevice()


def engine() -> GpuDevice:
    return EngineGpuDevice(EngineDevice(find_engine_copies()[1]))


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("way", [native, engine])
def test_copies_of_this_gpu_are_right(
    way: Callable[[], GpuDevice], load: str, record_property: Callable[[str, object], None]
) -> None:
    rates = proven(way(), "cuda", load)
    said = f"stores {rates.store_bytes_per_s / 1e9:.1f} GB/s, loads {rates.load_bytes_per_s / 1e9:.1f} GB/s"
    said += f", checksums {rates.checksum_bytes_per_s / 1e9:.1f} GB/s, {rates.num_pages} pages, {rates.seconds:.2f} s"
    record_property("rates", said)
    print(f"{way.__name__} {load}: {said}")


class Unfenced(EngineDevice):
    """Copies of one kind do not wait for compute."""

    def __init__(self, *, of_loads: bool) -> None:
        super().__init__(find_engine_copies()[1])
        # The first stream is that of stores.
        self._are_fenced = iter((of_loads, not of_loads))

    def new_stream(self) -> Any:
        return super().new_stream() if next(self._are_fenced) else _NeverWaiting(self._index)


class _NeverWaiting(torch.cuda.Stream):  # type: ignore[misc, name-defined]
    def wait_event(self, event: Any) -> None:
        """The fence that is left out."""


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize(("of_loads", "refused"), [(False, "a store of"), (True, "a load of")])
def test_a_fence_that_is_left_out_is_refused_on_this_gpu(of_loads: bool, refused: str) -> None:
    rig = Rig(EngineGpuDevice(Unfenced(of_loads=of_loads)), "cuda", "async")
    try:
        with pytest.raises(ConfigurationError, match=f"{refused}.*bytes differ"):
            rig.prove()
        torch.cuda.synchronize()
    finally:
        rig.close()
