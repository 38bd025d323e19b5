"""HybridMultiConnector keeps vLLM's connector interface, all of it: every method reaches every child.

The configurations are vLLM's own; the children are built through its factory.
"""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import stores
from stores import RecordingConnector
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR, register
from hybridkv.connectors.vllm.multi.connector import HybridMultiConnector
from hybridkv.connectors.vllm.multi.messages import MultiHandshakeMetadata, MultiMetadata
from oracle.mixes import GEMMA3, GPT_OSS, Mix
from oracle.settings import Configs, Connector, EngineSettings, make_configs

UNCHANGED = {"role", "has_connector_metadata"}
"""What the base class says of HybridMultiConnector itself, which is right."""
REQUEST = SimpleNamespace(request_id="r", num_tokens=100)
STEP = SimpleNamespace(
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_output_tokens=[]),
)
BLOCKS = SimpleNamespace(blocks=((), ()))
POOL = SimpleNamespace(num_gpu_blocks=64, get_num_free_blocks=lambda: 63)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def entry(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": stores.MODULE, "kv_connector_extra_config": extra}


def offload(**extra: Any) -> dict[str, Any]:
    tiers = [{"type": "ram", "capacity": "16MiB"}]
    return {"kv_connector": CONNECTOR, "kv_connector_extra_config": {"tiers": tiers, **extra}}


def configure(*children: dict[str, Any], mix: Mix = GPT_OSS, **more: Any) -> Configs:
    extra = {"connectors": list(children), **more}
    return make_configs(mix, EngineSettings(num_blocks=64, connector=Connector(MULTI_CONNECTOR, extra)))


def build(configs: Configs, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    kv_cache = configs.scheduler if role is KVConnectorRole.SCHEDULER else configs.worker
    with set_current_vllm_config(configs.vllm):
        return KVConnectorFactory.create_connector(configs.vllm, role, kv_cache)


def recording(role: KVConnectorRole, count: int = 2) -> tuple[Any, list[RecordingConnector]]:
    connector = build(configure(*(entry("RecordingConnector") for _ in range(count))), role)
    for child in connector.sub_connectors:
        child.calls.clear()
    return connector, connector.sub_connectors


def interface(base: type) -> set[str]:
    """Public methods and properties that a class declares."""
    kinds = (property, classmethod, staticmethod)
    return {
        name
        for name, member in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, kinds))
    }


def unhandled(base: type, connector: type) -> set[str]:
    """What a connector leaves to the base class that it should not."""
    own = {name for each in connector.__mro__ if each.__module__.startswith("hybridkv.") for name in vars(each)}
    return interface(base) - own - UNCHANGED


def test_every_method_of_the_base_class_is_handled() -> None:
    assert unhandled(KVConnectorBase_V1, HybridMultiConnector) == set(), "forward it, or put the answers together"
    assert unhandled(SupportsHMA, HybridMultiConnector) == set()
    assert interface(KVConnectorBase_V1) >= UNCHANGED, "no longer declared: remove it"


def test_a_method_that_vllm_adds_is_noticed() -> None:
    newer = type("Newer", (KVConnectorBase_V1,), {"prefetch": lambda self: None, "wants": property(lambda self: 1)})
    assert unhandled(newer, HybridMultiConnector) == {"prefetch", "wants"}


def test_the_arguments_of_every_method_are_the_base_classes() -> None:
    for name in interface(KVConnectorBase_V1) - UNCHANGED:
        theirs, ours = getattr(KVConnectorBase_V1, name), getattr(HybridMultiConnector, name)
        if callable(theirs):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


