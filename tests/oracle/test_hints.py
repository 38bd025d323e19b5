"""Hints of a request reach the store through the engine, and whatever the hints are, every byte is right."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR, register
from hybridkv.connectors.vllm.common.explain import Explanation, LookupReason
from hybridkv.tiers.stack import TierStack
from oracle.disk_tier import LARGE, SMALL, forget, stacked
from oracle.engine import OracleEngine
from oracle.heard import Heard, heard
from oracle.mixes import GPT_OSS, QWEN3_NEXT, Mix
from oracle.profile import profile
from oracle.rings import MIXES
from oracle.scenarios import Scenario, Tally, run, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

__all__ = ["heard"]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def offload(mix: Mix) -> Connector:
    return Connector(CONNECTOR, {"chunk_tokens": mix.alignment_tokens, "tiers": [{"type": "ram", "capacity": "64MiB"}]})


def below_multi(mix: Mix) -> Connector:
    return inside_multi(offload(mix))


def inside_multi(store: Connector) -> Connector:
    entries = [{"kv_connector": store.name, "kv_connector_extra_config": store.extra_config}]
    return Connector(MULTI_CONNECTOR, {"connectors": entries})


class PromptRunner:
    """An engine that answers one prompt after the other, each with an empty cache of its own."""

    def __init__(self, mix: Mix, connector: Connector, heard: Heard) -> None:
        settings = EngineSettings(num_blocks=400, max_step_tokens=512, retention_tokens=0, connector=connector)
        self.engine, self.heard = OracleEngine(mix, settings), heard
        self.num_lookups = 0

    def ask(self, tokens: list[int], params: object = None, num_outputs: int = 2) -> int:
        """Submits a prompt; returns the tokens that were restored."""
        self.engine.reset_prefix_cache()
        before = self.engine.restored_tokens
        self.engine.submit(f"request-{self.num_lookups}", tokens, num_outputs, transfer_params=params)
        self.num_lookups += 1
        self.engine.drain()
        self.engine.check_idle()
        return self.engine.restored_tokens - before

    def submit_and_abort(self, tokens: list[int], params: object) -> None:
        """A request that is aborted before the engine works on it."""
        self.engine.submit(f"request-{self.num_lookups}", tokens, 2, transfer_params=params)
        self.engine.abort(f"request-{self.num_lookups}")
        self.num_lookups += 1
        self.engine.drain()
        self.engine.check_idle()

    @property
    def last_explanation(self) -> Explanation:
        return self.heard.explanations[-1]

    def hints(self) -> dict[str, float]:
        assert self.engine.scheduler_connector is not None
        self.engine.scheduler_connector.get_kv_connector_stats()
        return {labels[0]: value for labels, value in self.heard.counted("hints_total").items()}


def prompt(mix: Mix, seed: int = 0) -> list[int]:
    generator = Random(seed)
    return [generator.randrange(200) for _ in range(4 * mix.alignment_tokens + 3)]


def said(**hints: Any) -> dict[str, Any]:
    return {"hybridkv_hints": hints}


@pytest.mark.parametrize("make", [offload, below_multi], ids=["alone", "below one connector"])
@pytest.mark.parametrize("mix", [QWEN3_NEXT, GPT_OSS], ids=lambda mix: mix.name)
def test_a_request_with_store_or_load_false_is_not_stored_or_loaded(mix: Mix, make: Any, heard: Heard) -> None:
    runner, tokens = PromptRunner(mix, make(mix), heard), prompt(mix)
    assert runner.ask(tokens, said(store=False)) == 0
    assert runner.ask(tokens) == 0, "nothing was stored"
    stored = runner.ask(tokens)
    assert stored == 4 * mix.alignment_tokens
    assert runner.ask(tokens, said(load=False)) == 0
    assert (runner.last_explanation.result, runner.last_explanation.reason) == ("miss", LookupReason.HINT)
    assert runner.last_explanation.compute_tokens == runner.last_explanation.num_tokens
    assert runner.ask(tokens) == stored, "still stored"


@pytest.mark.parametrize("params", [said(other=1), {"hybridkv_hints": "no"}, said(store="no"), {"others": [1]}])
def test_other_hints_are_ignored(params: object, heard: Heard) -> None:
    runner, tokens = PromptRunner(QWEN3_NEXT, offload(QWEN3_NEXT), heard), prompt(QWEN3_NEXT)
    assert runner.ask(tokens, params) == 0
    assert runner.ask(tokens, params) == 4 * QWEN3_NEXT.alignment_tokens
    assert runner.hints() == ({"invalid": 2} if isinstance(params, dict) and "hybridkv_hints" in params else {})


def test_a_keep_hint_keeps_chunks_in_the_engine(heard: Heard) -> None:
    runner, tokens = PromptRunner(QWEN3_NEXT, offload(QWEN3_NEXT), heard), prompt(QWEN3_NEXT)
    runner.ask(tokens, said(keep_seconds=60))
    assert runner.hints() == {"keep": 1}
    assert runner.heard.counted("keeps_total") == {("ram", "kept"): 1}


def test_the_last_state_of_an_answer_is_not_stored_with_store_false(heard: Heard) -> None:
    runner, tokens = PromptRunner(QWEN3_NEXT, offload(QWEN3_NEXT), heard), prompt(QWEN3_NEXT)
    # The last token of an answer is never computed.
    num_outputs = 5 * QWEN3_NEXT.alignment_tokens - len(tokens) + 1
    for params, num_states in ((said(store=False), 0), (None, 1)):
        runner.ask(tokens, params, num_outputs)
        runner.hints()
        assert runner.heard.counted("states_stored_total")["answer",] == num_states


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[TierStack]:
    """All stacks that are built."""
    built: list[TierStack] = []
    build = TierStack.__init__

    def init(stack: TierStack, *arguments: Any) -> None:
        build(stack, *arguments)
        built.append(stack)

    monkeypatch.setattr(TierStack, "__init__", init)
    return built


@pytest.mark.parametrize(
    ("named", "more", "source"),
    [
        (said(prefetch=True), {}, "ram"),
        (said(prefetch=True, load=False, store=False), {}, "ram"),
        (None, {}, "disk"),
        (said(prefetch=False), {}, "disk"),
        (said(prefetch=True), {"keep_share": 0}, "disk"),
    ],
    ids=["named", "named, and nothing else", "named without a word", "refused", "no share"],
)
@pytest.mark.parametrize("in_secondary", [False, True], ids=["alone", "below one connector"])
@pytest.mark.parametrize("mix", [QWEN3_NEXT, GPT_OSS], ids=lambda mix: mix.name)
def test_a_prefetch_of_an_aborted_request_gives_the_next_one_a_hit_in_ram(
    mix: Mix,
    in_secondary: bool,
    named: object,
    more: dict[str, Any],
    source: str,
    heard: Heard,
    stacks: list[TierStack],
    tmp_path: Path,
) -> None:
    store = stacked(mix, tmp_path / "store", **more)
    runner, tokens = PromptRunner(mix, inside_multi(store) if in_secondary else store, heard), prompt(mix)
    runner.ask(tokens)
    (stack,) = stacks
    stack.primary.clear()
    runner.submit_and_abort(tokens, named)
    assert runner.ask(tokens) == 4 * mix.alignment_tokens
    assert runner.last_explanation.source == source
    runner.engine.close()


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_prefetches_of_any_requests_never_corrupt(
    mix: Mix, stacks: list[TierStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    tally, brought = Tally(), Counter[str]()
    random = Random()
    submit, take = OracleEngine.submit, TierStack.take_counts

    def hinting(engine: OracleEngine, *arguments: Any, **_said: Any) -> None:
        words = {name: random.random() < 0.5 for name in ("prefetch", "load", "store") if random.random() < 0.4}
        if random.random() < 0.3:
            words |= {
                "prefetch": True,
                "load": False,
            }  # otherwise the request itself promotes the chunks that it waits for
        submit(engine, *arguments, transfer_params=said(**words))

    def counting(stack: TierStack) -> Any:
        counts = take(stack)
        brought.update({str(result): number for result, number in counts.prefetches.items()})
        return counts

    monkeypatch.setattr(OracleEngine, "submit", hinting)
    monkeypatch.setattr(TierStack, "take_counts", counting)

    @profile(40)
    @given(scenarios(mix), st.sampled_from((SMALL, LARGE)), st.sampled_from((0.25, 1.0)), st.integers(0, 1 << 32))
    def check(scenario: Scenario, chunks: int, keep_share: float, seed: int) -> None:
        random.seed(seed)
        with tempfile.TemporaryDirectory() as directory:
            store = stacked(mix, directory, chunks=chunks, keep_share=keep_share)
            tally.add(run(mix, with_connector(scenario, store), forget(Random(seed))))
            stacks.pop().take_counts()

    check()
    assert brought, "every scenario ends prefetches"
    if tally.scenarios >= 40:  # in few scenarios, the threads of the disk may be too late for each prefetch
        assert tally.with_restored > tally.scenarios // 20, tally
        assert brought["promoted"] > 0, brought
