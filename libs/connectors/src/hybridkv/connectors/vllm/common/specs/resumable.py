"""Decides whether this engine may resume a prefix, and gives the reason for a refusal.

A connector may resume only prefixes that the engine itself may resume. vLLM switches its own prefix cache off for
models that cannot resume a prefix, and keeps no record of the reason. So an engine without prefix caching is refused,
unless the operator sets the exception and no known fact contradicts it. `refusal` is a pure function; `gather` reads
its facts from vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.role import role_of
from hybridkv.connectors.vllm.common.specs.spec_table import (
    GROUP_FIELD_RULES,
    SpecFacts,
    SpecProblem,
    changed_fields,
    describe,
    field_problem,
    spec_problem,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

WITHOUT_PREFIX_CACHING_KEY = "without_prefix_caching"
"""Key of `kv_connector_extra_config`: the operator states that prefix caching is off on purpose."""

UNRESUMABLE_ARCHITECTURES = {
    "UnlimitedOCRForCausalLM": "an output token attends to the whole prompt, but only to a window of the output, so "
    "the KV of a block depends on where the prompt ended, with every attention backend"
}
BATCH_VARIANT_BACKENDS = frozenset({"FLASHINFER", "TRITON_MLA"})
"""Attention backends that are not batch-invariant after a resumed prefix."""


@dataclass(frozen=True, slots=True)
class Switches:
    """Switches of the engine in its final configuration.

    Args:
        prefix_caching: the engine itself resumes prefixes.
        chunked_prefill: the engine may compute a prompt in several chunks.
        batch_invariant: answers must not depend on other requests in the batch.
        is_excepted: the operator states that prefix caching is off on purpose.
        needs_routing: the engine must return the experts of loaded tokens, and may load tokens without them.
    """

    prefix_caching: bool = True
    chunked_prefill: bool = True
    batch_invariant: bool = False
    is_excepted: bool = False
    needs_routing: bool = False


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Hardware and attention backends of the model.

    Args:
        device: "cpu" or another device type.
        architecture: CPU architecture, as vLLM names it.
        has_amx: the CPU has AMX tiles, and the operating system permits their use.
        requested_backend: attention backend in the operator's settings, or "".
        backends: attention backends of the layers in this process.
    """

    device: str = "cpu"
    architecture: str = "X86"
    has_amx: bool = False
    requested_backend: str = ""
    backends: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of the model.

    Args:
        architectures: class names of the model.
        model_type: `model_type` in the model's configuration.
        is_encoder_decoder: the model has an encoder and a decoder.
        is_encoder_only: this instance runs only the multimodal encoder.
        is_diffusion: the model rewrites tokens until they are final.
        is_unfit_pooling: the model pools in a way for which vLLM does not support prefix caching.
        uses_mla: the model uses latent attention.
    """

    architectures: tuple[str, ...] = ()
    model_type: str = ""
    is_encoder_decoder: bool = False
    is_encoder_only: bool = False
    is_diffusion: bool = False
    is_unfit_pooling: bool = False
    uses_mla: bool = False


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A KV cache group.

    Args:
        is_cacheable: the engine's own prefix cache may hold the group.
        is_drafter: the group has a drafter's layers.
        fields: fields with other values than the defaults, and fields without a default.
        specs: spec of the group, and specs of its layers if they differ.
    """

    is_cacheable: bool
    is_drafter: bool
    fields: tuple[tuple[str, object], ...]
    specs: tuple[SpecFacts, ...]


@dataclass(frozen=True, slots=True)
class ResumeFacts:
    """All facts on which the refusal depends."""

    switches: Switches
    machine: MachineFacts
    model: ModelFacts
    groups: tuple[GroupFacts, ...]


def refusal(facts: ResumeFacts) -> ConfigurationError | None:
    """Refusal of an engine with these facts; None if prefixes may be resumed.

    Of several reasons, returns the most specific one: a spec before a switch.
    """
    return next(_refusals(facts), None)


def _refusals(facts: ResumeFacts) -> Iterator[ConfigurationError]:
    for index, group in enumerate(facts.groups):
        yield from _group_refusals(f"kv_cache_groups[{index}].kv_cache_spec", group)
    yield from _model_refusals(facts.model)
    yield from _machine_refusals(facts)
    yield from _switch_refusals(facts.switches)


