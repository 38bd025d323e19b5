"""Draws the results of `reuse_traces.py` as one SVG: a panel for each trace, hit rates over the size of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hybridkv.cli.simulation import chart
from hybridkv.cli.simulation.chart import ChartPanel, Curve

CURVES: Final = {
    "attention": Curve("attention alone (bound)", "#999999", "4 3"),
    "optimal": Curve("optimal, in hindsight", "#7b5ea7", "4 3"),
    "budgeted": Curve("budgeted (the planner)", "#b8405e"),
    "ladder": Curve("every 8 chunks", "#d9822b"),
    "junctions": Curve("prompt ends and junctions", "#3d9970"),
    "ends": Curve("prompt ends only", "#3b7dd8"),
}


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """The picture of all rows."""
    panels = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        own = [row for row in rows if row["trace"] == trace]
        sizes = [row["size_percent"] for row in own]
        rates = {name: [row["hit_rate"][name] for row in own] for name in CURVES}
        panels.append(ChartPanel(trace, sizes, [f"{size} %" for size in sizes], rates))
    return chart.draw(panels, CURVES)
