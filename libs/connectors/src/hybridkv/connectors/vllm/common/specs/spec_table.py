"""Table of vLLM's KV cache specs, with the field values under which a stored prefix can be resumed.

The table has one entry for each spec class of vLLM 0.30 to 0.33 and one for each field of a class, from the engine's
source. It contains only names and imports no engine. `layout.py` defines the content of a group of each spec.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any


def _any(value: object) -> bool:
    return True


def _never(value: object) -> bool:
    return False


def _named(*names: str) -> Callable[[object], bool]:
    """Accepts enumeration members and texts by name. Other values, which later versions may add, are refused."""
    return lambda value: (value.name if isinstance(value, enum.Enum) else value) in names


def _whole(value: object) -> bool:
    return isinstance(value, int) and value >= 1


@dataclass(frozen=True, slots=True)
class FieldRule:
    """A known field of a spec.

    Args:
        why: reason why the field's values are accepted or refused.
        accepts: whether a prefix can be resumed with a value other than the default.
        unfit_default: the default, if no prefix can be resumed with the default; else "".
        hint: next step for the operator after a refusal; "": start without hybridkv.
    """

    why: str
    accepts: Callable[[object], bool] = _any
    unfit_default: str = ""
    hint: str = ""

    @property
    def lists_values(self) -> bool:
        """Whether only some values are accepted. Then other values are unknown, and `why` describes the accepted
        values."""
        return self.accepts not in (_any, _never)


@dataclass(frozen=True, slots=True)
class SpecClass:
    """A known spec class.

    Args:
        parent: known class from which this class inherits fields.
        field_rules: own fields of the class, each with its rule.
        refused: reason why no group of this class can be resumed; "" if groups can.
        needs_scratch: the class is accepted only in groups that are not prefix-cacheable.
    """

    parent: str | None = None
    field_rules: Mapping[str, FieldRule] = field(default_factory=dict)
    refused: str = ""
    needs_scratch: bool = False


_SIZE = FieldRule("a size: it is part of the keys")
_PLACE = FieldRule("the place of a page, not its content")
_LABEL = FieldRule("a label for the engine's own planning")
_NON_CAUSAL = FieldRule("the layers attend in both directions, so the KV of a prefix depends on later tokens", _never)
_SHARDED = FieldRule("how ranks of decode context parallelism share tokens; that layout is refused separately")
_REPLAY = FieldRule(
    "the engine recomputes the last window of a hit, which is untested with a store",
    _never,
    hint="start with --no-swa-bounded-replay",
)
_DRAFT = FieldRule(
    # Only one model sets this field. Its drafter makes the keys and values of a position from the target's hidden state
    # at the same position. Only the drafts after the accepted tokens attend in both directions, and they are rewritten.
    "a drafter's layers attend in both directions among the drafts, which are never stored; outside a drafter's group "
    "the meaning is unknown",
    hint="start without disable_eagle_block_drop, if it is set; else without hybridkv",
)
_QUANT_MODES = _named(
    "FP8_PER_TENSOR",
    "INT8_PER_TOKEN_HEAD",
    "FP8_PER_TOKEN_HEAD",
    "INT4_PER_TOKEN_HEAD",
    "NVFP4",
    "TURBOQUANT_K8V4",
    "TURBOQUANT_4BIT_NC",
    "TURBOQUANT_K3V4_NC",
    "TURBOQUANT_3BIT_NC",
    "NVFP4_DS_MLA",
    "ULTRAQUANT_4BIT",
)
_TRANSFER_REPLICA = "an accelerator's replica of another group, filled by the engine alone"

KNOWN: Mapping[str, SpecClass] = {
    "KVCacheSpec": SpecClass(
        field_rules={
            "block_size": _SIZE,
            "dcp_sharded": _SHARDED,
            "block_stride_alignment": _PLACE,
            "is_draft": _LABEL,
        },
        refused="it is a base class, which does not define the content of a block",
    ),
    "AttentionSpec": SpecClass(
        "KVCacheSpec",
        {
            "max_tp_shards": FieldRule("how many ranks hold different bytes; each rank stores its own"),
            "num_kv_heads": _SIZE,
            "head_size": _SIZE,
            "head_size_v": _SIZE,
            "dtype": FieldRule("part of the keys"),
            "kv_quant_mode": FieldRule(
                "quantization with scales in the page or in the weights",
                _QUANT_MODES,
                hint="start with another --kv-cache-dtype",
            ),
            "page_size_padded": _PLACE,
            "num_head_slots": _SIZE,
            "state_content_bytes": _SIZE,
            "tokens_per_state": FieldRule(
                "whole tokens compressed into one state; parts of a token are untested", _whole
            ),
            "dcp_sharded": _SHARDED,
        },
        refused="it is a base class, which does not define the content of a block",
    ),
    "FullAttentionSpec": SpecClass(
        "AttentionSpec",
        {
            "sliding_window": FieldRule("the layers see less than the group keeps"),
            "attention_chunk_size": FieldRule("the layers see less than the group keeps"),
            "non_causal": _NON_CAUSAL,
        },
    ),
    "MLAAttentionSpec": SpecClass(
        "FullAttentionSpec",
        {
            "cache_dtype_str": FieldRule("how an entry is packed: part of the keys"),
            "alignment": _PLACE,
            "model_version": FieldRule("how an entry is packed", _named("deepseek_v4")),
            "cache_role": FieldRule(
                "latents or an indexer's keys, both of the tokens before", _named("SPARSE", "INDEXER")
            ),
            "is_index_group_leader": FieldRule("other layers use its choice of tokens, made again in every step"),
            "storage_block_size": _PLACE,
            "non_causal_multi_token_decode": _DRAFT,
            "head_size_v": _SIZE,
            "topk_buffer_width": FieldRule("a buffer of one step"),
        },
    ),
    "HiddenStateCacheSpec": SpecClass(
        "MLAAttentionSpec", refused="it holds hidden states that are handed out, and no attention reads them"
    ),
    "RSWASpec": SpecClass(
        "FullAttentionSpec",
        {"rswa_window": _SIZE},
        refused="an output token attends to the whole prompt, but only to a window of the output, so the KV of a block "
        "depends on where the prompt ended",
    ),
    "SinkFullAttentionSpec": SpecClass(
        "FullAttentionSpec",
        {"sink_len": _SIZE},
        refused="its first blocks hold sinks of the model, which are not tokens of the prompt",
    ),
    "ChunkedLocalAttentionSpec": SpecClass("AttentionSpec", {"attention_chunk_size": _SIZE}),
    "SlidingWindowSpec": SpecClass("AttentionSpec", {"sliding_window": _SIZE, "extra_retained_tokens": _SIZE}),
    "SlidingWindowMLASpec": SpecClass(
        "SlidingWindowSpec",
        {
            "cache_dtype_str": FieldRule("how an entry is packed: part of the keys"),
            "alignment": _PLACE,
            "model_version": FieldRule("how an entry is packed", _named("deepseek_v4")),
            "bounded_replay": _REPLAY,
            "head_size_v": _SIZE,
        },
    ),
    "CircularBufferSpec": SpecClass("AttentionSpec", needs_scratch=True),
    "KpoolTailSpec": SpecClass("SlidingWindowSpec", needs_scratch=True),
    "MambaSpec": SpecClass(
        "KVCacheSpec",
        {
            "shapes": _SIZE,
            "dtypes": FieldRule("part of the keys"),
            "page_size_padded": _PLACE,
            "mamba_type": FieldRule(
                "a state that is passed from each position to the next",
                _named("MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "GDN_ATTN"),
            ),
            "mamba_cache_mode": FieldRule(
                "whether the engine keeps states at block boundaries", _named("align"), "none"
            ),
            "num_speculative_blocks": FieldRule("states of drafts, which are never handed over to be stored"),
            "num_prefill_checkpoint_blocks": FieldRule("more states; the engine says which block holds which"),
            "prefill_checkpoint_alignment": FieldRule("boundaries of such states; the engine reports each"),
            "num_heads": _SIZE,
            "tokens_per_state": FieldRule("a state for so many tokens is untested", _never),
            "tp_replicated": FieldRule("whether all ranks hold the same; each rank stores its own"),
        },
    ),
    "EncoderOnlyAttentionSpec": SpecClass(
        "AttentionSpec", refused="an encoder attends to its whole input, so no part of it belongs to a prefix"
    ),
    "CrossAttentionSpec": SpecClass(
        "AttentionSpec", refused="it holds an encoder's output for an input that is not in the prefix"
    ),
    "HiSparseHotSpec": SpecClass(
        "KVCacheSpec", {"page_size": _SIZE, "blocks_per_request": _SIZE}, refused=_TRANSFER_REPLICA
    ),
    "HiSparseResidentSpec": SpecClass("KVCacheSpec", {"page_size": _SIZE}, refused=_TRANSFER_REPLICA),
    "UniformTypeKVCacheSpecs": SpecClass(
        "KVCacheSpec", {"kv_cache_specs": FieldRule("the layers' own specs, which are looked up one by one")}
    ),
}
"""Every spec class of vLLM 0.30 to 0.33."""

GROUP_FIELD_RULES: Mapping[str, FieldRule] = {
    "layer_names": _LABEL,
    "kv_cache_spec": _LABEL,
    "is_eagle_group": FieldRule("a drafter's layers: their keys include the token after a chunk"),
    "host_resident": FieldRule("its blocks lie in the engine's own host pool", _never),
    "enable_kv_transfer": FieldRule(_TRANSFER_REPLICA, _never),
    "role": FieldRule("its blocks are numbered by another pool", _never),
}
"""Every field of vLLM's KVCacheGroupSpec."""


