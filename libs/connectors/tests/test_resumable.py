"""Resumable prefixes: every spec and field of vLLM 0.30 to 0.33, and every reason of refusal."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import vllm
from hypothesis import given
from hypothesis import strategies as st
from spec_versions import DECLARED, GROUP_FIELDS, VERSIONS, classes_of, fields_of
from vllm.v1 import kv_cache_interface as installed

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.specs.resumable import (
    GroupFacts,
    MachineFacts,
    ModelFacts,
    ResumeFacts,
    Switches,
    refusal,
)
from hybridkv.connectors.vllm.common.specs.spec_table import (
    GROUP_FIELD_RULES,
    KNOWN,
    SpecFacts,
    changed_fields,
    describe,
    known_field_rules,
)

Quant = enum.Enum(
    "Quant", ["FP8_PER_TENSOR", "INT4_PER_TOKEN_HEAD", "NVFP4", "ULTRAQUANT_4BIT", "OCTAVE_K3V4", "CUSTOM"]
)
Role = enum.Enum("Role", ["SPARSE", "INDEXER", "ANOTHER"])
MambaTypes = enum.Enum("MambaTypes", ["MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "GDN_ATTN", "CUSTOM", "PLUGIN"])

REFUSED_CLASSES = {
    "KVCacheSpec",
    "AttentionSpec",
    "HiddenStateCacheSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "CrossAttentionSpec",
    "HiSparseHotSpec",
    "HiSparseResidentSpec",
}
SCRATCH_CLASSES = {"CircularBufferSpec", "KpoolTailSpec"}

FIT_AND_UNFIT: dict[tuple[str, str], tuple[list[object], list[object]]] = {
    ("KVCacheSpec", "block_size"): ([16, 256], []),
    ("KVCacheSpec", "dcp_sharded"): ([True], []),
    ("KVCacheSpec", "block_stride_alignment"): ([512], []),
    ("KVCacheSpec", "is_draft"): ([True], []),
    ("AttentionSpec", "dcp_sharded"): ([False], []),
    ("AttentionSpec", "max_tp_shards"): ([1], []),
    ("AttentionSpec", "num_kv_heads"): ([1, 8], []),
    ("AttentionSpec", "head_size"): ([64], []),
    ("AttentionSpec", "dtype"): ([torch.bfloat16], []),
    ("AttentionSpec", "head_size_v"): ([64], []),
    ("AttentionSpec", "kv_quant_mode"): (list(Quant)[:4], list(Quant)[4:]),
    ("AttentionSpec", "page_size_padded"): ([4096], []),
    ("AttentionSpec", "num_head_slots"): ([1], []),
    ("AttentionSpec", "state_content_bytes"): ([656], []),
    ("AttentionSpec", "tokens_per_state"): ([4, 128], [Fraction(1, 4), 0, -1]),
    ("FullAttentionSpec", "sliding_window"): ([1024], []),
    ("FullAttentionSpec", "attention_chunk_size"): ([8192], []),
    ("FullAttentionSpec", "non_causal"): ([], [True]),
    ("MLAAttentionSpec", "cache_dtype_str"): (["fp8_ds_mla"], []),
    ("MLAAttentionSpec", "alignment"): ([576], []),
    ("MLAAttentionSpec", "model_version"): (["deepseek_v4"], ["deepseek_v9"]),
    ("MLAAttentionSpec", "cache_role"): ([Role.INDEXER], [Role.ANOTHER]),
    ("MLAAttentionSpec", "is_index_group_leader"): ([True], []),
    ("MLAAttentionSpec", "storage_block_size"): ([64], []),
    # Accepted only in a drafter's group: has its own test.
    ("MLAAttentionSpec", "non_causal_multi_token_decode"): ([], [True]),
    ("MLAAttentionSpec", "head_size_v"): ([512], []),
    ("MLAAttentionSpec", "topk_buffer_width"): ([2048], []),
    ("ChunkedLocalAttentionSpec", "attention_chunk_size"): ([8192], []),
    ("SlidingWindowSpec", "sliding_window"): ([128], []),
    ("SlidingWindowSpec", "extra_retained_tokens"): ([3], []),
    ("SlidingWindowMLASpec", "cache_dtype_str"): (["fp8_ds_mla"], []),
    ("SlidingWindowMLASpec", "alignment"): ([576], []),
    ("SlidingWindowMLASpec", "model_version"): (["deepseek_v4"], ["deepseek_v9"]),
    ("SlidingWindowMLASpec", "head_size_v"): ([512], []),
    ("SlidingWindowMLASpec", "bounded_replay"): ([], [True]),
    ("MambaSpec", "shapes"): ([((4, 8),)], []),
    ("MambaSpec", "dtypes"): ([(torch.float32,)], []),
    ("MambaSpec", "page_size_padded"): ([4096], []),
    ("MambaSpec", "mamba_type"): (list(MambaTypes)[:5], list(MambaTypes)[5:]),
    ("MambaSpec", "mamba_cache_mode"): (["align"], ["all", "none", "newer"]),
    ("MambaSpec", "num_speculative_blocks"): ([2], []),
    ("MambaSpec", "num_prefill_checkpoint_blocks"): ([1], []),
    ("MambaSpec", "prefill_checkpoint_alignment"): ([64], []),
    ("MambaSpec", "num_heads"): ([4], []),
    ("MambaSpec", "tokens_per_state"): ([], [1, 16]),
    ("MambaSpec", "tp_replicated"): ([True], []),
    ("UniformTypeKVCacheSpecs", "kv_cache_specs"): ([{}], []),
}
"""Per field of every storable class: accepted values, and refused values."""

SOUND = ResumeFacts(Switches(), MachineFacts(), ModelFacts(), ())
NEEDED: dict[str, tuple[tuple[str, object], ...]] = {"MambaSpec": (("mamba_cache_mode", "align"),)}
"""Fields with a refused default, set to the value of a supported engine."""

FIELD_CASES = [
    (name, field, value, is_fit)
    for name in DECLARED
    if name not in REFUSED_CLASSES | SCRATCH_CLASSES
    for field, owner in fields_of(name).items()
    for is_fit in (True, False)
    for value in FIT_AND_UNFIT[owner, field][not is_fit]
]


def with_spec(name: str, *fields: tuple[str, object], **group: bool) -> ResumeFacts:
    spec = SpecFacts(name, ("model.layers.0",), tuple((dict(NEEDED.get(name, ())) | dict(fields)).items()))
    shape = {"is_cacheable": True, "is_drafter": False} | group
    return replace(SOUND, groups=(GroupFacts(**shape, fields=(), specs=(spec,)),))


# --- the table compared with the engine's source ---------------------------------------------------------------------


def installed_classes() -> dict[str, type[Any]]:
    return {
        name: each
        for name, each in inspect.getmembers(installed, inspect.isclass)
        if issubclass(each, installed.KVCacheSpec)
    }


def test_spec_versions_equal_the_installed_module() -> None:
    version = ".".join(vllm.__version__.split(".")[:2])
    assert version in VERSIONS, "read this version's kv_cache_interface.py and add it to spec_versions.py"
    record, found = classes_of(version), installed_classes()
    assert found.keys() == record.keys()
    for name, each in found.items():
        assert set(inspect.get_annotations(each)) == record[name].fields.keys(), name
        parents = [base.__name__ for base in each.__bases__ if base is not object]
        assert parents == ([record[name].parent] if record[name].parent else []), name
    assert {each.name for each in dataclasses.fields(installed.KVCacheGroupSpec)} == GROUP_FIELDS


def test_the_table_contains_exactly_the_known_classes_and_fields() -> None:
    assert KNOWN.keys() == DECLARED.keys()
    for name, each in DECLARED.items():
        assert KNOWN[name].field_rules.keys() == each.fields.keys(), name
        assert KNOWN[name].parent == each.parent, name
        assert known_field_rules(name).keys() == fields_of(name).keys(), name
    assert GROUP_FIELD_RULES.keys() == GROUP_FIELDS


def test_each_field_of_a_storable_class_has_a_case() -> None:
    fields = {
        (o, f) for name in DECLARED.keys() - REFUSED_CLASSES - SCRATCH_CLASSES for f, o in fields_of(name).items()
    }
    assert fields == FIT_AND_UNFIT.keys()
    assert all(fit or unfit for fit, unfit in FIT_AND_UNFIT.values())


# --- specs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECLARED)
def test_a_class_is_accepted_or_refused_by_name(name: str) -> None:
    found = refusal(with_spec(name))
    if name in REFUSED_CLASSES | SCRATCH_CLASSES:
        assert found is not None and found.hint.startswith("start without hybridkv: no setting")
        assert found.path == "kv_cache_groups[0].kv_cache_spec" and name in found.got
        assert "FullAttentionSpec" in found.expected and name not in found.expected.split(", ")
    else:
        assert found is None


@pytest.mark.parametrize("name", DECLARED)
def test_scratch_groups_use_the_same_table(name: str) -> None:
    assert (refusal(with_spec(name, is_cacheable=False)) is None) == (name not in REFUSED_CLASSES)


@pytest.mark.parametrize(("name", "field", "value", "is_fit"), FIELD_CASES)
def test_each_field_value_is_accepted_or_refused_by_name(name: str, field: str, value: object, is_fit: bool) -> None:
    found = refusal(with_spec(name, (field, value)))
    if is_fit:
        assert found is None
    else:
        rule = known_field_rules(name)[field]
        # For states not at block ends the missing part is known.
        is_unseen = rule.lists_values and field != "mamba_cache_mode"
        assert found is not None and ("a value that hybridkv does not know" in found.got) == is_unseen
        assert field in found.got and found.hint.startswith("start with")
        assert not rule.hint or found.hint == rule.hint
        assert not is_unseen or rule.why not in found.got


def test_states_that_the_engine_does_not_keep_are_refused() -> None:
    facts = replace(SOUND, groups=(GroupFacts(True, False, (), (SpecFacts("MambaSpec", ("mixer",), ()),)),))
    found = refusal(facts)
    assert found is not None and "--enable-prefix-caching" in found.hint and "mamba_cache_mode none" in found.got


def test_a_drafters_layers_may_be_bidirectional_among_drafts() -> None:
    facts = with_spec("MLAAttentionSpec", ("non_causal_multi_token_decode", True), is_drafter=True)
    assert refusal(facts) is None
    non_causal = with_spec("MLAAttentionSpec", ("non_causal", True), is_drafter=True)
    assert refusal(non_causal) is not None


@pytest.mark.parametrize("name", ["NewSpec", "somewhere.else.FullAttentionSpec"])
def test_an_unknown_class_is_refused(name: str) -> None:
    found = refusal(with_spec(name))
    assert found is not None and name in found.got and "report" in found.hint


def test_an_unknown_field_is_refused_once_it_is_set() -> None:
    newer = dataclasses.make_dataclass(
        "FullAttentionSpec",
        [("looks_back", bool, False)],
        bases=(installed.FullAttentionSpec,),
        frozen=True,
        kw_only=True,
    )
    newer.__module__ = installed.__name__
    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    for value in (False, True):
        spec = describe(newer(**sizes, looks_back=value), ("layer",))
        found = refusal(replace(SOUND, groups=(GroupFacts(True, False, (), (spec,)),)))
        assert (found is None) == (not value)
    assert found is not None and "looks_back True, a field that hybridkv does not know" in found.got
    assert "FullAttentionSpec" in found.expected


def test_a_spec_is_described_by_its_class_and_its_changed_fields() -> None:
    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
    spec = installed.FullAttentionSpec(**sizes, non_causal=True)
    found = describe(spec, ("a", "b"))
    assert (found.name, found.layers) == ("FullAttentionSpec", ("a", "b"))
    assert dict(found.fields) == sizes | {"head_size_v": 8, "non_causal": True}

    class Derived(installed.FullAttentionSpec):
        pass

    assert describe(Derived(**sizes), ()).name == f"{__name__}.Derived"


@pytest.mark.parametrize(
    ("field", "value"),
    [("host_resident", True), ("enable_kv_transfer", False), ("role", "hisparse_source"), ("new", 1)],
)
def test_a_group_with_blocks_moved_by_the_engine_is_refused(field: str, value: object) -> None:
    spec = SpecFacts("FullAttentionSpec", ("layer",), ())
    found = refusal(replace(SOUND, groups=(GroupFacts(True, False, ((field, value),), (spec,)),)))
    assert found is not None and field in found.got
    assert ("a field that hybridkv does not know" in found.got) == (field == "new")


def test_changed_fields_of_a_plain_group_are_those_without_a_default() -> None:
    spec = installed.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    group = installed.KVCacheGroupSpec(["layer"], spec)
    assert [name for name, _ in changed_fields(group)] == ["layer_names", "kv_cache_spec"]
    marked = replace(group, is_eagle_group=True, host_resident=True)
    assert {name for name, _ in changed_fields(marked)} >= {"is_eagle_group", "host_resident"}


# --- reasons -------------------------------------------------------------------------------------------------------

MLA = replace(SOUND, model=ModelFacts(uses_mla=True))
AMX = MachineFacts(has_amx=True)
OFF = Switches(prefix_caching=False)
ROUTING = "experts of every prompt token"
NO_PIECES = "compute a prompt in pieces"
NO_REASON = "vLLM does not tell"
"""Parts of the three refusals that name a switch."""
REASONS: list[tuple[ResumeFacts, str | None]] = [
    (SOUND, None),
    (with_spec("FullAttentionSpec", ("non_causal", True)), "non_causal True"),
    (with_spec("Unheard"), "Unheard"),
    (replace(SOUND, groups=(GroupFacts(True, False, (("host_resident", True),), ()),)), "host_resident True"),
    (replace(SOUND, model=ModelFacts(is_encoder_decoder=True)), "its decoder's KV"),
    (replace(SOUND, model=ModelFacts(is_encoder_only=True)), "encoder alone"),
    (replace(SOUND, model=ModelFacts(is_diffusion=True)), "diffusion"),
    (replace(SOUND, model=ModelFacts(is_unfit_pooling=True)), "pooling"),
    (replace(SOUND, model=ModelFacts(architectures=("UnlimitedOCRForCausalLM",))), "UnlimitedOCR"),
    (replace(SOUND, model=ModelFacts(architectures=("LlamaForCausalLM",))), None),
    (MLA, "kernels for CPUs"),
    (replace(MLA, machine=MachineFacts(architecture="ARM")), "kernels for CPUs"),
    (replace(MLA, machine=MachineFacts(architecture="ARM", has_amx=True)), "kernels for CPUs"),
    (replace(MLA, machine=AMX), None),
    (replace(MLA, machine=replace(AMX, requested_backend="AMX_MLA")), None),
    (replace(MLA, machine=replace(AMX, requested_backend="CPU_MLA")), "kernels for CPUs"),
    (
        replace(
            MLA,
            machine=replace(AMX, requested_backend="CPU_MLA"),
            model=ModelFacts(uses_mla=True, model_type="deepseek_v4"),
        ),
        None,
    ),
    (replace(MLA, model=ModelFacts(uses_mla=True, model_type="deepseek_v4")), "kernels for CPUs"),
    (replace(MLA, machine=MachineFacts(device="cuda")), None),
    (replace(SOUND, switches=Switches(needs_routing=True)), ROUTING),
    (replace(SOUND, switches=Switches(needs_routing=True, is_excepted=True)), ROUTING),
    (replace(SOUND, machine=MachineFacts(architecture="RISCV")), "RISC-V"),
    (replace(SOUND, machine=MachineFacts(device="cuda", architecture="RISCV")), None),
    (
        replace(
            SOUND,
            switches=Switches(batch_invariant=True),
            machine=MachineFacts("cuda", backends=frozenset({"FLASHINFER"})),
        ),
        "VLLM_BATCH_INVARIANT",
    ),
    (
        replace(
            SOUND,
            switches=Switches(batch_invariant=True),
            machine=MachineFacts("cuda", backends=frozenset({"TRITON_MLA"})),
        ),
        "VLLM_BATCH_INVARIANT",
    ),
    (
        replace(
            SOUND,
            switches=Switches(batch_invariant=True),
            machine=MachineFacts("cuda", backends=frozenset({"FLASH_ATTN"})),
        ),
        None,
    ),
    (replace(SOUND, machine=MachineFacts("cuda", backends=frozenset({"FLASHINFER"}))), None),
    (replace(SOUND, switches=Switches(chunked_prefill=False)), NO_PIECES),
    (replace(SOUND, switches=Switches(prefix_caching=False, chunked_prefill=False)), NO_PIECES),
    (replace(SOUND, switches=OFF), NO_REASON),
    # The most specific reason is given.
    (replace(MLA, switches=Switches(prefix_caching=False, chunked_prefill=False)), "kernels for CPUs"),
    (replace(with_spec("FullAttentionSpec", ("non_causal", True)), switches=OFF), "non_causal True"),
]


def gives(found: ConfigurationError | None, reason: str | None) -> bool:
    """Whether a refusal gives this reason; for None, whether there is no refusal."""
    if found is None or reason is None:
        return found is None and reason is None
    return reason in f"{found.expected}, got {found.got}"


@pytest.mark.parametrize(("facts", "reason"), REASONS)
def test_each_reason_is_recognised(facts: ResumeFacts, reason: str | None) -> None:
    found = refusal(facts)
    assert gives(found, reason)
    if found is not None:
        assert found.path and found.expected and found.got and found.hint


@pytest.mark.parametrize(("facts", "reason"), REASONS)
def test_the_exception_lifts_only_one_reason(facts: ResumeFacts, reason: str | None) -> None:
    excepted = refusal(replace(facts, switches=replace(facts.switches, is_excepted=True)))
    assert gives(excepted, None if reason == NO_REASON else reason)


switches = st.builds(Switches, st.booleans(), st.booleans(), st.booleans(), st.just(False))
machines = st.builds(
    MachineFacts,
    st.sampled_from(("cpu", "cuda")),
    st.sampled_from(("X86", "ARM", "RISCV")),
    st.booleans(),
    st.sampled_from(("", "CPU_MLA")),
    st.frozensets(st.sampled_from(("FLASHINFER", "FLASH_ATTN"))),
)
models = st.builds(
    ModelFacts,
    st.sampled_from(((), ("LlamaForCausalLM",), ("UnlimitedOCRForCausalLM",))),
    st.sampled_from(("llama", "deepseek_v4")),
    *(st.booleans() for _ in range(5)),
)


@given(switches, machines, models)
def test_prefix_caching_off_is_refused_without_the_exception(
    switch: Switches, machine: MachineFacts, model: ModelFacts
) -> None:
    facts = ResumeFacts(switch, machine, model, ())
    plain = refusal(facts)
    excepted = refusal(replace(facts, switches=replace(switch, is_excepted=True)))
    assert plain is not None or switch.prefix_caching
    assert str(excepted) == str(None if gives(plain, NO_REASON) else plain)
