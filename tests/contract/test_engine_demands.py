"""Requirements that newer versions of vLLM place on a connector, in an oracle engine of the installed version: sleep, a
repeated handshake, hits that the engine does not take, and outputs that arrive one step late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from multi_engine import entry, offload
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR
from hybridkv.connectors.vllm.common.base import store_connector
from hybridkv.connectors.vllm.lmcache.connector import HybridLMCacheConnector
from hybridkv.connectors.vllm.multi.connector import HybridMultiConnector
from hybridkv.connectors.vllm.nixl.connector import HybridNixlConnector
from hybridkv.connectors.vllm.offload.connector import HybridOffloadConnector
from oracle.engine import OracleEngine
from oracle.mixes import GEMMA3, GPT_OSS, QWEN3_NEXT, Mix
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

MIXES = (GPT_OSS, GEMMA3, QWEN3_NEXT)
TIERS = [{"type": "ram", "capacity": "16MiB"}]


@pytest.fixture(autouse=True)
def ranks_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of these engines live in one process. In production each rank has a process of its own."""
    monkeypatch.setattr(store_connector.StoreConnector, "_refuse_second", lambda self: None)


def single(mix: Mix, **extra: Any) -> Connector:
    return Connector(CONNECTOR, {"tiers": TIERS, "chunk_tokens": mix.alignment_tokens, **extra})


def multi(mix: Mix, **extra: Any) -> Connector:
    # No lookup waits for a slower child, so the restored tokens do not depend on the clock.
    children = [offload(chunk_tokens=mix.alignment_tokens, **extra) for _ in range(2)]
    return Connector(MULTI_CONNECTOR, {"connectors": children, "lookup_timeout_seconds": 0})


def engine_of(mix: Mix, connector: Connector, **more: Any) -> OracleEngine:
    return OracleEngine(mix, EngineSettings(num_blocks=600, connector=connector, **more))


def serve(engine: OracleEngine, name: str, prompts: Sequence[Sequence[int]]) -> int:
    """Runs requests to their end and returns the number of restored tokens."""
    before = engine.restored_tokens
    for index, prompt in enumerate(prompts):
        engine.submit(f"{name} {index}", prompt, 3)
    engine.drain()
    engine.check_idle()
    return engine.restored_tokens - before


def prompts_of(mix: Mix) -> list[list[int]]:
    tokens = 4 * mix.alignment_tokens + 5
    return [[(7 * number + i) % 97 for i in range(tokens)] for number in range(3)]


def calls(engine: OracleEngine, method: str) -> None:
    for runner in engine.runners:
        getattr(runner.connector, method)()


# Sleep.


def sleep_and_wake(engine: OracleEngine) -> None:
    """Repeats the calls of vLLM 0.33 at `sleep` and `wake_up`. The KV cache loses its content; the handshake is
    repeated."""
    engine.reset_prefix_cache()
    assert engine.reset_connector()
    for _ in range(2):
        calls(engine, "unregister_kv_caches")
    for runner in engine.runners:
        num_blocks = engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        runner.memory.poison(list(range(1, num_blocks)))
    for _ in range(2):
        calls(engine, "restore_kv_caches")
    engine._exchange_handshakes()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("connector", [single, multi], ids=["single", "multi"])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_an_engine_that_slept_restores_only_from_kept_tiers(mix: Mix, connector: Any, tp_size: int) -> None:
    restored = {}
    for on_reset in ("clear", "keep"):
        with engine_of(mix, connector(mix, on_reset=on_reset), tp_size=tp_size) as engine:
            assert serve(engine, "before", prompts_of(mix)) == 0
            sleep_and_wake(engine)
            restored[on_reset] = serve(engine, "after", prompts_of(mix))
            engine.reset_prefix_cache()
            assert serve(engine, "later", prompts_of(mix)) > 0
    assert restored["clear"] == 0, "the weights may have changed"
    assert restored["keep"] >= 3 * mix.alignment_tokens


def test_requests_continue_to_store_after_a_reset_that_keeps_the_tiers() -> None:
    with engine_of(GPT_OSS, single(GPT_OSS, on_reset="keep")) as engine:
        engine.submit("a", prompts_of(GPT_OSS)[0], 3)
        engine.step()
        assert engine.reset_connector()
        engine.drain()
        engine.reset_prefix_cache()
        assert serve(engine, "b", prompts_of(GPT_OSS)[:1]) > 0


def test_an_engine_with_copies_in_flight_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_connector, "SUSPEND_S", 0.01)
    with engine_of(GPT_OSS, single(GPT_OSS)) as engine:
        worker: Any = engine.worker_connector
        monkeypatch.setattr(worker._worker, "suspend", lambda timeout_s: timeout_s != 0.01)
        with pytest.raises(
            RuntimeError, match=r"HybridOffloadConnector: copies .* in flight after .*, .* cannot sleep"
        ):
            worker.unregister_kv_caches()


def test_other_children_continue_to_copy_if_one_child_cannot_sleep() -> None:
    ours = offload(chunk_tokens=GPT_OSS.alignment_tokens)
    connector = Connector(MULTI_CONNECTOR, {"connectors": [ours, entry("RecordingConnector"), ours]})
    with engine_of(GPT_OSS, connector) as engine:
        worker: Any = engine.worker_connector
        children = worker.sub_connectors
        children[1].unregister_kv_caches = lambda: (_ for _ in ()).throw(OSError("no"))
        for role in (engine.scheduler_connector, worker):
            role.sub_connectors[1].answers |= {"get_num_new_matched_tokens": (0, False)}
        with pytest.raises(OSError, match="no"):
            worker.unregister_kv_caches()
        assert serve(engine, "a", prompts_of(GPT_OSS)[:1]) == 0
        engine.reset_prefix_cache()
        assert serve(engine, "b", prompts_of(GPT_OSS)[:1]) > 0


