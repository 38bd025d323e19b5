"""Copy proof at the start on a GPU: it accepts correct copies in every order and refuses each wrong one.

The GPU is `LazyDevice`, which runs copies as late and in as odd an order as its streams allow.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lazy_device import LazyDevice, LoadsWithoutFence, StoresWithoutFence, WithoutCompletion
from lazy_gpu import LazyGpu

from hybridkv.canonical import GroupPages, LayerLayout, PageRegion
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.copies import proof
from hybridkv.connectors.vllm.common.copies.devices import zero_memory
from hybridkv.connectors.vllm.common.copies.kv_memory import zeros_in
from hybridkv.connectors.vllm.common.copies.lowering import RankMemory
from hybridkv.connectors.vllm.common.copies.proof import CopyRates, prove_copies
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyPaths
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.lmcache.config import LMCacheConfig
from hybridkv.connectors.vllm.lmcache.session_spec import session_spec_of
from hybridkv.connectors.vllm.lmcache.worker import LMCacheWorker
from hybridkv.connectors.vllm.offload.worker import OffloadWorker
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec
from hybridkv.tiers.ram import RamArena

BLOCKS = 6
STRIDE = 2048
GROUPS = {0: (1500, 1024), 2: (16,)}
"""Page bytes of a block in each layer, per stored group. The rest of the stride is padding."""


class Rig:
    """Two groups of blocks on a lazy device, an arena, and the copy engines of a worker."""

    def __init__(self, device: LazyDevice, load: str = "async", submission_cycles: int = 0) -> None:
        self.gpu = LazyGpu(device, submission_cycles)
        self.cache = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 2 * BLOCKS * STRIDE, dtype=np.uint8))
        base = self.cache.data_ptr()
        pages = {
            index: GroupPages(
                [[PageRegion(base + i * BLOCKS * STRIDE, STRIDE, size)] for i, size in enumerate(sizes)], BLOCKS
            )
            for index, sizes in GROUPS.items()
        }
        self.arena = RamArena(1 << 16, 4096, self.gpu.arena_memory(1 << 16))
        self.zeros = zero_memory("cpu")
        self.memory = RankMemory(pages, {}, zeros_in(self.zeros), self.arena)
        stores, loads = self.gpu.copy_engines(load)
        self.paths = CopyPaths(stores, loads, 30.0, lambda: 0.0)
        for engine in self.paths.engines():
            engine.register(base, self.cache.nbytes, "kv cache")
            engine.register(self.zeros.data_ptr(), self.zeros.nbytes, "zeros")
            engine.register(self.arena.base_address, self.arena.capacity_bytes, "arena")

    def prove(self, seed: int = 0) -> CopyRates:
        return prove_copies(self.memory, [self.cache], self.paths, self.gpu, np.random.default_rng(seed))

    def close(self) -> None:
        for engine in self.paths.engines():
            engine.close()


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round, without waiting for the clock."""
    monkeypatch.setattr(proof, "ROUNDS_S", 0.0)


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def made(*arguments: Any) -> Rig:
        rigs.append(Rig(*arguments))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("load", ["async", "sync"])
def test_correct_copies_pass_in_every_order_and_leave_nothing_changed(make: Callable[..., Rig], load: str) -> None:
    for seed in range(20):
        rig = make(LazyDevice(random.Random(seed).randrange), load)
        before = rig.cache.clone()
        rates = rig.prove(seed)
        assert rates.page_sizes == (16, 1024, 1500)
        assert rates.num_pages == 3 * (BLOCKS - 1)
        assert torch.equal(rig.cache, before)
        assert not rig.arena._seals


class Swapping(LazyDevice):
    """Exchanges the sources of two pages."""

    def swap_blocks_batch(self, *columns: Any, is_src_access_order_any: bool) -> None:
        sources, destinations, num_bytes = (np.array(column) for column in columns)
        same = np.flatnonzero(num_bytes == num_bytes[0])[:2]
        sources[same] = sources[same][::-1]
        super().swap_blocks_batch(sources, destinations, num_bytes, is_src_access_order_any=is_src_access_order_any)


