"""The families of models in the zoo, each with the sizes of a tiny model and the expected result."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import refused_models
from checkpoints import HIDDEN_SIZE, Scales, write_checkpoint

import tiny_models

PROMPT_TOKENS: Final = (258, 514)
"""Each leaves less than a block behind the last chunk, so that the own hit of the engine ends where ours does; and
so little that a short convolution, which remembers two tokens, still sees what lies before the hit."""
HIT_TOKENS: Final = (256, 512)
ANSWER_TOKENS: Final = 128
"""With the first prompt, three chunks and a rest that is less than a block."""

_ARGUMENTS: Final[dict[str, Any]] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "seed": 0,
}


class Resumable(enum.Enum):
    """Whether and where a prefix of the family may be resumed."""

    EVERYWHERE = "everywhere"
    WITH_AMX = "with AMX"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table.

    Attributes:
        name: names the test.
        title: names the row.
        write: writes the checkpoint to a directory.
        arguments: of the engine.
        resumable: where its prefixes may be resumed; elsewhere the engine must not start with the connector.
        needs_mamba2: it only runs on the CPU build with `mamba2_cpu`.
        refusal: words of the error where it is not.
        note: what a reader must know of the model.
        needs: arguments of the engine without which plain vLLM answers otherwise in other steps, over `arguments`.
        names_machine: its refusal names what the machine has.
    """

    name: str
    title: str
    write: Callable[[Path], object]
    arguments: dict[str, Any] = field(default_factory=lambda: _ARGUMENTS)
    resumable: Resumable = Resumable.EVERYWHERE
    needs_mamba2: bool = False
    refusal: str = ""
    note: str = ""
    names_machine: bool = False
    needs: dict[str, Any] = field(default_factory=dict)

    def served_here(self, has_amx: bool) -> bool:
        """Whether the connector must serve the family on this machine; otherwise it must refuse it."""
        return self.resumable is Resumable.EVERYWHERE or (self.resumable is Resumable.WITH_AMX and has_amx)


def _from_transformers(model_type: str, scales: Scales | None = None, **settings: Any) -> Callable[[Path], object]:
    return lambda directory: write_checkpoint(model_type, settings, scales or Scales(), directory)


def _write_whisper(directory: Path) -> None:
    """With the tokenizer and the processor that vLLM insists on before it asks the connector."""
    from transformers import WhisperFeatureExtractor

    settings = {
        "d_model": HIDDEN_SIZE,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "decoder_start_token_id": 3,
        "max_target_positions": 448,
    }
    write_checkpoint("whisper", settings, Scales(), directory)
    WhisperFeatureExtractor().save_pretrained(directory)
    tiny_models.write_tokenizer(directory)


_WINDOW: Final = 96
_THREE_TO_ONE: Final = [*["sliding_attention"] * 3, "full_attention"]
_SHARING: Final = [*_THREE_TO_ONE, "sliding_attention", "full_attention"]
_SCALED: Final = HIDDEN_SIZE**-0.5
"""Deviation of embeddings that the family multiplies by the root of the hidden size."""
# A whole prompt in one step, so that its state is saved on the way: see mamba2_cpu.
_MAMBA2: Final[dict[str, Any]] = _ARGUMENTS | {
    "block_size": 64,
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": 128,
}
_MAMBA2_NOTE: Final = "with the scan that vLLM's CPU build lacks"
_MLA_SIZES: Final[dict[str, Any]] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 3,
}

