"""Startup of HybridMultiConnector: accepted and refused children, their configurations, the hybrid KV cache manager."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from multi_engine import REQUEST, build, configure, entry, offload
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import CONNECTOR
from hybridkv.connectors.vllm.multi.connector import HybridMultiConnector
from oracle.mixes import GEMMA3, GPT_OSS
from oracle.settings import Connector, EngineSettings, make_configs


class StrangeSpec(FullAttentionSpec):
    """A spec that a later version might add."""


def test_children_get_copies_and_the_operators_configuration_is_unchanged() -> None:
    configs = configure(entry("RecordingConnector", load_weight=2.0, path="/a"), entry("RecordingConnector", path="/b"))
    before = copy.deepcopy(configs.vllm.kv_transfer_config)
    connector = build(configs)
    assert configs.vllm.kv_transfer_config == before
    own = [child.vllm_config.kv_transfer_config for child in connector.sub_connectors]
    assert [each.kv_connector_extra_config for each in own] == [{"path": "/a"}, {"path": "/b"}]
    assert {each.engine_id for each in own} == {before.engine_id}
    assert {each.kv_load_failure_policy for each in own} == {"recompute"}


# The hybrid KV cache manager.


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_children_without_groups_are_refused_with_the_hybrid_manager(
    role: KVConnectorRole,
) -> None:
    configs = configure(offload(), entry("QuietConnector"), entry("RaisingConnector"), mix=GEMMA3)
    with pytest.raises(TypeError) as caught:
        build(configs, role)
    assert isinstance(caught.value, ConfigurationError)
    text = str(caught.value)
    assert "got QuietConnector\n" in text and "hybrid KV cache manager is on" in text
    assert "remove QuietConnector" in text and "--disable-hybrid-kv-cache-manager" in text


def test_children_without_groups_work_without_the_hybrid_manager() -> None:
    configs = configure(entry("QuietConnector"), entry("RecordingConnector"))
    configs.vllm.scheduler_config.disable_hybrid_kv_cache_manager = True
    configs.scheduler.kv_cache_groups = configs.scheduler.kv_cache_groups[1:]
    connector = build(configs)
    quiet, recorder = connector.sub_connectors
    finished: list[Any] = []
    quiet.request_finished = lambda request, block_ids: (finished.append(block_ids), (False, None))[1]
    assert connector.request_finished_all_groups(REQUEST, ([1, 2],)) == (False, None)
    assert finished == [[1, 2]]
    assert recorder.arguments_of("request_finished_all_groups") == [(REQUEST, ([1, 2],))]


def test_children_without_groups_are_refused_if_there_are_several_groups() -> None:
    configs = configure(entry("QuietConnector"))
    configs.vllm.scheduler_config.disable_hybrid_kv_cache_manager = True
    with pytest.raises(TypeError, match="off and the model has 2 groups"):
        build(configs)


# Starting.


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("child", [offload(), entry("RecordingConnector")], ids=["offload", "foreign"])
def test_a_model_without_groups_is_refused_as_by_the_offload_connector(
    role: KVConnectorRole, child: dict[str, Any]
) -> None:
    configs = configure(child)
    configs.scheduler.kv_cache_groups = []
    configs.worker.kv_cache_groups = []
    with pytest.raises(ConfigurationError) as caught:
        build(configs, role)
    error = caught.value
    assert (error.path, error.expected, error.got) == ("kv_cache_groups", "a group that can be stored", "none")
    assert error.hint == "this model keeps no reusable KV cache"


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("child", [offload(), entry("RecordingConnector")], ids=["offload", "foreign"])
def test_a_group_of_an_unknown_spec_is_refused_for_every_child(
    role: KVConnectorRole, is_known: bool, child: dict[str, Any]
) -> None:
    """The number of blocks that a request needs of the group is unknown, so loads might wait for each other for
    ever."""
    configs = configure(child)
    for kv_cache in (configs.scheduler, configs.worker):
        group = kv_cache.kv_cache_groups[1]
        spec = group.kv_cache_spec
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
        group.kv_cache_spec = (type(spec) if is_known else StrangeSpec)(**values)
    if is_known:
        build(configs, role).shutdown()
        return
    with pytest.raises(ConfigurationError) as caught:
        build(configs, role)
    assert caught.value.path == "kv_cache_groups[1].kv_cache_spec" and "StrangeSpec" in str(caught.value.got)


def test_an_unregistered_child_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigurationError) as caught:
        build(configure({"kv_connector": "HybridOfloadConnector"}))
    assert 'did you mean "HybridOffloadConnector"?' in caught.value.hint


def test_a_child_that_vllm_configures_itself_for_by_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="HiSparseConnector"):
        build(configure({"kv_connector": "HiSparseConnector"}))


def test_children_before_a_child_that_cannot_start_are_shut_down() -> None:
    configs = configure(offload(), offload(chunk_token=3))
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="chunk_tokens"):
            build(configs)
    connector = build(configure(offload(), offload(chunk_tokens=256)))
    connector.shutdown()


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_two_offload_connectors_start_in_one_engine_and_end_with_it(role: KVConnectorRole) -> None:
    configs = configure(offload(), offload(chunk_tokens=64, load="sync"))
    for _ in range(2):
        connector = build(configs, role)
        assert [type(child).__name__ for child in connector.sub_connectors] == [CONNECTOR, CONNECTOR]
        connector.shutdown()


def test_two_offload_connectors_below_vllms_multi_connector_are_refused() -> None:
    extra = {"connectors": [{**offload(), "kv_role": "kv_both"}, {**offload(chunk_tokens=64), "kv_role": "kv_both"}]}
    configs = make_configs(GPT_OSS, EngineSettings(num_blocks=64, connector=Connector("MultiConnector", extra)))
    with pytest.raises(ConfigurationError) as caught:
        build(configs)
    assert "HybridMultiConnector" in caught.value.hint


def test_layouts_and_graphs_are_queried_from_every_child() -> None:
    configs = configure(offload(), {"kv_connector": "ExampleConnector"})
    assert HybridMultiConnector.get_required_kvcache_layout(configs.vllm) is None
    extra = configs.vllm.kv_transfer_config.kv_connector_extra_config
    assert HybridMultiConnector.requires_piecewise_for_cudagraph(extra) is False
    layerwise = {
        "connectors": [{"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {"use_layerwise": True}}]
    }
    try:
        assert HybridMultiConnector.requires_piecewise_for_cudagraph(layerwise) is True
    except ImportError:
        pytest.skip("LMCache is not installed")
