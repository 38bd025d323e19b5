"""Copy engines and memory of each device, and refused devices. Refusals need no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import patience
import pytest
import torch
import vllm
from vllm import _custom_ops
from vllm.v1.kv_offload.cpu import host_register

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.copies import devices
from hybridkv.connectors.vllm.common.copies.devices import (
    MAX_BATCH_COPIES,
    SMALL_CHUNK_BYTES,
    EngineCopies,
    EngineDevice,
)
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyPaths
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.worker import OffloadWorker
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec
from hybridkv.tiers.ram import RamArena
from hybridkv.transfer import CopyRuns, CpuCopyEngine, InlineCopyEngine, JobId

TIMEOUT_S = patience.seconds(6.0)


def swap_in_order(
    sources: torch.Tensor, destinations: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
) -> None:
    """vLLM's batched copy, on host memory."""
    for column in (sources, destinations, sizes):
        assert column.dtype == torch.int64 and column.device.type == "cpu" and column.is_contiguous()
    for triple in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(*triple)


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the behaviour without a GPU")


def test_a_cpu_stores_and_loads_on_one_thread() -> None:
    stores, loads = devices.CpuDevice().copy_engines("async")
    assert stores is loads
    assert isinstance(stores, CpuCopyEngine)
    stores.close()


def test_synchronous_loads_on_a_cpu_are_copied_inline() -> None:
    stores, loads = devices.CpuDevice().copy_engines("sync")
    assert isinstance(loads, InlineCopyEngine)
    stores.close()


def test_the_arena_of_a_cpu_is_ordinary_memory() -> None:
    assert devices.CpuDevice().arena_memory(4096) is None


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "num_threads"), [(2, 1, 1), (16, 1, 4), (128, 1, 8), (128, 8, 4), (8, 8, 1)]
)
def test_checksums_leave_three_quarters_of_the_cores_to_a_gpu_engine(
    num_cores: int, num_workers: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda process: set(range(num_cores)))
    assert devices.NativeGpuDevice().digest_threads(num_workers) == num_threads
    assert devices.CpuDevice().digest_threads(num_workers) == 1


@pytest.mark.parametrize("copies", ["engine", "native"])
def test_the_copies_setting_does_not_matter_on_a_cpu(copies: str) -> None:
    assert isinstance(devices.open_device("cpu", copies), devices.CpuDevice)


def test_a_device_without_a_copy_engine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cpu or cuda"):
        devices.open_device("xpu", "engine")


def test_native_copies_need_no_batched_copies_of_vllm() -> None:
    assert isinstance(devices.open_device("cuda", "native"), devices.NativeGpuDevice)


@needs_no_gpu
@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_missing_gpu_is_refused_with_the_reason(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="sees no GPU"):
        devices.NativeGpuDevice().copy_engines(load)
    copies = EngineCopies(swap_in_order, lambda *_: True, lambda _: None, lambda: 0)
    monkeypatch.setattr(compat, "engine_copies", lambda: copies)
    with pytest.raises(ConfigurationError, match="a GPU that torch can use"):
        devices.open_device("cuda", "engine")


@needs_no_gpu
def test_memory_that_cannot_be_pinned_is_refused_with_the_reason() -> None:
    native = devices.NativeGpuDevice()
    with pytest.raises(ConfigurationError, match="memory that can be pinned") as caught:
        native.arena_memory(4096)
    assert "WSL2" in caught.value.hint
    with pytest.raises(ConfigurationError, match="memory that can be pinned"):
        native.pin_pool(np.zeros(4096, dtype=np.uint8))


class CudaRuntime:
    def cudaGetLastError(self) -> int:  # noqa: N802
        return 0


