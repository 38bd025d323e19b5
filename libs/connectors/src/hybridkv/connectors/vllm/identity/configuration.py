"""Facts of the engine's configuration: every field of it but those that a list leaves out, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm.identity.canonical import text
from hybridkv.connectors.vllm.identity.operator import names

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LEFT_OUT = {
    "model_config": "skeleton",
    "instance_id": "names the engine",
    "kv_transfer_config": "what a store does with the bytes",
    "compilation_config": "skeleton",
}


def configuration_facts(vllm_config: VllmConfig, ignored: Sequence[str] = ()) -> dict[str, str]:
    """Every field of the final configuration, recursively, by its dotted path.

    Of what the operator ignores only the name is there, so that a value without canonical text is no obstacle.
    """
    return dict(_walk("", vllm_config, ignored))


def _walk(path: str, node: Any, ignored: Sequence[str]) -> Iterator[tuple[str, str]]:
    for field in fields(node):
        at = f"{path}.{field.name}" if path else field.name
        if any(names(pattern, at) for pattern in LEFT_OUT):
            continue
        if any(names(pattern, at) for pattern in ignored):
            yield at, "ignored"
            continue
        value = getattr(node, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _walk(at, value, ignored)
        else:
            yield at, text(at, value)