class DroppingLastByte(LazyDevice):
    def swap_blocks_batch(self, *columns: Any, is_src_access_order_any: bool) -> None:
        sources, destinations, num_bytes = (np.array(column) for column in columns)
        num_bytes[-1] -= 1
        super().swap_blocks_batch(sources, destinations, num_bytes, is_src_access_order_any=is_src_access_order_any)


class Refusing(LazyDevice):
    def swap_blocks_batch(self, *columns: Any, is_src_access_order_any: bool) -> None:
        raise RuntimeError("swap_blocks_batch: invalid argument")


def refusal(rig: Rig) -> str:
    with pytest.raises(ConfigurationError) as caught:
        rig.prove()
    assert caught.value.path.endswith("copies")
    return str(caught.value.got)


@pytest.mark.parametrize("device", [Swapping, DroppingLastByte])
def test_misplaced_or_missing_bytes_are_refused_and_located(make: Callable[..., Rig], device: type[LazyDevice]) -> None:
    found = refusal(make(device(lambda below: 0)))
    assert found.startswith("a store of group 0 at the start: ") and "bytes differ" in found
    assert "of a page of" in found and "of block" in found


def copies_first(below: int) -> int:
    return below - 1


@pytest.mark.parametrize(
    ("device", "expected"),
    [(StoresWithoutFence, "a store of"), (LoadsWithoutFence, "a load of"), (WithoutCompletion, "a store of")],
)
def test_an_ignored_fence_is_refused(make: Callable[..., Rig], device: type[LazyDevice], expected: str) -> None:
    assert refusal(make(device(copies_first, is_late=True))).startswith(expected)


@pytest.mark.parametrize("device", [StoresWithoutFence, LoadsWithoutFence])
@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_fence_is_tried_again_if_compute_ended_before_the_copy(
    make: Callable[..., Rig], device: type[LazyDevice], load: str
) -> None:
    cycles = proof.MAX_DELAY_CYCLES
    assert "bytes differ" in refusal(make(device(copies_first, is_late=True), load, cycles))


def test_untested_fences_are_reported(make: Callable[..., Rig]) -> None:
    rig = make(LazyDevice(copies_first, is_late=True), "async", proof.MAX_DELAY_CYCLES + 1)
    before = rig.cache.clone()
    assert rig.prove().untested_fences == ("loads", "stores")
    assert torch.equal(rig.cache, before)
    assert make(LazyDevice(copies_first, is_late=True)).prove().untested_fences == ()