def test_a_vllm_without_batched_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed vLLM is built for a CPU."""
    with pytest.raises(ConfigurationError, match=f"copies.*vLLM {vllm.__version__}"):
        devices.open_device("cuda", "engine")
    monkeypatch.setattr(torch.ops._C_cache_ops, "swap_blocks_batch", swap_in_order, raising=False)
    with pytest.raises(ConfigurationError, match=r"copies.*runtime.*libcudart is not loaded"):
        compat.engine_copies()
    monkeypatch.setattr(host_register, "CudaRTLibrary", CudaRuntime)
    assert compat.engine_copies().swap_blocks_batch is _custom_ops.swap_blocks_batch
    monkeypatch.setattr(_custom_ops, "swap_blocks_batch", lambda sources, destinations, sizes: None)
    with pytest.raises(ConfigurationError, match="swap_blocks_batch"):
        compat.engine_copies()


@pytest.mark.parametrize(("device", "is_fine"), [(devices.CpuDevice(), True), (devices.NativeGpuDevice(), False)])
def test_kv_caches_must_be_on_the_device_of_the_copy_engines(device: devices.Device, is_fine: bool) -> None:
    caches = {"layer.0": torch.zeros(4), "layer.1": [torch.zeros(4), torch.zeros(4)]}
    if is_fine:
        device.prepare(caches)
    else:
        with pytest.raises(ConfigurationError, match=r"KV caches on cuda.*cpu \(layer\.0\)"):
            device.prepare(caches)


def test_every_tensor_of_a_layer_is_checked() -> None:
    elsewhere = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(ConfigurationError, match=r"cuda:0 \(layer\.0\)"):
        devices.CpuDevice().prepare({"layer.0": [torch.zeros(4), elsewhere]})


def test_amx_is_requested_if_torch_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True), raising=False)
    compat.permit_amx()
    assert asked == [True]
    monkeypatch.delattr(torch.cpu, "_init_amx")
    compat.permit_amx()


@pytest.mark.parametrize(("device", "is_asked"), [(devices.CpuDevice(), True), (devices.NativeGpuDevice(), False)])
def test_amx_is_requested_only_on_a_cpu(
    device: devices.Device, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True), raising=False)
    device.prepare({})
    assert bool(asked) is is_asked


def test_a_worker_requests_amx_when_it_registers_kv_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart the first step of an engine may be one token, with all tokens before it loaded from a tier."""
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True), raising=False)
    spec = CacheSpec((GroupSpec(GroupKind.FULL, 16),), 16)
    layout = CacheLayout(spec, ((LayerLayout("layer 0", 64),),), (), 16, "sha256", 1)
    engine = InlineCopyEngine()
    worker = OffloadWorker(layout, RamArena(1 << 20), CopyPaths(engine, engine, 30.0, lambda: 0.0), ConnectorMetrics())
    assert asked == []
    worker.register({"layer 0": torch.zeros(4, 64, dtype=torch.int8)}, 4)
    assert asked == [True]
    worker.close()


