"""The fake runner of the oracle calls a connector in the order of this version of vLLM."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import stores
from multi_engine import entry
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.worker import kv_connector_model_runner_mixin as runner_1
from vllm.v1.worker.gpu import kv_connector as runner_2

from oracle.engine import OracleEngine
from oracle.mixes import GPT_OSS
from oracle.settings import Connector, EngineSettings, make_configs

COMPARED = {
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
}
FORWARD = "the forward pass"


def settings(runner: str, *, saves_last: bool) -> EngineSettings:
    child = entry("RecordingConnector")
    connector = Connector(child["kv_connector"], module_path=child["kv_connector_module_path"])
    return EngineSettings(num_blocks=64, runner=runner, connector=connector, saves_last=saves_last)  # type: ignore[arg-type]


def compared(calls: list[tuple[str, Any, Any]]) -> list[str]:
    names = [FORWARD if name == "save_kv_layer" else name for name, _, _ in calls]
    return [name for i, name in enumerate(names) if name in COMPARED or (name == FORWARD and names[i - 1] != FORWARD)]


def of_the_fake(runner: str, *, is_sync: bool, saves_last: bool) -> list[str]:
    with OracleEngine(GPT_OSS, settings(runner, saves_last=saves_last)) as engine:
        connector: Any = engine.worker_connector
        if is_sync:
            planner: Any = engine.scheduler_connector
            planner.answers["get_num_new_matched_tokens"] = (0, False)
        schedule = engine.scheduler.schedule

        def scheduled(*arguments: Any) -> Any:
            output = schedule(*arguments)
            output.has_sync_kv_loads = is_sync
            return output

        engine.scheduler.schedule = scheduled  # type: ignore[method-assign]
        connector.answers["wait_for_layer_load"] = None
        engine.submit("r", list(range(40)), 1)
        connector.calls.clear()
        engine.step()
        calls = [call for call in connector.calls if call[0] != "wait_for_layer_load"]
        engine.drain()
    return compared(calls)


class Recorded:
    """A worker's connector below the runners of vLLM."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configs = make_configs(GPT_OSS, settings("v1", saves_last=False))
        with set_current_vllm_config(self.configs.vllm):
            made: Any = KVConnectorFactory.create_connector(
                self.configs.vllm, KVConnectorRole.WORKER, self.configs.worker
            )
        self.connector = made
        for module in (runner_1, runner_2):
            monkeypatch.setattr(module, "has_kv_transfer_group", lambda: True)
            monkeypatch.setattr(module, "get_kv_transfer_group", lambda: made)

    def step(self, *, is_sync: bool) -> Any:
        return SimpleNamespace(
            kv_connector_metadata=stores.Nothing(),
            has_sync_kv_loads=is_sync,
            finished_req_ids=set(),
            total_num_scheduled_tokens=1,
        )

    def forward(self) -> None:
        self.connector.calls.append(("save_kv_layer", (), {}))

    def of_runner_1(self, *, is_sync: bool, saves_last: bool) -> list[str]:
        mixin, output = runner_1.KVConnectorModelRunnerMixin, self.step(is_sync=is_sync)
        self.connector.calls.clear()
        self.connector.handle_preemptions(output.kv_connector_metadata)  # by execute_model, before the mixin
        with (
            set_forward_context(None, self.configs.vllm),
            mixin.maybe_get_kv_connector_output(output, defer_finalize=saves_last),
        ):
            self.forward()
        if saves_last:
            mixin.finalize_kv_connector()
        return compared(self.connector.calls)

    def of_runner_2(self, *, is_sync: bool, saves_last: bool) -> list[str]:
        runner, output = runner_2.ActiveKVConnector(self.configs.vllm, {}), self.step(is_sync=is_sync)
        self.connector.calls.clear()
        runner.pre_forward(output)
        self.forward()
        runner.finish_forward()
        if saves_last:
            runner.post_forward(set(), defer_finalize=True)
            runner.finalize_step()
        else:
            runner.post_forward(set())
        return compared(self.connector.calls)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


@pytest.mark.parametrize("saves_last", [False, True], ids=["plain", "with a drafter"])
@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_fake_runner_calls_a_step_in_the_order_of_vllm(
    recorded: Recorded, runner: str, is_sync: bool, saves_last: bool
) -> None:
    parameters = inspect.signature(runner_2.ActiveKVConnector.post_forward).parameters
    if runner == "v2" and saves_last and "defer_finalize" not in parameters:
        pytest.skip("before vLLM 0.33, runner 2 saves before it takes results")
    method = recorded.of_runner_1 if runner == "v1" else recorded.of_runner_2
    theirs = method(is_sync=is_sync, saves_last=saves_last)
    assert FORWARD in theirs
    assert of_the_fake(runner, is_sync=is_sync, saves_last=saves_last) == theirs
