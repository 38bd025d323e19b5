"""Facts of the engine's configuration: every field, except the fields that `excluded.py` lists with a reason.

The objects are read after the engine is built, so overrides and defaults are applied. A field that is not on the list
is a fact, also a new field of a newer engine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm.common.identity.excluded import (
    EXCLUDED_FIELDS,
    EXCLUDED_FIELDS_OF_OTHER_VERSIONS,
    SECRET,
    is_named,
)
from hybridkv.connectors.vllm.common.identity.fact_text import (
    child,
    is_model_settings,
    model_settings,
    parts,
    secret_text,
    text,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

INDEPENDENT = frozenset(
    {
        "default",
        "mrope",
        "linear",
        "llama3",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
        "ntk",
        "proportional",
        "mllama4",
        "bailing_mrope",
        "openpangu",
    }
)
"""Types of rotary embeddings with angles that depend only on the parameters of the embedding and on the position."""
LONG = ("longrope", "su")
LLAMA4_TUNED_TOKENS = 32768


def length_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """Facts that models derive from `max_model_len`, for the model and for its drafter."""
    model = vllm_config.model_config
    facts = dict(_facts("model_config", model, (model.max_model_len,)))
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft is not model:
        # A layer of the drafter may read the length of the drafter's or of the model's configuration.
        lengths = (draft.max_model_len, model.max_model_len)
        facts |= dict(_facts("speculative_config.draft_model_config", draft, lengths))
    return facts


def _facts(path: str, model: ModelConfig, lengths: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    settings = _settings(model.hf_config)
    ropes = list(_ropes(settings))
    kinds = {_kind(rope) for rope, _ in ropes}
    originals = [(_original(rope, of), _kind(rope)) for rope, of in ropes]
    longs = sorted({original for original, kind in originals if kind in LONG and original is not None})
    is_unknown = any(kind not in INDEPENDENT and (kind not in LONG or not original) for original, kind in originals)
    if is_unknown or "dual_chunk_attention_config" in settings:
        yield f"{path}.max_model_len", text(path, list(lengths))
    if kinds & set(LONG):
        yield f"{path}.is_longrope_long", text(path, [[length > original for original in longs] for length in lengths])
    if "llama4" in str(settings.get("model_type")) or any("Llama4" in str(name) for name in _architectures(settings)):
        yield f"{path}.is_llama4_tuned", text(path, [length > LLAMA4_TUNED_TOKENS for length in lengths])
    override = getattr(model, "override_generation_config", None) or {}
    if "attn_temperature_tuning" in override:
        yield f"{path}.attn_temperature_tuning", text(path, override["attn_temperature_tuning"])


def _settings(hf_config: Any) -> dict[str, Any]:
    found: dict[str, Any] = hf_config.to_dict()
    return found


def _architectures(settings: Mapping[str, Any]) -> list[Any]:
    return list(settings.get("architectures") or ())


def _ropes(settings: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Parameters of every rotary embedding of a model, each with the configuration that contains the parameters."""
    for key, value in settings.items():
        if not isinstance(value, Mapping):
            continue
        if key in ("rope_parameters", "rope_scaling"):
            # Layers of different kinds may have separate parameters.
            by_layer = [inner for inner in value.values() if isinstance(inner, Mapping)]
            for rope in by_layer or [value]:
                yield rope, settings
        else:
            yield from _ropes(value)


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _original(rope: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    name = "original_max_position_embeddings"
    found = rope.get(name, settings.get(name))
    return found if isinstance(found, int) else None


MAX_KEYS = 64
"""Maximum keys of a mapping with one fact for each key; a larger mapping is one fact."""
IGNORED = "ignored"


def configuration_facts(vllm_config: VllmConfig, ignored: Sequence[str] = ()) -> dict[str, str]:
    """Every field of the final configuration that is not excluded, recursively, by its dotted path.

    A fact in `ignored` gets the text `IGNORED`, so that a value without canonical text causes no error.

    Raises:
        ConfigurationError: a value has a type without canonical text.
    """
    facts = dict(_Walk(ignored).visit("", "", vllm_config))
    # `quant_config` also collects data while weights are loaded, so only its class is a fact. Its settings are other
    # facts.
    facts["quantization.method"] = text("quant_config", vllm_config.quant_config and type(vllm_config.quant_config))
    return facts | length_facts(vllm_config)


@functools.cache
def field_exclusion_reason(scope: str) -> str | None:
    """Reason why a field is not in the fingerprint; None if the field is in it. `scope`: class and field, such as
    `ModelConfig.tokenizer`."""
    for reasons in (EXCLUDED_FIELDS, EXCLUDED_FIELDS_OF_OTHER_VERSIONS):
        if scope in reasons:
            return reasons[scope]
        for pattern, reason in reasons.items():
            if pattern.endswith("*") and fnmatchcase(scope, pattern):
                return reason
    return None


class _Walk:
    """One traversal. If an object occurs again, such as the target's configuration in the drafter's, the second
    occurrence is one fact."""

    def __init__(self, ignored: Sequence[str]) -> None:
        self._ignored = ignored
        self._visited: dict[int, str] = {}

    def visit(self, path: str, scope: str, value: Any) -> Iterator[tuple[str, str]]:
        """Facts of the value at `path`. `scope`: the path from the innermost object, which begins with its class."""
        if path and field_exclusion_reason(scope) is not None:
            return
        if path and any(is_named(pattern, path) for pattern in self._ignored):
            yield path, IGNORED
        elif scope in SECRET:
            yield path, secret_text(path, value)
        elif is_model_settings(value):
            yield from self._object(path, value, lambda: self._model(path, value))
        elif (members := parts(value)) is not None:
            name = type(value).__name__
            yield from self._object(path, value, lambda: self._all(path, name, members))
        elif isinstance(value, Mapping) and 0 < len(value) <= MAX_KEYS:
            yield from self._all(path, scope, value)
        else:
            yield path, text(path, value)

    def _object(self, path: str, value: Any, inside: Any) -> Iterator[tuple[str, str]]:
        former = self._visited.setdefault(id(value), path)
        if former != path:
            yield path, f"the same as {former}"
            return
        if path:
            yield path, type(value).__name__
        yield from inside()

    def _all(self, path: str, scope: str, members: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
        for key, value in members.items():
            yield from self.visit(child(path, key), child(scope, key), value)

    def _model(self, path: str, value: Any) -> Iterator[tuple[str, str]]:
        settings = model_settings(path, value)
        self._visit_nested(path, value, settings)
        yield from self._all(path, "PreTrainedConfig", settings)

    def _visit_nested(self, path: str, value: Any, settings: Mapping[str, Any]) -> None:
        """Records nested configurations as visited, because the engine also has separate fields for them."""
        for name, inner in vars(value).items():
            if is_model_settings(inner) and id(inner) not in self._visited and isinstance(settings.get(name), Mapping):
                self._visited[id(inner)] = child(path, name)
                self._visit_nested(child(path, name), inner, settings[name])


EXCLUDED_SPEC_FIELDS = {
    "block_size": "each group has it, in tokens of a block",
    "page_size_padded": "padding is not stored",
    "block_stride_alignment": "the place of pages, not their content",
}
"""Fields of a spec that are not in the fingerprint, each with its reason."""


def spec_facts(spec: KVCacheSpec) -> dict[str, str]:
    """Every field of a spec, and the name of its class, without `EXCLUDED_SPEC_FIELDS`.

    Raises:
        ConfigurationError: a field's value has a type without canonical text.
    """
    kind = type(spec).__name__
    members = parts(spec) or {}
    facts = {name: text(f"{kind}.{name}", value) for name, value in members.items() if name not in EXCLUDED_SPEC_FIELDS}
    return {"spec": kind} | facts
