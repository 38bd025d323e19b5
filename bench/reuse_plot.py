"""Draws what `reuse_traces.py` found, as one SVG: a panel for each trace, hit rates over the size of the store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

_CURVES: Final = {
    "attention": ("attention alone (bound)", "#999999", "4 3"),
    "optimal": ("optimal, in hindsight", "#7b5ea7", "4 3"),
    "budgeted": ("budgeted (the planner)", "#b8405e", ""),
    "ladder": ("every 8 chunks", "#d9822b", ""),
    "junctions": ("prompt ends and junctions", "#3d9970", ""),
    "ends": ("prompt ends only", "#3b7dd8", ""),
}
_WIDTH: Final = 300
_HEIGHT: Final = 220
_MARGIN: Final = 44
_LINE_HEIGHT: Final = 16


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """The picture of all rows."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    width = len(traces) * (_WIDTH + _MARGIN) + _MARGIN
    height = _HEIGHT + 2 * _MARGIN + _LINE_HEIGHT * 3
    parts = [
        _panel(trace, [row for row in rows if row["trace"] == trace], _MARGIN + number * (_WIDTH + _MARGIN))
        for number, trace in enumerate(traces)
    ]
    for number, (name, colour, dashes) in enumerate(_CURVES.values()):
        left, line = _MARGIN + number % 3 * 240, _HEIGHT + 2 * _MARGIN + number // 3 * _LINE_HEIGHT
        parts.append(_line([(left, line - 4), (left + 24, line - 4)], colour, dashes))
        parts.append(f'<text x="{left + 30}" y="{line}">{escape(name)}</text>')
    style = "text{font:11px sans-serif;fill:#444}.title{font:bold 13px sans-serif;fill:#222}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{style}</style><rect width="{width}" height="{height}" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panel(trace: str, rows: Sequence[dict[str, Any]], left: int) -> str:
    rates = [rate for row in rows for name, rate in row["hit_rate"].items() if name in _CURVES]
    low, high = math.floor(min(rates) * 10) / 10, math.ceil(max(rates) * 10) / 10
    sizes = [row["size_percent"] for row in rows]
    span = math.log(max(sizes) / min(sizes)) or 1.0

    def across(size: float) -> float:
        return left + math.log(size / min(sizes)) / span * _WIDTH

    def up(rate: float) -> float:
        return _MARGIN + _HEIGHT - (rate - low) / (high - low) * _HEIGHT

    parts = [f'<text x="{left}" y="{_MARGIN - 14}" class="title">{escape(trace)}: token hit rate</text>']
    for tenth in range(round(low * 10), round(high * 10) + 1):
        y = up(tenth / 10)
        parts.append(f'<path d="M{left},{y:.1f}h{_WIDTH}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth * 10} %</text>')
    for size in sizes:
        place = f'x="{across(size):.1f}" y="{_MARGIN + _HEIGHT + 16}"'
        parts.append(f'<text {place} text-anchor="middle">{size} %</text>')
    for name, (_, colour, dashes) in _CURVES.items():
        points = [(across(row["size_percent"]), up(row["hit_rate"][name])) for row in rows]
        parts.append(_line(points, colour, dashes))
    return "\n".join(parts)


def _line(points: Sequence[tuple[float, float]], colour: str, dashes: str) -> str:
    written = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{written}" fill="none" stroke="{colour}" stroke-width="1.8"{dashed}/>'
