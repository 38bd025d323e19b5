"""Draws pictures of boxes and arrows: each TXT file of a folder becomes an SVG file beside it.

    python tools/pictures.py docs/pictures

Has no automatic layout: the source gives the place of each box. A source has one item on each line:

    columns 4 190 60                     number of columns, their width, the gap between them, in pixels
    gap 40                               pixels between two rows
    head COLUMN text                     text above a column
    box NAME ROW COLUMN SPAN title / line / line
    plain NAME ROW COLUMN SPAN title / line      a box without a frame
    arrow FROM TO label                  between two boxes that share a row or a column
    both FROM TO label                   an arrow with two heads

Lines that begin with `#` are comments. Rows and columns count from 0. A text that does not fit is an error, except for
the label of an arrow between two rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

_MARGIN: Final = 16
_PADDING: Final = 8
_LINE_HEIGHT: Final = 15
_CHARACTER_WIDTH: Final = 6.3
"""Upper estimate of the mean width of a character in the pictures' font of 11 pixels."""
_STYLE: Final = (
    "text{font:11px sans-serif;fill:#333}.title{font:bold 12px sans-serif;fill:#111}.label{font:italic 11px sans-serif}"
    ".frame{fill:#f4f7fb;stroke:#3b7dd8}.arrow{stroke:#555;stroke-width:1.3;fill:none}"
)
_MARKER: Final = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>'
)


class PictureError(ValueError):
    """A source that cannot be drawn. The message names the line, the text or the boxes."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box on the grid. `lines` begins with the title."""

    name: str
    row: int
    column: int
    span: int
    lines: tuple[str, ...]
    is_framed: bool


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow between two boxes, by their names."""

    start: str
    end: str
    label: str
    has_two_heads: bool


@dataclass(slots=True)
class Picture:
    """One source, decoded."""

    num_columns: int = 1
    column_width: int = 200
    column_gap: int = 60
    row_gap: int = 40
    column_heads: dict[int, str] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[Arrow] = field(default_factory=list)


def parse(source: str) -> Picture:
    """Decodes a source. `PictureError` for an invalid line, or an arrow to an unknown box."""
    picture = Picture()
    for line in source.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        try:
            _add(picture, line)
        except (ValueError, IndexError) as error:
            raise PictureError(f"cannot read {line!r}: {error}") from error
    for arrow in picture.arrows:
        for name in (arrow.start, arrow.end):
            if name not in picture.boxes:
                raise PictureError(f"an arrow names {name!r}, which is no box")
    return picture


def _add(picture: Picture, line: str) -> None:
    kind, rest = line.split(maxsplit=1)
    if kind == "columns":
        picture.num_columns, picture.column_width, picture.column_gap = map(int, rest.split())
    elif kind == "gap":
        picture.row_gap = int(rest)
    elif kind == "head":
        column, text = rest.split(maxsplit=1)
        picture.column_heads[int(column)] = text
    elif kind in ("box", "plain"):
        name, row, column, span, text = rest.split(maxsplit=4)
        lines = tuple(part.strip() for part in text.split(" / "))
        picture.boxes[name] = Box(name, int(row), int(column), int(span), lines, kind == "box")
    elif kind in ("arrow", "both"):
        start, end, *label = rest.split(maxsplit=2)
        picture.arrows.append(Arrow(start, end, " ".join(label), kind == "both"))
    else:
        raise ValueError(f"unknown item {kind!r}")


@dataclass(frozen=True, slots=True)
class _Rectangle:
    left: int
    top: int
    right: int
    bottom: int


def draw(picture: Picture) -> str:
    """The SVG. `PictureError` if a text is too wide, or the boxes of an arrow share neither row nor column."""
    places, height = _layout(picture)
    width = 2 * _MARGIN + picture.num_columns * (picture.column_width + picture.column_gap) - picture.column_gap
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{_STYLE}</style>{_MARKER}<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for column, text in sorted(picture.column_heads.items()):
        center = _MARGIN + column * (picture.column_width + picture.column_gap) + picture.column_width // 2
        _require_fit(text, picture.column_width)
        parts.append(_text(center, _MARGIN + 12, text, "title"))
    parts += [_arrow(picture, arrow, places) for arrow in picture.arrows]
    for box in picture.boxes.values():
        parts += _box(box, places[box.name])
    return "\n".join([*parts, "</svg>", ""])


def _layout(picture: Picture) -> tuple[dict[str, _Rectangle], int]:
    """Rectangles of all boxes by name, and the picture's height. Boxes of a row are equally high."""
    places: dict[str, _Rectangle] = {}
    top = _MARGIN + (28 if picture.column_heads else 0)
    step = picture.column_width + picture.column_gap
    for row in sorted({box.row for box in picture.boxes.values()}):
        members = [box for box in picture.boxes.values() if box.row == row]
        height = 2 * _PADDING + max(len(box.lines) for box in members) * _LINE_HEIGHT
        for box in members:
            left = _MARGIN + box.column * step
            places[box.name] = _Rectangle(left, top, left + box.span * step - picture.column_gap, top + height)
        top += height + picture.row_gap
    return places, top - picture.row_gap + _MARGIN


def _box(box: Box, place: _Rectangle) -> Iterable[str]:
    if box.is_framed:
        size = f'width="{place.right - place.left}" height="{place.bottom - place.top}"'
        yield f'<rect x="{place.left}" y="{place.top}" {size} rx="4" class="frame"/>'
    center = (place.left + place.right) // 2
    first = (place.top + place.bottom - len(box.lines) * _LINE_HEIGHT) // 2 + 11
    for number, line in enumerate(box.lines):
        _require_fit(line, place.right - place.left - _PADDING)
        yield _text(center, first + number * _LINE_HEIGHT, line, "title" if number == 0 else "")


def _arrow(picture: Picture, arrow: Arrow, places: dict[str, _Rectangle]) -> str:
    start, end = places[arrow.start], places[arrow.end]
    pair = {arrow.start, arrow.end}
    beside = [other for other in picture.arrows if {other.start, other.end} == pair]
    share = (beside.index(arrow) + 1) / (len(beside) + 1)
    if start.top == end.top:
        y = round(start.top + share * (start.bottom - start.top))
        x1, x2 = (start.right, end.left) if start.left < end.left else (start.left, end.right)
        _require_fit(arrow.label, abs(x2 - x1))
        path, label = f"M{x1} {y}H{x2}", _text((x1 + x2) // 2, y - 5, arrow.label, "label")
    else:
        left, right = max(start.left, end.left), min(start.right, end.right)
        if left >= right:
            raise PictureError(f"{arrow.start} and {arrow.end} share neither a row nor a column")
        x = round(left + share * (right - left))
        y1, y2 = (start.bottom, end.top) if start.top < end.top else (start.top, end.bottom)
        path, label = f"M{x} {y1}V{y2}", _text(x + 6, (y1 + y2) // 2 + 4, arrow.label, "label", anchor="start")
    heads = 'marker-end="url(#head)"' + (' marker-start="url(#head)"' if arrow.has_two_heads else "")
    return f'<path d="{path}" class="arrow" {heads}/>' + (label if arrow.label else "")


def _require_fit(text: str, width: int) -> None:
    if len(text) * _CHARACTER_WIDTH > width:
        raise PictureError(f"{text!r} is wider than {width} pixels")


def _text(x: int, y: int, text: str, style: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for source in sorted(parser.parse_args().folder.glob("*.txt")):
        try:
            picture = draw(parse(source.read_text(encoding="utf-8")))
        except PictureError as error:
            sys.exit(f"{source.name}: {error}")
        source.with_suffix(".svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