def _group_refusals(path: str, group: GroupFacts) -> Iterator[ConfigurationError]:
    for name, value in group.fields:
        problem = field_problem("a KV cache group", name, value, GROUP_FIELD_RULES)
        if problem is not None:
            yield _problem_refusal(path, problem)
    for spec in group.specs:
        problem = spec_problem(spec, is_cacheable=group.is_cacheable, is_drafter=group.is_drafter)
        if problem is not None:
            yield _problem_refusal(path, problem)


def _problem_refusal(path: str, problem: SpecProblem) -> ConfigurationError:
    return ConfigurationError(path, problem.expected, problem.got, problem.hint)


def _model_refusals(model: ModelFacts) -> Iterator[ConfigurationError]:
    if model.is_encoder_decoder:
        yield _model_refusal("its decoder's KV depends on the encoder's input")
    if model.is_encoder_only:
        yield _model_refusal("this instance runs a multimodal encoder alone and keeps no KV cache")
    if model.is_diffusion:
        yield _model_refusal(
            "a diffusion model rewrites its tokens' KV until they are final, and sees both directions",
        )
    if model.is_unfit_pooling:
        yield _model_refusal(
            "a pooling model whose answer needs more than the end of the prompt, or sees both directions",
        )
    for name in model.architectures:
        if name in UNRESUMABLE_ARCHITECTURES:
            yield _model_refusal(f"{name}: {UNRESUMABLE_ARCHITECTURES[name]}")


def _model_refusal(got: str) -> ConfigurationError:
    return ConfigurationError(
        "model",
        "a model whose prefixes can be resumed",
        got,
        "start without hybridkv: vLLM cannot resume it either",
    )


def _machine_refusals(facts: ResumeFacts) -> Iterator[ConfigurationError]:
    machine, switches = facts.machine, facts.switches
    if machine.device == "cpu" and facts.model.uses_mla and not _amx_runs_mla(facts):
        found = f"{machine.architecture.lower()} {'with' if machine.has_amx else 'without'} AMX"
        yield ConfigurationError(
            "enable_prefix_caching",
            "latent attention (MLA) by kernels that can resume a prefix",
            f"vLLM's reference kernels for CPUs ({found}{_backend_option(machine)}), for which it switches prefix "
            "caching off",
            "start without hybridkv, or on a CPU with AMX and without --attention-backend CPU_MLA; "
            f"{WITHOUT_PREFIX_CACHING_KEY} does not help",
        )
    if machine.device == "cpu" and machine.architecture == "RISCV":
        yield ConfigurationError(
            "enable_prefix_caching",
            "a CPU on which vLLM can resume a prefix",
            "RISC-V, for which vLLM switches prefix caching and chunked prefill off",
            f"start without hybridkv; {WITHOUT_PREFIX_CACHING_KEY} does not help",
        )
    unfit = sorted(machine.backends & BATCH_VARIANT_BACKENDS)
    if switches.batch_invariant and unfit:
        yield ConfigurationError(
            "enable_prefix_caching",
            "an attention backend that stays batch-invariant after a resumed prefix",
            f"VLLM_BATCH_INVARIANT with {', '.join(unfit)}, for which vLLM switches prefix caching off",
            "choose another --attention-backend, or start without hybridkv or without VLLM_BATCH_INVARIANT",
        )


def _amx_runs_mla(facts: ResumeFacts) -> bool:
    """Whether vLLM's CPU platform can resume prefixes with latent attention."""
    machine = facts.machine
    if machine.architecture != "X86" or not machine.has_amx:
        return False
    # DeepSeek-V4 has its own kernels, with any backend.
    return machine.requested_backend != "CPU_MLA" or facts.model.model_type == "deepseek_v4"


def _backend_option(machine: MachineFacts) -> str:
    return f", --attention-backend {machine.requested_backend}" if machine.requested_backend else ""


