"""Models, adapters and engines for tests of identity: which chunks of one engine another engine finds.

Engines run one after the other in the test's process, so all but the first start within two seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import Engine, make_prompt, prepare_environment
from safetensors.torch import load_file, save_file

import tiny_models

PROMPT_TOKENS = 1064
"""Two steps of the engine and 40 tokens of a third one, so that the rest after a hit is computed as in a cold run."""
GEMMA3 = tiny_models.ENGINE_ARGUMENTS["gemma3"]


def prompt(seed: int = 0) -> list[int]:
    return make_prompt(PROMPT_TOKENS, seed=seed)


@dataclass(slots=True)
class Answer:
    """The answer to one prompt, and its number of cached tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    cached: int

    def same_as(self, other: Answer) -> bool:
        """Exactly equal tokens and log-probabilities."""
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)


@dataclass(slots=True)
class Life:
    """A running engine, and the log of the connector and its libraries since its start."""

    engine: Engine
    log: list[str] = field(default_factory=list)

    def ask(self, tokens: Sequence[int], lora: Any = None) -> Answer:
        """Run one prompt after a reset of the engine's own cache."""
        from vllm import SamplingParams

        engine = self.engine
        engine.reset_prefix_cache()
        name = f"request-{id(tokens)}-{len(self.log)}-{engine._next_request}"
        engine._next_request += 1
        parameters = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5, ignore_eos=True)
        engine.llm.llm_engine.add_request(name, {"prompt_token_ids": list(tokens)}, parameters, lora_request=lora)
        engine.run()
        engine.drain()
        result = engine.result(name)
        return Answer(result.token_ids, result.logprobs, result.num_cached_tokens)

    def cold(self, tokens: Sequence[int], lora: Any = None) -> Answer:
        """Run one prompt with all tiers empty."""
        assert self.engine.connector.reset_cache() is not False
        answer = self.ask(tokens, lora)
        assert answer.cached == 0
        return answer

    def lines_with(self, words: str) -> list[str]:
        """The log lines that contain these words."""
        return [line for line in self.log if words in line]


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextlib.contextmanager
def engine_on(
    model: Path | str, directory: Path, *, extra: dict[str, Any] | None = None, **options: Any
) -> Iterator[Life]:
    """An engine with a disk tier in `directory`/cache, on a model from disk.

    `extra` is added to the connector's configuration, `options` to the engine's arguments.
    """
    prepare_environment(directory / "environment")
    torch.cpu._init_amx()

    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    tiers = [
        {"type": "ram", "capacity": "64MiB"},
        {"type": "disk", "path": str(directory / "cache"), "capacity": "1GiB", "fsync": "none"},
    ]
    transfer = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": tiers} | (extra or {}),
    }
    lines: list[str] = []
    handler = _Lines(lines)
    loggers = [logging.getLogger(name) for name in ("hybridkv", "vllm.hybridkv")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    llm = LLM(str(model), kv_transfer_config=transfer, **options)
    try:
        yield Life(Engine(llm), lines)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        for logger in loggers:
            logger.removeHandler(handler)


def inspect_here(*architectures: str) -> None:
    """Avoid the fifteen seconds in which vLLM inspects a model's class in a subprocess."""
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in architectures:
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


LONG_FROM = 2048
"""From this number of tokens on, the model below uses its long factors."""


def make_long_rope_model(directory: Path) -> Path:
    """A tiny Phi-3 whose rotary embedding has one set of factors for short engines and another for long ones."""
    num_layers, num_heads, head_size, hidden, intermediate = 2, 4, 32, tiny_models.HIDDEN_SIZE, 256
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "bos_token_id": tiny_models.BOS_ID,
        "eos_token_id": tiny_models.EOS_ID,
        "pad_token_id": tiny_models.PAD_ID,
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": tiny_models.MAX_POSITIONS,
        "original_max_position_embeddings": LONG_FROM,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * (head_size // 2),
            "long_factor": [1.0 + i / 4 for i in range(head_size // 2)],
        },
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": tiny_models.VOCABULARY_SIZE,
    }
    generator = torch.Generator().manual_seed(0)

    def linear(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn((outputs, inputs), generator=generator) * (gain / math.sqrt(inputs))

    tensors = {
        "model.embed_tokens.weight": torch.randn((tiny_models.VOCABULARY_SIZE, hidden), generator=generator),
        "lm_head.weight": linear(tiny_models.VOCABULARY_SIZE, hidden, 2.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": torch.ones(hidden),
            f"{at}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{at}.self_attn.qkv_proj.weight": linear(3 * num_heads * head_size, hidden, 1.5),
            f"{at}.self_attn.o_proj.weight": linear(hidden, num_heads * head_size, 4.0),
            f"{at}.mlp.gate_up_proj.weight": linear(2 * intermediate, hidden),
            f"{at}.mlp.down_proj.weight": linear(hidden, intermediate, 2.0),
        }
    # All tiny models have the same tokenizer.
    tiny_models.make_tiny_model("gpt-oss", directory)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter for the tiny Gemma 3. Another seed gives other weights."""
    rank, hidden, num_kv_heads, head_size = 8, tiny_models.HIDDEN_SIZE, 2, 32
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(6):
        for projection in ("k_proj", "v_proj"):
            at = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            tensors[f"{at}.lora_A.weight"] = torch.randn((rank, hidden), generator=generator) / math.sqrt(hidden)
            tensors[f"{at}.lora_B.weight"] = torch.randn((num_kv_heads * head_size, rank), generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["k_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def change_between_samples(model: Path) -> None:
    """Change weights that a sample of the file does not include, without changing its size and header."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.up_proj.weight"
    changed = tensors[name].clone()
    changed[64:68] += 1.0
    save_file(tensors | {name: changed}, path, metadata={"format": "pt"})
