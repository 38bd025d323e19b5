"""HybridMultiConnector implements vLLM's whole connector interface: every method reaches every child.

The children are built through vLLM's factory and record their calls. `test_multi_startup.py` tests startup and
refusals.
"""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import stores
from multi_engine import REQUEST, recording
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import CONNECTOR
from hybridkv.connectors.vllm.multi.connector import HybridMultiConnector
from hybridkv.connectors.vllm.multi.messages import MultiHandshakeMetadata, MultiMetadata

UNCHANGED = {"role", "has_connector_metadata"}
"""Values of the base class that are already right for HybridMultiConnector."""
STEP = SimpleNamespace(
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_output_tokens=[]),
)
BLOCKS = SimpleNamespace(blocks=((), ()))
POOL = SimpleNamespace(num_gpu_blocks=64, get_num_free_blocks=lambda: 63)


def interface(base: type) -> set[str]:
    """Public methods and properties that a class declares."""
    kinds = (property, classmethod, staticmethod)
    return {
        name
        for name, member in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, kinds))
    }


def unhandled(base: type, connector: type) -> set[str]:
    """Methods that a connector wrongly leaves to the base class."""
    own = {name for each in connector.__mro__ if each.__module__.startswith("hybridkv.") for name in vars(each)}
    return interface(base) - own - UNCHANGED


def test_every_method_of_the_base_class_is_handled() -> None:
    assert unhandled(KVConnectorBase_V1, HybridMultiConnector) == set(), "forward it, or combine the results"
    assert unhandled(SupportsHMA, HybridMultiConnector) == set()
    assert interface(KVConnectorBase_V1) >= UNCHANGED, "no longer declared: remove it"


def test_a_new_method_of_vllm_is_detected() -> None:
    newer = type("Newer", (KVConnectorBase_V1,), {"prefetch": lambda self: None, "wants": property(lambda self: 1)})
    assert unhandled(newer, HybridMultiConnector) == {"prefetch", "wants"}


def test_every_method_has_the_arguments_of_the_base_class() -> None:
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
    "unregister_kv_caches": (),
    "restore_kv_caches": (),
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
    "get_finished",  # combined from get_transfer_results
    "get_loaded_kv_cache_group_ids",  # from the chosen child
    "get_external_cache_hit_sources",  # from the chosen child
    "supports_divergent_local_hybrid_hits",
    "requires_kv_delivery",
    "supports_sleep_mode",
    "get_required_kvcache_layout",
    "requires_piecewise_for_cudagraph",
    "build_kv_connector_stats",
    "build_prom_metrics",
}


NEWER = {
    "get_mem_pool_context",  # 0.31
    "get_external_cache_hit_sources",  # 0.32
    "get_loaded_kv_cache_group_ids",
    "restore_kv_caches",  # 0.33
    "supports_sleep_mode",
    "unregister_kv_caches",
}
"""Methods that vLLM 0.30 does not have."""
DECLARED = interface(KVConnectorBase_V1) | interface(SupportsHMA)


def test_the_tables_above_cover_the_interface() -> None:
    assert (WORKER.keys() | SCHEDULER.keys() | OTHERWISE) - (NEWER - DECLARED) == DECLARED - UNCHANGED


@pytest.mark.parametrize(
    ("role", "method"),
    [(KVConnectorRole.WORKER, name) for name in WORKER if name in DECLARED]
    + [(KVConnectorRole.SCHEDULER, name) for name in SCHEDULER if name in DECLARED],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_call_reaches_every_child(role: KVConnectorRole, method: str) -> None:
    connector, children = recording(role)
    arguments = (WORKER if role is KVConnectorRole.WORKER else SCHEDULER)[method]
    getattr(connector, method)(*arguments)
    for child in children:
        assert len(child.arguments_of(method)) == 1


def test_the_arguments_of_the_engine_reach_the_children_unchanged() -> None:
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


def test_preemptions_reach_each_child_as_its_own_metadata() -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    own = stores.Nothing(), stores.Nothing()
    connector.handle_preemptions(MultiMetadata(own))
    assert [child.arguments_of("handle_preemptions") for child in children] == [[(own[0],)], [(own[1],)]]


def test_preemptions_reach_children_as_a_plain_set_of_request_ids() -> None:
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
def test_a_save_ends_when_each_child_that_began_one_has_ended_it(reading: tuple[bool, bool]) -> None:
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


def test_a_child_receives_only_its_own_loads() -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER)
    children[1].answers["get_num_new_matched_tokens"] = (16, True)
    assert connector.get_num_new_matched_tokens(REQUEST, 0) == (16, True)
    connector.update_state_after_alloc(REQUEST, BLOCKS, 16)
    connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"}))
    heard = [child.arguments_of("update_connector_output")[0][0] for child in children]
    assert [output.finished_recving for output in heard] == [set(), {"r"}]
    assert [output.failed_recving for output in heard] == [set(), {"r"}]
    answers = [connector.get_num_new_matched_tokens(REQUEST, 0) for _ in range(2)]
    assert answers == [(None, False), (0, False)], "the load failed: its child is excluded after one deferral"


