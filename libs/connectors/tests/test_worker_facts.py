"""Facts of workers: listed per layer only if layers differ, and per rank only if ranks differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_lookups import FULL, STATE, make_layout

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.vllm.common.identity.worker_facts import merged, relevant_facts, worker_facts
from hybridkv.connectors.vllm.common.layout import CacheLayout


class Backend:
    pass


class OtherBackend:
    pass


def layer(**changed: Any) -> Any:
    known = {"isa": "vec", "_k_scale_float": 1.0, "_v_scale_float": 1.0, "backend": Backend} | changed
    return SimpleNamespace(get_attn_backend=lambda: known["backend"], **known)


def layout() -> CacheLayout:
    plain = make_layout([FULL, STATE]).layout
    layers = ((LayerLayout("a", 8), LayerLayout("b", 8)), (LayerLayout("c", 8),))
    return CacheLayout(plain.spec, layers, plain.groups, 4, "sha256", 1)


def facts(first: Any = None, cache: torch.Tensor | None = None, **environ: str) -> dict[str, str]:
    layers = {"a": first or layer(), "b": layer(), "c": layer(isa="none")}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    attention = torch.zeros(3, 2, 4, 8) if cache is None else cache
    caches = {"a": attention, "b": torch.zeros(3, 2, 4, 8), "c": torch.zeros(3, 1, 1, 16, dtype=torch.int8)}
    return worker_facts(config, layout(), caches, environ)  # type: ignore[arg-type]


def test_a_fact_common_to_all_layers_is_given_once() -> None:
    found = facts()
    assert found["worker.attention_backend"] == "Backend"
    assert found["worker.enable_prefix_caching"] == "true"
    assert found["worker.conv_state_layout"] in ("SD", "DS")
    assert "a" in found["worker.attention_isa"] and "vec" in found["worker.attention_isa"]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("worker.attention_backend", {"first": layer(backend=OtherBackend)}),
        ("worker.attention_isa", {"first": layer(isa="amx")}),
        ("worker.kv_scales", {"first": layer(_k_scale_float=0.5)}),
        ("worker.kv_scales", {"first": layer(_v_scale_float=0.5)}),
        ("worker.element_order", {"cache": torch.zeros(3, 2, 4, 8, dtype=torch.float16)}),
        ("worker.element_order", {"cache": torch.zeros(3, 4, 2, 8).transpose(1, 2)}),
        ("worker.element_order", {"cache": torch.zeros(6, 2, 2, 8)}),
        ("worker.environment.VLLM_BATCH_INVARIANT", {"VLLM_BATCH_INVARIANT": "1"}),
    ],
)
def test_a_fact_of_one_layer_changes_the_facts(name: str, changed: dict[str, Any]) -> None:
    plain, other = facts(), facts(**changed)
    assert {each for each in plain.keys() | other.keys() if plain.get(each) != other.get(each)} == {name}


def test_the_stride_of_a_dimension_of_size_1_does_not_count() -> None:
    one_head = torch.zeros(3, 1, 4, 8)
    assert facts(cache=one_head) == facts(cache=one_head.as_strided((3, 1, 4, 8), (32, 7, 8, 1)))


def test_equal_facts_of_ranks_are_merged_and_others_listed() -> None:
    ranks = {0: {"worker.x": "1", "worker.y": "1"}, 1: {"worker.x": "1", "worker.y": "2"}}
    assert merged(ranks, {}) == {"worker.x": "1", "worker.y": '{"rank 0": "1", "rank 1": "2"}'}
    assert merged({0: {"worker.x": "1"}, 1: {}}, {}) != merged({0: {"worker.x": "1"}, 1: {"worker.x": "1"}}, {})


def test_a_variable_inherited_from_the_engine_is_not_listed_again() -> None:
    ranks = {0: {"worker.environment.VLLM_A": "1", "worker.environment.VLLM_B": "2"}}
    assert merged(ranks, {"environment.VLLM_A": "1", "environment.VLLM_B": "1"}) == {"worker.environment.VLLM_B": "2"}


def test_facts_about_states_count_only_with_recurrent_groups() -> None:
    facts = {"environment.VLLM_SSM_CONV_STATE_LAYOUT": "1", "cache_config.mamba_ssm_cache_dtype": "2", "x": "3"}
    assert relevant_facts(facts, make_layout([FULL, STATE]).spec) == facts
    assert relevant_facts(facts, make_layout([FULL]).spec) == {"x": "3"}


def test_a_variable_missing_in_all_workers_counts_as_nothing() -> None:
    of_engine = {"environment.VLLM_A": "1", "cache_config.block_size": "1"}
    assert merged({0: {}, 1: {}}, of_engine) == {"worker.environment.VLLM_A": "nothing"}
