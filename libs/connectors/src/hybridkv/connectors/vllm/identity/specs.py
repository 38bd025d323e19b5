"""What the bytes of one layer's page depend on, of the layer's KVCacheSpec."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.identity.canonical import text

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


def spec_facts(spec: KVCacheSpec) -> dict[str, str]:
    """Every field of a spec but those that say only where its pages lie."""
    facts = {field.name: text(field.name, getattr(spec, field.name)) for field in fields(spec)}
    return {"type": type(spec).__name__} | {name: value for name, value in facts.items() if name not in LEFT_OUT}


LEFT_OUT = {
    "page_size_padded": "padding is not stored",
}
