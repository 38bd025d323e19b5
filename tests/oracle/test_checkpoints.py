"""Prompts with a common beginning hit: the engine stops where the store needs a state, and offers it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR, register
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.prefill_stops import PrefillStops
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics, OffloadStats
from hybridkv.connectors.vllm.offload import checkpoints
from hybridkv.connectors.vllm.offload.checkpoints import AnswerStates, Checkpoints
from hybridkv.metrics import Counts
from hybridkv.planner.checkpoints import Experience, Placement, Prompt
from oracle.disk_tier import stack_of, stacked, wait_for_disk
from oracle.engine import OracleEngine
from oracle.known_stops import STEPS, known_stops_alone
from oracle.mixes import GPT_OSS, QWEN3_NEXT, Mix
from oracle.rings import but_full
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["known_stops_alone"]

UNIT = QWEN3_NEXT.alignment_tokens

pytestmark = pytest.mark.usefixtures("known_stops_alone")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def offload(chunk_tokens: int = UNIT, load: str = "async", **keys: Any) -> Connector:
    tiers = [{"type": "ram", "capacity": "64MiB"}]
    return Connector(CONNECTOR, {"chunk_tokens": chunk_tokens, "tiers": tiers, "load": load, **STEPS, **keys})


def two(*chunk_tokens: int, **keys: Any) -> Connector:
    """HybridMultiConnector over stores with chunks of these lengths."""
    children = [offload(each, **keys) for each in chunk_tokens]
    entries = [{"kv_connector": each.name, "kv_connector_extra_config": each.extra_config} for each in children]
    return Connector(MULTI_CONNECTOR, {"connectors": entries, "lookup_timeout_seconds": 0})


def prompt(num_tokens: int, seed: int, prefix: Sequence[int] = ()) -> list[int]:
    generator = Random(seed)
    return [*prefix, *(generator.randrange(1000) for _ in range(num_tokens - len(prefix)))]


class PromptRunner:
    """An engine that answers one request after the other, and counts the tokens of each that were restored."""

    def __init__(self, connector: Connector, mix: Mix = QWEN3_NEXT, step_tokens: int = 512, **settings: Any) -> None:
        self.engine = OracleEngine(
            mix, EngineSettings(num_blocks=600, max_step_tokens=step_tokens, connector=connector, **settings)
        )
        self.num_lookups = 0

    def ask(self, tokens: list[int], num_outputs: int = 2, *, keep_cache: bool = False, **request: Any) -> int:
        """Tokens restored for a request; the engine's own cache is empty unless `keep_cache`."""
        if not keep_cache:
            self.engine.reset_prefix_cache()
        before = self.engine.restored_tokens
        self.engine.submit(f"request-{self.num_lookups}", tokens, num_outputs, **request)
        self.num_lookups += 1
        self.engine.drain()
        self.engine.check_idle()
        return self.engine.restored_tokens - before

    def outputs(self) -> list[int]:
        """Output of the last request."""
        return self.engine.outputs(f"request-{self.num_lookups - 1}")


@pytest.mark.parametrize("plans_ahead", [False, True], ids=["in_step", "ahead"])
@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("shared", [4 * UNIT, 4 * UNIT + 7, 5 * UNIT - 1])
def test_a_shared_prefix_hits_from_the_second_sibling_on(shared: int, load: str, plans_ahead: bool) -> None:
    engine, stem = PromptRunner(offload(load=load), async_scheduling=plans_ahead), prompt(shared, 0)
    siblings = [prompt(8 * UNIT + 3, seed, stem) for seed in range(1, 6)]
    branch = shared // UNIT * UNIT
    assert [engine.ask(each) for each in siblings] == [0, 0, branch, branch, branch]