def _switch_refusals(switches: Switches) -> Iterator[ConfigurationError]:
    if switches.needs_routing:
        yield ConfigurationError(
            "enable_return_routed_experts",
            "off: this version of vLLM must know the experts of every prompt token, and does not know those of loaded "
            "tokens",
            "on",
            "remove --enable-return-routed-experts, or use vLLM 0.33 or later; with kv_role kv_producer, which loads "
            "nothing, the option is accepted",
        )
    if not switches.chunked_prefill:
        yield ConfigurationError(
            "enable_chunked_prefill",
            "on: the tokens after a restored prefix are a later piece of a prompt",
            "off, by the operator or because vLLM knows that this model or machine cannot compute a prompt in pieces",
            "remove --no-enable-chunked-prefill; if it was not given, start without hybridkv; "
            f"{WITHOUT_PREFIX_CACHING_KEY} does not help",
        )
    if not switches.prefix_caching and not switches.is_excepted:
        yield ConfigurationError(
            "enable_prefix_caching",
            "on: hybridkv resumes prefixes only if vLLM itself does",
            "off, and vLLM does not tell whether the operator or a model that cannot resume is the reason",
            f'start with --enable-prefix-caching; or set "{WITHOUT_PREFIX_CACHING_KEY}": true in {ROOT}, but only if '
            "vLLM's log does not say that vLLM switched prefix caching off, and you know that this model resumes "
            "prefixes exactly",
        )


logger = logging.getLogger("vllm.hybridkv")


def require_resumable(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_excepted: bool) -> None:
    """Refuses an engine that may not resume prefixes.

    Raises:
        ConfigurationError: no prefix may be resumed; the text has the reason.
    """
    found = refusal(gather(vllm_config, kv_cache_config, is_excepted=is_excepted))
    if found is not None:
        raise found


def warn_other_connectors(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, others: Sequence[str]) -> None:
    """Warns if no prefix may be resumed, but connectors of other projects could restore one.

    Such connectors are not refused: some fetch a whole prompt from the engine that has just computed it, which is safe.

    Args:
        vllm_config: final configuration.
        kv_cache_config: the engine's KV cache.
        others: names of the connectors of other projects.
    """
    found = refusal(gather(vllm_config, kv_cache_config, is_excepted=False)) if others else None
    if found is not None:
        logger.warning(
            "HybridMultiConnector: no prefix can be relied on here (%s: %s), but %s may still restore some: "
            "hybridkv is not responsible for their loads",
            found.path,
            found.got,
            ", ".join(others),
        )


def gather(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_excepted: bool) -> ResumeFacts:
    """Facts of this process now. Only a worker's process has layers and their attention backends."""
    cacheable = compat.cacheable_group_ids(kv_cache_config)
    return ResumeFacts(
        Switches(
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            chunked_prefill=bool(vllm_config.scheduler_config.enable_chunked_prefill),
            batch_invariant=_is_batch_invariant(),
            is_excepted=is_excepted,
            needs_routing=compat.returns_routing(vllm_config)
            and role_of(vllm_config.kv_transfer_config).loads
            and not compat.limits_loads_to_known_routing(),
        ),
        _machine(vllm_config),
        _model(vllm_config),
        tuple(_group(group, i in cacheable) for i, group in enumerate(kv_cache_config.kv_cache_groups)),
    )


def _is_batch_invariant() -> bool:
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def _machine(vllm_config: VllmConfig) -> MachineFacts:
    from vllm.platforms import current_platform

    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    requested = getattr(vllm_config.attention_config, "backend", None)
    layers = vllm_config.compilation_config.static_forward_context.values()
    named = (getattr(getattr(layer, "attn_backend", None), "get_name", None) for layer in layers)
    return MachineFacts(
        device=vllm_config.device_config.device_type,
        architecture=current_platform.get_cpu_architecture().name,
        has_amx=bool(has_tiles is not None and has_tiles()),
        requested_backend=str(getattr(requested, "name", requested or "")),
        backends=frozenset(str(name()) for name in named if name is not None),
    )


def _model(vllm_config: VllmConfig) -> ModelFacts:
    model = vllm_config.model_config
    pools = model.runner_type == "pooling"
    return ModelFacts(
        architectures=tuple(model.architectures),
        model_type=str(getattr(model.hf_config, "model_type", "")),
        is_encoder_decoder=bool(model.is_encoder_decoder),
        is_encoder_only=bool(getattr(vllm_config, "is_mm_encoder_only", False)),
        is_diffusion=bool(getattr(model, "is_diffusion", False)),
        is_unfit_pooling=pools and not model.is_prefix_caching_supported,
        uses_mla=bool(model.use_mla),
    )


def _group(group: KVCacheGroupSpec, is_cacheable: bool) -> GroupFacts:
    per_layer: dict[str, Any] | None = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    names = tuple(group.layer_names)
    specs = [describe(group.kv_cache_spec, names)]
    specs += (describe(spec, (name,)) for name, spec in (per_layer or {}).items())
    return GroupFacts(is_cacheable, bool(group.is_eagle_group), changed_fields(group), tuple(specs))