def known_field_rules(name: str) -> dict[str, FieldRule]:
    """Rules of the fields of a known class and of its parents. The class's own rule replaces a parent's rule."""
    spec: SpecClass | None = KNOWN[name]
    rules: dict[str, FieldRule] = {}
    while spec is not None:
        rules = {**spec.field_rules, **rules}
        spec = KNOWN[spec.parent] if spec.parent is not None else None
    return rules


_HOME = "vllm.v1.kv_cache_interface"
_DRAFTS_FIELD = "non_causal_multi_token_decode"
_RUN_WITHOUT = "start without hybridkv: no setting makes this model's prefixes safe to store"


@dataclass(frozen=True, slots=True)
class SpecFacts:
    """A spec of the engine.

    Args:
        name: name of its exact class.
        layers: layers with this spec.
        fields: fields with other values than the defaults, and fields without a default.
    """

    name: str
    layers: tuple[str, ...]
    fields: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class SpecProblem:
    """Reason why a spec is refused.

    Args:
        expected: accepted values.
        got: value that was found.
        hint: next step for the operator.
    """

    expected: str
    got: str
    hint: str


def changed_fields(value: Any) -> tuple[tuple[str, object], ...]:
    """Fields of a dataclass with other values than the defaults, and fields without a default."""
    changed = []
    for each in fields(value):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found = getattr(value, each.name)
        if default is MISSING or found != default:
            changed.append((each.name, found))
    return tuple(changed)


