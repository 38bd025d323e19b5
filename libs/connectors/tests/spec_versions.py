"""KV cache specs of vLLM 0.30 to 0.33 and their fields, as read in each version's kv_cache_interface.py.

A field or class exists in all versions unless a span says otherwise: "0.31-" from 0.31 on, "-0.31" up to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

VERSIONS = ("0.30", "0.31", "0.32", "0.33")


@dataclass(frozen=True, slots=True)
class Declared:
    """Class with its parent, its own fields with their spans, and its own span."""

    parent: str | None
    fields: dict[str, str] = field(default_factory=dict)
    span: str = ""


def _all(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")


DECLARED: dict[str, Declared] = {
    "KVCacheSpec": Declared(
        None, _all("block_size") | {"dcp_sharded": "0.31-", "block_stride_alignment": "0.31-", "is_draft": "0.33-"}
    ),
    "HiSparseHotSpec": Declared("KVCacheSpec", _all("page_size", "blocks_per_request")),
    "HiSparseResidentSpec": Declared("KVCacheSpec", _all("page_size")),
    "AttentionSpec": Declared(
        "KVCacheSpec",
        _all(
            "num_kv_heads",
            "head_size",
            "dtype",
            "head_size_v",
            "kv_quant_mode",
            "page_size_padded",
            "num_head_slots",
            "state_content_bytes",
            "tokens_per_state",
        )
        | {"dcp_sharded": "0.31-", "max_tp_shards": "0.31-"},
    ),
    "FullAttentionSpec": Declared("AttentionSpec", _all("sliding_window", "attention_chunk_size", "non_causal")),
    "MLAAttentionSpec": Declared(
        "FullAttentionSpec",
        _all(
            "cache_dtype_str",
            "alignment",
            "model_version",
            "cache_role",
            "is_index_group_leader",
            "non_causal_multi_token_decode",
            "head_size_v",
        )
        | {"storage_block_size": "-0.31", "topk_buffer_width": "0.33-"},
    ),
    "HiddenStateCacheSpec": Declared("MLAAttentionSpec"),
    "RSWASpec": Declared("FullAttentionSpec", _all("rswa_window")),
    "ChunkedLocalAttentionSpec": Declared("AttentionSpec", _all("attention_chunk_size")),
    "SlidingWindowSpec": Declared("AttentionSpec", _all("sliding_window", "extra_retained_tokens")),
    "CircularBufferSpec": Declared("AttentionSpec"),
    "SlidingWindowMLASpec": Declared(
        "SlidingWindowSpec",
        _all("cache_dtype_str", "alignment", "model_version", "head_size_v") | {"bounded_replay": "0.31-"},
    ),
    "KpoolTailSpec": Declared("SlidingWindowSpec", span="-0.31"),
    "MambaSpec": Declared(
        "KVCacheSpec",
        _all(
            "shapes",
            "dtypes",
            "page_size_padded",
            "mamba_type",
            "mamba_cache_mode",
            "num_speculative_blocks",
            "num_prefill_checkpoint_blocks",
            "prefill_checkpoint_alignment",
            "num_heads",
            "tokens_per_state",
            "tp_replicated",
        ),
    ),
    "EncoderOnlyAttentionSpec": Declared("AttentionSpec"),
    "CrossAttentionSpec": Declared("AttentionSpec"),
    "SinkFullAttentionSpec": Declared("FullAttentionSpec", _all("sink_len")),
    "UniformTypeKVCacheSpecs": Declared("KVCacheSpec", _all("kv_cache_specs")),
}

GROUP_FIELDS = frozenset(
    ("layer_names", "kv_cache_spec", "is_eagle_group", "host_resident", "enable_kv_transfer", "role")
)
"""Fields of KVCacheGroupSpec, the same in all four versions."""


def _is_in(span: str, version: str) -> bool:
    first, _, last = span.partition("-")
    return (not first or version >= first) and (not last or version <= last)


def classes_of(version: str) -> dict[str, Declared]:
    """Classes of one version, each with the fields that it declares itself."""
    return {
        name: Declared(each.parent, {f: "" for f, span in each.fields.items() if _is_in(span, version)})
        for name, each in DECLARED.items()
        if _is_in(each.span, version)
    }


def fields_of(name: str) -> dict[str, str]:
    """Every field of a class in any version, including inherited ones, mapped to the declaring class."""
    found: dict[str, str] = {}
    owner: str | None = name
    while owner is not None:
        found = dict.fromkeys(DECLARED[owner].fields, owner) | found
        owner = DECLARED[owner].parent
    return found
