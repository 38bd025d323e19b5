"""Real vLLM configurations for tests of the identity, made without weights, tokenizer or network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, LoadConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.models import ModelRegistry

ARCHITECTURE = "HybridkvIdentityForCausalLM"
LLAMA: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
LONGROPE = LLAMA | {
    "model_type": "phi3",
    "pad_token_id": 0,
    "max_position_embeddings": 8192,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


class _NoModel(torch.nn.Module):
    """Registered model class, so that vLLM inspects it in process and loads no model code."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def write_model(root: Path, settings: dict[str, Any] | None = None) -> Path:
    """Directory of a model with only its configuration."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(settings or LLAMA))
    return root


def make_config(root: Path, load: dict[str, Any] | None = None, **model: Any) -> VllmConfig:
    """Configuration of an engine for the model in a directory."""
    ModelRegistry.register_model(ARCHITECTURE, _NoModel)
    chosen = {"max_model_len": 4096, "dtype": "float16", "seed": 0} | model
    config = ModelConfig(model=str(root), skip_tokenizer_init=True, **chosen)
    return VllmConfig(
        model_config=config,
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        load_config=LoadConfig(**(load or {})),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=config.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
