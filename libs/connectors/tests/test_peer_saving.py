"""Which blocks go by host memory, and that the copies touch no other."""

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
TABLES = ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15], [0, 0, 0, 24, 25], [31, 32, 33, 34, 35])


def request(num_prompt_tokens: int, computed_tokens: int = 0) -> Any:
    return SimpleNamespace(request_id="p", num_prompt_tokens=num_prompt_tokens, num_computed_tokens=computed_tokens)


def step(saving: HostCopyTracker, running: Any, count: int) -> list[tuple[tuple[int, ...], ...]]:
    """One step of the engine, which computes so many tokens."""
    plans = saving.of_step({"p": count, "other": 3}, lambda name: TABLES)
    running.num_computed_tokens += count
    return [plan.block_ids for plan in plans]


def test_a_prompt_is_copied_out_once_it_is_whole_and_then_what_changes() -> None:
    saving, running = HostCopyTracker(GROUPS), request(14)
    saving.begin(running)
    assert step(saving, running, 8) == []
    assert step(saving, running, 6) == [((1, 2, 3, 4), (13, 14), (24,), ())]
    assert step(saving, running, 1) == [((4,), (14,), (24,), ())]
    assert step(saving, running, 2) == [((4, 5), (14, 15), (25,), ())]
    assert saving.end(running) == 17
    assert saving.end(running) == 0
    assert saving.of_step({"p": 1}, lambda name: TABLES) == []


def test_what_was_hit_in_the_engines_own_cache_is_copied_out_as_well() -> None:
    saving, running = HostCopyTracker(GROUPS), request(14, computed_tokens=12)
    saving.begin(running)
    assert step(saving, running, 2) == [((1, 2, 3, 4), (13, 14), (24,), ())]


def test_a_request_that_was_preempted_is_copied_out_anew() -> None:
    saving, running = HostCopyTracker(GROUPS), request(14)
    saving.begin(running)
    step(saving, running, 14)
    running.num_computed_tokens = 0
    assert step(saving, running, 8) == []
    assert step(saving, running, 6) == [((1, 2, 3, 4), (13, 14), (24,), ())]


def test_blocks_that_are_hit_after_a_preemption_are_copied_out_as_well() -> None:
    """They may be another request's, which computed the same tokens and is not handed over."""
    saving, running = HostCopyTracker(GROUPS), request(16)
    saving.begin(running)
    step(saving, running, 16)
    saving.preempted({"p"})
    assert saving.of_step({}, lambda name: TABLES) == []
    running.num_computed_tokens = 16
    assert step(saving, running, 1) == [((1, 2, 3, 4, 5), (14, 15), (25,), ())]


def test_a_request_that_is_not_in_the_step_is_left_alone() -> None:
    saving, running = HostCopyTracker(GROUPS), request(14, computed_tokens=12)
    saving.begin(running)
    assert saving.of_step({"other": 3}, lambda name: TABLES) == []
    assert saving.end(running) == 0, "and would not be handed over"


@pytest.mark.parametrize(
    ("num_tokens", "computed_tokens", "blocks"),
    [
        (14, 0, ((1, 2, 3, 4), (13, 14), (24,), ())),
        (14, 8, ((3, 4), (13, 14), (24,), ())),
        (16, 12, ((4,), (14,), (24,), ())),
        (12, 12, ((), (), (), ())),
    ],
)
def test_what_a_load_writes_is_copied_in(num_tokens: int, computed_tokens: int, blocks: Any) -> None:
    prompt = RemotePrompt("e", "r", "h", (RankAddress(1, "n"),), 16, (), (), (), Lease(0, 1), 1.0, 0, "x")
    load = PromptLoad("d", prompt, num_tokens, computed_tokens, tuple(map(tuple, TABLES)))
    assert loaded_blocks(GROUPS, load) == blocks


BLOCKS, PAGE = 9, 24
LAYERS = ((LayerLayout("a", 16), LayerLayout("b", 16)), (LayerLayout("c", PAGE),))


def caches() -> dict[str, Any]:
    """Two layers of one group and one of another that overlays them, in one allocation; blocks are not together."""
    memory = torch.arange(BLOCKS * 64, dtype=torch.int8)
    rows = memory.view(BLOCKS, 64)
    return {"a": rows[:, :16].view(torch.float16), "b": rows[:, 32:48].view(torch.float16), "c": rows[:, :PAGE]}


@pytest.mark.parametrize("copy_bytes", [1, 1 << 20])
def test_copies_touch_the_blocks_that_were_named_and_no_other(copy_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_tensors_that_are_not_as_described_are_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        HostBuffer(caches(), ((LayerLayout("a", 17),),), BLOCKS)
    assert caught.value.path == "kv_caches"
