"""Hit rates of hybrid models on public traces, by placement of recurrent states. Uses planner and index, no engine.

Seven policies, with stores of 5, 10, 30 and 100 % of the chunks of a trace without a limit (its attention, and a state
at the end of each prompt):
- `ends`: the state at the end of each prompt, which an engine provides without stops;
- `junctions`: also a state at the end of the stored attention, if it has no state;
- `ladder`: also a state every 8 chunks;
- `budgeted`: the stops of the planner (`hybridkv.planner.checkpoints`), with only the information of a connector;
- `optimal`: the best stops if all later requests are known, by dynamic programming, with the price of a state that is
  best for the whole trace. `optimal_free` also omits the ends of prompts that no later request uses;
- `attention`: the model has only attention: the upper limit for every placement with the same number of bytes.

Cost model: a state is as large as 4 chunks of attention (Qwen3-Next with chunks of 512 tokens), one more step costs as
much as 64 tokens of prefill (5 ms at 12,800 tokens a second). Requests come one after the other; answers are not
modelled. The simulation is not random: there is no seed. `--variants` also runs the planner with each of its constants
halved and doubled, and with other costs of a step, to show the effect on the goals. `--halves` also runs the two halves
of each trace alone, each with an empty store and a new planner.

    python bench/reuse_traces.py --traces FOLDER --json reuse_traces.json --svg reuse_traces.svg

FOLDER holds Mooncake's mooncake_conversation_trace.jsonl and mooncake_synthetic_trace.jsonl (kvcache-ai/Mooncake,
FAST25-release) and magagent/*.jsonl (LMCache/lmcache-agent-trace), both Apache-2.0.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from reuse_files import Part, part_of, read_all
from reuse_plot import draw
from reuse_policies import Hindsight, Junctions, Ladder

from hybridkv.cli.simulation.policies import PlannerStops, PromptEnds
from hybridkv.cli.simulation.store import CostModel, SimulationResult, StopPolicy, simulate, unique_chunks
from hybridkv.cli.simulation.traces import Trace
from hybridkv.planner.checkpoints import answer_reuse, experience, placement, seen

SIZES: Final = (5, 10, 30, 100)
LADDER_CHUNKS: Final = 8
SEEN_CHUNKS: Final = 1 << 18
"""Maximum number of prefixes in the planner's table."""
HINDSIGHT_PRICES: Final = (0.125, 4.0, 16.0)
"""Prices of a state in chunks of attention."""
WITHIN_BOUND: Final = 0.01
"""Allowed distance from the upper limit with a store of 100 %."""
CONSTANTS: Final = ("KEPT_SHARE", "OLD_SHARE", "PRIOR_DIVERGENCES", "PRIOR_PROMPTS", "EXTRA_RETURN")


def run_size(trace: Trace, size: int, costs: CostModel) -> dict[str, SimulationResult]:
    """Runs all policies with one store."""
    capacity = unique_chunks(trace, costs) * size // 100
    policies: dict[str, StopPolicy | None] = {
        "ends": PromptEnds(),
        "junctions": Junctions(),
        "ladder": Ladder(LADDER_CHUNKS),
        "budgeted": PlannerStops(trace, capacity, costs, SEEN_CHUNKS),
        "attention": None,
    }
    outcomes = {name: simulate(trace, capacity, costs, policy) for name, policy in policies.items()}
    for name, with_all_ends in (("optimal", True), ("optimal_free", False)):
        found = (
            simulate(trace, capacity, costs, Hindsight(trace, capacity, costs, price, with_all_ends))
            for price in HINDSIGHT_PRICES
        )
        outcomes[name] = max(found, key=lambda outcome: outcome.hit_tokens)
    return outcomes


def goal(rates: dict[str, float], size: int) -> float:
    """Goal for `budgeted`: near the upper limit with a store of 100 %, otherwise half of the gain of hindsight."""
    if size == 100:
        return rates["attention"] - WITHIN_BOUND
    return (rates["ends"] + rates["optimal"]) / 2


