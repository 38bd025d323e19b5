"""Tiny random models whose engines may not resume a prefix, or only on some machines. Weights as in tiny_models.

* ``mla``: DeepSeek-V3 with three dense layers. vLLM's CPU kernels for latent attention are compiled for a latent of 512
and a rotary part of 64, so these sizes are not tiny. Without AMX the CPU build cannot resume it.

* ``prefix-lm``: HRM-Text, whose prompt attends in both directions: its layers have ``non_causal`` in their specs.

* ``ordinary``: Llama, which can be resumed anywhere.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from tiny_models import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE

HIDDEN_SIZE: Final = 128
MAX_POSITIONS: Final = 2048

ENGINE_ARGUMENTS: Final[dict[str, Any]] = {
    "max_model_len": MAX_POSITIONS,
    # A prompt of 1,061 tokens is computed in steps of 512, so its last step is what a hit of 1,024 leaves.
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "dtype": "float32",
    "enforce_eager": True,
    "num_gpu_blocks_override": 512,
    "skip_tokenizer_init": True,
    "seed": 0,
}
_COMMON_CONFIG: Final[dict[str, Any]] = {
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "dtype": "float32",
    "hidden_size": HIDDEN_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY_SIZE,
}
_Shapes = Iterator[tuple[str, tuple[int, ...], float]]
"""Name, shape, and standard deviation of the entries; 0 means all ones."""


def make_model(kind: str, directory: Path) -> Path:
    """Write the model of ``kind`` to ``directory``, without a tokenizer: prompts are token ids."""
    config, shapes = _BUILDERS[kind]()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * deviation if deviation else torch.ones(shape)
        for name, shape, deviation in shapes
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_COMMON_CONFIG | config, indent=2, sort_keys=True))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _matrix(name: str, outputs: int, inputs: int, gain: float = 1.0) -> tuple[str, tuple[int, ...], float]:
    return f"{name}.weight", (outputs, inputs), gain * inputs**-0.5


def _mla() -> tuple[dict[str, Any], _Shapes]:
    num_layers, num_heads, latent, rotary, plain, value, intermediate = 3, 4, 512, 64, 64, 64, 256
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": plain,
        "v_head_dim": value,
        "intermediate_size": intermediate,
        "first_k_dense_replace": num_layers,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 0,
    }

    def shapes() -> _Shapes:
        yield "model.embed_tokens.weight", (VOCABULARY_SIZE, HIDDEN_SIZE), 1.0
        for layer in range(num_layers):
            prefix = f"model.layers.{layer}"
            attention = f"{prefix}.self_attn"
            yield f"{prefix}.input_layernorm.weight", (HIDDEN_SIZE,), 0.0
            yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN_SIZE,), 0.0
            yield _matrix(f"{attention}.q_proj", num_heads * (plain + rotary), HIDDEN_SIZE, 2.0)
            yield _matrix(f"{attention}.kv_a_proj_with_mqa", latent + rotary, HIDDEN_SIZE)
            yield f"{attention}.kv_a_layernorm.weight", (latent,), 0.0
            yield _matrix(f"{attention}.kv_b_proj", num_heads * (plain + value), latent)
            yield _matrix(f"{attention}.o_proj", HIDDEN_SIZE, num_heads * value, 4.0)
            yield from _gated_mlp(f"{prefix}.mlp", intermediate)
        yield "model.norm.weight", (HIDDEN_SIZE,), 0.0
        yield _matrix("lm_head", VOCABULARY_SIZE, HIDDEN_SIZE, 2.0)

    return config, shapes()


def _gated_mlp(prefix: str, intermediate: int) -> _Shapes:
    yield _matrix(f"{prefix}.gate_proj", intermediate, HIDDEN_SIZE)
    yield _matrix(f"{prefix}.up_proj", intermediate, HIDDEN_SIZE)
    yield _matrix(f"{prefix}.down_proj", HIDDEN_SIZE, intermediate, 2.0)


def _ordinary() -> tuple[dict[str, Any], _Shapes]:
    num_layers, num_heads, head_size, intermediate = 2, 4, 32, 256
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_size,
        "intermediate_size": intermediate,
    }

    def shapes() -> _Shapes:
        yield "model.embed_tokens.weight", (VOCABULARY_SIZE, HIDDEN_SIZE), 1.0
        for layer in range(num_layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (HIDDEN_SIZE,), 0.0
            yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN_SIZE,), 0.0
            for projection, gain in (("q_proj", 2.0), ("k_proj", 1.5), ("v_proj", 1.0), ("o_proj", 4.0)):
                yield _matrix(f"{prefix}.self_attn.{projection}", HIDDEN_SIZE, num_heads * head_size, gain)
            yield from _gated_mlp(f"{prefix}.mlp", intermediate)
        yield "model.norm.weight", (HIDDEN_SIZE,), 0.0
        yield _matrix("lm_head", VOCABULARY_SIZE, HIDDEN_SIZE, 2.0)

    return config, shapes()


def _prefix_lm() -> tuple[dict[str, Any], _Shapes]:
    layers_per_stack, num_heads, head_size, intermediate = 1, 4, 32, 256
    config = {
        "architectures": ["HrmTextForCausalLM"],
        "model_type": "hrm_text",
        "num_hidden_layers": layers_per_stack,
        "num_attention_heads": num_heads,
        "head_dim": head_size,
        "intermediate_size": intermediate,
        "H_cycles": 1,
        "L_cycles": 2,
        "embedding_scale": 1.0,
        "prefix_lm": True,
    }

    def shapes() -> _Shapes:
        yield "model.embed_tokens.weight", (VOCABULARY_SIZE, HIDDEN_SIZE), 1.0
        yield "model.z_L_init", (HIDDEN_SIZE,), 1.0
        for stack in ("L_module", "H_module"):
            for layer in range(layers_per_stack):
                prefix = f"model.{stack}.layers.{layer}"
                yield _matrix(f"{prefix}.attn.gqkv_proj", 4 * num_heads * head_size, HIDDEN_SIZE, 2.0)
                yield _matrix(f"{prefix}.attn.o_proj", HIDDEN_SIZE, num_heads * head_size, 4.0)
                yield _matrix(f"{prefix}.mlp.gate_up_proj", 2 * intermediate, HIDDEN_SIZE)
                yield _matrix(f"{prefix}.mlp.down_proj", HIDDEN_SIZE, intermediate, 2.0)
        yield _matrix("lm_head", VOCABULARY_SIZE, HIDDEN_SIZE, 2.0)

    return config, shapes()


_BUILDERS: Final[dict[str, Callable[[], tuple[dict[str, Any], _Shapes]]]] = {
    "mla": _mla,
    "ordinary": _ordinary,
    "prefix-lm": _prefix_lm,
}
