"""Chart of simulated hit rates, as SVG: one panel for each trace, hit rate over the size of the store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 300
HEIGHT: Final = 220
MARGIN: Final = 44
LINE_HEIGHT: Final = 16
STYLE: Final = "text{font:11px sans-serif;fill:#444}.title{font:bold 13px sans-serif;fill:#222}"


@dataclass(frozen=True, slots=True)
class Curve:
    """Appearance of one curve in all panels.

    Args:
        name: text of the legend.
        colour: colour in SVG's notation.
        dashes: dashes in SVG's notation; "" for a line without gaps.
    """

    name: str
    colour: str
    dashes: str = ""


@dataclass(frozen=True, slots=True)
class ChartPanel:
    """Hit rates of one trace.

    Args:
        title: name of the trace.
        sizes: sizes of the store, ascending, in any unit.
        labels: text for each size.
        rates: for each curve, the hit rate at each size, from 0 to 1.
    """

    title: str
    sizes: Sequence[float]
    labels: Sequence[str]
    rates: Mapping[str, Sequence[float]]


def draw(panels: Sequence[ChartPanel], curves: Mapping[str, Curve]) -> str:
    """Draws the chart. Sizes are on a logarithmic scale."""
    width = len(panels) * (WIDTH + MARGIN) + MARGIN
    height = HEIGHT + 2 * MARGIN + LINE_HEIGHT * 3
    parts = [_draw_panel(panel, curves, MARGIN + i * (WIDTH + MARGIN)) for i, panel in enumerate(panels)]
    for i, curve in enumerate(curves.values()):
        left, line = MARGIN + i % 3 * 240, HEIGHT + 2 * MARGIN + i // 3 * LINE_HEIGHT
        parts.append(_line([(left, line - 4), (left + 24, line - 4)], curve))
        parts.append(f'<text x="{left + 30}" y="{line}">{escape(curve.name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _draw_panel(panel: ChartPanel, curves: Mapping[str, Curve], left: int) -> str:
    rates = [rate for name in curves for rate in panel.rates[name]]
    low, high = math.floor(min(rates) * 10) / 10, math.ceil(max(rates) * 10) / 10
    high = high if high > low else low + 0.1
    span = math.log(max(panel.sizes) / min(panel.sizes)) or 1.0

    def across(size: float) -> float:
        return left + math.log(size / min(panel.sizes)) / span * WIDTH

    def up(rate: float) -> float:
        return MARGIN + HEIGHT - (rate - low) / (high - low) * HEIGHT

    parts = [f'<text x="{left}" y="{MARGIN - 14}" class="title">{escape(panel.title)}: token hit rate</text>']
    for tenth in range(round(low * 10), round(high * 10) + 1):
        y = up(tenth / 10)
        parts.append(f'<path d="M{left},{y:.1f}h{WIDTH}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth * 10} %</text>')
    for size, label in zip(panel.sizes, panel.labels, strict=True):
        place = f'x="{across(size):.1f}" y="{MARGIN + HEIGHT + 16}"'
        parts.append(f'<text {place} text-anchor="middle">{escape(label)}</text>')
    for name, curve in curves.items():
        points = [(across(size), up(rate)) for size, rate in zip(panel.sizes, panel.rates[name], strict=True)]
        parts.append(_line(points, curve))
    return "\n".join(parts)


def _line(points: Sequence[tuple[float, float]], curve: Curve) -> str:
    written = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{curve.dashes}"' if curve.dashes else ""
    return f'<polyline points="{written}" fill="none" stroke="{curve.colour}" stroke-width="1.8"{dashed}/>'
