"""Simulated hit rates of a trace of requests, by size of host memory. Uses the planner and the RAM tier's index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from hybridkv.cli.output import ReportError
from hybridkv.cli.simulation.chart import ChartPanel, Curve, draw
from hybridkv.cli.simulation.policies import PlannerStops, PromptEnds
from hybridkv.cli.simulation.store import CostModel, StopPolicy, simulate, unique_chunks
from hybridkv.cli.simulation.traces import Trace, in_chunks, read_trace
from hybridkv.connectors.config import format_size, parse_size
from hybridkv.connectors.errors import SettingProblem

MULTIPLES: Final = (0.25, 0.5, 1, 2, 4, 8)
"""Simulated sizes of host memory, as multiples of the size in the plan."""
PERCENTS: Final = (5, 10, 30, 100)
"""Simulated sizes without a plan, in percent of all content that the trace stores."""
MAX_SEEN_PREFIXES: Final = 1 << 18
"""Maximum number of prefixes in the planner's table."""
CURVES: Final = {
    "attention": Curve("attention alone (bound)", "#999999", "4 3"),
    "planner": Curve("the planner", "#b8405e"),
    "ends": Curve("prompt ends only", "#3b7dd8"),
}
"""Curves of a model with recurrent states. A model without states has one curve."""


class ModelSizes(msgspec.Struct, frozen=True):
    """Sizes of a model, over all ranks.

    Args:
        chunk_tokens: tokens in a chunk.
        token_bytes: bytes of one token in all attention groups.
        state_bytes: bytes of the states of one boundary; 0 without recurrent groups.
        capacity_bytes: size of host memory.
    """

    chunk_tokens: int
    token_bytes: float
    state_bytes: int
    capacity_bytes: int


class SimulationRow(msgspec.Struct, frozen=True):
    """Result for one size of host memory.

    Args:
        size: size of host memory, as text.
        percent: size of host memory, in percent of all content that the trace stores.
        hit_rate: restored tokens as a share of all tokens. "planner": with the planner's stops; "ends": with states at
            the ends of prompts only; "attention": if requests could resume at each boundary.
        extra_prefill: cost of the planner's stops, as a share of the computed tokens.
    """

    size: str
    percent: float
    hit_rate: dict[str, float]
    extra_prefill: float


class SimulationReport(msgspec.Struct, frozen=True):
    """Result of a trace.

    Args:
        trace: name of the trace.
        requests: number of requests.
        tokens: tokens of all prompts.
        chunk_tokens: tokens in a simulated chunk.
        planned_chunk_tokens: tokens in a chunk of the plan; 0 without a plan.
        state_chunks: size of the states of one boundary, in chunks of attention; 0 without recurrent groups.
        rows: by size, ascending.
    """

    trace: str
    requests: int
    tokens: int
    chunk_tokens: int
    planned_chunk_tokens: int
    state_chunks: float
    rows: list[SimulationRow]


def sizes_of_plan(text: str, name: str) -> ModelSizes:
    """Sizes from the JSON document of `hybridkv plan`.

    Raises:
        ReportError: the text is another document, the model has no attention, or the plan has no tiers.
    """
    from hybridkv.connectors.vllm.offload.startup_log import StartupReport

    try:
        document = msgspec.json.decode(text, type=dict[str, Any])
        startup = msgspec.convert(document.get("startup"), StartupReport)
    except msgspec.DecodeError as error:  # ValidationError is a subclass
        raise ReportError(
            SettingProblem(
                "error", name, "the document of hybridkv plan --json", str(error), "hybridkv plan MODEL --json"
            )
        ) from None
    states = sum(group.chunk_bytes for group in startup.groups if group.kind == "RECURRENT")
    if states == startup.chunk_bytes:
        raise ReportError(SettingProblem("error", name, "a model with attention", "recurrent groups alone", ""))
    if not startup.tiers:
        raise ReportError(SettingProblem("error", name, "a plan with tiers", "none"))
    token_bytes = (startup.chunk_bytes - states) / startup.chunk_tokens
    return ModelSizes(startup.chunk_tokens, token_bytes, states, startup.tiers[0].capacity_bytes or 0)


