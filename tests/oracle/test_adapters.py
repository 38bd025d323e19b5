"""Requests with a LoRA adapter: the content of its files decides what is found; in doubt nothing is found or stored."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patience
import pytest
from vllm.lora.request import LoRARequest

from hybridkv.connectors.vllm import register
from hybridkv.connectors.vllm.common.identity import adapters
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.hashing import ChunkKeys
from oracle.disk_tier import stacked
from oracle.engine import OracleEngine
from oracle.mixes import GPT_OSS
from oracle.runner import CorruptionError
from oracle.settings import EngineSettings

PROMPT = list(range(200))
HOUR_NS = 3600 * 10**9
SOON_S = patience.seconds(6.0)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setattr(adapters, "LOOK_S", SOON_S)


class AdapterEngine:
    """An engine that started when the files of its adapters were an hour old."""

    def __init__(self, engine: OracleEngine) -> None:
        self.engine = engine
        self.adapters: Adapters = engine.scheduler_connector._scheduler._identity.adapters  # type: ignore[union-attr]
        self.adapters._began_ns += HOUR_NS
        now_ns = time.time_ns() + HOUR_NS
        self.adapters._now_ns = lambda: now_ns
        self.count = 0

    def restored(self, lora: LoRARequest | None, model: int) -> int:
        """Tokens of the prompt that are restored with the adapter that the engine holds; its own cache is empty."""
        self.engine.reset_prefix_cache()
        before = self.engine.restored_tokens
        self.count += 1
        self.engine.submit(f"request {self.count}", PROMPT, 2, lora, model)
        self.engine.drain()
        assert self.adapters.wait_until_idle(SOON_S)
        return self.engine.restored_tokens - before


@contextmanager
def open_engine(
    directory: Path, before_step: Callable[[OracleEngine, int], None] | None = None, **changed: Any
) -> Iterator[AdapterEngine]:
    settings = EngineSettings(num_blocks=200, retention_tokens=None, connector=stacked(GPT_OSS, directory / "cache"))
    with OracleEngine(GPT_OSS, replace(settings, **changed), before_step) as engine:
        yield AdapterEngine(engine)


def step_until(engine: OracleEngine, is_so: Callable[[], object]) -> None:
    """Steps until `is_so()` is true. Raises AssertionError on a timeout."""
    until_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until_s, engine._left()
        engine.step()


def train(directory: Path, number: int) -> LoRARequest:
    """An adapter with other weights for another number, always at the same path."""
    path = directory / "adapter"
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(bytes([number]) * 100)
    return LoRARequest("tuned", 1, str(path))


def test_an_adapter_is_found_again_and_its_retraining_finds_nothing(tmp_path: Path) -> None:
    lora = train(tmp_path, 1)
    with open_engine(tmp_path) as life:
        assert life.restored(lora, 1) == 0
        assert life.restored(lora, 1) == 0, "tokens computed before the files were read are not stored"
        assert life.restored(lora, 1) > 100
    with open_engine(tmp_path) as life:
        assert life.restored(lora, 1) == 0
        assert life.restored(lora, 1) > 100, "the next engine finds it once it has read the files"
    train(tmp_path, 2)
    with open_engine(tmp_path) as life:
        assert [life.restored(lora, 2) for _ in range(2)] == [0, 0]
        assert life.restored(lora, 2) > 100


def test_files_that_change_below_a_running_engine_end_its_hits(tmp_path: Path) -> None:
    lora = train(tmp_path, 1)
    with open_engine(tmp_path) as life:
        assert [life.restored(lora, 1) > 100 for _ in range(3)] == [False, False, True]
        train(tmp_path, 2)
        # The engine may still hold the first training, or have read the second.
        assert [life.restored(lora, 1), life.restored(lora, 2), life.restored(lora, 1)] == [0, 0, 0]
        again = LoRARequest("tuned", 1, lora.lora_path, load_inplace=True)
        assert [life.restored(again, 2) > 100 for _ in range(3)] == [False, True, True]
        assert life.restored(lora, 2) > 100


def test_tokens_computed_while_files_changed_are_not_stored(tmp_path: Path) -> None:
    lora = train(tmp_path, 1)

    def retrain(engine: OracleEngine, step: int) -> None:
        if "request 2" in engine.scheduler.requests:
            train(tmp_path, 2)

    with open_engine(tmp_path, retrain, max_step_tokens=64) as life:
        assert [life.restored(lora, 1), life.restored(lora, 1)] == [0, 0]
        assert not life.engine.scheduler_connector._scheduler._stack.primary.num_keys  # type: ignore[union-attr]


def test_an_identity_of_name_and_path_alone_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a retrained adapter loads the chunks of its former training, and the oracle notices."""
    monkeypatch.setattr(ChunkKeys, "for_adapter", lambda keys, digest: keys)
    lora = train(tmp_path, 1)
    with open_engine(tmp_path) as life:
        assert [life.restored(lora, 1) for _ in range(2)] == [0, 0]
    train(tmp_path, 2)
    with open_engine(tmp_path) as life:
        life.restored(lora, 2)
        with pytest.raises(CorruptionError):
            life.restored(lora, 2)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_request_preempted_between_two_steps_stores_all_chunks(tmp_path: Path, has_adapter: bool) -> None:
    """The next step admits it again."""
    lora = train(tmp_path, 1) if has_adapter else None
    with open_engine(tmp_path, max_step_tokens=64) as life:
        if lora is not None:
            life.engine.submit("another", list(range(500, 560)), 2, lora, 1)
            life.engine.drain()
            assert life.adapters.wait_until_idle(SOON_S)
        life.engine.submit("preempted", PROMPT, 4, lora, 1)
        life.engine.step()
        life.engine.step()
        life.engine.preempt_all()
        life.engine.drain()
        assert life.engine.preemptions == 1
        assert life.restored(lora, 1) == 192


