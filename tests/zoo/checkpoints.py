"""Writes the checkpoint of a tiny random model: the tensors are those of transformers' own class for the family.

Each tensor is drawn by its name and shape, so that a family needs a configuration and no code. The draw is what makes a
model a witness: attention is peaked, recurrent states remember hundreds of tokens, and the output is neither flat nor a
spike, so that another prefix gives other log-probabilities. The same family gives the same bytes everywhere. No
tokenizer is written: prompts are token ids.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

VOCABULARY_SIZE: Final = 1024
HIDDEN_SIZE: Final = 128

COMMON: Final[dict[str, Any]] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""The default settings of a configuration."""


@dataclass(frozen=True, slots=True)
class Scales:
    """What differs between families in how a tensor's numbers act.

    Attributes:
        norm: the weight with which a norm changes nothing; 0 where the family multiplies by one plus the weight.
        embedding: deviation of an embedding's entries, where the family scales them up itself.
        query: gain of the query projections, or the weight of query norms; more makes attention more peaked.
        final: by how much the last norm multiplies, and so how far the logits of a tied head spread.
    """

    norm: float = 1.0
    embedding: float = 1.0
    query: float = 2.0
    final: float = 1.0


_OUTPUTS: Final = ("o_proj", "out_proj", "down_proj", "w2", "output_linear", "dense", "fc2")
_RECURRENT: Final = ("A_log", "dt_bias", "D", "conv1d.weight", "conv.conv.weight")
_FINAL_NORMS: Final = ("model.norm", "model.norm_f", "model.final_layernorm", "model.embedding_norm")


def write_checkpoint(model_type: str, settings: dict[str, Any], scales: Scales, directory: Path) -> Path:
    """Writes config.json and model.safetensors of the family to `directory` and returns it.

    Args:
        model_type: the family's name in transformers.
        settings: of its configuration, over `COMMON`.
        scales: how its tensors are drawn.
        directory: made if absent; files are overwritten.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

    config = AutoConfig.for_model(model_type, **(COMMON | settings))
    kind = AutoModelForSpeechSeq2Seq if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    tied = {"lm_head.weight", "proj_out.weight"} if config.tie_word_embeddings else set()
    tensors = {
        name: draw(name, tuple(tensor.shape), scales) for name, tensor in model.state_dict().items() if name not in tied
    }
    directory.mkdir(parents=True, exist_ok=True)
    written = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def draw(name: str, shape: tuple[int, ...], scales: Scales) -> torch.Tensor:
    """The numbers of one tensor, which depend on its name, its shape and `scales` alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    module = name.removesuffix(".weight")
    leaf = module.rpartition(".")[2]
    if name.endswith(_RECURRENT):
        return _draw_recurrent(leaf, shape, generator)
    if module in _FINAL_NORMS:
        # Random signs: a head that is tied to the embeddings would otherwise mostly repeat its input.
        signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0
        return signs * scales.final - (1.0 - scales.norm)
    if "norm" in leaf and len(shape) == 1:
        multiply = scales.query if leaf.startswith("q_") else 1.0
        return torch.full(shape, multiply - (1.0 - scales.norm))
    if leaf in {"layer_scalar", "correct_output_scale"}:
        return torch.ones(shape)
    noise = torch.randn(shape, generator=generator)
    if "embed" in leaf and len(shape) == 2:
        return noise * scales.embedding
    if len(shape) == 1:
        return noise * 0.1
    return noise * _gain(leaf, scales) / math.sqrt(shape[-1])


def _gain(leaf: str, scales: Scales) -> float:
    if leaf == "q_proj":
        return scales.query
    if leaf == "lm_head":
        return 2.0
    return 3.0 if leaf in _OUTPUTS else 1.0


def _draw_recurrent(leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if leaf == "A_log":
        # Decay rates of one part in 700 to one in 7 a token: the state remembers far beyond one block.
        low, high = math.log(0.002), math.log(0.2)
        return low + (high - low) * torch.rand(shape, generator=generator)
    if leaf == "dt_bias":
        return torch.zeros(shape)
    if leaf == "D":
        return torch.full(shape, 0.5)
    return torch.randn(shape, generator=generator) * 0.7
