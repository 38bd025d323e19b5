"""Tiny random hybrid language models on disk, so that a real engine can run anywhere in a second.

Each kind has the cache groups of a model that people serve, at a size where a prompt of 2000 tokens takes well under a
second on two CPU cores:

* ``qwen3-next``: six gated-delta-net layers and two full-attention layers, so three recurrent groups and one full one.
* ``gemma3``: five sliding-window layers and one full-attention layer.
* ``gpt-oss``: one sliding-window and one full-attention layer with sinks and a mixture of experts.

The weights are random but not degenerate: attention is peaked, recurrent states remember hundreds of tokens, and the
output distribution is neither flat nor a single spike, so another context gives other tokens and other
log-probabilities. The same kind and seed give the same bytes. Nothing is downloaded and neither vLLM nor transformers
is imported. The output of the models has no meaning.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY_SIZE: Final = 1024
HIDDEN_SIZE: Final = 128
MAX_POSITIONS: Final = 8192
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2

# Arguments of vllm.LLM (or, with dashes, of the server) that suit each kind on the CPU build. The number of blocks is
# fixed, so tests know when the engine's own cache is full. No argument depends on the machine.
# A result is equal to the last digit with and without a cache hit if the tokens after the hit are computed in the same
# steps both times. With recurrent groups this is always so, because a hit ends only where a step ended. For the other
# kinds, a step is as long as the chunk of the offload connector. So if a request runs alone, the steps after its hit
# are the steps of the cold run.
_COMMON_ARGUMENTS: Final[dict[str, Any]] = {
    "max_model_len": MAX_POSITIONS,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "seed": 0,
}
_WINDOW_ARGUMENTS: Final[dict[str, Any]] = {
    "dtype": "float32",
    "block_size": 64,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 1024,
}
ENGINE_ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "qwen3-next": _COMMON_ARGUMENTS | {"dtype": "bfloat16", "block_size": 128, "num_gpu_blocks_override": 512},
    "gemma3": _COMMON_ARGUMENTS | _WINDOW_ARGUMENTS,
    "gpt-oss": _COMMON_ARGUMENTS | _WINDOW_ARGUMENTS,
}
KINDS: Final[tuple[str, ...]] = tuple(ENGINE_ARGUMENTS)


class _Parameter(NamedTuple):
    """One tensor of a checkpoint: its name and the function that draws it."""

    name: str
    draw: Callable[[torch.Generator], torch.Tensor]


def make_tiny_model(kind: str, directory: Path, *, seed: int = 0) -> Path:
    """Write the model of ``kind`` to ``directory`` (made if absent, files overwritten) and return the directory.

    Raises ValueError for an unknown kind.
    """
    if kind not in _BUILDERS:
        raise ValueError(f"unknown kind {kind!r}: expected one of {', '.join(KINDS)}")
    config, parameters = _BUILDERS[kind]()
    dtype = getattr(torch, ENGINE_ARGUMENTS[kind]["dtype"])
    generator = torch.Generator().manual_seed(seed)
    tensors = {parameter.name: parameter.draw(generator).to(dtype) for parameter in parameters}

    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _COMMON_CONFIG | {"dtype": str(dtype).removeprefix("torch.")} | config)
    _write_json(directory / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


# --- tokenizer ------------------------------------------------------------------------------------------------------


def write_tokenizer(directory: Path) -> None:
    """Byte-level BPE: every text round-trips; pairs of small letters and a letter after a space are one token."""
    letters = [chr(ord("a") + i) for i in range(26)]
    merges = [("Ġ", letter) for letter in letters] + [(first, second) for first in letters for second in letters]
    pieces = [BOS, EOS, PAD, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    reserved = [f"<|reserved_{i}|>" for i in range(VOCABULARY_SIZE - len(pieces))]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces + reserved)}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in (BOS, EOS, PAD, *reserved)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}",
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# --- drawing tensors ------------------------------------------------------------------------------------------------


def _constant(name: str, shape: tuple[int, ...], value: float) -> _Parameter:
    return _Parameter(name, lambda _: torch.full(shape, value))


def _normal(name: str, shape: tuple[int, ...], deviation: float) -> _Parameter:
    return _Parameter(name, lambda generator: torch.randn(shape, generator=generator) * deviation)


def _log_uniform(name: str, size: int, low: float, high: float) -> _Parameter:
    """The logarithm of values spread evenly, on a logarithmic scale, between ``low`` and ``high``."""
    start, width = math.log(low), math.log(high) - math.log(low)
    return _Parameter(name, lambda generator: start + width * torch.rand(size, generator=generator))


def _linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> _Parameter:
    """A weight matrix that turns inputs of unit variance into outputs of variance ``gain`` squared."""
    return _normal(f"{name}.weight", (outputs, inputs), gain / math.sqrt(inputs))


def _embeddings() -> Iterator[_Parameter]:
    """Embedding and head are separate: a tied head on random weights mostly repeats its input."""
    yield _normal("model.embed_tokens.weight", (VOCABULARY_SIZE, HIDDEN_SIZE), 1.0)
    yield _linear("lm_head", VOCABULARY_SIZE, HIDDEN_SIZE, gain=2.0)


def _dense_mlp(prefix: str, intermediate_size: int) -> Iterator[_Parameter]:
    yield _linear(f"{prefix}.gate_proj", intermediate_size, HIDDEN_SIZE)
    yield _linear(f"{prefix}.up_proj", intermediate_size, HIDDEN_SIZE)
    yield _linear(f"{prefix}.down_proj", HIDDEN_SIZE, intermediate_size, gain=2.0)


# --- the kinds ------------------------------------------------------------------------------------------------------

_COMMON_CONFIG: Final[dict[str, Any]] = {
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "hidden_size": HIDDEN_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY_SIZE,
}
_Model = tuple[dict[str, Any], list[_Parameter]]


def _qwen3_next() -> _Model:
    num_layers, interval, intermediate_size = 8, 4, 256
    num_heads, num_kv_heads, head_size = 4, 2, 64
    key_heads, value_heads, state_size = 2, 2, 64
    num_experts, expert_size = 4, 64
    config: dict[str, Any] = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": num_layers,
        "layer_types": [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
        ],
        "full_attention_interval": interval,
        "intermediate_size": intermediate_size,
        "hidden_act": "silu",
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": state_size,
        "linear_value_head_dim": state_size,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(num_layers - 1)),  # vLLM needs at least one layer with experts
        "moe_intermediate_size": expert_size,
        "shared_expert_intermediate_size": expert_size,
    }
    key_size, value_size = key_heads * state_size, value_heads * state_size
    parameters = list(_embeddings())
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        # This model's norms multiply by one plus the weight, but for the gated norm of the recurrent layers.
        parameters.append(_constant(f"{prefix}.input_layernorm.weight", (HIDDEN_SIZE,), 0.0))
        parameters.append(_constant(f"{prefix}.post_attention_layernorm.weight", (HIDDEN_SIZE,), 0.0))
        if layer in config["mlp_only_layers"]:
            parameters.extend(_dense_mlp(f"{prefix}.mlp", intermediate_size))
        else:
            parameters.append(_linear(f"{prefix}.mlp.gate", num_experts, HIDDEN_SIZE))
            parameters.append(_linear(f"{prefix}.mlp.shared_expert_gate", 1, HIDDEN_SIZE))
            for expert in ("shared_expert", *(f"experts.{i}" for i in range(num_experts))):
                parameters.extend(_dense_mlp(f"{prefix}.mlp.{expert}", expert_size))
        if (layer + 1) % interval:
            mixer = f"{prefix}.linear_attn"
            parameters += [
                _linear(f"{mixer}.in_proj_qkvz", 2 * key_size + 2 * value_size, HIDDEN_SIZE),
                _linear(f"{mixer}.in_proj_ba", 2 * value_heads, HIDDEN_SIZE),
                _normal(f"{mixer}.conv1d.weight", (2 * key_size + value_size, 1, 4), 0.7),
                _constant(f"{mixer}.dt_bias", (value_heads,), 0.0),
                # Decay rates of one part in 700 to one in 7 a token: the state remembers far beyond one block.
                _log_uniform(f"{mixer}.A_log", value_heads, 0.002, 0.2),
                _constant(f"{mixer}.norm.weight", (state_size,), 1.0),
                _linear(f"{mixer}.out_proj", HIDDEN_SIZE, value_size, gain=2.0),
            ]
        else:
            attention = f"{prefix}.self_attn"
            parameters += [
                _linear(f"{attention}.q_proj", 2 * num_heads * head_size, HIDDEN_SIZE),  # queries and output gates
                _linear(f"{attention}.k_proj", num_kv_heads * head_size, HIDDEN_SIZE),
                _linear(f"{attention}.v_proj", num_kv_heads * head_size, HIDDEN_SIZE),
                _linear(f"{attention}.o_proj", HIDDEN_SIZE, num_heads * head_size, gain=4.0),
                _constant(f"{attention}.q_norm.weight", (head_size,), 1.0),
                _constant(f"{attention}.k_norm.weight", (head_size,), 0.5),
            ]
    parameters.append(_constant("model.norm.weight", (HIDDEN_SIZE,), 0.0))
    return config, parameters


def _gemma3() -> _Model:
    num_layers, interval, intermediate_size = 6, 6, 256
    num_heads, num_kv_heads, head_size = 4, 2, 32
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": num_layers,
        "layer_types": [
            "sliding_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
        ],
        "sliding_window": 256,
        "intermediate_size": intermediate_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "query_pre_attn_scalar": head_size,
        "attention_bias": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    # This model scales embeddings by the root of the hidden size; undo it. Its norms multiply by one plus the weight.
    parameters = [
        _normal("model.embed_tokens.weight", (VOCABULARY_SIZE, HIDDEN_SIZE), 1.0 / math.sqrt(HIDDEN_SIZE)),
        _linear("lm_head", VOCABULARY_SIZE, HIDDEN_SIZE, gain=2.0),
    ]
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            parameters.append(_constant(f"{prefix}.{norm}.weight", (HIDDEN_SIZE,), 0.0))
        parameters.extend(_dense_mlp(f"{prefix}.mlp", intermediate_size))
        attention = f"{prefix}.self_attn"
        parameters += [
            _linear(f"{attention}.q_proj", num_heads * head_size, HIDDEN_SIZE),
            _linear(f"{attention}.k_proj", num_kv_heads * head_size, HIDDEN_SIZE),
            _linear(f"{attention}.v_proj", num_kv_heads * head_size, HIDDEN_SIZE),
            _linear(f"{attention}.o_proj", HIDDEN_SIZE, num_heads * head_size),
            _constant(f"{attention}.q_norm.weight", (head_size,), 1.0),
            _constant(f"{attention}.k_norm.weight", (head_size,), 0.5),
        ]
    parameters.append(_constant("model.norm.weight", (HIDDEN_SIZE,), 0.0))
    return config, parameters


def _gpt_oss() -> _Model:
    num_layers, intermediate_size, num_experts = 2, 128, 4
    num_heads, num_kv_heads, head_size = 4, 2, 32
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": num_layers,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 256,
        "intermediate_size": intermediate_size,
        "hidden_act": "silu",
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "attention_bias": True,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "original_max_position_embeddings": MAX_POSITIONS // 2,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    }
    parameters = list(_embeddings())
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        parameters.append(_constant(f"{prefix}.input_layernorm.weight", (HIDDEN_SIZE,), 1.0))
        parameters.append(_constant(f"{prefix}.post_attention_layernorm.weight", (HIDDEN_SIZE,), 1.0))
        attention, experts = f"{prefix}.self_attn", f"{prefix}.mlp.experts"
        for projection, outputs, gain in (
            ("q_proj", num_heads * head_size, 2.0),
            ("k_proj", num_kv_heads * head_size, 1.5),
            ("v_proj", num_kv_heads * head_size, 1.0),
        ):
            parameters.append(_linear(f"{attention}.{projection}", outputs, HIDDEN_SIZE, gain))
            parameters.append(_normal(f"{attention}.{projection}.bias", (outputs,), 0.1))
        parameters += [
            _linear(f"{attention}.o_proj", HIDDEN_SIZE, num_heads * head_size, gain=4.0),
            _normal(f"{attention}.o_proj.bias", (HIDDEN_SIZE,), 0.1),
            _normal(f"{attention}.sinks", (num_heads,), 0.5),
            _linear(f"{prefix}.mlp.router", num_experts, HIDDEN_SIZE),
            _normal(f"{prefix}.mlp.router.bias", (num_experts,), 0.1),
            # Expert matrices are stored input-first, gate and up interleaved.
            _normal(f"{experts}.gate_up_proj", (num_experts, HIDDEN_SIZE, 2 * intermediate_size), HIDDEN_SIZE**-0.5),
            _normal(f"{experts}.gate_up_proj_bias", (num_experts, 2 * intermediate_size), 0.1),
            _normal(f"{experts}.down_proj", (num_experts, intermediate_size, HIDDEN_SIZE), intermediate_size**-0.5),
            _normal(f"{experts}.down_proj_bias", (num_experts, HIDDEN_SIZE), 0.1),
        ]
    parameters.append(_constant("model.norm.weight", (HIDDEN_SIZE,), 1.0))
    return config, parameters


_BUILDERS: Final[dict[str, Callable[[], _Model]]] = {
    "qwen3-next": _qwen3_next,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
}


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: python {sys.argv[0]} {'|'.join(KINDS)} DIRECTORY")
    make_tiny_model(sys.argv[1], Path(sys.argv[2]))
