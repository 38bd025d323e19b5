"""Which copy engines and which memory an engine's device gets, and what is refused. No GPU is needed to be refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import compat, devices
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.connectors.vllm.worker import CopyPaths, OffloadWorker
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec
from hybridkv.tiers.ram import RamArena
from hybridkv.transfer import CpuCopyEngine, InlineCopyEngine

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this is what happens without a GPU")


def test_a_cpu_stores_and_loads_on_one_thread() -> None:
    stores, loads = devices.copy_engines("cpu", "async")
    assert stores is loads
    assert isinstance(stores, CpuCopyEngine)
    stores.close()


def test_synchronous_loads_of_a_cpu_are_copied_at_once() -> None:
    stores, loads = devices.copy_engines("cpu", "sync")
    assert isinstance(loads, InlineCopyEngine)
    stores.close()


def test_the_arena_of_a_cpu_is_ordinary_memory() -> None:
    assert devices.arena_memory("cpu", 4096) is None


def test_a_device_without_a_copy_engine_is_refused() -> None:
    for refused in (lambda: devices.copy_engines("xpu", "async"), lambda: devices.arena_memory("xpu", 4096)):
        with pytest.raises(ConfigurationError, match="cpu or cuda"):
            refused()


@needs_no_gpu
@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_gpu_that_is_not_there_is_refused_with_the_reason(load: str) -> None:
    with pytest.raises(ConfigurationError, match="sees no GPU"):
        devices.copy_engines("cuda", load)


@needs_no_gpu
def test_memory_that_cannot_be_pinned_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="memory that can be pinned"):
        devices.arena_memory("cuda", 4096)
    with pytest.raises(ConfigurationError, match="memory that can be pinned"):
        devices.reach_memory("cuda", np.zeros(4096, dtype=np.uint8))


def test_a_cpu_reaches_all_memory() -> None:
    devices.reach_memory("cpu", np.zeros(4096, dtype=np.uint8))


@pytest.mark.parametrize(("device_type", "is_fine"), [("cpu", True), ("cuda", False)])
def test_kv_caches_must_lie_where_the_copy_engines_reach(device_type: str, is_fine: bool) -> None:
    caches = {"layer.0": torch.zeros(4), "layer.1": [torch.zeros(4), torch.zeros(4)]}
    if is_fine:
        devices.require_same_device(caches, device_type)
    else:
        with pytest.raises(ConfigurationError, match=r"KV caches on cuda.*cpu \(layer\.0\)"):
            devices.require_same_device(caches, device_type)


def test_every_tensor_of_a_layer_is_looked_at() -> None:
    elsewhere = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(ConfigurationError, match=r"cuda:0 \(layer\.0\)"):
        devices.require_same_device({"layer.0": [torch.zeros(4), elsewhere]}, "cpu")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_gpu_is_used_only_where_somebody_asked_for_it(device_type: str) -> None:
    assert devices.require_allowed(device_type, experimental_cuda=True) == device_type
    if device_type == "cpu":
        assert devices.require_allowed(device_type, experimental_cuda=False) == device_type
        return
    with pytest.raises(ConfigurationError) as caught:
        devices.require_allowed(device_type, experimental_cuda=False)
    assert "experimental_cuda" in caught.value.hint


def test_amx_is_asked_for_where_torch_knows_how(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True), raising=False)
    compat.permit_amx()
    assert asked == [True]
    monkeypatch.delattr(torch.cpu, "_init_amx")
    compat.permit_amx()


@pytest.mark.parametrize(("device_type", "is_asked"), [("cpu", True), ("cuda", False)])
def test_amx_is_asked_for_where_the_engine_runs_on_the_cpu(
    device_type: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True), raising=False)
    devices.permit_instructions(device_type)
    assert bool(asked) is is_asked


def test_a_worker_asks_for_amx_when_it_gets_the_kv_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart the first step of an engine may be one token: everything before it comes from a tier."""
    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True), raising=False)
    spec = CacheSpec((GroupSpec(GroupKind.FULL, 16),), 16)
    layout = CacheLayout(spec, ((LayerLayout("layer 0", 64),),), (), 16, "sha256", 1)
    engine = InlineCopyEngine()
    worker = OffloadWorker(layout, RamArena(1 << 20), CopyPaths(engine, engine, 30.0, lambda: 0.0), Recorder())
    assert asked == []
    worker.register({"layer 0": torch.zeros(4, 64, dtype=torch.int8)}, 4)
    assert asked == [True]
    worker.close()
