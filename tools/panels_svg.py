"""Draws the panels of the dashboard as one SVG: for the docs, and without Grafana.

    python tools/panels_svg.py --prometheus http://127.0.0.1:9090 --minutes 60 > panels.svg

Sends every query of the dashboard to a Prometheus server, with all models, engines and stores chosen. Leaves out panels
without data.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

DASHBOARD: Final = Path("deploy/grafana/hybridkv.json")
WINDOW_STEPS: Final = 4
"""Window of a rate, in steps between two points."""
MAX_POINTS: Final = 120
REPLY_DEADLINE_S: Final = 30.0
_COLUMNS: Final = 3
_WIDTH: Final = 380
_PLOT_HEIGHT: Final = 90
_MARGIN: Final = 12
_LINE_HEIGHT: Final = 14
_MAX_NAMED: Final = 5
_COLOURS: Final = ("#3b7dd8", "#d9822b", "#3d9970", "#b8405e", "#7b5ea7")
_PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One curve, or family of curves, of a dashboard's panel. `legend` names them; {{label}} is a label's value."""

    section: str
    panel: str
    unit: str
    legend: str
    expression: str

    @property
    def metrics(self) -> frozenset[str]:
        """Declared names of the metrics that the query reads."""
        return frozenset(name.removesuffix("_bucket") for name in re.findall(r"vllm:\w+", self.expression))


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (seconds, value) in order of time; values are finite."""

    name: str
    points: tuple[tuple[float, float], ...]

    @property
    def highest(self) -> float:
        return max(value for _, value in self.points)


@dataclass(frozen=True, slots=True)
class PanelData:
    """Content of a panel."""

    section: str
    title: str
    unit: str
    curves: tuple[Curve, ...]


def panel_queries(dashboard: Path, window: str) -> list[PanelQuery]:
    """All queries of a dashboard, as Grafana sends them with all models, engines and stores chosen."""
    queries, section = [], ""
    for panel in json.loads(dashboard.read_text())["panels"]:
        if panel["type"] == "row":
            section = panel["title"]
            continue
        for target in panel["targets"]:
            expression = re.sub(r'=~"\$\w+"', '=~".*"', target["expr"].replace("$__rate_interval", window))
            unit = panel["fieldConfig"]["defaults"]["unit"]
            queries.append(PanelQuery(section, panel["title"], unit, target["legendFormat"], expression))
    return queries


def read_panels(url: str, dashboard: Path, start_s: float, end_s: float) -> list[PanelData]:
    """Curves of every panel from `start_s` to `end_s`, from the server at `url`. OSError if it does not answer."""
    step_s = max(1.0, math.ceil((end_s - start_s) / MAX_POINTS))
    panels: dict[tuple[str, str], PanelData] = {}
    for query in panel_queries(dashboard, f"{math.ceil(step_s * WINDOW_STEPS)}s"):
        before = panels.get((query.section, query.panel), PanelData(query.section, query.panel, query.unit, ()))
        curves = _curves(_ask(url, query.expression, start_s, end_s, step_s), query.legend)
        panels[query.section, query.panel] = PanelData(
            query.section, query.panel, query.unit, (*before.curves, *curves)
        )
    return list(panels.values())


def _ask(url: str, expression: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
    parameters = urllib.parse.urlencode({"query": expression, "start": start_s, "end": end_s, "step": step_s})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{parameters}", timeout=REPLY_DEADLINE_S) as reply:
        result: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return result


def _curves(result: Sequence[dict[str, Any]], legend: str) -> list[Curve]:
    curves = []
    for series in result:
        labels = series["metric"]
        name = re.sub(r"{{(\w+)}}", lambda found, labels=labels: labels.get(found[1], ""), legend)
        points = tuple((float(at), float(value)) for at, value in series["values"])
        finite = tuple((at, value) for at, value in points if math.isfinite(value))
        if finite:
            curves.append(Curve(name.replace(" (engine 0)", ""), finite))
    return curves


def draw(panels: Sequence[PanelData]) -> str:
    """The picture: a heading for each section, its panels three in a row."""
    parts: list[str] = []
    top = _MARGIN
    for section in dict.fromkeys(panel.section for panel in panels):
        members = [panel for panel in panels if panel.section == section]
        parts.append(f'<text x="{_MARGIN}" y="{top + 16}" class="section">{escape(section)}</text>')
        top += 28
        for first in range(0, len(members), _COLUMNS):
            row = members[first : first + _COLUMNS]
            for column, panel in enumerate(row):
                parts.append(_panel(panel, _MARGIN + column * _WIDTH, top))
            top += max(_height(panel) for panel in row) + _MARGIN
    width = _COLUMNS * _WIDTH + _MARGIN
    style = (
        "text{font:11px sans-serif;fill:#444}.section{font:bold 15px sans-serif;fill:#111}"
        ".title{font:bold 12px sans-serif;fill:#222}.frame{fill:#fafafa;stroke:#ddd}"
    )
    background = f'<rect width="{width}" height="{top}" fill="#fff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}">'
        f"<style>{style}</style>{background}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _named(panel: PanelData) -> list[Curve]:
    """The highest curves, at most `_MAX_NAMED`, without curves at 0."""
    risen = [curve for curve in panel.curves if curve.highest > 0]
    return sorted(risen, key=lambda curve: -curve.highest)[:_MAX_NAMED]


def _height(panel: PanelData) -> int:
    named = _named(panel)
    has_rest = len(panel.curves) > len(named)
    return 34 + (_PLOT_HEIGHT if named else 0) + (len(named) + has_rest) * _LINE_HEIGHT


def _panel(panel: PanelData, left: int, top: int) -> str:
    named = _named(panel)
    highest = max((curve.highest for curve in named), default=0.0)
    times = [at for curve in panel.curves for at, _ in curve.points]
    start, span = min(times, default=0.0), max(1.0, max(times, default=0.0) - min(times, default=0.0))
    inner, base = _WIDTH - 2 * _MARGIN, top + 24 + (_PLOT_HEIGHT if named else 0)
    parts = [
        f'<rect x="{left}" y="{top}" width="{inner + 12}" height="{_height(panel)}" class="frame"/>',
        f'<text x="{left + 6}" y="{top + 15}" class="title">{escape(panel.title)}</text>',
        f'<text x="{left + inner}" y="{top + 15}" text-anchor="end">max {escape(_written(highest, panel.unit))}</text>',
    ]
    for number, curve in enumerate(named):
        colour = _COLOURS[number]
        points = " ".join(
            f"{left + 6 + (at - start) / span * (inner - 6):.1f},{base - value / highest * _PLOT_HEIGHT:.1f}"
            for at, value in curve.points
        )
        line = base + (number + 1) * _LINE_HEIGHT
        last = _written(curve.points[-1][1], panel.unit)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<rect x="{left + 6}" y="{line - 8}" width="8" height="8" fill="{colour}"/>')
        parts.append(f'<text x="{left + 19}" y="{line}">{escape(curve.name)}</text>')
        parts.append(f'<text x="{left + inner}" y="{line}" text-anchor="end">{escape(last)}</text>')
    rest = len(panel.curves) - len(named)
    if rest:
        line = base + (len(named) + 1) * _LINE_HEIGHT
        are_all_named = sum(curve.highest > 0 for curve in panel.curves) == len(named)
        words = "at 0" if are_all_named else "lower ones"
        parts.append(f'<text x="{left + 6}" y="{line}">{rest} {words}</text>')
    return "\n".join(parts)


def _written(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    words = {"bytes": "B", "Bps": "B/s", "s": "s", "ops": "/s", "short": ""}.get(unit, unit)
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{words}".strip()
    return f"{value:.3g} {words}".strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="the server's URL")
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD)
    parser.add_argument("--minutes", type=float, default=60.0, help="how far to look back")
    chosen = parser.parse_args()
    end_s = time.time()
    panels = read_panels(chosen.prometheus, chosen.dashboard, end_s - 60 * chosen.minutes, end_s)
    sys.stdout.write(draw([panel for panel in panels if panel.curves]))


if __name__ == "__main__":
    main()
