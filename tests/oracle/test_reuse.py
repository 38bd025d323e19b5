"""The estimated hits for other sizes of host memory equal the restored tokens of engines with these sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from hybridkv.connectors.vllm import CONNECTOR, register
from hybridkv.connectors.vllm.offload import reuse
from oracle.engine import OracleEngine
from oracle.heard import Heard, heard
from oracle.mixes import GPT_OSS, QWEN3_NEXT, Mix
from oracle.settings import Connector, EngineSettings

__all__ = ["heard"]

NUM_PROMPTS, TURNS, CHUNKS = 12, 3, 4
SHARE = "vllm:hybridkv_estimated_hit_share"


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


class Run:
    """The same prompts at an engine with host memory of one size; its own cache is dropped before each."""

    def __init__(self, mix: Mix, capacity_bytes: int, prompts: Iterator[list[int]]) -> None:
        tiers = [{"type": "ram", "capacity": capacity_bytes}]
        connector = Connector(CONNECTOR, {"chunk_tokens": mix.alignment_tokens, "tiers": tiers, "checkpoints": "off"})
        settings = EngineSettings(num_blocks=400, max_step_tokens=512, retention_tokens=0, connector=connector)
        self.engine = OracleEngine(mix, settings)
        self.num_tokens = 0
        for number, tokens in enumerate(prompts):
            self.engine.reset_prefix_cache()
            self.num_tokens += len(tokens)
            self.engine.submit(f"request-{number}", tokens, 2)
            self.engine.drain()

    @property
    def restored_share(self) -> float:
        return self.engine.restored_tokens / self.num_tokens

    @property
    def scheduler(self) -> Any:
        connector: Any = self.engine.scheduler_connector
        return connector._scheduler

    def estimate(self, heard: Heard) -> tuple[dict[str, float], float]:
        """Share of restored tokens by size of host memory, and the bytes for most of them."""
        assert self.engine.scheduler_connector is not None
        self.engine.scheduler_connector.get_kv_connector_stats()
        gauges = {(name, *labels): value for name, labels, value in heard.counts.data().gauges}
        shares = {labels[0]: value for (name, *labels), value in gauges.items() if name == SHARE}
        return shares, gauges["vllm:hybridkv_reused_bytes",]


def prompts(mix: Mix, *, again: bool) -> Iterator[list[int]]:
    for turn in range(TURNS):
        for number in range(NUM_PROMPTS):
            chance = Random(number if again else f"{turn} {number}")
            yield [chance.randrange(200) for _ in range(CHUNKS * mix.alignment_tokens + 3)]


@pytest.mark.parametrize("mix", [QWEN3_NEXT, GPT_OSS], ids=lambda mix: mix.name)
def test_a_loop_larger_than_host_memory_reports_the_needed_size(
    mix: Mix, heard: Heard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reuse, "RECORD_S", 0.0)
    roomy = Run(mix, 64 << 20, prompts(mix, again=True))
    needed = roomy.scheduler._stack.primary.used_bytes
    assert roomy.restored_share == pytest.approx((TURNS - 1) / TURNS, abs=0.08)

    tight = Run(mix, needed // 3, prompts(mix, again=True))
    assert tight.restored_share == 0, "the least recently used prompt is always the next one"
    shares, needed_bytes = tight.estimate(heard)
    assert shares["1x"] == 0
    for multiple in (2, 4):
        run = Run(mix, needed * multiple // 3, prompts(mix, again=True))
        assert shares[f"{multiple}x"] == pytest.approx(run.restored_share, abs=0.02), multiple
    assert needed_bytes == pytest.approx(needed, rel=0.1)
    with caplog.at_level(logging.INFO, logger="vllm.hybridkv.scheduler"):
        tight.scheduler.close()
    assert "reuse of" in caplog.text and "unbounded 6" in caplog.text


def test_prompts_without_common_parts_need_no_memory(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "RECORD_S", 0.0)
    shares, needed_bytes = Run(QWEN3_NEXT, 1 << 20, prompts(QWEN3_NEXT, again=False)).estimate(heard)
    assert set(shares.values()) == {0} and needed_bytes == 0


def test_an_error_disables_the_estimate_and_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(reuse.ReuseEstimator, "count_prompt", fail)
    with caplog.at_level(logging.ERROR, logger="vllm.hybridkv.scheduler"):
        run = Run(QWEN3_NEXT, 64 << 20, prompts(QWEN3_NEXT, again=True))
    assert run.restored_share > 0.6
    assert caplog.text.count("the estimate of reuse failed and is switched off") == 1