def simulate_trace(path: Path, sizes: ModelSizes | None, capacities: Sequence[str]) -> SimulationReport:
    """Simulates a trace.

    Args:
        path: file or folder of the trace.
        sizes: sizes of the model. None: the states of a boundary take four chunks, and sizes are in percent of the
            trace.
        capacities: sizes of host memory, such as "16GiB"; by default multiples of the size in the plan.

    Raises:
        OSError: the trace cannot be read.
        ReportError: the trace has another format, or capacities are given without sizes.
        ConfigurationError: a capacity is not a valid size.
    """
    trace = read_trace(path)
    if sizes is None:
        if capacities:
            got = "--capacity without --plan"
            raise ReportError(
                SettingProblem("error", "--plan", "the sizes of the model", got, "hybridkv plan MODEL --json")
            )
        costs = CostModel()
        whole = unique_chunks(trace, costs)
        stores = [(f"{percent} %", whole * percent // 100) for percent in PERCENTS]
    else:
        trace = in_chunks(trace, sizes.chunk_tokens)
        chunk_bytes = sizes.token_bytes * trace.chunk_tokens
        costs = CostModel(state_chunks=_rounded(sizes.state_bytes / chunk_bytes))
        whole = unique_chunks(trace, costs)
        given = sorted(parse_size("--capacity", text) for text in capacities)
        given = given or [int(sizes.capacity_bytes * multiple) for multiple in MULTIPLES]
        stores = [(format_size(num_bytes), int(num_bytes / chunk_bytes)) for num_bytes in given]
    rows = [_row(trace, size, max(1, chunks), whole, costs) for size, chunks in stores]
    num_tokens = sum(request.num_tokens for request in trace.requests)
    return SimulationReport(
        trace.name,
        len(trace.requests),
        num_tokens,
        trace.chunk_tokens,
        0 if sizes is None else sizes.chunk_tokens,
        float(costs.state_chunks),
        rows,
    )


def _rounded(state_chunks: float) -> float:
    """Rounds a size above 8 chunks to whole chunks, because the simulation rounds parts of a chunk up."""
    return float(round(state_chunks)) if state_chunks > 8 else state_chunks


def _row(trace: Trace, size: str, chunks: int, whole: int, costs: CostModel) -> SimulationRow:
    attention = simulate(trace, chunks, costs, None)
    rates, extra = {"attention": attention.hit_rate}, 0.0
    if costs.state_chunks:
        policies: dict[str, StopPolicy] = {
            "planner": PlannerStops(trace, chunks, costs, MAX_SEEN_PREFIXES),
            "ends": PromptEnds(),
        }
        found = {name: simulate(trace, chunks, costs, policy) for name, policy in policies.items()}
        rates |= {name: outcome.hit_rate for name, outcome in found.items()}
        extra = found["planner"].extra_share
    return SimulationRow(size, 100 * chunks / max(1, whole), rates, extra)


def simulation_text(report: SimulationReport) -> str:
    """Text of the report, for people."""
    has_states = report.state_chunks > 0
    states = f"; the states of a boundary take as much as {report.state_chunks:.3g} chunks" if has_states else ""
    counts = f"{report.requests:,} requests, {report.tokens:,} tokens, chunks of {report.chunk_tokens} tokens"
    if report.planned_chunk_tokens not in (0, report.chunk_tokens):
        counts += f" (the plan has {report.planned_chunk_tokens}; the trace allows no smaller ones)"
    columns = ["planner", "ends", "attention"] if has_states else ["attention"]
    titles = {"planner": "hit rate", "ends": "prompt ends only", "attention": "attention alone"}
    header = ["host memory", "of the trace"] + [titles[name] if has_states else "hit rate" for name in columns]
    table = [header + (["extra prefill"] if has_states else [])]
    for row in report.rows:
        cells = [row.size, f"{row.percent:.1f} %", *(f"{100 * row.hit_rate[name]:.1f} %" for name in columns)]
        table.append(cells + ([f"{100 * row.extra_prefill:.2f} %"] if has_states else []))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join([f"{report.trace}: {counts}{states}", "", *lines])


def chart_of(report: SimulationReport) -> str:
    """The hit rates as an SVG."""
    curves = CURVES if report.state_chunks else {"attention": Curve("hit rate", "#b8405e")}
    rates = {name: [row.hit_rate[name] for row in report.rows] for name in curves}
    panel = ChartPanel(report.trace, [row.percent for row in report.rows], [row.size for row in report.rows], rates)
    return draw([panel], curves)
