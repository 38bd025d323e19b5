"""Several stores below a real engine: the selected one loads, answers do not change, and no request waits forever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import patience
import pytest
import stores
from audit import Audit, stored_views
from equality import require_same, require_same_output
from harness import SAME_STEPS, Engine, exact_prompt_lengths, make_prompt
from noise import Noise, deviation

from hybridkv.metrics import ChildSelection

KIND = os.environ.get("HYBRIDKV_E2E_MULTI_MODEL", "qwen3-next")
OFFLOAD = "HybridOffloadConnector"
CHUNKS = (128, 256)
PROMPTS = 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.scratch_directory(tmp_path_factory.mktemp("engine"))


def offload(chunk_tokens: int, **extra: Any) -> dict[str, Any]:
    tiers = [{"type": "ram", "capacity": "256MiB"}]
    return {
        "kv_connector": OFFLOAD,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": tiers, "chunk_tokens": chunk_tokens, **SAME_STEPS, **extra},
    }


def foreign(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": stores.MODULE, "kv_connector_extra_config": extra}


@contextmanager
def running(
    directory: Path, *children: dict[str, Any], name: str = "HybridMultiConnector", **options: Any
) -> Iterator[Engine]:
    timeout = {"lookup_timeout_seconds": options.pop("timeout_s")} if "timeout_s" in options else {}
    config = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children), **timeout},
    }
    with harness.running_engine(KIND, directory, kv_transfer_config=config, **options) as engine:
        yield engine


def make_prompts() -> list[list[int]]:
    return [make_prompt(length, seed=i) for i, length in enumerate(exact_prompt_lengths(KIND, PROMPTS))]


def one_by_one(engine: Engine, prompts: list[list[int]]) -> list[harness.Result]:
    return [engine.generate([prompt])[0] for prompt in prompts]


class Selections:
    """Collects the statistics of the selection as they leave the scheduler."""

    def __init__(self, engine: Engine) -> None:
        self._total: dict[str, ChildSelection] = {}
        selector = engine.connector._scheduler
        take = selector.take_stats

        def taking() -> Any:
            stats = take()
            if stats is not None:
                for name, counts in stats.children.items():
                    self._total.setdefault(name, ChildSelection()).merge(counts)
            return stats

        selector.take_stats = taking

    def of(self, name: str) -> ChildSelection:
        return self._total.setdefault(name, ChildSelection())


@pytest.mark.parametrize("preferred", [pytest.param(0, marks=pytest.mark.full), 1])
def test_the_store_with_the_larger_weight_loads_and_answers_do_not_change(directory: Path, preferred: int) -> None:
    weights = [1.0, 1.0]
    weights[preferred] = 10.0
    children = [offload(chunk, load_weight=weight) for chunk, weight in zip(CHUNKS, weights, strict=True)]
    # Only host memory, and host memory with a large disk.
    disk = {"type": "disk", "path": str(directory / f"disk-{preferred}"), "capacity": "1GiB"}
    children[1]["kv_connector_extra_config"]["tiers"].append(disk)
    with running(directory, *children, disable_log_stats=False) as engine:
        selections = Selections(engine)
        audits = [Audit(engine, child).attach() for child in (0, 1)]
        prompts = make_prompts()
        before = engine.counters()
        cold = one_by_one(engine, prompts)
        local = one_by_one(engine, prompts)
        engine.reset_prefix_cache()
        warm = one_by_one(engine, prompts)
        chosen, other = audits[preferred], audits[1 - preferred]
        require_same(chosen, cold, warm)
        require_same(chosen, local, warm)
        restorable = [(len(prompt) - 1) // CHUNKS[preferred] * CHUNKS[preferred] for prompt in prompts]
        assert [result.num_cached_tokens for result in warm] == restorable
        assert (chosen.restored_tokens, other.restored_tokens) == (sum(restorable), 0)
        name, passed = f"{OFFLOAD}-{preferred}", f"{OFFLOAD}-{1 - preferred}"
        assert (selections.of(name).hits, selections.of(name).hit_tokens) == (PROMPTS, sum(restorable))
        assert (selections.of(passed).hits, selections.of(passed).passed_over) == (0, PROMPTS)
        assert selections.of(name).load_bytes > 0 and selections.of(name).load_seconds > 0

        shown = {series: value - before.get(series, 0.0) for series, value in engine.counters().items()}
        assert shown[f"vllm:kv_connector_mc_hit_tokens,connector={name}"] == sum(restorable)
        assert f"vllm:kv_connector_mc_hits,connector={passed}" not in shown
        assert shown[f"vllm:kv_connector_mc_queries,connector={passed}"] == selections.of(passed).queries == 3 * PROMPTS
        assert shown[f"vllm:hybridkv_hit_tokens,connector={name}"] == sum(restorable)
        assert shown["vllm:external_prefix_cache_hits"] == sum(restorable)

        # Controls: zeros in the store that does not load change no answer; zeros in the loading store do.
        for child, is_seen in ((1 - preferred, False), (preferred, True)):
            engine.reset_prefix_cache()
            for key in list(audits[child].stored):
                for view in stored_views(engine, key, child):
                    view[:] = bytes(len(view))
            again = one_by_one(engine, prompts)
            assert all(a.same_output(b) for a, b in zip(cold, again, strict=True)) is not is_seen
        with pytest.raises(AssertionError):
            require_same(chosen, cold, again)


def test_the_other_store_loads_if_one_is_damaged(directory: Path) -> None:
    with running(directory, offload(128, load_weight=10.0), offload(256)) as engine:
        selections = Selections(engine)
        audits = [Audit(engine, child).attach() for child in (0, 1)]
        prompts = make_prompts()
        cold = one_by_one(engine, prompts)
        engine.reset_prefix_cache()
        arena = engine.worker_connector.sub_connectors[0]._worker._arena
        for slot in arena._seals:
            arena._buffer[slot] ^= 1
        warm = one_by_one(engine, prompts)
        assert audits[0].failed_loads == selections.of(f"{OFFLOAD}-0").failures == PROMPTS
        assert audits[1].restored_tokens == selections.of(f"{OFFLOAD}-1").hit_tokens > 0
        assert audits[1].mismatches == []
        require_same_output(cold, warm)


def test_a_stalling_store_does_not_delay_requests_that_another_answers(directory: Path) -> None:
    with running(directory, foreign("StallingConnector"), offload(128), timeout_s=patience.seconds(6.0)) as engine:
        selections = Selections(engine)
        audit = Audit(engine, 1).attach()
        prompts = make_prompts()
        cold = one_by_one(engine, prompts)
        stalling = selections.of("StallingConnector")
        assert (stalling.timeouts, stalling.unanswered, stalling.deferrals) == (0, PROMPTS, 0)
        engine.reset_prefix_cache()
        warm = one_by_one(engine, prompts)
        require_same(audit, cold, warm)
        assert audit.restored_tokens > 0
        assert (stalling.timeouts, stalling.unanswered, stalling.deferrals) == (0, 2 * PROMPTS, 0)


@pytest.mark.full
def test_a_stalling_store_beside_a_store_only_one_delays_only_until_the_timeout(directory: Path) -> None:
    producer = {**offload(128), "kv_role": "kv_producer"}
    with running(directory, foreign("StallingConnector"), producer, timeout_s=0.05) as engine:
        selections = Selections(engine)
        audit = Audit(engine, 1).attach()
        prompts = make_prompts()
        cold = one_by_one(engine, prompts)
        engine.reset_prefix_cache()
        again = one_by_one(engine, prompts)
        assert [a.token_ids for a in again] == [b.token_ids for b in cold]
        stalling = selections.of("StallingConnector")
        assert (stalling.timeouts, stalling.unanswered) == (
            2 * PROMPTS,
            2 * PROMPTS,
        ) and stalling.deferrals >= 2 * PROMPTS
        assert audit.stored and audit.restored_tokens == 0 and selections.of(OFFLOAD).queries == 0


def test_a_raising_store_does_not_stop_the_engine(directory: Path) -> None:
    with running(directory, foreign("RaisingConnector"), offload(128)) as engine:
        selections = Selections(engine)
        audit = Audit(engine, 1).attach()
        prompts = make_prompts()
        cold = one_by_one(engine, prompts)
        engine.reset_prefix_cache()
        require_same(audit, cold, one_by_one(engine, prompts))
        assert selections.of("RaisingConnector").errors == 2 * PROMPTS


def test_a_hybrid_model_with_a_store_without_groups_does_not_start(directory: Path) -> None:
    with pytest.raises(TypeError) as caught, running(directory, offload(128), foreign("QuietConnector")):
        pass
    text = str(caught.value)
    assert "got QuietConnector\n" in text
    assert "remove QuietConnector" in text and "--disable-hybrid-kv-cache-manager" in text


@pytest.mark.full
def test_the_offload_connector_works_below_vllms_multi_connector(
    directory: Path,
) -> None:
    children = {**foreign("GroupsConnector"), "kv_role": "kv_both"}, offload(128)
    with running(directory, *children, name="MultiConnector", disable_log_stats=False) as engine:
        audit = Audit(engine, 1).attach()
        prompts = make_prompts()
        before = engine.counters()
        cold = one_by_one(engine, prompts)
        engine.reset_prefix_cache()
        require_same(audit, cold, one_by_one(engine, prompts))
        after = engine.counters()
        assert after["vllm:hybridkv_hit_tokens"] - before.get("vllm:hybridkv_hit_tokens", 0) == audit.restored_tokens


@pytest.mark.skipif(
    KIND == "qwen3-next", reason="a recurrent model needs the hybrid manager, which ExampleConnector does not support"
)
def test_vllms_example_connector_works_below_ours_without_the_hybrid_manager(directory: Path, tmp_path: Path) -> None:
    example = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    children = example, offload(128)
    # The example connector stores a prompt correctly only if it is computed in one step.
    options = {"disable_hybrid_kv_cache_manager": True, "max_num_batched_tokens": 512}
    with running(directory, *children, **options) as engine:
        selections = Selections(engine)
        prompts = [make_prompt(300, seed=50 + i) for i in range(2)]
        cold = one_by_one(engine, prompts)
        assert any(tmp_path.iterdir()), "the example connector stored nothing"
        engine.reset_prefix_cache()
        warm = one_by_one(engine, prompts)
        tolerance = Noise(engine).tolerance
        for before, after in zip(cold, warm, strict=True):
            assert deviation(before, after) <= tolerance
        example_counts = selections.of("ExampleConnector")
        assert (example_counts.hits, example_counts.hit_tokens) == (2, 512), "of two equal hits the first one loads"
        assert example_counts.load_bytes > 0 and example_counts.load_seconds > 0
        assert (selections.of(OFFLOAD).passed_over, example_counts.pending_loads) == (2, 0)