@pytest.mark.parametrize("blocks", [2, 3])
@pytest.mark.parametrize("num_tokens", [5 * UNIT + 3, 6 * UNIT, 6 * UNIT + 1, 8 * UNIT - 1])
def test_a_repeated_prompt_hits_where_chunks_are_longer_than_blocks(num_tokens: int, blocks: int) -> None:
    """The engine's own last state may be after the last chunk boundary."""
    engine, chunk = PromptRunner(offload(blocks * UNIT)), blocks * UNIT
    again = [engine.ask(prompt(num_tokens, 1)) for _ in range(3)]
    assert again == [0, *[(num_tokens - 1) // chunk * chunk] * 2]


loads_nothing = pytest.mark.parametrize(
    "request_keys",
    [{"transfer_params": {"hybridkv_hints": {"load": False}}}, {"skips_prefix_cache": True}],
    ids=["hint", "scored"],
)


@loads_nothing
@pytest.mark.parametrize("make", [offload, two], ids=["alone", "below_multi"])
def test_a_request_that_must_not_load_stops_for_others(make: Any, request_keys: dict[str, Any]) -> None:
    runner, stem = PromptRunner(make(UNIT)), prompt(4 * UNIT, 0)
    assert [runner.ask(prompt(8 * UNIT + 3, seed, stem), **request_keys) for seed in (1, 2)] == [0, 0]
    assert runner.ask(prompt(8 * UNIT + 3, 3, stem)) == 4 * UNIT


@loads_nothing
def test_a_request_that_must_not_load_reuses_no_state_of_an_answer(request_keys: dict[str, Any]) -> None:
    runner, said = PromptRunner(offload()), prompt(3 * UNIT + 3, 0)
    runner.ask(said, 3 * UNIT)
    said += [*runner.outputs(), *prompt(5, 1)]
    answers = runner.engine.scheduler_connector._scheduler._checkpoints._answers  # type: ignore[union-attr]
    assert runner.ask(said, 1, **request_keys) == 0
    assert answers._answer_reuse.resumed_share == 0
    assert runner.ask(said, 1) == 6 * UNIT
    assert answers._answer_reuse.resumed_share > 0


@pytest.mark.parametrize("is_child", [False, True], ids=["alone", "below_multi"])
def test_a_producer_stops_where_its_prompts_diverge(is_child: bool, tmp_path: Path) -> None:
    consumer, stem = stacked(QWEN3_NEXT, tmp_path), prompt(4 * UNIT, 0)
    producer = replace(consumer, role="kv_producer")
    if is_child:
        keys = {"kv_connector": CONNECTOR, "kv_connector_extra_config": consumer.extra_config}
        only_loads = {**keys, "kv_connector_extra_config": offload().extra_config, "kv_role": "kv_consumer"}
        producer = Connector(MULTI_CONNECTOR, {"connectors": [{**keys, "kv_role": "kv_producer"}, only_loads]})
    runner = PromptRunner(producer)
    with runner.engine:
        for seed in (1, 2):
            runner.ask(prompt(8 * UNIT + 3, seed, stem))
    runner = PromptRunner(replace(consumer, role="kv_consumer"))
    with runner.engine:
        assert runner.ask(prompt(8 * UNIT + 3, 3, stem)) == 4 * UNIT


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_a_stop_of_a_preempted_request_is_planned_again(role: str, counted: Counts) -> None:
    runner, stem = PromptRunner(replace(offload(), role=role), step_tokens=2 * UNIT), prompt(5 * UNIT, 0)
    runner.ask(prompt(9 * UNIT + 3, 1, stem))
    runner.engine.submit("preempted", prompt(9 * UNIT + 3, 2, stem), 2)
    runner.engine.reset_prefix_cache()
    runner.engine.step()
    runner.engine.preempt_all()
    runner.engine.drain()
    runner.engine.check_idle()
    assert runner.engine.preemptions == 1
    assert counters(counted, "states_stored") == {"prompt_end": 2, "stop": 1}


def test_a_prefill_of_many_steps_stops_within_one_of_them() -> None:
    engine, stem = PromptRunner(offload(), step_tokens=2 * UNIT), prompt(5 * UNIT, 0)
    assert [engine.ask(prompt(9 * UNIT + 3, seed, stem)) for seed in range(1, 5)] == [0, 0, 5 * UNIT, 5 * UNIT]


def test_every_branch_of_a_tree_hits_from_its_third_visit_on() -> None:
    """Calls of an agent: each level shares its prefix and diverges in its own way."""
    engine, root = PromptRunner(offload()), prompt(3 * UNIT, 0)
    visits: dict[int, int] = {}
    for seed in range(1, 13):
        first = prompt(6 * UNIT, 100 + seed % 2, root)
        second = prompt(9 * UNIT, 200 + seed % 4, first)
        restored = engine.ask(prompt(11 * UNIT + 5, 300 + seed, second))
        visits[seed % 4] = visits.get(seed % 4, 0) + 1
        if visits[seed % 4] == 3:
            assert restored == 9 * UNIT, seed
        elif seed > 4:
            assert restored >= 6 * UNIT, seed


def test_a_preempted_prefill_stops_again_at_the_same_place() -> None:
    engine, stem = PromptRunner(offload(), step_tokens=2 * UNIT), prompt(5 * UNIT, 0)
    engine.ask(prompt(9 * UNIT + 3, 1, stem))
    engine.engine.reset_prefix_cache()
    engine.engine.submit("preempted", prompt(9 * UNIT + 3, 2, stem), 2)
    for _ in range(2):
        engine.engine.step()
    engine.engine.preempt_all()
    engine.engine.drain()
    assert engine.engine.preemptions == 1
    assert engine.ask(prompt(9 * UNIT + 3, 3, stem)) == 5 * UNIT


@pytest.mark.parametrize("num_shared", [0, 3 * UNIT])
def test_a_preempted_prefill_does_not_diverge_from_itself(
    num_shared: int, counted: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stored chunks end where it was preempted, without a state there, as at a divergence of another request."""
    learned, learn = [], checkpoints.learn_request

    def learning(experience: Experience, asked: Prompt, placement: Placement) -> Experience:
        learned.append(learn(experience, asked, placement))
        return learned[-1]

    monkeypatch.setattr(checkpoints, "learn_request", learning)
    engine, stem = PromptRunner(offload(), step_tokens=2 * UNIT), prompt(num_shared, 0)
    engine.ask(prompt(9 * UNIT + 3, 1, stem))
    engine.engine.reset_prefix_cache()
    engine.engine.submit("preempted", prompt(9 * UNIT + 3, 2, stem), 2)
    for _ in range(3):
        engine.engine.step()
    engine.engine.preempt_all()
    engine.engine.drain()
    assert engine.engine.preemptions == 1
    _, parting, restarted = learned
    assert (max(parting.divergences) > 1) == (num_shared > 0)
    assert (restarted.divergences, restarted.prompts) == (parting.divergences, parting.prompts)
    assert restarted.computed_tokens > parting.computed_tokens
    assert counters(counted, "checkpoint_stops") == ({"junction": 1} if num_shared else {})
    # No later request diverges there: it is computed as if it had never been preempted.
    assert engine.ask(prompt(9 * UNIT + 3, 3, stem)) == num_shared


def test_a_retry_after_a_failed_load_has_no_stop(counted: Counts) -> None:
    engine, tokens = PromptRunner(offload()), prompt(8 * UNIT + 3, 1)
    engine.ask(tokens)
    worker = engine.engine.worker_connector._worker  # type: ignore[union-attr]
    for slot in worker._arena._seals:
        worker._arena._buffer[slot] ^= 1
    engine.ask(tokens)
    assert engine.engine.failed_loads
    assert counters(counted, "checkpoint_stops") == {}


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "kept"])
def test_the_newest_state_of_an_answer_replaces_the_one_before(
    is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_replaced:
        monkeypatch.setattr(AnswerStates, "on_planned", lambda *_: None)
    # A chunk of a group takes a granule of 4 KiB: room for the conversation, and half of the next prompt.
    tiers = [{"type": "ram", "capacity": 21 * 4096}]
    engine = PromptRunner(Connector(CONNECTOR, {"chunk_tokens": UNIT, "tiers": tiers}))
    said = prompt(3 * UNIT + 3, 0)
    engine.ask(said, 3 * UNIT)
    answered = [*said, *engine.outputs()]
    engine.ask(prompt(4 * UNIT + 1, 1), 1)
    restored = engine.ask([*answered, 1, 2, 3], 1)
    assert (restored == 6 * UNIT) == is_replaced, restored


@pytest.mark.parametrize("is_renewed", [False, True])
def test_a_loaded_state_is_evicted_before_the_deeper_one_of_its_prompt(
    is_renewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_renewed:
        monkeypatch.setattr(Checkpoints, "_is_loaded", lambda *_: False)
    # Six chunks of attention and two states of three groups, and half of the next prompt.
    tiers = [{"type": "ram", "capacity": 15 * 4096}]
    engine = PromptRunner(Connector(CONNECTOR, {"chunk_tokens": UNIT, "tiers": tiers}))
    said = prompt(4 * UNIT + 3, 0)
    assert [engine.ask(said, 1), engine.ask(prompt(6 * UNIT + 3, 1, said), 1)] == [0, 4 * UNIT]
    engine.ask(prompt(3 * UNIT + 1, 2), 1)
    restored = engine.ask(prompt(6 * UNIT + 3, 1, said), 1)
    assert (restored == 6 * UNIT) != is_renewed, restored


@pytest.mark.parametrize("is_answer", [True, False])
def test_an_unproven_state_is_copied_to_a_disk(tmp_path: Path, is_answer: bool) -> None:
    engine, stem = PromptRunner(stacked(QWEN3_NEXT, tmp_path)), prompt(4 * UNIT, 0)
    stack = stack_of(engine.engine)
    if is_answer:
        said = prompt(3 * UNIT + 3, 0)
        engine.ask(said, 3 * UNIT)
        again, expected = [*said, *engine.outputs(), 1, 2, 3], 6 * UNIT
    else:
        for seed in (1, 2):
            engine.ask(prompt(8 * UNIT + 3, seed, stem))
        again, expected = prompt(8 * UNIT + 3, 3, stem), 4 * UNIT
    for seed in (10, 11, 12):  # steps in which chunks are copied to the disk
        engine.ask(prompt(UNIT, seed))
        wait_for_disk(engine.engine)
    for key in stack.primary.eviction_order():
        stack.primary.invalidate(key)
    if is_answer:
        assert engine.ask(again[: 5 * UNIT + 3]) == 3 * UNIT, "the disk gets only the last state of an answer"
    assert engine.ask(again) == expected


def test_no_sibling_hits_without_checkpoints() -> None:
    engine, stem = PromptRunner(offload(checkpoints="off")), prompt(4 * UNIT, 0)
    assert [engine.ask(prompt(8 * UNIT + 3, seed, stem)) for seed in range(1, 5)] == [0, 0, 0, 0]


def test_chunks_of_several_blocks_hit_at_their_last_boundary_before_the_branch() -> None:
    engine, stem = PromptRunner(offload(chunk_tokens=2 * UNIT)), prompt(5 * UNIT, 0)
    assert [engine.ask(prompt(9 * UNIT + 3, seed, stem)) for seed in range(1, 5)] == [0, 0, 4 * UNIT, 4 * UNIT]


def test_three_consecutive_siblings_cost_one_load() -> None:
    engine, stem = PromptRunner(offload()), prompt(4 * UNIT, 0)
    for seed in (1, 2):
        engine.ask(prompt(8 * UNIT + 3, seed, stem))
    engine.engine.reset_prefix_cache()
    held_before = engine.engine.local_hit_tokens
    restored = [engine.ask(prompt(8 * UNIT + 3, seed, stem), keep_cache=True) for seed in (3, 4, 5)]
    assert restored == [4 * UNIT, 0, 0]
    # Loaded tokens count as held when the engine continues after a load.
    assert engine.engine.local_hit_tokens - held_before == 3 * 4 * UNIT


@pytest.mark.parametrize("chunks", [(UNIT, 2 * UNIT), (2 * UNIT, UNIT)])
def test_siblings_below_a_multi_connector_hit_in_the_store_with_shorter_chunks(chunks: tuple[int, int]) -> None:
    engine, stem = PromptRunner(two(*chunks)), prompt(5 * UNIT, 0)
    restored = [engine.ask(prompt(9 * UNIT + 3, seed, stem)) for seed in range(1, 6)]
    assert restored == [0, 0, 5 * UNIT, 5 * UNIT, 5 * UNIT]


@pytest.mark.parametrize("chunks", [(UNIT, 2 * UNIT), (2 * UNIT, UNIT)])
def test_each_store_below_a_multi_connector_learns_the_resume_point(
    chunks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, learn = [], checkpoints.learn_request

    def learning(experience: Experience, asked: Prompt, placement: Placement) -> Experience:
        assert all(stop.num_tokens > asked.resumed_tokens for stop in placement.stops)
        begun.append(asked.resumed_tokens)
        return learn(experience, asked, placement)

    monkeypatch.setattr(checkpoints, "learn_request", learning)
    engine, stem = PromptRunner(two(*chunks)), prompt(5 * UNIT, 0)
    restored = [engine.ask(prompt(9 * UNIT + 3, seed, stem)) for seed in range(1, 5)]
    # The store with the longer chunks could have loaded 4 of these 5.
    assert restored[-1] == 5 * UNIT
    assert begun == [tokens for tokens in restored for _ in chunks]


@pytest.mark.parametrize("plans_ahead", [False, True], ids=["in_step", "ahead"])
@pytest.mark.parametrize("load", ["async", "sync"])
def test_every_turn_of_a_conversation_resumes_inside_the_last_answer(load: str, plans_ahead: bool) -> None:
    engine = PromptRunner(offload(load=load), async_scheduling=plans_ahead)
    said, wanted, restored = prompt(5 * UNIT + 3, 0), [0], []
    for turn, num_outputs in enumerate((2 * UNIT + 1, UNIT, 40, 17, 5)):
        restored.append(engine.ask(said, num_outputs))
        said += engine.outputs()
        wanted.append((len(said) - 1) // UNIT * UNIT)
        said += prompt(9, turn + 1)
    assert restored == wanted[:-1]


@pytest.mark.parametrize(
    ("num_prompt", "plans_ahead"),
    but_full(
        itertools.product((UNIT - 1, 3 * UNIT, 3 * UNIT + 5), (False, True)),
        (UNIT - 1, False),
        (3 * UNIT, True),
        (3 * UNIT + 5, False),
    ),
    ids=lambda value: {False: "in_step", True: "ahead"}[value] if isinstance(value, bool) else str(value),
)
def test_the_next_turn_resumes_at_the_last_computed_boundary_of_the_answer(num_prompt: int, plans_ahead: bool) -> None:
    engine = PromptRunner(offload(), async_scheduling=plans_ahead)
    for num_outputs in range(1, 2 * UNIT + 2):
        said = prompt(num_prompt, num_outputs)
        engine.ask(said, num_outputs)
        said += engine.outputs()
        assert engine.ask([*said, *prompt(5, 0)]) == (len(said) - 1) // UNIT * UNIT, num_outputs


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """All counts of the connectors."""
    counts, take = Counts(), ConnectorMetrics.take

    def taking(metrics: ConnectorMetrics) -> OffloadStats | None:
        stats = take(metrics)
        if stats is not None:
            counts.merge(Counts.from_dict(stats.data))
        return stats

    monkeypatch.setattr(ConnectorMetrics, "take", taking)
    return counts


def counters(counts: Counts, name: str) -> dict[str, float]:
    """A counter by its only label."""
    return {
        labels[0]: value for found, labels, value in counts.data().counters if found == f"vllm:hybridkv_{name}_total"
    }


def num_superseded(counts: Counts) -> float:
    return sum(value for found, _, value in counts.data().counters if found == "vllm:hybridkv_superseded_states_total")


def test_stops_and_states_are_counted_by_origin(counted: Counts) -> None:
    engine, stem = PromptRunner(offload()), prompt(4 * UNIT, 0)
    for seed in (1, 2, 3):
        engine.ask(prompt(8 * UNIT + 3, seed, stem), num_outputs=1)
    assert counters(counted, "checkpoint_stops") == {"junction": 1}
    assert counters(counted, "states_stored") == {"prompt_end": 3, "stop": 1}
    assert num_superseded(counted) == 0


def test_the_newest_state_of_an_answer_supersedes_those_before_it(counted: Counts) -> None:
    engine, said = PromptRunner(offload()), prompt(3 * UNIT + 3, 0)
    engine.ask(said, 3 * UNIT)
    # The answer ends at 6 * UNIT + 3: three states of it, the first and the second of which are gone.
    assert counters(counted, "states_stored") == {"prompt_end": 1, "answer": 3}
    assert num_superseded(counted) == 2
    engine.ask([*said, *engine.outputs(), *prompt(UNIT, 1)], 1)
    assert counters(counted, "states_stored") == {"prompt_end": 2, "answer": 3}
    assert num_superseded(counted) == 2


def test_states_of_answers_may_be_disabled(counted: Counts) -> None:
    engine, said = PromptRunner(offload(checkpoint_answers=False)), prompt(3 * UNIT + 3, 0)
    engine.ask(said, 3 * UNIT)
    assert engine.ask([*said, *engine.outputs()]) == 3 * UNIT
    assert "answer" not in counters(counted, "states_stored")


def test_no_prefill_stops_with_a_limit_of_zero(counted: Counts) -> None:
    engine, stem = PromptRunner(offload(checkpoint_stops=0)), prompt(4 * UNIT, 0)
    assert [engine.ask(prompt(8 * UNIT + 3, seed, stem)) for seed in range(1, 5)] == [0, 0, 0, 0]
    assert counters(counted, "checkpoint_stops_left_out")["stops"] == 3


def test_a_model_without_states_gets_no_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefill_stops(*_: Any) -> None:
        raise AssertionError("no stop may be requested")

    monkeypatch.setattr(PrefillStops, "add_stops", prefill_stops)
    monkeypatch.setattr(compat, "set_prefill_stop", prefill_stops)
    engine = PromptRunner(offload(GPT_OSS.alignment_tokens), GPT_OSS)
    stem = prompt(4 * UNIT, 0)
    assert [engine.ask(prompt(8 * UNIT + 3, seed, stem)) for seed in (1, 2)] == [0, 4 * UNIT]


def test_a_child_that_fails_to_plan_costs_a_request_only_its_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no plan")

    monkeypatch.setattr(checkpoints.Checkpoints, "_planned", fail)
    played, tokens = PromptRunner(two(UNIT, UNIT)), prompt(4 * UNIT + 1, seed=1)
    assert [played.ask(tokens), played.ask(tokens)] == [0, 4 * UNIT]
