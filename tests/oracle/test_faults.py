"""Negative control: the oracle finds every bug that is injected into the small connector."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from oracle import engine
from oracle.block_store import Fault, block_store
from oracle.engine import LeakError, OracleEngine, StuckError
from oracle.mixes import DEEPSEEK_V4, GEMMA3, GPT_OSS, LLAMA4, QWEN3_NEXT, Mix
from oracle.runner import CorruptionError, OracleError
from oracle.scenarios import Scenario, run, scenarios, with_connector
from oracle.settings import EngineSettings

CASES = [
    (Fault.SHORT_WINDOW, GEMMA3, "async", CorruptionError),
    (Fault.SHORT_WINDOW, GPT_OSS, "sync", CorruptionError),
    (Fault.SHORT_WINDOW, DEEPSEEK_V4, "async", CorruptionError),
    (Fault.PREVIOUS_STATE, QWEN3_NEXT, "async", CorruptionError),
    (Fault.EARLY_STATE, QWEN3_NEXT, "async", CorruptionError),
    (Fault.WHOLE_PROMPT, QWEN3_NEXT, "async", CorruptionError),
    (Fault.SYNC_STATE, QWEN3_NEXT, "sync", CorruptionError),
    (Fault.STALE_PAGE, QWEN3_NEXT, "async", CorruptionError),
    (Fault.STALE_PAGE, GEMMA3, "sync", CorruptionError),
    (Fault.STALE_PAGE, DEEPSEEK_V4, "sync", CorruptionError),
    (Fault.STALE_PAGE, LLAMA4, "async", CorruptionError),
    (Fault.ZERO_PAGE, GPT_OSS, "async", CorruptionError),
    (Fault.ZERO_PAGE, QWEN3_NEXT, "async", CorruptionError),
    (Fault.SWAPPED_LAYERS, GPT_OSS, "sync", CorruptionError),
    (Fault.SWAPPED_LAYERS, QWEN3_NEXT, "async", CorruptionError),
    (Fault.SWAPPED_LAYERS, LLAMA4, "async", CorruptionError),
    (Fault.SHIFTED_BLOCK, GEMMA3, "async", CorruptionError),
    (Fault.SHIFTED_BLOCK, LLAMA4, "sync", CorruptionError),
    (Fault.EARLY_REPORT, GPT_OSS, "async", CorruptionError),
    (Fault.EARLY_REPORT, QWEN3_NEXT, "async", CorruptionError),
    (Fault.LATE_STORE, GEMMA3, "async", CorruptionError),
    (Fault.LEAKED_BLOCKS, GPT_OSS, "async", (StuckError, LeakError)),
    (Fault.LOST_LOAD, GPT_OSS, "async", StuckError),
]


@pytest.mark.parametrize(
    ("fault", "mix", "load", "error"), CASES, ids=[f"{case[0].name}-{case[1].name}-{case[2]}" for case in CASES]
)
def test_the_oracle_finds_an_injected_fault(
    fault: Fault,
    mix: Mix,
    load: str,
    error: type[OracleError] | tuple[type[OracleError], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "IDLE_STEPS_LIMIT", 100)
    monkeypatch.setattr(engine, "IDLE_PAUSE_S", 0.0)
    monkeypatch.setattr(engine, "IDLE_LIMIT_S", 0.0)

    # One seed, no shrinking: one of the first scenarios must fail, and fail in the right way.
    @settings(
        max_examples=80,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios(mix), st.integers(0, 1))
    def check(scenario: Scenario, delay_steps: int) -> None:
        run(mix, with_connector(scenario, block_store(mix, load, delay_steps, fault=fault)))

    with pytest.raises(error):
        check()


def test_one_flipped_bit_of_the_engine_memory_is_found() -> None:
    def corrupt(oracle: OracleEngine, step: int) -> None:
        if step == 2:
            plane = oracle.memory.planes[1][0]
            table = np.array(oracle.scheduler.kv_cache_manager.get_block_ids("only")[1])
            blocks, slots = plane.locate(table, 5, 6)
            plane.words[blocks[0], slots[0], 1, 0, 0] ^= np.uint64(1)

    chosen = EngineSettings(num_blocks=60, max_step_tokens=16)
    with OracleEngine(GPT_OSS, chosen, corrupt) as oracle:
        oracle.submit("only", list(range(50)), 4)
        with pytest.raises(CorruptionError, match=r"group 1 .* cell 5 "):
            oracle.drain()