def row_of(trace: Trace, size: int, outcomes: dict[str, SimulationResult]) -> dict[str, Any]:
    rates = {name: outcome.hit_rate for name, outcome in outcomes.items()}
    return {
        "trace": trace.name,
        "size_percent": size,
        "hit_rate": {name: round(rate, 5) for name, rate in rates.items()},
        "stored_per_saved_token": {name: round(o.stored_per_saved_token, 3) for name, o in outcomes.items()},
        "extra_prefill_share": {name: round(o.extra_share, 5) for name, o in outcomes.items()},
        "stops": {name: outcome.num_stops for name, outcome in outcomes.items()},
        "goal": round(goal(rates, size), 5),
        "reaches_goal": rates["budgeted"] >= goal(rates, size),
        "never_below_ends": rates["budgeted"] >= rates["ends"],
        "half_of_optimal_free": rates["budgeted"] >= (rates["ends"] + rates["optimal_free"]) / 2,
    }


@contextmanager
def _changed(name: str, value: float) -> Iterator[None]:
    """Sets another value of a constant in every module that reads it."""
    readers = [module for module in (answer_reuse, experience, placement, seen) if hasattr(module, name)]
    before = getattr(readers[0], name)
    for module in readers:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module in readers:
            setattr(module, name, before)


def run_variants(traces: list[Trace], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compares `budgeted` with other constants and other costs of a step with the same goals."""
    found = []
    for step_tokens in (16, 32, 64, 128, 256):
        found.append({"step_tokens": step_tokens} | _budgeted(traces, rows, CostModel(step_tokens=step_tokens)))
    for name in CONSTANTS:
        value = getattr(placement if hasattr(placement, name) else experience, name)
        # `KEPT_SHARE` is a kept share: the lost share is doubled and halved.
        values = (1 - 2 * (1 - value), (1 + value) / 2) if name == "KEPT_SHARE" else (value / 2, value * 2)
        for other in values:
            with _changed(name, other):
                found.append({name: other} | _budgeted(traces, rows, CostModel()))
    return found


def _budgeted(traces: list[Trace], rows: list[dict[str, Any]], costs: CostModel) -> dict[str, Any]:
    goals = {(row["trace"], row["size_percent"]): row for row in rows}
    short, below, shares = [], [], []
    for trace in traces:
        for size in SIZES:
            capacity = unique_chunks(trace, costs) * size // 100
            outcome = simulate(trace, capacity, costs, PlannerStops(trace, capacity, costs, SEEN_CHUNKS))
            row = goals[trace.name, size]
            shares.append(outcome.extra_share)
            if outcome.hit_rate < row["goal"]:
                short.append(f"{trace.name} {size} %: {100 * (outcome.hit_rate - row['goal']):+.2f}")
            if outcome.hit_rate < row["hit_rate"]["ends"]:
                below.append(f"{trace.name} {size} %")
    return {"short_of_goal": short, "below_ends": below, "most_extra_prefill_share": round(max(shares), 5)}


def run_part(traces: list[Trace], part: Part, costs: CostModel, with_variants: bool) -> dict[str, Any]:
    """Runs all policies with all sizes of stores, on a part of each trace."""
    parts = [part_of(trace, part) for trace in traces]
    rows = []
    for trace in parts:
        for size in SIZES:
            row = row_of(trace, size, run_size(trace, size, costs))
            rows.append(row)
            rates = "  ".join(f"{name} {100 * rate:.2f}" for name, rate in row["hit_rate"].items())
            share = 100 * row["extra_prefill_share"]["budgeted"]
            verdict = "" if row["reaches_goal"] else f"  short of {100 * row['goal']:.2f}"
            print(f"{trace.name}, {part}, {size} %: {rates}; extra prefill {share:.2f} %{verdict}", flush=True)
    return {"rows": rows, "variants": run_variants(parts, rows) if with_variants else []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the traces")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--svg", type=Path, help="where to write the picture")
    parser.add_argument("--variants", action="store_true", help="also run other constants")
    parser.add_argument("--halves", action="store_true", help="also run each half of each trace alone")
    chosen = parser.parse_args()
    traces, costs = read_all(chosen.traces), CostModel()
    whole = run_part(traces, Part.WHOLE, costs, chosen.variants)
    halves = (Part.FIRST, Part.SECOND) if chosen.halves else ()
    figures = {
        "cost_model": {
            "state_chunks": costs.state_chunks,
            "step_tokens": costs.step_tokens,
            "chunk_tokens": {trace.name: trace.chunk_tokens for trace in traces},
            "ladder_chunks": LADDER_CHUNKS,
            "seed": None,
        },
        **whole,
        "halves": {part: run_part(traces, part, costs, chosen.variants) for part in halves},
    }
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")
    if chosen.svg is not None:
        chosen.svg.write_text(draw(whole["rows"]))


if __name__ == "__main__":
    main()
