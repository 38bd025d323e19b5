"""What models read out of `max_model_len`, which is no fact itself: engines of different lengths may share a cache.

Three things hang on it. LongRoPE takes its long factors where the length exceeds the original one
(`Phi3LongRoPEScaledRotaryEmbedding`); Llama 4 turns its attention's temperature on above 32,768 tokens; and of a rotary
embedding that is not known to be independent of the length the length itself counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm.identity.canonical import text

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

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
