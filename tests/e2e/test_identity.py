"""An engine restores only what an engine with the same identity stored, wherever both keep it.

Every test has a control: the same engine without the difference restores the prefix.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import patience
import pytest
import torch
from harness import scratch_directory
from identity_models import (
    GEMMA3,
    LONG_FROM,
    Life,
    change_between_samples,
    engine_on,
    inspect_here,
    make_adapter,
    make_long_rope_model,
    prompt,
)

import tiny_models

RESTORED = 1024
"""Tokens that a hit restores: all whole chunks of a prompt."""
FULL: dict[str, Any] = {"weights_digest": "full"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return scratch_directory(tmp_path) / tmp_path.name


def require_no_shared_cache(life: Life, seed: int = 0, lora: Any = None) -> None:
    """The engine finds none of the stored chunks, and gives the same answer as with an empty store."""
    warm = life.ask(prompt(seed), lora)
    assert warm.same_as(life.cold(prompt(seed), lora))
    assert warm.cached == 0


def test_another_configuration_of_the_same_weights_uses_another_cache(directory: Path) -> None:
    model = tiny_models.make_tiny_model("gemma3", directory / "model")
    inspect_here("Gemma3ForCausalLM")
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    with engine_on(model, directory, extra=FULL, **GEMMA3) as life:
        stored = life.ask(prompt())
        assert stored.cached == 0
    for overrides in ({"rope_parameters": ropes}, {"query_pre_attn_scalar": 64}):
        with engine_on(model, directory, extra=FULL, hf_overrides=overrides, **GEMMA3) as life:
            require_no_shared_cache(life)
            (line,) = life.lines_with("holds no cache for this engine")
            assert next(iter(overrides)) in line.partition("the nearest differs: ")[2]
    # Control: the same model in another directory.
    moved = shutil.copytree(model, directory / "elsewhere" / "of another name")
    shutil.rmtree(model)
    with engine_on(moved, directory, extra=FULL, **GEMMA3) as life:
        again = life.ask(prompt())
        assert again.cached == RESTORED
        assert again.same_as(stored)
    # A sample of the weights can miss a change; a digest of all weights cannot.
    change_between_samples(moved)
    with engine_on(moved, directory, extra=FULL, **GEMMA3) as life:
        require_no_shared_cache(life)
        (line,) = life.lines_with("holds no cache for this engine")
        assert "weights" in line


def test_engines_of_different_length_share_no_cache_of_a_longrope_model(directory: Path) -> None:
    model = make_long_rope_model(directory / "phi3")
    inspect_here("Phi3ForCausalLM")
    short = GEMMA3 | {"max_model_len": LONG_FROM}
    with engine_on(model, directory, **short) as life:
        stored = life.ask(prompt())
    with engine_on(model, directory, **GEMMA3 | {"max_model_len": LONG_FROM + 64}) as life:
        require_no_shared_cache(life)
    with engine_on(model, directory, **short) as life:
        again = life.ask(prompt())
        assert again.cached == RESTORED
        assert again.same_as(stored)


def test_a_retrained_adapter_at_the_same_path_is_another_adapter(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.request import LoRARequest

    from hybridkv.connectors.vllm.common.identity import adapters

    monkeypatch.setattr(adapters, "LOOK_S", patience.seconds(6.0))
    model = tiny_models.make_tiny_model("gemma3", directory / "model")
    inspect_here("Gemma3ForCausalLM")
    path = make_adapter(directory / "adapter", seed=1)
    lora = LoRARequest("tuned", 1, str(path))
    options = GEMMA3 | {"enable_lora": True, "max_lora_rank": 8}
    with engine_on(model, directory, **options) as life:
        load_adapter(life, lora)
        stored = life.ask(prompt(), lora)
        assert stored.cached == 0
        assert not stored.same_as(life.ask(prompt())), "the adapter changes nothing"
    # Control: the unchanged adapter.
    with engine_on(model, directory, **options) as life:
        load_adapter(life, lora)
        again = life.ask(prompt(), lora)
        assert again.cached == RESTORED
        assert again.same_as(stored)
    make_adapter(path, seed=2)
    with engine_on(model, directory, **options) as life:
        load_adapter(life, lora)
        assert life.ask(prompt()).cached == RESTORED, "prompts without an adapter are not affected"
        require_no_shared_cache(life, lora=lora)


def load_adapter(life: Life, lora: Any) -> None:
    """Run a short request with the adapter, and wait until the adapter's files are read."""
    life.ask(prompt()[:16], lora)
    assert life.engine.connector._scheduler._identity.adapters.wait_until_idle(patience.seconds(6.0))


def test_a_cache_written_by_another_instruction_set_is_not_used(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaces the function with which vLLM's CPU backend chooses its instruction set."""
    from vllm.v1.attention.backends import cpu_attn

    from hybridkv.connectors.vllm.offload import connector as offload

    model = tiny_models.make_tiny_model("gemma3", directory / "model")
    inspect_here("Gemma3ForCausalLM")
    with engine_on(model, directory, **GEMMA3) as life:
        assert life.ask(prompt()).cached == 0
    native = cpu_attn._get_attn_isa(torch.float32, GEMMA3["block_size"], 32)
    other = "vec16" if native != "vec16" else "vec"
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: other)
    with engine_on(model, directory, **GEMMA3) as life:
        assert life.ask(prompt()).cached == 0
        (line,) = life.lines_with("holds no cache for this engine")
        assert f"worker.attention_isa: {other} is not {native}" in line
    # Control: only this fact separates the caches.
    facts = offload.worker_facts
    monkeypatch.setattr(offload, "worker_facts", lambda *about: facts(*about) | {"worker.attention_isa": native})
    with engine_on(model, directory, **GEMMA3) as life:
        assert life.ask(prompt()).cached == RESTORED


def test_amx_writes_the_cache_in_another_order_than_vectors() -> None:
    """The reason for the fact. Both vector lengths write the same order, so AVX2 may read a cache of AVX-512."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(64, 2, 32, generator=generator).bfloat16() for _ in range(2))

    def written(isa: str) -> torch.Tensor:
        cache = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
        halves = cache.view(1, 2, 128, 32).chunk(2, dim=2)
        scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(64), isa, **scales)
        return cache

    assert torch.equal(written("vec"), written("vec16"))
    try:
        amx = written("amx")
    except RuntimeError as error:
        pytest.skip(f"these kernels have no AMX: {error}")
    assert not torch.equal(amx, written("vec"))
    assert torch.equal(amx.flatten().sort().values, written("vec").flatten().sort().values), "the same elements"
