"""Host copies: the blocks that are copied through host memory, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.nixl.memory.host_buffer import HostCopyTracker, loaded_blocks
from hybridkv.connectors.vllm.nixl.messages import PromptLoad
from hybridkv.connectors.vllm.nixl.params import RankAddress, RemotePrompt
from hybridkv.peers.leases import Lease
from hybridkv.planner import GroupKind, GroupSpec

torch = pytest.importorskip("torch", reason="it makes the tensors of these tests")

from hybridkv.connectors.vllm.nixl.memory import host_buffer  # noqa: E402
from hybridkv.connectors.vllm.nixl.memory.host_buffer import HostBuffer  # noqa: E402

GROUPS = (
    GroupSpec(GroupKind.FULL, 4),
    GroupSpec(GroupKind.WINDOW, 4, window_tokens=6),
    GroupSpec(GroupKind.RECURRENT, 4),
    GroupSpec(GroupKind.SCRATCH, 4),
)
TABLES = ([1, 2, 3, 4, 5], [0, 12, 13, 14, 15], [0, 0, 0, 24, 25], [31, 32, 33, 34, 35])


def request(num_prompt_tokens: int, computed_tokens: int = 0) -> Any:
    return SimpleNamespace(request_id="p", num_prompt_tokens=num_prompt_tokens, num_computed_tokens=computed_tokens)


def step(saving: HostCopyTracker, running: Any, count: int) -> list[tuple[tuple[int, ...], ...]]:
    """One step of the engine that computes `count` tokens."""
    plans = saving.of_step({"p": count, "other": 3}, lambda name: TABLES)
    running.num_computed_tokens += count
    return [plan.block_ids for plan in plans]


def test_a_prompt_is_copied_once_complete_and_then_its_changed_blocks() -> None:
    saving, running = HostCopyTracker(GROUPS), request(14)
    saving.begin(running)
    assert step(saving, running, 8) == []
    assert step(saving, running, 6) == [((1, 2, 3, 4), (0, 12, 13, 14), (24,), ())]
    assert step(saving, running, 1) == [((4,), (14,), (24,), ())]
    assert step(saving, running, 2) == [((4, 5), (14, 15), (25,), ())]
    assert saving.end(running) == 17
    assert saving.end(running) == 0
    assert saving.of_step({"p": 1}, lambda name: TABLES) == []


def test_blocks_hit_in_the_engines_cache_are_copied_too() -> None:
    saving, running = HostCopyTracker(GROUPS), request(14, computed_tokens=12)
    saving.begin(running)
    assert step(saving, running, 2) == [((1, 2, 3, 4), (0, 12, 13, 14), (24,), ())]


def test_a_preempted_request_is_copied_again() -> None:
    saving, running = HostCopyTracker(GROUPS), request(14)
    saving.begin(running)
    step(saving, running, 14)
    running.num_computed_tokens = 0
    assert step(saving, running, 8) == []
    assert step(saving, running, 6) == [((1, 2, 3, 4), (0, 12, 13, 14), (24,), ())]


def test_blocks_hit_after_a_preemption_are_copied_too() -> None:
    """They may belong to another request with the same tokens that is not handed over."""
    saving, running = HostCopyTracker(GROUPS), request(16)
    saving.begin(running)
    step(saving, running, 16)
    saving.preempted({"p"})
    assert saving.of_step({}, lambda name: TABLES) == []
    running.num_computed_tokens = 16
    assert step(saving, running, 1) == [((1, 2, 3, 4, 5), (0, 12, 13, 14, 15), (25,), ())]


def test_a_request_outside_the_step_is_not_copied() -> None:
    saving, running = HostCopyTracker(GROUPS), request(14, computed_tokens=12)
    saving.begin(running)
    assert saving.of_step({"other": 3}, lambda name: TABLES) == []
    assert saving.end(running) == 0, "it would not be handed over either"


@pytest.mark.parametrize(
    ("num_tokens", "computed_tokens", "blocks"),
    [
        (14, 0, ((1, 2, 3, 4), (13, 14), (24,), ())),
        (14, 8, ((3, 4), (13, 14), (24,), ())),
        (16, 12, ((4,), (14,), (24,), ())),
        (12, 12, ((), (), (), ())),
    ],
)
def test_blocks_written_by_a_load_are_copied_to_the_device(num_tokens: int, computed_tokens: int, blocks: Any) -> None:
    prompt = RemotePrompt("e", "r", "h", (RankAddress(1, "n"),), 16, (), (), (), Lease(0, 1), 1.0, 0, "x")
    load = PromptLoad("d", prompt, num_tokens, computed_tokens, tuple(map(tuple, TABLES)))
    assert loaded_blocks(GROUPS, load) == blocks


BLOCKS, PAGE = 9, 24
LAYERS = ((LayerLayout("a", 16), LayerLayout("b", 16)), (LayerLayout("c", PAGE),))


def caches() -> dict[str, Any]:
    """Two layers of one group and one of another that overlays them, in one allocation; blocks are not adjacent."""
    memory = torch.arange(BLOCKS * 64, dtype=torch.int8)
    rows = memory.view(BLOCKS, 64)
    return {"a": rows[:, :16].view(torch.float16), "b": rows[:, 32:48].view(torch.float16), "c": rows[:, :PAGE]}


@pytest.mark.parametrize("copy_bytes", [1, 1 << 20])
def test_copies_touch_only_the_given_blocks(copy_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffer, "COPY_BYTES", copy_bytes)
    device = caches()
    before = {name: cache.clone() for name, cache in device.items()}
    buffer = HostBuffer(device, LAYERS, BLOCKS)
    assert buffer.num_bytes == BLOCKS * 64
    assert all(
        cache.untyped_storage().data_ptr() != device[name].untyped_storage().data_ptr()
        for name, cache in buffer.kv_caches.items()
    )
    buffer.save([[0, 3, 4], [6]])
    for name, blocks in {"a": (3, 4, 6), "b": (3, 4), "c": (3, 4, 6)}.items():
        mirror = buffer.kv_caches[name]
        assert (mirror.shape, mirror.stride(), mirror.dtype) == (
            device[name].shape,
            device[name].stride(),
            device[name].dtype,
        )
        for block in range(BLOCKS):
            if block in blocks:
                assert torch.equal(mirror[block].view(torch.int8), before[name][block].view(torch.int8))
            else:
                assert not mirror[block].view(torch.int8).any()
    buffer.clear([[3], []])
    buffer.load([[3], [6]])
    for name, cache in device.items():
        for block in range(BLOCKS):
            is_zero = block == 3
            expected = torch.zeros_like(before[name][block]) if is_zero else before[name][block]
            assert torch.equal(cache[block].view(torch.int8), expected.view(torch.int8)), (name, block)


def test_tensors_that_differ_from_the_layout_are_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        HostBuffer(caches(), ((LayerLayout("a", 17),),), BLOCKS)
    assert caught.value.path == "kv_caches"