@pytest.mark.skipif("get_loaded_kv_cache_group_ids" not in DECLARED, reason="new in vLLM 0.32")
def test_the_child_that_loads_answers_calls_about_the_load() -> None:
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
def test_the_connector_has_work_if_any_child_has_work(method: str) -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER)
    assert getattr(connector, method)() is False
    children[1].answers[method] = True
    assert getattr(connector, method)() is True


def test_parameters_of_children_are_merged_and_in_a_conflict_the_first_child_wins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An exception would end the engine."""
    connector, children = recording(KVConnectorRole.SCHEDULER)
    children[0].answers["request_finished_all_groups"] = (False, {"a": 1})
    children[1].answers["request_finished_all_groups"] = (False, {"b": 2})
    assert connector.request_finished_all_groups(REQUEST, ([1], [2])) == (False, {"a": 1, "b": 2})
    children[1].answers["request_finished_all_groups"] = (True, {"a": 2})
    for _ in range(2):
        assert connector.request_finished_all_groups(REQUEST, ([1], [2])) == (True, {"a": 1})
    [logged] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "RecordingConnector-1 and an earlier child both return kv_transfer_params ['a']" in logged


def test_events_of_all_children_are_collected() -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER)
    children[0].answers["take_events"], children[1].answers["take_events"] = ["a"], ("b", "c")
    assert connector.take_events() == ["a", "b", "c"]


@pytest.mark.parametrize("is_ours", [True, False])
def test_events_are_counted_only_for_own_stores(is_ours: bool) -> None:
    """Foreign stores may report a block twice, drop it without an event, or never drop one."""
    connector, children = recording(KVConnectorRole.SCHEDULER)
    if is_ours:
        configs = [dataclasses.replace(child.config, connector=CONNECTOR) for child in connector._children]
        pairs = zip(connector._children, configs, strict=True)
        connector._children = tuple(dataclasses.replace(child, config=config) for child, config in pairs)
    stored = BlockStored([7], None, [1, 2], 2, None, "CPU", None, group_idx=0)
    removed = BlockRemoved([7], "CPU", group_idx=0)
    for child in children:
        child.answers["take_events"] = [stored]
    assert connector.take_events() == ([stored] if is_ours else [stored, stored])
    children[0].answers["take_events"], children[1].answers["take_events"] = [removed], ()
    assert connector.take_events() == ([] if is_ours else [removed])
    assert len(connector._announced_blocks) == (1 if is_ours else 0)


def test_a_handshake_is_returned_to_the_child_that_created_it() -> None:
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
def test_a_reset_succeeds_unless_a_child_reports_a_failure(answers: tuple[Any, Any], expected: bool) -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER)
    for child, answer in zip(children, answers, strict=True):
        child.answers["reset_cache"] = answer
    assert connector.reset_cache() is expected


@pytest.mark.parametrize("method", ["shutdown", "reset_cache"])
def test_a_call_reaches_all_children_even_if_one_raises(method: str) -> None:
    connector, children = recording(KVConnectorRole.SCHEDULER, 3)
    children[1].answers[method] = OSError("no")
    with pytest.raises(OSError, match="no"):
        getattr(connector, method)()
    assert all(child.arguments_of(method) for child in children)


@pytest.mark.skipif("get_mem_pool_context" not in DECLARED, reason="new in vLLM 0.31")
def test_one_memory_pool_is_used_and_two_are_an_error() -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    children[1].answers["get_mem_pool_context"] = "pool"
    assert connector.get_mem_pool_context() == "pool"
    children[0].answers["get_mem_pool_context"] = "another"
    with pytest.raises(ConfigurationError, match="RecordingConnector-0, RecordingConnector-1"):
        connector.get_mem_pool_context()


@pytest.mark.parametrize(("counts", "expected"), [((None, None), None), ((2, None), None), ((2, 2), 2)])
def test_the_number_of_ranks_to_wait_for_comes_from_the_children(counts: tuple[Any, Any], expected: int | None) -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    for child, count in zip(children, counts, strict=True):
        child.answers["get_finished_count"] = count
    assert connector.get_finished_count() == expected


def test_children_that_wait_for_different_numbers_of_ranks_are_refused() -> None:
    connector, children = recording(KVConnectorRole.WORKER)
    children[0].answers["get_finished_count"], children[1].answers["get_finished_count"] = 1, 2
    with pytest.raises(ConfigurationError, match="same number of ranks"):
        connector.get_finished_count()
