"""Configuration of HybridMultiConnector: valid settings are decoded, and mistakes are reported."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.multi.config import MultiConfig, decode_multi_config
from hybridkv.metrics import MAX_CHILDREN

KEYS = ("kv_connector", "kv_role", "engine_id", "kv_load_failure_policy", "kv_connector_extra_config")
OUTER = {"engine_id": "e", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def child(name: str = "Store", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_extra_config": extra}


def decode(*children: Any, **more: Any) -> MultiConfig:
    return decode_multi_config({"connectors": list(children), **more}, OUTER, KEYS)


def test_a_child_gets_its_keys_without_the_weight_from_a_copy() -> None:
    entry = child(load_weight=2.5, chunk_tokens=64)
    before = copy.deepcopy(entry)
    (decoded,) = decode(entry).children
    assert decoded.weight == 2.5
    assert decoded.transfer["kv_connector_extra_config"] == {"chunk_tokens": 64}
    assert entry == before
    assert entry["kv_connector_extra_config"] is not decoded.transfer["kv_connector_extra_config"]


def test_a_child_inherits_missing_keys() -> None:
    (first, second) = decode(child("A"), {**child("B"), "kv_role": "kv_producer", "engine_id": "own"}).children
    assert (first.transfer["kv_role"], first.transfer["engine_id"]) == ("kv_both", "e")
    assert (second.transfer["kv_role"], second.transfer["engine_id"]) == ("kv_producer", "own")
    assert second.transfer["kv_load_failure_policy"] == "recompute"


def test_children_of_one_class_are_numbered_by_their_position() -> None:
    assert [each.name for each in decode(child("A"), child("B"), child("A")).children] == ["A-0", "B", "A-2"]


def test_the_defaults() -> None:
    config = decode({"kv_connector": "Store"})
    assert (config.children[0].weight, config.lookup_timeout_s) == (1.0, 1.0)
    assert decode(child(load_weight=3), lookup_timeout_seconds=0).children[0].weight == 3.0
    assert decode(child(load_weight="auto")).children[0].weight == "auto"


@pytest.mark.parametrize(
    ("raw", "path", "hint"),
    [
        ({}, "connectors", "for example"),
        ({"connectors": []}, "connectors", "for example"),
        ({"connectors": "Store"}, "connectors", "for example"),
        ({"connector": [child()]}, "connector", 'did you mean "connectors"?'),
        ({"connectors": [child()], "lookup_timeout": 1}, "lookup_timeout", 'did you mean "lookup_timeout_seconds"?'),
        ({"connectors": [child()], "lookup_timeout_seconds": -1}, "lookup_timeout_seconds", "default"),
        ({"connectors": [child()], "lookup_timeout_seconds": math.inf}, "lookup_timeout_seconds", "default"),
        ({"connectors": [child()], "lookup_timeout_seconds": math.nan}, "lookup_timeout_seconds", "default"),
        ({"connectors": [child()], "lookup_timeout_seconds": "1s"}, "lookup_timeout_seconds", "default"),
        ({"connectors": [child()], "lookup_timeout_seconds": True}, "lookup_timeout_seconds", "default"),
        ({"connectors": [child()] * (MAX_CHILDREN + 1)}, "connectors", "fewer"),
        ({"connectors": ["Store"]}, "connectors[0]", "for example"),
        ({"connectors": [child(), {}]}, "connectors[1].kv_connector", "HybridOffloadConnector"),
        ({"connectors": [child("MultiConnector")]}, "connectors[0].kv_connector", "list its connectors"),
        ({"connectors": [child("HybridMultiConnector")]}, "connectors[0].kv_connector", "list its connectors"),
        ({"connectors": [{**child(), "kv_rol": "x"}]}, "connectors[0].kv_rol", 'did you mean "kv_role"?'),
        ({"connectors": [{**child(), "load_weight": 2}]}, "connectors[0].load_weight", "kv_connector_extra_config"),
        (
            {"connectors": [{**child(), "kv_load_failure_policy": "fail"}]},
            "connectors[0].kv_load_failure_policy",
            "beside HybridMultiConnector",
        ),
        (
            {"connectors": [child("HybridNixlConnector"), {**child("HybridNixlConnector"), "kv_role": "kv_producer"}]},
            "connectors",
            "kv_consumer",
        ),
        (
            {"connectors": [{"kv_connector": "S", "kv_connector_extra_config": []}]},
            "connectors[0].kv_connector_extra_config",
            "leave it out",
        ),
    ],
)
def test_a_mistake_in_several_stores_is_reported_with_path_and_hint(raw: Any, path: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        decode_multi_config(raw, OUTER, KEYS)
    assert caught.value.path == f"kv_connector_extra_config.{path}"
    assert hint in caught.value.hint


def test_one_child_may_hand_over_and_another_read() -> None:
    reads, hands_over = ({**child("HybridNixlConnector"), "kv_role": role} for role in ("kv_consumer", "kv_producer"))
    assert len(decode(reads, hands_over).children) == 2


@pytest.mark.parametrize("weight", [0, -1, -0.5, math.nan, math.inf, -math.inf, "fast", "1.0", None, True, []])
def test_a_weight_must_be_positive_and_finite_or_auto(weight: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        decode(child("A"), child("B", load_weight=weight))
    assert caught.value.path == "kv_connector_extra_config.connectors[1].kv_connector_extra_config.load_weight"
    assert "auto" in caught.value.expected and repr(weight) in str(caught.value)