def describe(spec: Any, layers: tuple[str, ...]) -> SpecFacts:
    """Facts of a spec of the engine. A class outside vLLM's module gets a name with its module, so the table does not
    have it."""
    cls = type(spec)
    name = cls.__name__ if cls.__module__ == _HOME else f"{cls.__module__}.{cls.__name__}"
    return SpecFacts(name, layers, changed_fields(spec))


def accepted_classes() -> list[str]:
    """Classes of groups that can be stored."""
    return [name for name, spec in KNOWN.items() if not spec.refused and not spec.needs_scratch]


def spec_problem(spec: SpecFacts, *, is_cacheable: bool, is_drafter: bool) -> SpecProblem | None:
    """Reason why no prefix can be resumed from a group of this spec; None if prefixes can be resumed."""
    known = KNOWN.get(spec.name)
    where = f"{spec.name} (layers {', '.join(spec.layers[:2])}, ...)"
    if known is None:
        return SpecProblem(
            "one of " + ", ".join(accepted_classes()),
            where,
            "hybridkv cannot store this group; start vLLM without hybridkv, or report the model",
        )
    if known.refused or (known.needs_scratch and is_cacheable):
        why = known.refused or "vLLM keeps it for one request alone, and yet reports it as shared"
        return SpecProblem("one of " + ", ".join(accepted_classes()), f"{where}: {why}", _RUN_WITHOUT)
    rules, found = known_field_rules(spec.name), dict(spec.fields)
    problems: list[SpecProblem | None] = [
        _refused_value(spec.name, n, f.unfit_default, f) for n, f in rules.items() if f.unfit_default and n not in found
    ]
    problems += (field_problem(spec.name, name, value, rules) for name, value in spec.fields)
    if found.get(_DRAFTS_FIELD) and not is_drafter:
        got = f"{_DRAFTS_FIELD} True: {rules[_DRAFTS_FIELD].why}"
        problems.append(SpecProblem(f"{_DRAFTS_FIELD} in a drafter's group alone", got, rules[_DRAFTS_FIELD].hint))
    problem = next((each for each in problems if each is not None), None)
    return replace(problem, got=f"{where}: {problem.got}") if problem is not None else None


def field_problem(owner: str, name: str, value: object, rules: Mapping[str, FieldRule]) -> SpecProblem | None:
    """Reason why a field with this non-default value is refused; None if the value is accepted."""
    shown = str(getattr(value, "name", value))
    rule = rules.get(name)
    if rule is None:
        return SpecProblem(
            f"{owner} with the fields that hybridkv knows",
            f"{name} {shown}, a field that hybridkv does not know",
            "this vLLM is newer than hybridkv knows; use one that the compatibility page lists, or report the model",
        )
    return None if rule.accepts(value) else _refused_value(owner, name, shown, rule)


def _refused_value(owner: str, name: str, shown: str, rule: FieldRule) -> SpecProblem:
    if name == "mamba_cache_mode":
        return SpecProblem(
            "recurrent states at block boundaries (mamba_cache_mode align)",
            f"mamba_cache_mode {shown}",
            "start with --enable-prefix-caching: without it no state is ever kept, so nothing could be restored"
            if shown == "none"
            else "start with --mamba-cache-mode align, the only mode in which the engine hands over states",
        )
    if rule.lists_values:
        got = f"{name} {shown}, a value that hybridkv does not know"
        return SpecProblem(f"{owner} with a {name} that hybridkv knows", got, rule.hint or _RUN_WITHOUT)
    return SpecProblem(
        f"{owner} with {name} at its default",
        f"{name} {shown}: {rule.why}",
        rule.hint or _RUN_WITHOUT,
    )