SLEEPS: list[tuple[type[Any], dict[str, Any], bool]] = [
    (HybridOffloadConnector, {"tiers": TIERS}, True),
    (HybridLMCacheConnector, {"url": "tcp://127.0.0.1:5555"}, True),
    (HybridNixlConnector, {}, False),
    (HybridMultiConnector, {"connectors": [offload(), entry("QuietConnector")]}, True),
    (HybridMultiConnector, {"connectors": [offload(), {"kv_connector": "HybridNixlConnector"}]}, False),
]


def transfer_of(connector: type[Any], extra: dict[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=connector.__name__, kv_role="kv_both", kv_connector_extra_config=extra)


@pytest.mark.parametrize(("connector", "extra", "expected"), SLEEPS)
def test_a_connector_declares_whether_its_engine_may_sleep(
    connector: type[Any], extra: dict[str, Any], expected: bool
) -> None:
    assert connector.supports_sleep_mode(transfer_of(connector, extra)) is expected


@pytest.mark.skipif(not hasattr(KVConnectorBase_V1, "supports_sleep_mode"), reason="new in vLLM 0.33")
@pytest.mark.parametrize(("connector", "extra", "expected"), SLEEPS)
def test_vllm_refuses_sleep_mode_only_for_connectors_without_support(
    connector: type[Any], extra: dict[str, Any], expected: bool
) -> None:
    config: Any = type("Config", (), {})()
    config.kv_transfer_config = transfer_of(connector, extra)
    config.model_config = type("Model", (), {"enable_sleep_mode": True, "enable_cumem_allocator": True})()
    if expected:
        VllmConfig._verify_kv_transfer_compat(config)
        return
    with pytest.raises(ValueError, match=f"{connector.__name__} does not support sleep mode"):
        VllmConfig._verify_kv_transfer_compat(config)


def test_memory_that_peers_read_is_not_unregistered() -> None:
    with pytest.raises(RuntimeError, match="peers read it"):
        HybridNixlConnector.unregister_kv_caches(object.__new__(HybridNixlConnector))


# A hit that the engine does not take.


@pytest.mark.parametrize("connector", [single, multi], ids=["single", "multi"])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_a_hit_that_the_engine_does_not_take_leaves_no_lease(mix: Mix, connector: Any) -> None:
    """vLLM 0.33 with auxiliary outputs: N tokens are offered, and 0 are allocated."""
    with engine_of(mix, connector(mix)) as engine:
        serve(engine, "first", prompts_of(mix))
        engine.reset_prefix_cache()
        offers: Any = engine.scheduler_connector
        ask, offered = offers.get_num_new_matched_tokens, []

        def capped(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            num_tokens, is_async = ask(request, num_computed_tokens)
            offered.append(num_tokens)
            return (num_tokens, is_async) if num_tokens is None else (0, False)

        offers.get_num_new_matched_tokens = capped
        assert serve(engine, "capped", prompts_of(mix)) == 0
        assert any(offered)
        halves = offers.sub_connectors if isinstance(offers, HybridMultiConnector) else [offers]
        for half in halves:
            assert not half._scheduler._stack._leases.by_owner
            assert half._scheduler._admission.is_idle
            assert not half._scheduler.has_work_in_flight()
        offers.get_num_new_matched_tokens = ask
        engine.reset_prefix_cache()
        assert serve(engine, "taken", prompts_of(mix)) > 0


# Outputs of a failed worker.


class LateEngine(OracleEngine):
    """Every third step, the outputs of some ranks' connectors arrive with those of the next step."""

    num_late = 0
    _late: tuple[Any, ...] = ()

    def _execute(self, output: SchedulerOutput, fresh: Sequence[int]) -> ModelRunnerOutput:
        results = [runner.execute(output, fresh) for runner in self.runners]
        late, self._late = self._late, ()
        if self.num_steps % 3 == 0:
            self._late = tuple(result.kv_connector_output for result in results)
            self.num_late += sum(not each.is_empty() for each in self._late)
            for result in results:
                result.kv_connector_output = type(self._late[0])()
        if hasattr(self._aggregator, "ft_defer_kv_connector_outputs"):
            self._aggregator.ft_defer_kv_connector_outputs(list(late))
            merged = self._aggregator.aggregate(list(results))
        else:
            more = [type(results[0])(req_ids=[], req_id_to_index={}, kv_connector_output=each) for each in late]
            merged = KVOutputAggregator.aggregate(self._aggregator, [*results, *more])
        assert merged is not None
        return merged


@pytest.mark.parametrize("connector", [single, multi], ids=["single", "multi"])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_worker_outputs_may_arrive_one_step_late(mix: Mix, connector: Any) -> None:
    settings = EngineSettings(num_blocks=600, connector=connector(mix), tp_size=2)
    with LateEngine(mix, settings) as engine:
        for wave in range(4):
            restored = serve(engine, f"wave {wave}", prompts_of(mix))
            assert bool(restored) == (wave > 0)
            engine.reset_prefix_cache()
        assert engine.num_late > 0