class Calls:
    """Records calls of torch.cuda and of vLLM, in place of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, can_pin: bool = True, has_kernel: bool = True) -> None:
        self.names: list[str] = []
        self.pinned: dict[int, int] = {}
        self.entered: set[tuple[str, int]] = set()
        self._can_pin = can_pin
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: None)
        monkeypatch.setattr(torch.cuda, "set_device", self._set_device)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"compute of {index}")
        monkeypatch.setattr(torch.cuda, "Stream", self._stream)
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        self.last_error = self.error_of_swaps = self.num_streams = 0
        self.error_of_kernel: Exception | None = None
        kernel = (self._load_small, 4096) if has_kernel else ()
        copies = EngineCopies(self._swap, self._register, self.pinned.pop, self._take_error, *kernel)
        self.device = devices.EngineGpuDevice(EngineDevice(copies))

    def _set_device(self, index: int) -> None:
        self.entered.add((threading.current_thread().name, index))

    def _stream(self, index: int) -> Any:
        self.num_streams += 1
        name = f"stream {self.num_streams} of {index}"
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.names.append(f"{name} waits"),
            synchronize=lambda: self.names.append(f"synchronize {name}"),
        )

    def _event(self, blocking: bool) -> Any:
        assert blocking
        return SimpleNamespace(
            record=lambda stream: self.names.append(f"record {getattr(stream, 'name', stream)}"),
            synchronize=lambda: self.names.append("synchronize"),
        )

    def _swap(self, *columns: torch.Tensor, is_src_access_order_any: bool) -> None:
        self.names.append(f"swap {len(columns[0])}{', any order' if is_src_access_order_any else ''}")
        swap_in_order(*columns)
        self.last_error = self.error_of_swaps or self.last_error

    def _load_small(self, *columns: torch.Tensor, is_src_access_order_any: bool, bytes_per_chunk: int) -> None:
        assert is_src_access_order_any and bytes_per_chunk == SMALL_CHUNK_BYTES
        self.names.append(f"small {len(columns[0])}")
        if self.error_of_kernel is not None:
            raise self.error_of_kernel
        swap_in_order(*columns)

    def _take_error(self) -> int:
        error, self.last_error = self.last_error, 0
        return error

    def _register(self, address: int, num_bytes: int) -> bool:
        self.pinned[address] = num_bytes
        return self._can_pin


def test_gpu_engines_use_streams_events_and_pinned_memory_like_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    arena = calls.device.arena_memory(1 << 16)
    assert calls.pinned == {int(arena.ctypes.data): 1 << 16}
    cache = np.arange(1 << 16, dtype=np.uint64).astype(np.uint8)
    pair = [int(cache.ctypes.data), int(arena.ctypes.data)]
    stores, loads = calls.device.copy_engines("async")
    for engine, (source, destination) in ((stores, pair), (loads, pair[::-1])):
        for address in pair:
            engine.register(address, 1 << 16, "memory")
        assert engine.submit(JobId(1), CopyRuns.of([(source, destination, 500), (source + 900, destination + 900, 7)]))
        assert engine.wait([JobId(1)], TIMEOUT_S)
        [result] = engine.poll()
        assert (result.failure, result.num_bytes) == (None, 507)
    for engine in (stores, loads):
        engine.close()
    assert arena[:500].tobytes() == cache[:500].tobytes() and arena[900:907].tobytes() == cache[900:907].tobytes()
    assert calls.entered == {("hybridkv-copy", 3), ("hybridkv-copied", 3)}
    assert calls.names == [
        *("record compute of 3", "stream 1 of 3 waits", "swap 2"),
        *("record stream 1 of 3", "synchronize"),
        *("record compute of 3", "stream 2 of 3 waits", "swap 2, any order"),
        *("record stream 2 of 3", "synchronize"),
    ]


class SmallRig:
    """A pinned arena, and memory of a GPU, with pages at multiples of 8,192."""

    def __init__(self, calls: Calls, is_store: bool = False) -> None:
        self.arena = calls.device.arena_memory(1 << 18)
        self.arena[:] = np.random.default_rng(1).integers(0, 256, 1 << 18, dtype=np.uint8)
        self.cache = np.zeros(1 << 18, dtype=np.uint8)
        self.engine = calls.device.copy_engines("async")[0 if is_store else 1]
        for memory in (self.arena, self.cache):
            self.engine.register(int(memory.ctypes.data), memory.nbytes, "memory")
        self._sides = (self.cache, self.arena) if is_store else (self.arena, self.cache)

    def copy(self, sizes: Sequence[int], source_offset: int = 0, destination_offset: int = 0) -> str | None:
        """Copies page i to page i. Returns the failure."""
        source, destination = (int(side.ctypes.data) for side in self._sides)
        runs = [
            (source + 8192 * i + source_offset, destination + 8192 * i + destination_offset, size)
            for i, size in enumerate(sizes)
        ]
        assert self.engine.submit(JobId(1), CopyRuns.of(runs))
        assert self.engine.wait([JobId(1)], TIMEOUT_S)
        [result] = self.engine.poll()
        self.engine.close()
        return result.failure

    def is_loaded(self, sizes: Sequence[int]) -> bool:
        return all(
            np.array_equal(self.cache[8192 * i :][:size], self.arena[8192 * i :][:size]) for i, size in enumerate(sizes)
        )


def swaps(calls: Calls) -> list[str]:
    return [name for name in calls.names if name.startswith(("swap", "small"))]


@pytest.mark.parametrize(
    ("sizes", "copied"),
    [
        ((64, 4088) * 8, ["small 16"]),
        ((64,) * 19, ["small 16", "swap 3, any order"]),
        ((64,) * 15, ["swap 15, any order"]),
        ((64,) * 15 + (4096,), ["swap 16, any order"]),
        ((64,) * 15 + (60,), ["swap 16, any order"]),
    ],
)
def test_small_loads_use_the_kernel_of_vllm(
    sizes: tuple[int, ...], copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    rig = SmallRig(calls)
    assert rig.copy(sizes) is None
    assert swaps(calls) == copied
    assert rig.is_loaded(sizes)


@pytest.mark.parametrize("offsets", [(4, 0), (0, 4)])
def test_the_kernel_of_vllm_gets_only_addresses_that_it_can_read_and_write(
    offsets: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    assert SmallRig(calls).copy((64,) * 16, *offsets) is None
    assert swaps(calls) == ["swap 16, any order"]


def test_the_kernel_of_vllm_does_not_store(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    assert SmallRig(calls, is_store=True).copy((64,) * 16) is None
    assert swaps(calls) == ["swap 16"]


def test_a_kernel_of_vllm_that_fails_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Calls(monkeypatch)
    calls.error_of_kernel = RuntimeError("no compiler")
    for number in range(2):
        rig = SmallRig(calls)
        assert rig.copy((64,) * 20) is None
        assert swaps(calls) == ["small 16", *["swap 20, any order"] * (number + 1)]
        assert rig.is_loaded((64,) * 20)
    assert caplog.text.count("small loads do not use vLLM's kernel: RuntimeError: no compiler") == 1


def test_a_vllm_without_the_kernel_loads_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, has_kernel=False)
    rig = SmallRig(calls)
    assert rig.copy((64,) * 16) is None
    assert swaps(calls) == ["swap 16, any order"]


def test_synchronous_loads_on_a_gpu_end_at_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    stores, loads = calls.device.copy_engines("sync")
    assert loads.submit(JobId(1), CopyRuns.empty())
    assert calls.names == ["record compute of 3"]
    assert [result.failure for result in loads.poll()] == [None]
    stores.close()


def test_a_copy_refused_by_the_runtime_fails_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ignores the return codes when it copies one by one."""
    calls = Calls(monkeypatch)
    memory = np.zeros(4096, dtype=np.uint8)
    stores, loads = calls.device.copy_engines("sync")
    address = int(memory.ctypes.data)
    loads.register(address, memory.nbytes, "memory")
    calls.error_of_swaps = 700
    assert loads.submit(JobId(1), CopyRuns.of([(address, address + 100, 10)]))
    calls.last_error, calls.error_of_swaps = 2, 0  # an error of another caller
    assert loads.submit(JobId(2), CopyRuns.of([(address, address + 100, 10)]))
    failures = [result.failure for result in loads.poll()]
    assert "error 700" in str(failures[0]) and failures[1] is None
    assert "synchronize stream 2 of 3" in calls.names
    stores.close()