@pytest.mark.parametrize("has_adapter", [False, True])
def test_chunks_stored_after_a_reset_are_found_by_the_same_engine_only(tmp_path: Path, has_adapter: bool) -> None:
    """Weights may have been changed in place: the next engine reads others from the files."""
    lora = train(tmp_path, 1) if has_adapter else None
    with open_engine(tmp_path) as life:
        if lora is not None:
            life.restored(lora, 1)
        assert life.restored(lora, 1) == 0
        assert life.restored(lora, 1) > 100
        life.engine.reset_connector()
        assert life.restored(lora, 1) == 0
        assert life.restored(lora, 1) > 100
    with open_engine(tmp_path) as life:
        assert [life.restored(lora, 1) for _ in range(2 if has_adapter else 1)] == [0] * (1 + has_adapter)
        assert life.restored(lora, 1) > 100, "the next engine shares again"
    with open_engine(tmp_path) as life:
        assert life.restored(lora, 1) > 100 or (lora is not None and life.restored(lora, 1) > 100)


def test_a_wait_behind_a_failed_load_of_another_adapter_is_bounded(tmp_path: Path) -> None:
    """vLLM cannot schedule the request with the failed load while another adapter has the only slot."""
    tuned, other = train(tmp_path, 1), LoRARequest("other", 2, str(tmp_path / "other"))
    shutil.copytree(tuned.lora_path, other.lora_path)
    plain, step_s, most_steps = list(range(30, 190)), 10.0, 40
    with open_engine(tmp_path) as life:
        engine = life.engine
        engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
        assert [life.restored(tuned, 1) > 100 for _ in range(3)] == [False, False, True]
        engine.submit("stored", plain, 2)
        engine.drain()
        engine.reset_prefix_cache()
        arena = engine.worker_connector._worker._arena  # type: ignore[union-attr]
        engine.submit("failed", PROMPT, 2, tuned, 1)
        damaged = dict(arena._seals)
        for slot in damaged:
            arena._buffer[slot] ^= 1
        failed = engine.scheduler.requests["failed"]
        step_until(engine, lambda: failed.status.name == "WAITING_FOR_REMOTE_KVS")
        engine.submit("running", list(range(500, 540)), 4 * most_steps, other, 2)
        step_until(engine, lambda: engine.failed_loads and engine.outputs("running"))
        for slot, seal in damaged.items():
            if arena._seals.get(slot) is seal:  # no other chunk was stored there since
                arena._buffer[slot] ^= 1
        planner, passed_s = engine.scheduler_connector._scheduler._loads, 0.0  # type: ignore[union-attr]
        real = planner._clock
        planner._clock = lambda: real() + passed_s
        engine.submit("plain", plain, 2)
        for _ in range(most_steps):
            passed_s += step_s
            engine.step()
        assert len(engine.outputs("running")) < 4 * most_steps
        assert engine.outputs("plain") and not engine.outputs("failed")
        engine.drain()
        engine.check_idle()
