"""Facts of the engine's configuration: every field of it but those that a list leaves out, each with its reason.

The objects are read as they are once the engine is built, after overrides and defaults; nobody's constructor is asked
what it was given. What is not on the list is in, so a field that a newer engine brings is in as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm.common.identity.fact_text import (
    child,
    is_model_settings,
    model_settings,
    parts,
    secret_text,
    text,
)
from hybridkv.connectors.vllm.common.identity.ignored import LEFT_OUT, LEFT_OUT_ELSEWHERE, SECRET, is_named

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
"""Types of rotary embedding whose angles follow from their own parameters and the position."""
LONG = ("longrope", "su")
LLAMA4_TUNED_TOKENS = 32768


def length_facts(vllm_config: VllmConfig) -> dict[str, str]:
    """Facts of `max_model_len`, for the model and for its drafter."""
    model = vllm_config.model_config
    facts = dict(_facts("model_config", model, (model.max_model_len,)))
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft is not model:
        # A layer of the drafter reads the length of the current configuration, which is now one, now the other.
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
    """The parameters of every rotary embedding of a model, and the configuration that each is in."""
    for key, value in settings.items():
        if not isinstance(value, Mapping):
            continue
        if key in ("rope_parameters", "rope_scaling"):
            # Of layers of several kinds each kind may have its own.
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
"""Keys of a mapping that get a fact each; a larger one is one fact."""
IGNORED = "ignored"


def configuration_facts(vllm_config: VllmConfig, ignored: Sequence[str] = ()) -> dict[str, str]:
    """Every field of the final configuration, recursively, by its dotted path.

    Of what the operator ignores only the name is there, so that a value without canonical text is no obstacle.

    Raises:
        ConfigurationError: a value is of a type that has no canonical text.
    """
    facts = dict(_Walk(ignored).visit("", "", vllm_config))
    # The object itself collects what happens while weights are loaded; what it was made of is in.
    facts["quantization.method"] = text("quant_config", vllm_config.quant_config and type(vllm_config.quant_config))
    return facts | length_facts(vllm_config)


@functools.cache
def reason_left_out(scope: str) -> str | None:
    """Why a field is no fact, if it is none. It is called by the class that has it, such as `ModelConfig.tokenizer`."""
    for reasons in (LEFT_OUT, LEFT_OUT_ELSEWHERE):
        if scope in reasons:
            return reasons[scope]
        for pattern, reason in reasons.items():
            if pattern.endswith("*") and fnmatchcase(scope, pattern):
                return reason
    return None


class _Walk:
    """One walk. What is met a second time, such as the target's configuration in the drafter's, is named, not told."""

    def __init__(self, ignored: Sequence[str]) -> None:
        self._ignored = ignored
        self._met: dict[int, str] = {}

    def visit(self, path: str, scope: str, value: Any) -> Iterator[tuple[str, str]]:
        """The facts of a value at a path; `scope` is the path from the innermost object on, by its class."""
        if path and reason_left_out(scope) is not None:
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
        former = self._met.setdefault(id(value), path)
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
        told = model_settings(path, value)
        self._meet_inner(path, value, told)
        yield from self._all(path, "PreTrainedConfig", told)

    def _meet_inner(self, path: str, value: Any, told: Mapping[str, Any]) -> None:
        """A model's configuration tells those inside it, which the engine keeps in fields of their own, too."""
        for name, inner in vars(value).items():
            if is_model_settings(inner) and id(inner) not in self._met and isinstance(told.get(name), Mapping):
                self._met[id(inner)] = child(path, name)
                self._meet_inner(child(path, name), inner, told[name])


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