def test_a_batch_has_at_most_the_copies_that_every_driver_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    memory = np.arange(1 << 16, dtype=np.uint64).astype(np.uint8)
    stores, loads = calls.device.copy_engines("sync")
    address, number = int(memory.ctypes.data), MAX_BATCH_COPIES + 1
    loads.register(address, memory.nbytes, "memory")
    runs = [(address + 2 * i, address + (1 << 15) + 2 * i, 1) for i in range(number)]
    assert loads.submit(JobId(1), CopyRuns.of(runs))
    assert [result.failure for result in loads.poll()] == [None]
    assert [name for name in calls.names if name.startswith("swap")] == [f"swap {MAX_BATCH_COPIES}", "swap 1"]
    assert (memory[(1 << 15) :][: 2 * number : 2] == memory[: 2 * number : 2]).all()
    stores.close()


def test_memory_that_vllm_cannot_pin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, can_pin=False)
    with pytest.raises(ConfigurationError, match=r"capacity.*memory that can be pinned.*host_register of 4096 bytes"):
        calls.device.arena_memory(4096)
    with pytest.raises(ConfigurationError, match=r"pool.*memory that can be pinned"):
        calls.device.pin_pool(np.zeros(4096, dtype=np.uint8))


def test_memory_is_unpinned_after_its_last_view_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    memory = np.zeros(4096, dtype=np.uint8)
    calls.device.pin_pool(memory)
    view = memory[:5]
    del memory
    assert len(calls.pinned) == 1
    del view
    assert calls.pinned == {}
