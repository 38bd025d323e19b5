"""What the bytes of one layer's page depend on, of the layer's KVCacheSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common.identity.fact_text import parts, text

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

SPEC_LEFT_OUT = {
    "block_size": "each group says it, in tokens of a block",
    "page_size_padded": "padding is not stored",
    "block_stride_alignment": "where pages lie, not what they hold",
}
"""Fields of a spec that are no facts, each with its reason."""


def spec_facts(spec: KVCacheSpec) -> dict[str, str]:
    """Every field of a spec but those that say only where its pages lie.

    Raises:
        ConfigurationError: a field's value is of a type that has no canonical text.
    """
    kind = type(spec).__name__
    members = parts(spec) or {}
    facts = {name: text(f"{kind}.{name}", value) for name, value in members.items() if name not in SPEC_LEFT_OUT}
    return {"spec": kind} | facts