_NO_ROTARY_KERNEL: Final[dict[str, Any]] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""vLLM's kernel for CPUs uses the last stride but one as the stride of a token. Some models pass it tensors of tokens,
heads and numbers, where that is the stride of a head.
"""

FAMILIES: Final[tuple[Family, ...]] = (
    Family("llama", "Llama", _from_transformers("llama")),
    Family(
        "mistral",
        "Mistral",
        _from_transformers("mistral", sliding_window=_WINDOW),
        note="every layer has a window",
    ),
    Family(
        "gemma-2",
        "Gemma 2",
        _from_transformers(
            "gemma2",
            Scales(norm=0.0, embedding=_SCALED, final=2.0),
            sliding_window=_WINDOW,
            query_pre_attn_scalar=32,
            tie_word_embeddings=True,
        ),
    ),
    Family(
        "gemma-3",
        "Gemma 3",
        _from_transformers(
            "gemma3_text",
            Scales(norm=0.0, embedding=_SCALED),
            num_hidden_layers=4,
            layer_types=_THREE_TO_ONE,
            sliding_window=_WINDOW,
            query_pre_attn_scalar=32,
        ),
    ),
    Family(
        "gemma-3n",
        "Gemma 3n",
        _from_transformers(
            "gemma3n_text",
            Scales(embedding=_SCALED, final=3.0),
            num_hidden_layers=6,
            intermediate_size=[256] * 6,
            layer_types=_SHARING,
            sliding_window=_WINDOW,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=tiny_models.VOCABULARY_SIZE,
            laurel_rank=16,
            activation_sparsity_pattern=[0.0] * 6,
            altup_num_inputs=2,
            tie_word_embeddings=True,
        ),
        note="two layers read the KV of others",
    ),
    Family(
        "gemma-4",
        "Gemma 4",
        _from_transformers(
            "gemma4_text",
            Scales(embedding=_SCALED),
            num_hidden_layers=6,
            layer_types=_SHARING,
            sliding_window=_WINDOW,
            global_head_dim=64,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=tiny_models.VOCABULARY_SIZE,
        ),
        note="two layers read the KV of others; full layers have larger heads, so blocks differ in size",
    ),
    Family(
        "cohere2",
        "Cohere2",
        _from_transformers(
            "cohere2", num_hidden_layers=4, sliding_window=_WINDOW, tie_word_embeddings=True, logit_scale=0.2
        ),
    ),
    Family(
        "exaone-4",
        "EXAONE 4",
        _from_transformers("exaone4", num_hidden_layers=4, sliding_window=_WINDOW, sliding_window_pattern=4),
    ),
    Family(
        "llama-4",
        "Llama 4",
        _from_transformers(
            "llama4_text",
            num_hidden_layers=4,
            attention_chunk_size=96,
            no_rope_layers=[1, 1, 1, 0],
            interleave_moe_layer_step=0,
            moe_layers=[],
            intermediate_size_mlp=256,
            num_local_experts=1,
        ),
        note="three of four layers attend within chunks of 96 tokens; dense",
    ),
    Family(
        "gpt-oss",
        "gpt-oss",
        lambda directory: tiny_models.make_tiny_model("gpt-oss", directory),
        note="sinks; a mixture of experts",
    ),
    Family(
        "lfm2",
        "LFM2",
        _from_transformers(
            "lfm2",
            num_hidden_layers=4,
            layer_types=["conv", "full_attention", "conv", "conv"],
            conv_dim=HIDDEN_SIZE,
            conv_dim_out=HIDDEN_SIZE,
            block_dim=HIDDEN_SIZE,
            block_ff_dim=256,
            block_auto_adjust_ff_dim=False,
        ),
        note="states are of short convolutions; without vLLM's kernel for rotary embeddings, see below",
        needs=_NO_ROTARY_KERNEL,
    ),
    Family(
        "qwen3-next",
        "Qwen3-Next",
        lambda directory: tiny_models.make_tiny_model("qwen3-next", directory),
        _ARGUMENTS | {"dtype": "bfloat16", "block_size": 128, "num_gpu_blocks_override": 128},
        note="in bfloat16",
    ),
    Family(
        "granite-4",
        "Granite 4",
        _from_transformers(
            "granitemoehybrid",
            num_hidden_layers=4,
            layer_types=["mamba", "mamba", "attention", "mamba"],
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=256,
            mamba_n_heads=4,
            mamba_d_head=64,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_expand=2,
            mamba_chunk_size=32,
        ),
        _MAMBA2,
        needs_mamba2=True,
        note=_MAMBA2_NOTE,
    ),
    Family(
        "nemotron-h",
        "Nemotron-H",
        _from_transformers(
            "nemotron_h",
            layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"],
            mamba_num_heads=4,
            mamba_head_dim=64,
            ssm_state_size=16,
            n_groups=1,
            expand=2,
            chunk_size=32,
        ),
        _MAMBA2,
        needs_mamba2=True,
        note=_MAMBA2_NOTE,
    ),
    Family(
        "falcon-h1",
        "Falcon-H1",
        _from_transformers(
            "falcon_h1",
            mamba_d_ssm=256,
            mamba_n_heads=4,
            mamba_d_head=64,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=32,
        ),
        _MAMBA2,
        needs_mamba2=True,
        note=_MAMBA2_NOTE,
    ),
    Family(
        "zamba2",
        "Zamba2",
        _from_transformers(
            "zamba2",
            num_hidden_layers=4,
            num_key_value_heads=4,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            mamba_d_state=16,
            mamba_ngroups=1,
            n_mamba_heads=4,
            mamba_expand=2,
            num_mem_blocks=1,
            attention_head_dim=64,
            attention_hidden_size=256,
            chunk_size=32,
            adapter_rank=16,
        ),
        _MAMBA2,
        needs_mamba2=True,
        note=_MAMBA2_NOTE,
    ),
    Family(
        "mla",
        "DeepSeek-V3 (MLA)",
        _from_transformers("deepseek_v3", **_MLA_SIZES),
        _ARGUMENTS | {"dtype": "bfloat16"},
        resumable=Resumable.WITH_AMX,
        refusal="without AMX",
        note="dense",
        needs=_NO_ROTARY_KERNEL,
    ),
    Family(
        "mla-reference",
        "DeepSeek-V3 (MLA), `--attention-backend CPU_MLA`",
        _from_transformers("deepseek_v3", **_MLA_SIZES),
        _ARGUMENTS | {"block_size": 16, "attention_backend": "CPU_MLA"},
        resumable=Resumable.NOWHERE,
        refusal="CPU_MLA",
        note="dense",
        names_machine=True,
    ),
    Family(
        "prefix-lm",
        "HRM-Text (prefix-LM)",
        lambda directory: refused_models.make_model("prefix-lm", directory),
        _ARGUMENTS | {"max_num_batched_tokens": 1024},
        resumable=Resumable.NOWHERE,
        refusal="non_causal",
        note="the prompt attends in both directions",
    ),
    Family(
        "whisper",
        "Whisper",
        _write_whisper,
        _ARGUMENTS | {"max_model_len": 448, "max_num_batched_tokens": 2048, "skip_tokenizer_init": False},
        resumable=Resumable.NOWHERE,
        refusal="CrossAttentionSpec",
        note="an encoder and a decoder",
    ),
)