def test_fewer_blocks_are_copied_on_a_device_with_little_memory(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros, most = torch.zeros, 2 * 2528

    def with_little_memory(shape: Any, **keywords: Any) -> torch.Tensor:
        if shape[1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(shape, **keywords)

    rig = make(LazyDevice(lambda below: 0))
    monkeypatch.setattr(torch, "zeros", with_little_memory)
    rates = rig.prove()
    assert rates.num_pages == 2 * 2 + (BLOCKS - 1)


def test_a_rejected_job_is_refused(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(LazyDevice(lambda below: 0))
    monkeypatch.setattr(rig.paths.stores, "submit", lambda *arguments: False)
    assert "no more jobs" in refusal(rig)


def test_a_wrong_load_is_refused(make: Callable[..., Rig]) -> None:
    rig = make(LazyDevice(lambda below: 0))
    copy = rig.gpu.lazy.swap_blocks_batch

    def swap_blocks_batch(sources: Any, destinations: Any, num_bytes: Any, *, is_src_access_order_any: bool) -> None:
        if is_src_access_order_any:
            num_bytes = num_bytes - 1
        copy(sources, destinations, num_bytes, is_src_access_order_any=is_src_access_order_any)

    rig.gpu.lazy.swap_blocks_batch = swap_blocks_batch  # type: ignore[method-assign]
    assert refusal(rig).startswith("a load of group 0 at the start: ")


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_copy_that_cannot_be_submitted_is_refused_with_its_reason(make: Callable[..., Rig], load: str) -> None:
    assert "invalid argument" in refusal(make(Refusing(lambda below: 0), load))


def test_a_wrong_digest_is_refused(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(LazyDevice(lambda below: 0))
    monkeypatch.setattr(rig.arena, "_checksums", lambda buffer, slots: bytes(16) * len(slots))
    assert "the digest" in refusal(rig)


def test_checksums_are_measured_in_chunks_that_were_sealed_a_pass_before(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(LazyDevice(lambda below: 0))
    events: list[tuple[str, list[int]]] = []

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def record(chunks: Any) -> Any:
            events.append((name, [slot.num_bytes for _, slot in chunks]))
            assert [slot.first_offset for _, slot in chunks] == np.cumsum([0, *events[-1][1][:-1]]).tolist()
            return call(chunks)

        return record

    def clock() -> float:
        events.append(("clock", []))
        return float(len(events))

    for name in ("seal_all", "check_all"):
        monkeypatch.setattr(rig.arena, name, recorded(name, getattr(rig.arena, name)))
    monkeypatch.setattr(proof, "CHECKSUM_BYTES", 50_000)
    monkeypatch.setattr(proof, "MAX_CHECKSUM_BYTES", 50_000)
    rig.paths = CopyPaths(rig.paths.stores, rig.paths.loads, 30.0, clock)
    rates = prove_copies(rig.memory, [rig.cache], rig.paths, rig.gpu, np.random.default_rng(0), [10_000, 7_000])
    sizes = [10_000, 7_000, 10_000, 7_000, 10_000]
    clock_read: tuple[str, list[int]] = ("clock", [])
    assert events[-5:] == [("seal_all", sizes), clock_read, ("check_all", sizes), clock_read, clock_read]
    assert rates.checksum_bytes_per_s == sum(sizes) / 2
    assert not rig.arena._seals


def test_checksums_are_measured_over_four_times_the_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for cache_bytes, expected in ((0, 256 << 20), (-1, 256 << 20), (100 << 20, 400 << 20), (1 << 40, 1 << 30)):
        monkeypatch.setattr("os.sysconf", lambda name, cache_bytes=cache_bytes: cache_bytes)
        assert proof._bytes_beyond_caches() == expected


LAYOUT = CacheLayout(
    CacheSpec((GroupSpec(GroupKind.FULL, 16),), 16), ((LayerLayout("layer 0", 64),),), (), 16, "sha256", 1
)
SITE = session_spec_of(LMCacheConfig(url="tcp://127.0.0.1:5555"), LAYOUT)


def register_offload(gpu: LazyGpu, paths: CopyPaths, caches: dict[str, torch.Tensor]) -> None:
    arena = RamArena(1 << 16, 4096, gpu.arena_memory(1 << 16))
    OffloadWorker(LAYOUT, arena, paths, ConnectorMetrics()).register(caches, BLOCKS, gpu)


def register_lmcache(gpu: LazyGpu, paths: CopyPaths, caches: dict[str, torch.Tensor]) -> None:
    LMCacheWorker(LAYOUT, 0, SITE, paths, ConnectorMetrics()).register(caches, BLOCKS, gpu)


@pytest.mark.parametrize("register", [register_offload, register_lmcache])
def test_a_worker_proves_its_copies_when_it_registers_kv_caches(
    register: Callable[[LazyGpu, CopyPaths, dict[str, torch.Tensor]], None], caplog: pytest.LogCaptureFixture
) -> None:
    caches = {"layer 0": torch.zeros(BLOCKS, 64, dtype=torch.int8)}
    for device in (LazyDevice(lambda below: 0), DroppingLastByte(lambda below: 0)):
        gpu = LazyGpu(device)
        stores, loads = gpu.copy_engines("async")
        paths = CopyPaths(stores, loads, 30.0, time.monotonic)
        if isinstance(device, DroppingLastByte):
            with pytest.raises(ConfigurationError, match="bytes differ"):
                register(gpu, paths, caches)
        else:
            with caplog.at_level(logging.INFO, "vllm.hybridkv.worker"):
                register(gpu, paths, caches)
            assert re.search(r"seed \d+", caplog.text)
            assert re.search(
                r"stores \d+\.\d GB/s, loads \d+\.\d GB/s, checksums \d+\.\d GB/s; 5 pages \(sizes in bytes: 64\) ",
                caplog.text,
            )
        for engine in paths.engines():
            engine.close()