META = stores.Nothing()
HANDSHAKE = KVConnectorHandshakeMetadata()
MANAGER = SimpleNamespace(block_pool=POOL)
WORKER = {
    "get_mem_pool_context": (),
    "bind_connector_metadata": (MultiMetadata((META, META)),),
    "clear_connector_metadata": (),
    "register_kv_caches": ({"layer": 1},),
    "set_host_xfer_buffer_ops": (print,),
    "finish_forward": (),
    "reset_capture_state": (),
    "handle_preemptions": (MultiMetadata((META, META)),),
    "start_load_kv": ("context",),
    "wait_for_layer_load": ("layer",),
    "save_kv_layer": ("layer", 1, 2),
    "wait_for_save": (),
    "get_transfer_results": ({"r"},),
    "get_block_ids_with_load_errors": (),
    "shutdown": (),
    "get_kv_connector_stats": (),
    "get_kv_connector_kv_cache_events": (),
    "get_handshake_metadata": (),
    "build_connector_worker_meta": (),
    "get_finished_count": (),
}
SCHEDULER = {
    "bind_kv_cache_manager": (MANAGER,),
    "bind_gpu_block_pool": (POOL,),
    "get_num_new_matched_tokens": (REQUEST, 0),
    "update_state_after_alloc": (REQUEST, BLOCKS, 0),
    "build_connector_meta": (STEP,),
    "on_new_request": (REQUEST,),
    "update_connector_output": (KVConnectorOutput(),),
    "request_finished": (REQUEST, [1, 2]),
    "request_finished_all_groups": (REQUEST, ([1], [2])),
    "register_finished_partial_tail": (REQUEST, ([1], [2]), [(0, 1, 16)]),
    "take_events": (),
    "has_pending_block_frees": (),
    "has_pending_push_work": (),
    "set_xfer_handshake_metadata": ({0: HANDSHAKE},),
    "set_xfer_handshake_metadata_pp_aware": ({(0, 0): HANDSHAKE},),
    "reset_cache": (),
    "shutdown": (),
    "get_kv_connector_stats": (),
}
OTHERWISE = {
    "get_finished",  # put together from get_transfer_results
    "get_loaded_kv_cache_group_ids",  # the chosen child's
    "get_external_cache_hit_sources",  # the chosen child's
    "supports_divergent_local_hybrid_hits",
    "requires_kv_delivery",
    "get_required_kvcache_layout",
    "requires_piecewise_for_cudagraph",
    "build_kv_connector_stats",
    "build_prom_metrics",
}


def test_the_tables_below_cover_the_interface() -> None:
    declared = interface(KVConnectorBase_V1) | interface(SupportsHMA)
    assert WORKER.keys() | SCHEDULER.keys() | OTHERWISE == declared - UNCHANGED


@pytest.mark.parametrize(
    ("role", "method"),
    [(KVConnectorRole.WORKER, name) for name in WORKER] + [(KVConnectorRole.SCHEDULER, name) for name in SCHEDULER],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_call_reaches_every_child(role: KVConnectorRole, method: str) -> None:
    connector, children = recording(role)
    arguments = (WORKER if role is KVConnectorRole.WORKER else SCHEDULER)[method]
    getattr(connector, method)(*arguments)
    for child in children:
        assert len(child.arguments_of(method)) == 1


def test_the_engines_arguments_arrive_unchanged() -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    connector.start_load_kv("context", request_ids=["r"])
    connector.save_kv_layer("layer", 1, 2, more=3)
    for child in children:
        assert child.calls == [
            ("start_load_kv", ("context",), {"request_ids": ["r"]}),
            ("save_kv_layer", ("layer", 1, 2), {"more": 3}),
        ]


def test_each_child_is_bound_to_its_own_metadata() -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    own = stores.Nothing(), stores.Nothing()
    connector.bind_connector_metadata(MultiMetadata(own))
    assert connector.has_connector_metadata()
    assert [child.arguments_of("bind_connector_metadata") for child in children] == [[(own[0],)], [(own[1],)]]
    connector.clear_connector_metadata()
    assert not connector.has_connector_metadata()


def test_preemptions_are_forwarded_as_metadata_child_by_child() -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    own = stores.Nothing(), stores.Nothing()
    connector.handle_preemptions(MultiMetadata(own))
    assert [child.arguments_of("handle_preemptions") for child in children] == [[(own[0],)], [(own[1],)]]


def test_preemptions_are_forwarded_as_a_plain_set_of_request_ids() -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    connector.handle_preemptions({"a", "b"})
    assert all(child.arguments_of("handle_preemptions") == [({"a", "b"},)] for child in children)


def test_loads_and_errors_of_any_child_are_reported() -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    children[0].answers["get_transfer_results"] = KVConnectorTransferResults(set(), {"a"}, set())
    children[1].answers["get_transfer_results"] = KVConnectorTransferResults(set(), {"b"}, {"b"})
    children[1].answers["get_block_ids_with_load_errors"] = {7}
    results = connector.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"b"})
    assert connector.get_block_ids_with_load_errors() == {7}
    assert connector.get_finished(set()) == (None, {"a", "b"})


