"""A disk below the RAM tier: no success, failure or delay of it reaches the engine as a wrong byte."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import register
from hybridkv.connectors.vllm.offload import tiers
from hybridkv.planner import GroupKind
from hybridkv.tiers import FailureReason
from hybridkv.tiers.stack import StackCounts, TierStack
from kits.tiers.faults import Delay, Drop, Fail, FaultInjectingMedium, FaultPlan, Operation, Rule
from oracle.disk_tier import LARGE, SMALL, forget, stack_of, stacked
from oracle.engine import OracleEngine
from oracle.mixes import GEMMA3, GPT_OSS, QWEN3_NEXT, Mix
from oracle.profile import profile
from oracle.rings import LOADS, MIXES, but_full
from oracle.scenarios import Scenario, Tally, run, scenarios, with_connector
from oracle.settings import EngineSettings

if TYPE_CHECKING:
    from hybridkv.tiers import TierMedium

SOON_S = 0.3
"""Deadline for operations that never end."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


class Moved:
    """Counts of the stacks of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total: dict[str, int] = {}
        take = TierStack.take_counts

        def counting(stack: TierStack) -> StackCounts:
            taken = take(stack)
            counts = taken.moves
            for name, results in (("promoted", counts.promotions), ("cascaded", counts.cascades)):
                for result, number in results.items():
                    self.add(f"{name} {result}", number)
            self.add("timeouts", taken.timeouts)
            self.add("openings", sum(counts.breaker_openings.values()))
            for reason, number in counts.failures.items():
                self.add(f"failed {reason}", number)
            return taken

        monkeypatch.setattr(TierStack, "take_counts", counting)

    def add(self, name: str, number: int) -> None:
        self.total[name] = self.total.get(name, 0) + number

    def __getitem__(self, name: str) -> int:
        return self.total.get(name, 0)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Moved:
    return Moved(monkeypatch)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[FaultPlan]:
    """The first plan in this list applies to the disk media that are built."""
    plans = [FaultPlan()]
    build = tiers.DiskMedium

    def disk_medium(*arguments: Any) -> TierMedium:
        return FaultInjectingMedium(build(*arguments), plans[0])

    monkeypatch.setattr(tiers, "DiskMedium", disk_medium)
    return plans


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_chunks_evicted_from_ram_are_restored_from_disk_and_never_corrupt(mix: Mix, load: str, moved: Moved) -> None:
    tally = Tally()

    @profile(40)
    @given(scenarios(mix), st.sampled_from((SMALL, LARGE)), st.integers(0, 1 << 32))
    def check(scenario: Scenario, chunks: int, seed: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            chosen = with_connector(scenario, stacked(mix, directory, load, chunks))
            tally.add(run(mix, chosen, forget(Random(seed))))

    check()
    assert tally.with_restored > tally.scenarios // 10, tally
    assert moved["promoted done"] > 0 and moved["cascaded done"] > 0, moved.total


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_another_engine_on_the_same_directory_hits_chunks_of_the_first_one(mix: Mix, moved: Moved) -> None:
    tally = Tally()

    @profile(30)
    @given(scenarios(mix))
    def check(scenario: Scenario) -> None:
        with tempfile.TemporaryDirectory() as directory:
            chosen = with_connector(scenario, stacked(mix, directory))
            run(mix, chosen)
            before = moved["promoted done"]
            first_wave = Scenario(chosen.settings, chosen.prompts, chosen.waves[:1])
            tally.add(run(mix, first_wave))
            moved.add("scenarios with promotions after the restart", moved["promoted done"] > before)

    check()
    assert moved["scenarios with promotions after the restart"] > tally.scenarios // 10, moved.total


fault_rules = st.builds(
    Rule,
    st.sampled_from([Operation.LOAD, Operation.STORE]),
    st.one_of(
        st.builds(Fail, st.sampled_from([FailureReason.IO, FailureReason.CHECKSUM, FailureReason.BUSY])),
        st.builds(Delay, st.integers(1, 30)),
        st.just(Drop()),
    ),
    nth=st.sampled_from([None, 1, 2, 3, 5, 8]),
)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_a_disk_that_fails_stalls_and_loses_costs_only_time(mix: Mix, moved: Moved, faulty: list[FaultPlan]) -> None:
    tally = Tally()

    @profile(40)
    @given(scenarios(mix), st.lists(fault_rules, min_size=1, max_size=3), st.integers(0, 1 << 32))
    def check(scenario: Scenario, rules: list[Rule], seed: int) -> None:
        faulty[0] = FaultPlan(tuple(rules))
        with tempfile.TemporaryDirectory() as directory:
            connector = stacked(mix, directory, load_timeout_seconds=SOON_S, pending_timeout_seconds=SOON_S)
            tally.add(run(mix, with_connector(scenario, connector), forget(Random(seed))))

    check()
    assert moved["timeouts"] + sum(moved[f"failed {reason}"] for reason in ("io", "checksum", "busy")) > 0, moved.total


@pytest.mark.parametrize("mix", but_full((GEMMA3, GPT_OSS, QWEN3_NEXT), GEMMA3, QWEN3_NEXT), ids=lambda mix: mix.name)
def test_flipped_bits_on_disk_are_recomputed(mix: Mix, moved: Moved) -> None:
    tally = Tally()

    @profile(30)
    @given(scenarios(mix), st.integers(0, 1 << 32), st.sampled_from(("always", "sampled", "off")))
    def check(scenario: Scenario, seed: int, verify_ram: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            chosen = with_connector(scenario, stacked(mix, directory, verify_ram=verify_ram))
            run(mix, chosen)
            flip_bits(Path(directory), Random(seed))
            tally.add(run(mix, chosen))

    check()
    assert moved["failed checksum"] + moved["failed wrong_key"] > 0, moved.total


def flip_bits(directory: Path, random: Random) -> None:
    """Flips one bit in every 4 KiB of written content."""
    for path in directory.rglob("segment-*"):
        content = bytearray(path.read_bytes())
        used = len(bytes(content).rstrip(b"\0"))
        for page in range(4096, used, 4096):
            content[page + random.randrange(min(4096, used - page))] ^= 1 << random.randrange(8)
        path.write_bytes(content)


def storing(mix: Mix, directory: Path, num_prompts: int = 1) -> OracleEngine:
    """An engine that has stored some prompts, which then left its own cache and RAM."""
    settings = EngineSettings(
        num_blocks=400, max_step_tokens=64, retention_tokens=None, connector=stacked(mix, directory)
    )
    engine = OracleEngine(mix, settings)
    for number in range(num_prompts):
        engine.submit(f"cold-{number}", prompt(number), 2)
        engine.drain()
    engine.reset_prefix_cache()
    stack_of(engine).primary.clear()
    return engine


def prompt(number: int) -> list[int]:
    generator = Random(number)
    return [generator.randrange(200) for _ in range(300)]


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_nothing_is_read_from_disk_where_one_group_cannot_resume(mix: Mix, tmp_path: Path, moved: Moved) -> None:
    """Every group but one is on disk, whole: no byte of it is useful, so none is read."""
    with storing(mix, tmp_path) as engine:
        connector = engine.scheduler_connector._scheduler  # type: ignore[union-attr]
        spec, stack = connector._layout.spec, stack_of(engine)
        # A CHUNKED group needs nothing at some boundaries, a FULL one something at each.
        groups = {spec.groups[i].kind: i for i in spec.stored_groups}
        lacking = groups.get(GroupKind.RECURRENT, groups.get(GroupKind.WINDOW, groups.get(GroupKind.FULL)))
        engine.submit("warm", prompt(0), 2)
        keys = connector._requests.get("warm").keys()
        for end in range(spec.chunk_tokens, len(prompt(0)) + 1, spec.chunk_tokens):
            stack.secondary["disk"].invalidate(keys.key(lacking, end))  # type: ignore[union-attr]
        engine.drain()
        assert engine.restored_tokens == 0
        assert moved["promoted done"] == 0 and stack.take_counts().moves.promoted_bytes == 0


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_only_chunks_that_the_boundary_needs_are_read_from_disk(mix: Mix, tmp_path: Path, moved: Moved) -> None:
    with storing(mix, tmp_path) as engine:
        connector = engine.scheduler_connector._scheduler  # type: ignore[union-attr]
        num_keys = stack_of(engine).secondary["disk"].num_keys  # type: ignore[union-attr]
        engine.submit("warm", prompt(0), 2)
        engine.drain()
        assert engine.restored_tokens > 0
        spec = connector._layout.spec
        if any(group.kind is not GroupKind.FULL for group in spec.groups):
            assert 0 < moved["promoted done"] < num_keys


def test_a_request_is_computed_when_its_disk_load_times_out(
    tmp_path: Path, moved: Moved, faulty: list[FaultPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(tiers, "clock", lambda: now_s[0])
    faulty[0] = FaultPlan((Rule(Operation.LOAD, Drop()),))
    with storing(GPT_OSS, tmp_path, 2) as engine:
        engine.submit("warm", prompt(0), 2)
        for _ in range(20):
            assert not engine.step(), "the request runs before its deadline"
        now_s[0] = 29.9
        assert not engine.step()
        now_s[0] = 30.1
        engine.drain()
        assert engine.restored_tokens == 0
        engine.check_idle()
        engine.scheduler_connector.get_kv_connector_stats()  # type: ignore[union-attr]
        assert moved["timeouts"] == 1
