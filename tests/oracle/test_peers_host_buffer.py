"""KV in a device goes through host memory: copied out before it is offered, copied in after it was checked.

The device is another part of host memory here. The connector does not know that: it reads and writes only its copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridkv.connectors.vllm import PEER_CONNECTOR, register
from hybridkv.connectors.vllm.nixl.memory.host_buffer import HostBuffer, HostCopyTracker
from oracle.mixes import GEMMA3, LLAMA4, QWEN3_NEXT, Group, Kind, Mix
from oracle.pairs import CALM, Pair, require_handed_over, tokens
from oracle.rings import MIXES
from oracle.runner import CorruptionError
from oracle.settings import Connector, EngineSettings

LENGTHS = (1, 17, 64, 129, 200)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def settings(role: str, **extra: Any) -> EngineSettings:
    config = {"weights_digest": "oracle", **CALM, **extra}
    return EngineSettings(num_blocks=400, connector=Connector(PEER_CONNECTOR, config, role=role), device="cuda")


def a_pair(mix: Mix) -> Pair:
    return Pair(mix, settings("kv_producer"), settings("kv_consumer"))


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_a_prompt_goes_from_device_to_device_through_host_memory(mix: Mix) -> None:
    with a_pair(mix) as pair:
        require_handed_over(pair, LENGTHS)


@pytest.mark.parametrize("mix", [GEMMA3, QWEN3_NEXT, LLAMA4], ids=lambda mix: mix.name)
def test_blocks_that_a_side_holds_are_copied_out_and_not_copied_in(mix: Mix) -> None:
    stem = tokens(96, seed=1)
    with a_pair(mix) as pair:
        for turn in range(2):
            prompts = [stem + tokens(20 + 7 * i, seed=100 * turn + i) for i in range(6)]
            answers = [pair.prefill(f"p{turn}-{i}", prompt) for i, prompt in enumerate(prompts)]
            for i, (prompt, params) in enumerate(zip(prompts, answers, strict=True)):
                pair.decode(f"d{turn}-{i}", prompt, 4, params)
            pair.drain()
        assert pair.consumer.failed_loads == 0
        assert pair.consumer.restored_tokens > 0


@pytest.mark.parametrize("way", ["save", "load"])
def test_a_missing_copy_is_noticed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: digests cover host memory, and cannot show it."""
    monkeypatch.setattr(HostBuffer, way, lambda self, block_ids: None)
    prompt = tokens(150, seed=2)
    with a_pair(GEMMA3) as pair:
        pair.decode("d", prompt, 5, pair.prefill("p", prompt))
        with pytest.raises(CorruptionError):
            pair.drain()


def test_blocks_that_were_not_copied_out_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopyTracker, "of_step", lambda self, scheduled_tokens, tables: [])
    with a_pair(GEMMA3) as pair:
        assert pair.prefill("p", tokens(150, seed=3)) is None
        pair.drain()


def test_a_failed_load_is_not_copied_in(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []
    load = HostBuffer.load
    monkeypatch.setattr(HostBuffer, "load", lambda self, block_ids: copied.append(block_ids) or load(self, block_ids))
    prompt = tokens(150, seed=4)
    consumer = settings("kv_consumer", weights_digest="another")
    with Pair(GEMMA3, settings("kv_producer"), consumer) as pair:
        pair.decode("d", prompt, 5, pair.prefill("p", prompt))
        pair.drain()
        assert pair.consumer.failed_loads == 1 and not copied
    with a_pair(GEMMA3) as pair:
        pair.decode("d", prompt, 5, pair.prefill("p", prompt))
        pair.drain()
        assert pair.consumer.failed_loads == 0 and len(copied) == 1


def test_a_preempted_producer_copies_its_new_blocks() -> None:
    """Preempted while it generates, which is possible where all groups keep everything."""
    mix = Mix("full", (Group(Kind.FULL, 16),))
    few = replace(settings("kv_producer"), num_blocks=30)
    with Pair(mix, few, settings("kv_consumer")) as pair:
        prompts = {f"{i}": tokens(100 + i, seed=30 + i) for i in range(6)}
        for name, prompt in prompts.items():
            pair.producer.submit_with_params(name, prompt, 40, {"do_remote_decode": True})
        read: set[str] = set()

        def all_are_read() -> bool:
            for name in pair.producer.answered.keys() - read:
                read.add(name)
                pair.decode(name, prompts[name], 5, pair.producer.answered[name])
            return len(read) == len(prompts)

        pair.until(all_are_read)
        pair.drain()
        assert pair.producer.preemptions > 0 and pair.consumer.failed_loads == 0
        assert pair.consumer.restored_tokens == sum(len(prompt) - 1 for prompt in prompts.values())