@pytest.mark.parametrize("reading", [(True, True), (True, False), (False, True), (False, False)])
def test_a_save_is_over_when_each_child_that_began_one_has_ended_it(reading: tuple[bool, bool]) -> None:
    scheduler, planners = recording(KVConnectorRole.SCHEDULER)
    worker, copiers = recording(KVConnectorRole.WORKER)
    for planner, reads_on in zip(planners, reading, strict=True):
        planner.answers["request_finished_all_groups"] = (reads_on, None)
    assert scheduler.request_finished_all_groups(REQUEST, ([1], [2])) == (any(reading), None)
    worker.bind_connector_metadata(scheduler.build_connector_meta(STEP))
    done = []
    for copier, reads_on in zip(copiers, reading, strict=True):
        for other in copiers:
            other.answers["get_transfer_results"] = KVConnectorTransferResults()
        if reads_on:
            copier.answers["get_transfer_results"] = KVConnectorTransferResults({"r"}, set(), set())
        done.append(worker.get_transfer_results({"r"}).finished_sending)
    assert sum(map(len, done)) == any(reading)
    assert not done[0] or not reading[1], "the second child still reads"


def test_a_child_hears_of_its_own_loads_only() -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER)
    children[1].answers["get_num_new_matched_tokens"] = (16, True)
    assert connector.get_num_new_matched_tokens(REQUEST, 0) == (16, True)
    connector.update_state_after_alloc(REQUEST, BLOCKS, 16)
    connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"}))
    heard = [child.arguments_of("update_connector_output")[0][0] for child in children]
    assert [output.finished_recving for output in heard] == [set(), {"r"}]
    assert [output.failed_recving for output in heard] == [set(), {"r"}]
    assert connector.get_num_new_matched_tokens(REQUEST, 0) == (0, False), "the load failed: its child is barred"


def test_what_the_engine_asks_of_a_load_is_answered_by_the_child_that_loads() -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER)
    assert connector.get_loaded_kv_cache_group_ids(REQUEST) == (0, 1)
    children[1].answers["get_num_new_matched_tokens"] = (16, True)
    children[1].answers["get_loaded_kv_cache_group_ids"] = (1,)
    children[1].answers["get_external_cache_hit_sources"] = {"disk": 16}
    connector.get_num_new_matched_tokens(REQUEST, 0)
    connector.update_state_after_alloc(REQUEST, BLOCKS, 16)
    assert connector.get_loaded_kv_cache_group_ids(REQUEST) == (1,)
    assert connector.get_external_cache_hit_sources(REQUEST, 16) == {"disk": 16}


@pytest.mark.parametrize("method", ["has_pending_block_frees", "has_pending_push_work"])
def test_work_of_one_child_is_work_of_all(method: str) -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER)
    assert getattr(connector, method)() is False
    children[1].answers[method] = True
    assert getattr(connector, method)() is True


def test_parameters_of_children_are_put_together_and_a_clash_is_an_error() -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER)
    children[0].answers["request_finished_all_groups"] = (False, {"a": 1})
    children[1].answers["request_finished_all_groups"] = (False, {"b": 2})
    assert connector.request_finished_all_groups(REQUEST, ([1], [2])) == (False, {"a": 1, "b": 2})
    children[1].answers["request_finished_all_groups"] = (False, {"a": 2})
    with pytest.raises(RuntimeError, match="RecordingConnector-1 and another child both answer"):
        connector.request_finished_all_groups(REQUEST, ([1], [2]))


def test_events_of_all_children_are_taken() -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER)
    children[0].answers["take_events"], children[1].answers["take_events"] = ["a"], ("b", "c")
    assert connector.take_events() == ["a", "b", "c"]


def test_a_handshake_goes_back_to_the_child_that_made_it() -> None:
    worker, makers = recording(KVConnectorRole.WORKER)
    assert worker.get_handshake_metadata() is None
    makers[1].answers["get_handshake_metadata"] = HANDSHAKE
    metadata = worker.get_handshake_metadata()
    assert isinstance(metadata, MultiHandshakeMetadata)
    scheduler, takers = recording(KVConnectorRole.SCHEDULER)
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
    assert takers[0].arguments_of("set_xfer_handshake_metadata_pp_aware") == []
    assert takers[1].arguments_of("set_xfer_handshake_metadata_pp_aware") == [({(0, 0): HANDSHAKE},)]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [((True, True), True), ((None, None), True), ((True, False), False), ((False, None), False)],
)
def test_a_reset_succeeds_if_no_child_says_that_it_failed(answers: tuple[Any, Any], expected: bool) -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER)
    for child, answer in zip(children, answers, strict=True):
        child.answers["reset_cache"] = answer
    assert connector.reset_cache() is expected


