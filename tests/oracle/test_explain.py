"""The explanation of each request agrees with the counts and with the engine, to the token."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, register
from hybridkv.connectors.vllm.common.explain import Explanation, LookupReason
from oracle.engine import OracleEngine
from oracle.heard import Heard, heard
from oracle.known_stops import STEPS, known_stops_alone
from oracle.mixes import GPT_OSS, QWEN3_NEXT, Mix
from oracle.profile import profile
from oracle.rings import MIXES
from oracle.scenarios import Scenario, run, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

__all__ = ["heard", "known_stops_alone"]

pytestmark = pytest.mark.usefixtures("known_stops_alone")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def offload(mix: Mix, capacity: str | int = "64MiB") -> Connector:
    tiers = [{"type": "ram", "capacity": capacity}]
    return Connector(CONNECTOR, {"chunk_tokens": mix.alignment_tokens, "tiers": tiers, **STEPS})


def require_agreement(heard: Heard, engine: OracleEngine) -> None:
    """The sums of the explanations equal the counts and the tokens that the engine took."""
    assert engine.scheduler_connector is not None
    engine.scheduler_connector.get_kv_connector_stats()  # counts after the last step
    explained = heard.explanations
    for one in explained:
        assert one.engine_tokens + one.offered_tokens + one.compute_tokens == one.num_tokens, one
        assert min(one.engine_tokens, one.offered_tokens, one.compute_tokens - 1, one.lost_tokens) >= 0, one
        assert one.lost_tokens < one.num_tokens, one
        assert 0 <= one.local_tokens <= one.offered_tokens, one
        assert bool(one.lost_tokens) <= (one.limiting_kind not in ("", "full")), one
    lookups = heard.counted("lookups_total")
    assert +Counter((one.result, str(one.reason)) for one in explained) == +Counter(
        {labels: value for labels, value in lookups.items() if labels[0] != "pending"}
    )
    tokens: Counter[tuple[str]] = Counter()
    for one in explained:
        tokens += Counter(
            {("engine",): one.engine_tokens, (one.source,): one.offered_tokens, ("compute",): one.compute_tokens}
        )
    assert tokens == heard.counted("lookup_tokens_total")
    assert (
        sum(one.offered_tokens for one in explained) == heard.counted("hit_tokens_total")[()] == engine.restored_tokens
    )
    resumable = sum(one.resumable_tokens - one.engine_tokens for one in explained)
    assert resumable == heard.counted("resumable_tokens_total")[()]
    assert all(one.engine_tokens + one.offered_tokens + one.lost_tokens <= one.resumable_tokens for one in explained)
    assert all(one.stop == (one.resumable_tokens if one.limiting_kind == "recurrent" else 0) for one in explained)
    stops = Counter((reason,) for one in explained for _, reason in one.stops)
    assert stops == heard.counted("checkpoint_stops_total")
    if not engine.failed_loads:
        local = sum(heard.counted("local_tokens_total").values())
        assert sum(one.local_tokens for one in explained) == local
    lost: Counter[tuple[str]] = Counter()
    limited: Counter[tuple[str]] = Counter()
    for one in explained:
        lost += Counter({(one.limiting_kind,): one.lost_tokens})
        limited += Counter({(one.limiting_kind,): int(one.lost_tokens > 0)})
    assert lost == heard.counted("lost_tokens_total")
    assert limited == heard.counted("limited_lookups_total")
    assert Counter((one.junction,) for one in explained if one.junction) == heard.counted("junctions_total")


@pytest.mark.parametrize("capacity", ["64MiB", 40 * 4096], ids=["large", "small"])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_explanations_and_counts_agree_to_the_token(mix: Mix, capacity: str | int, heard: Heard) -> None:
    reasons: Counter[LookupReason] = Counter()

    @profile(40)
    @given(scenarios(mix, st.booleans()))
    def check(scenario: Scenario) -> None:
        heard.forget()
        engine = run(mix, with_connector(scenario, offload(mix, capacity)))
        require_agreement(heard, engine)
        reasons.update(one.reason for one in heard.explanations)

    check()
    assert {LookupReason.COMPLETE, LookupReason.NOT_STORED, LookupReason.NO_BOUNDARY} <= reasons.keys(), reasons


def prompt(num_tokens: int, seed: int, prefix: list[int] | None = None) -> list[int]:
    generator = Random(seed)
    return [*(prefix or []), *(generator.randrange(200) for _ in range(num_tokens))][:num_tokens]


class ExplainedEngine:
    """An engine that answers one prompt after the other, each with an empty cache of its own."""

    def __init__(self, mix: Mix, heard: Heard) -> None:
        settings = EngineSettings(num_blocks=400, max_step_tokens=512, retention_tokens=0, connector=offload(mix))
        self.engine = OracleEngine(mix, settings)
        self.heard = heard

    def ask(self, tokens: list[int], keep_cache: bool = False) -> Explanation:
        if not keep_cache:
            self.engine.reset_prefix_cache()
        self.engine.submit(f"request-{len(self.heard.explanations)}", tokens, 2)
        self.engine.drain()
        return self.heard.explanations[-1]


@pytest.fixture
def chunk() -> int:
    return QWEN3_NEXT.alignment_tokens


def test_a_cold_prompt_is_not_stored_and_no_state_limits_it(heard: Heard, chunk: int) -> None:
    explained = ExplainedEngine(QWEN3_NEXT, heard).ask(prompt(6 * chunk + 1, 1))
    assert (explained.result, explained.reason, explained.limiting_kind) == ("miss", LookupReason.NOT_STORED, "full")
    assert (explained.offered_tokens, explained.lost_tokens, explained.junction) == (0, 0, "")


def test_a_stored_prompt_is_hit_completely(heard: Heard, chunk: int) -> None:
    engine, tokens = ExplainedEngine(QWEN3_NEXT, heard), prompt(6 * chunk + 1, 1)
    engine.ask(tokens)
    explained = engine.ask(tokens)
    assert (explained.result, explained.reason, explained.source) == ("hit", LookupReason.COMPLETE, "ram")
    assert (explained.offered_tokens, explained.compute_tokens, explained.limiting_kind) == (6 * chunk, 1, "")


def test_a_sibling_loses_its_prefix_for_lack_of_a_state(heard: Heard, chunk: int) -> None:
    engine, tokens = ExplainedEngine(QWEN3_NEXT, heard), prompt(6 * chunk + 1, 1)
    engine.ask(tokens)
    explained = engine.ask(prompt(6 * chunk + 1, 2, prefix=tokens[: 4 * chunk]))
    assert (explained.result, explained.reason, explained.limiting_kind) == (
        "miss",
        LookupReason.GROUP_LIMITS,
        "recurrent",
    )
    assert (explained.offered_tokens, explained.lost_tokens, explained.junction) == (0, 4 * chunk, "lost")
    assert (explained.resumable_tokens, explained.stop, explained.stop_reason) == (4 * chunk, 4 * chunk, "junction")
    assert explained.stops == ((4 * chunk, "junction"),)


def test_the_next_sibling_finds_the_state_and_needs_no_stop(heard: Heard, chunk: int) -> None:
    engine, tokens = ExplainedEngine(QWEN3_NEXT, heard), prompt(6 * chunk + 1, 1)
    for seed in (1, 2):
        engine.ask(prompt(6 * chunk + 1, seed, prefix=tokens[: 4 * chunk]))
    explained = engine.ask(prompt(6 * chunk + 1, 3, prefix=tokens[: 4 * chunk]))
    assert (explained.offered_tokens, explained.lost_tokens, explained.junction) == (4 * chunk, 0, "resumed")
    assert (explained.resumable_tokens, explained.stop, explained.stop_reason, explained.stops) == (
        4 * chunk,
        0,
        "",
        (),
    )


def test_a_sibling_with_windows_resumes_where_it_diverges(heard: Heard) -> None:
    chunk = GPT_OSS.alignment_tokens
    engine, tokens = ExplainedEngine(GPT_OSS, heard), prompt(6 * chunk + 1, 1)
    engine.ask(tokens)
    explained = engine.ask(prompt(6 * chunk + 1, 2, prefix=tokens[: 4 * chunk]))
    assert (explained.result, explained.reason, explained.limiting_kind) == ("hit", LookupReason.PREFIX_ENDS, "full")
    assert (explained.offered_tokens, explained.lost_tokens, explained.junction) == (4 * chunk, 0, "resumed")


def test_nothing_is_offered_if_the_engine_holds_the_prompt(heard: Heard, chunk: int) -> None:
    engine, tokens = ExplainedEngine(QWEN3_NEXT, heard), prompt(6 * chunk + 1, 1)
    engine.ask(tokens)
    explained = engine.ask(tokens, keep_cache=True)
    assert (explained.result, explained.reason) == ("miss", LookupReason.NO_BOUNDARY)
    assert (explained.engine_tokens, explained.compute_tokens) == (6 * chunk, 1)
