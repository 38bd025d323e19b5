"""Roles: a producer is not searched, a consumer stores nothing, and a request that skips the cache gets no hit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR, register
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics, OffloadStats
from hybridkv.connectors.vllm.offload.loads.load_planner import LoadPlanner
from hybridkv.metrics import Counts
from oracle import disk_tier
from oracle.engine import OracleEngine
from oracle.mixes import GPT_OSS, NAMED, QWEN3_NEXT, Mix
from oracle.profile import profile
from oracle.rings import MIXES, but_full
from oracle.scenarios import Scenario, run, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from hybridkv.tiers.stack import TierStack

ROLES = ("kv_producer", "kv_consumer", "kv_both")
PROMPT = [Random(1).randrange(200) for _ in range(300)]
OTHER_PROMPT = [Random(2).randrange(200) for _ in range(300)]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


class Seen:
    """Searches and counts of the connectors of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.searches = 0
        self._counts = Counts()
        search, take = LoadPlanner._longest_hit, ConnectorMetrics.take

        def searching(planner: LoadPlanner, *arguments: Any, **more: Any) -> Any:
            self.searches += 1
            return search(planner, *arguments, **more)

        def taking(metrics: ConnectorMetrics) -> OffloadStats | None:
            if (stats := take(metrics)) is not None:
                self._counts.merge(Counts.from_dict(stats.data))
            return stats

        monkeypatch.setattr(LoadPlanner, "_longest_hit", searching)
        monkeypatch.setattr(ConnectorMetrics, "take", taking)

    def total(self, name: str, *labels: str) -> float:
        """Sum of a counter over all values of its labels, or over those that include these."""
        found = self._counts.data().counters
        return sum(n for each, of, n in found if each == f"vllm:hybridkv_{name}" and set(labels) <= set(of))

    def forget(self) -> None:
        self.searches = 0
        self._counts = Counts()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def extra(mix: Mix, directory: str | Path) -> dict[str, Any]:
    return dict(disk_tier.stacked(mix, directory).extra_config)


def stacked(mix: Mix, directory: str | Path, role: str) -> Connector:
    return Connector(CONNECTOR, extra(mix, directory), role=role)


def beside_a_producer(mix: Mix, directory: str | Path, role: str) -> Connector:
    """The same below a HybridMultiConnector, whose role it inherits, beside a child with a role of its own."""
    ram = {"chunk_tokens": mix.alignment_tokens, "tiers": [{"type": "ram", "capacity": "64MiB"}]}
    children = [
        {"kv_connector": CONNECTOR, "kv_connector_extra_config": extra(mix, directory)},
        {"kv_connector": CONNECTOR, "kv_role": "kv_producer", "kv_connector_extra_config": ram},
    ]
    return Connector(MULTI_CONNECTOR, {"connectors": children}, role=role)


BUILDS = pytest.mark.parametrize("build", [stacked, beside_a_producer])


def engine(mix: Mix, connector: Connector) -> OracleEngine:
    return OracleEngine(mix, EngineSettings(num_blocks=400, retention_tokens=None, connector=connector))


def stack_of(opened: OracleEngine) -> TierStack:
    connector: Any = opened.scheduler_connector
    first = getattr(connector, "sub_connectors", [connector])[0]
    stack: TierStack = first._scheduler._stack
    return stack


def serve(opened: OracleEngine, name: str, prompt: list[int], **more: Any) -> int:
    """Tokens that were restored for a prompt that the engine itself does not hold."""
    opened.reset_prefix_cache()
    before = opened.restored_tokens
    opened.submit(name, prompt, 2, **more)
    opened.drain()
    opened.check_idle()
    assert opened.scheduler_connector is not None
    opened.scheduler_connector.get_kv_connector_stats()
    return opened.restored_tokens - before


@BUILDS
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_a_consumer_loads_what_a_producer_stored_and_stores_nothing(
    mix: Mix, build: Any, tmp_path: Path, seen: Seen
) -> None:
    with engine(mix, build(mix, tmp_path, "kv_producer")) as producer:
        assert [serve(producer, f"p{turn}", PROMPT) for turn in range(2)] == [0, 0]
        assert seen.searches == 0 and seen.total("lookups_total") == 0
        assert seen.total("moves_total", "promote") == 0
        num_keys = stack_of(producer).secondary["disk"].num_keys  # type: ignore[union-attr]
        assert num_keys > 0
    seen.forget()
    with engine(mix, build(mix, tmp_path, "kv_consumer")) as consumer:
        stack = stack_of(consumer)
        assert stack.secondary["disk"].num_keys == num_keys
        assert serve(consumer, "warm", PROMPT) > 0
        promoted = stack.primary.num_keys
        assert promoted > 0 and seen.searches > 0
        assert serve(consumer, "cold", OTHER_PROMPT) == 0
        assert (stack.primary.num_keys, stack.secondary["disk"].num_keys) == (promoted, num_keys)
        assert seen.total("moves_total", "cascade") == 0
        assert serve(consumer, "again", PROMPT) > 0, "from host memory, into which it was promoted"


@pytest.mark.parametrize("mix", but_full(NAMED, QWEN3_NEXT), ids=lambda mix: mix.name)
def test_a_connector_of_any_role_never_corrupts(mix: Mix, seen: Seen) -> None:
    restored = dict.fromkeys(ROLES, 0)

    @profile(30)
    @given(scenarios(mix), st.lists(st.sampled_from(ROLES), min_size=2, max_size=3))
    def check(scenario: Scenario, roles: list[str]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for role in ("kv_producer", *roles):
                seen.forget()
                ran = run(mix, with_connector(scenario, stacked(mix, directory, role)))
                restored[role] += ran.restored_tokens
                if role == "kv_consumer":
                    assert seen.total("stores_total") == seen.total("moves_total", "cascade") == 0

    check()
    assert restored["kv_producer"] == 0 and restored["kv_consumer"] > 0 and restored["kv_both"] > 0, restored


@BUILDS
def test_a_request_that_skips_the_cache_is_not_searched_and_promotes_nothing(
    build: Any, tmp_path: Path, seen: Seen
) -> None:
    with engine(GPT_OSS, build(GPT_OSS, tmp_path, "kv_both")) as opened:
        assert serve(opened, "cold", PROMPT) == 0
        stack_of(opened).primary.clear()
        seen.forget()
        assert serve(opened, "scored", PROMPT, skips_prefix_cache=True) == 0
        assert seen.searches == 0
        assert seen.total("lookups_total") == seen.total("lookup_tokens_total") == 0
        assert seen.total("moves_total", "promote") == 0
        stack_of(opened).primary.clear()
        assert serve(opened, "warm", PROMPT) > 0 and seen.total("moves_total", "promote") > 0