@pytest.mark.parametrize("method", ["shutdown", "reset_cache"])
def test_all_children_are_reached_also_after_one_has_raised(method: str) -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER, 3)
    children[1].answers[method] = OSError("no")
    with pytest.raises(OSError, match="no"):
        getattr(connector, method)()
    assert all(child.arguments_of(method) for child in children)


def test_one_memory_pool_is_the_pool_and_two_are_an_error() -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    children[1].answers["get_mem_pool_context"] = "pool"
    assert connector.get_mem_pool_context() == "pool"
    children[0].answers["get_mem_pool_context"] = "another"
    with pytest.raises(ConfigurationError, match="RecordingConnector-0, RecordingConnector-1"):
        connector.get_mem_pool_context()


@pytest.mark.parametrize(("counts", "expected"), [((None, None), None), ((2, None), None), ((2, 2), 2)])
def test_the_number_of_ranks_to_await_is_the_childrens(counts: tuple[Any, Any], expected: int | None) -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    for child, count in zip(children, counts, strict=True):
        child.answers["get_finished_count"] = count
    assert connector.get_finished_count() == expected


def test_children_that_await_different_numbers_of_ranks_are_refused() -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    children[0].answers["get_finished_count"], children[1].answers["get_finished_count"] = 1, 2
    with pytest.raises(ConfigurationError, match="same number of ranks"):
        connector.get_finished_count()


def test_the_operators_configuration_is_not_changed_and_children_get_their_own() -> None:
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
def test_with_the_hybrid_manager_children_without_groups_are_refused_by_name_with_both_ways_out(
    role: KVConnectorRole,
) -> None:
    configs = configure(offload(), entry("QuietConnector"), entry("RaisingConnector"), mix=GEMMA3)
    with pytest.raises(TypeError) as caught:
        build(configs, role)
    assert isinstance(caught.value, ConfigurationError)
    text = str(caught.value)
    assert "got QuietConnector\n" in text and "hybrid KV cache manager is on" in text
    assert "remove QuietConnector" in text and "--disable-hybrid-kv-cache-manager" in text


def test_without_the_hybrid_manager_children_without_groups_work() -> None:
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


def test_without_the_manager_but_with_several_groups_children_without_them_are_refused() -> None:
    configs = configure(entry("QuietConnector"))
    configs.vllm.scheduler_config.disable_hybrid_kv_cache_manager = True
    with pytest.raises(TypeError, match="off and the model has 2 groups"):
        build(configs)


# Starting.


def test_a_child_that_is_not_registered_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigurationError) as caught:
        build(configure({"kv_connector": "HybridOfloadConnector"}))
    assert 'did you mean "HybridOffloadConnector"?' in caught.value.hint


def test_a_child_for_which_vllm_sets_itself_up_by_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="HiSparseConnector"):
        build(configure({"kv_connector": "HiSparseConnector"}))


def test_children_before_one_that_cannot_start_are_shut_down() -> None:
    configs = configure(offload(), offload(chunk_token=3))
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="chunk_tokens"):
            build(configs)
    connector = build(configure(offload(), offload(chunk_tokens=256)))
    connector.shutdown()


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_two_offload_connectors_start_below_one_engine_and_end_with_it(role: KVConnectorRole) -> None:
    configs = configure(offload(), offload(chunk_tokens=64, load="sync"))
    for _ in range(2):
        connector = build(configs, role)
        assert [type(child).__name__ for child in connector.sub_connectors] == [CONNECTOR, CONNECTOR]
        connector.shutdown()


def test_two_offload_connectors_below_vllms_own_multi_connector_are_still_refused() -> None:
    extra = {"connectors": [{**offload(), "kv_role": "kv_both"}, {**offload(chunk_tokens=64), "kv_role": "kv_both"}]}
    configs = make_configs(GPT_OSS, EngineSettings(num_blocks=64, connector=Connector("MultiConnector", extra)))
    with pytest.raises(ConfigurationError) as caught:
        build(configs)
    assert "HybridMultiConnector" in caught.value.hint


def test_layouts_and_graphs_are_asked_of_every_child() -> None:
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
